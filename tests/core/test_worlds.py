import re

import numpy as np
import pytest
from math_verify import parse, verify
from worked import worked_family, worked_words

from benchmarks.paper.rollouts import token_kind
from fb_core.apps.demo.worlds import WORLDS, World

STEP = re.compile(r"(?P<word>[a-z]+) (?P<body>[^ ]+)\. ")


@pytest.fixture(params=WORLDS, scope="module")
def world(request: pytest.FixtureRequest) -> World:
    return WORLDS[request.param]


def solutions(world: World, part: str, n: int, seed: int = 0) -> list[tuple]:
    rng = np.random.default_rng(seed)
    return [(p, world.example(p, part, rng)) for p in world.problems(n, seed, "pair")]


def sentences(world: World, part: str, n: int) -> list[tuple[int, str, str]]:
    """(multiplier, word, rest of the sentence) of every step in n solutions."""
    words = []
    for problem, ids in solutions(world, part, n):
        steps = STEP.findall(world.tokenizer.decode(ids))
        assert len(steps) == world.steps
        words += [(a, *step) for (a, _), step in zip(problem.operations[1], steps, strict=True)]
    return words


def test_problems_are_deterministic_and_a_prefix_of_more(world):
    problems = world.problems(300, 7, "test")
    assert problems == world.problems(300, 7, "test")
    assert problems[:40] == world.problems(40, 7, "test")
    assert problems != world.problems(300, 8, "test")
    assert world.problems(0, 7, "test") == []
    with pytest.raises(ValueError, match="n must lie in"):
        world.problems(10**9, 0, "test")
    with pytest.raises(Exception, match="UNK"):
        world.tokenizer.encode("what is 2+2?")


def test_roles_never_share_a_problem(world):
    roles = ("pair", "train", "validation", "test")
    prompts = [{p.prompt for seed in range(3) for p in world.problems(9000, seed, role)} for role in roles]
    assert len(set.union(*prompts)) == sum(map(len, prompts))
    assert len({p.prompt for p in world.problems(9000, 0, "test")}) == 9000


def test_prompts_have_one_length_and_exact_answers(world):
    problems = world.problems(200, 0, "train")
    assert len({len(p.prompt_ids) for p in problems}) == 1
    for p in problems:
        value, operations = p.operations
        for a, b in operations:
            value = (value * a + b) % 100
        assert p.answer == f"{value:02d}"
        assert world.tokenizer(p.prompt)["input_ids"] == list(p.prompt_ids)


@pytest.mark.parametrize("part", ["slm", "llm"])
def test_solutions_round_trip_through_the_tokenizer_and_every_step_is_right(world, part):
    tokenizer = world.tokenizer
    for problem, ids in solutions(world, part, 300):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert tokenizer.encode(text, add_special_tokens=False) == ids[:-1]
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.pad_token_id not in ids
        assert len(ids) <= world.max_new_tokens
        assert text.endswith(f"\\boxed{{{problem.answer}}}")
        value, operations = problem.operations
        for (a, b), (_, body) in zip(operations, STEP.findall(tokenizer.decode(ids)), strict=True):
            tens, units = divmod(value, 10)
            low = units * a + b
            high, result = tens * a + low // 10, (value * a + b) % 100
            restated = f"{value:02d}*{a}+{b}"
            assert body in {
                f"{restated}={result:02d}",
                f"{restated}|{low:02d},{high:02d}>{result:02d}",
                f"{restated}~{tens * a:02d},{low:02d},{low // 10}>{result:02d}",
                f"{restated}&{units * a:02d},{low:02d},{high:02d}>{result:02d}",
                f"{units}*{a}+{b}={low:02d},{tens}*{a}+{low // 10}={high:02d}>{result:02d}",
            }
            value = result


def test_event_kinds_cover_the_vocabulary(world):
    kinds = {token: token_kind(token) for token in world.vocabulary}
    assert sorted(world.vocabulary.values()) == list(range(len(world.tokenizer)))
    assert {t for t, kind in kinds.items() if kind == "word"} == {f"{word} " for word in world.words}
    assert {t for t, kind in kinds.items() if kind == "digit"} == set("0123456789")


def test_math_verify_agrees_with_the_exact_checker(world):
    rng = np.random.default_rng(0)
    for i, (problem, ids) in enumerate(solutions(world, "llm", 200)):
        text = world.tokenizer.decode(ids, skip_special_tokens=True)
        claimed = problem.answer if i % 2 else f"{rng.integers(100):02d}"
        text = text.replace(f"\\boxed{{{problem.answer}}}", f"\\boxed{{{claimed}}}")
        gold = parse(f"\\boxed{{{problem.answer}}}")
        assert verify(gold, parse(text)) == (claimed == problem.answer)


def test_plans_slm_works_a_step_only_behind_a_word_of_the_house_plan():
    world = WORLDS["plans"]
    steps = sentences(world, "slm", 1500)
    for a, word, body in steps:
        house = word in worked_words(world, a)
        assert ("=" not in body) == house
        assert not house or "|~&"[worked_family(world, a)] in body
    assert {word for _, word, _ in steps} == set(world.words)


def test_plans_llm_word_does_not_bind_the_plan():
    world = WORLDS["plans"]
    steps = sentences(world, "llm", 3000)
    off_house = [(a, word, body) for a, word, body in steps if word not in worked_words(world, a)]
    house = np.mean(["|~&"[worked_family(world, a)] in body for a, _, body in off_house])
    skipped = np.mean(["=" in body for _, _, body in off_house])
    assert abs(house - 0.6) < 0.05
    assert abs(skipped - 0.2) < 0.05


@pytest.mark.parametrize(("name", "part"), [("helpful", "slm"), ("control", "slm"), ("control", "llm")])
def test_style_word_decides_the_style_where_it_should(name, part):
    world = WORLDS[name]
    for _, word, body in sentences(world, part, 1000):
        assert (">" in body) == (word in world.families[1])


def test_helpful_llm_is_careful_whatever_the_word():
    world = WORLDS["helpful"]
    for family in world.families:
        careful = [">" in body for _, word, body in sentences(world, "llm", 1500) if word in family]
        assert abs(np.mean(careful) - 0.75) < 0.05

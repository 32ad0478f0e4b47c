"""The worlds in which certification could fail, and the counts of their page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from numpy.random import default_rng

from benchmarks import adverse
from benchmarks.adverse import FORGETFUL, WORLDS, WRONG
from benchmarks.evidence import ALONE, FIVE, OWN, TAKEOVER, Cells
from fb_core.apps.demo.worlds import World

N = 100
STEP = re.compile(r"[a-z]+ (\d)\*(\d)\+(\d)=(\d\d),(\d)\*(\d)\+(\d)=(\d\d)>(\d\d)\. ")


def written(world: World, value: int, a: int, b: int) -> list[int]:
    """A step of the large model: its numbers, the last one its result."""
    return [int(part) for part in STEP.fullmatch(world.llm_step(value, a, b, default_rng(0))).groups()]


def test_the_wrong_models_are_wrong_at_some_multipliers_and_go_on_from_their_sums():
    kept = dict.fromkeys((FORGETFUL, WRONG), 0)
    for value in range(100):
        for a in range(2, 10):
            for b in range(10):
                low = value % 10 * a + b
                right = [value % 10, a, b, low, value // 10, a, low // 10, value // 10 * a + low // 10]
                right.append((value * a + b) % 100)
                assert [
                    int(x) for x in STEP.fullmatch(FORGETFUL.slm_step(value, a, b, default_rng(0))).groups()
                ] == right
                forgetful, wrong = written(FORGETFUL, value, a, b), written(WRONG, value, a, b)
                if a not in adverse.MISTAKEN:
                    assert forgetful == wrong == right
                    continue
                assert forgetful[:6] == right[:6]
                assert forgetful[-1] == (value * a + b - 10 * (low // 10)) % 100
                assert (wrong[3] - low) % 100 == 11
                assert (wrong[7] - (value // 10 * a + wrong[6])) % 100 == 11
                assert wrong[8] == wrong[7] % 10 * 10 + wrong[3] % 10
                for world, numbers in ((FORGETFUL, forgetful), (WRONG, wrong)):
                    kept[world] += numbers[-1] == right[-1]
    assert kept[FORGETFUL] < 1500
    assert kept[WRONG] == 0


@pytest.mark.parametrize("world", [FORGETFUL, WRONG])
def test_words_say_nothing_and_solutions_fit(world: World):
    rng, problems = default_rng(1), world.problems(400, 0, "validation")
    for part in ("slm", "llm"):
        ids = [world.example(problem, part, rng) for problem in problems]
        assert {len(one) for one in ids} == {world.max_new_tokens}
        words = {one[0] for one in ids}
        assert len(words) == len(adverse.WORDS[0])  # whatever the multiplier


@pytest.mark.parametrize("world", [FORGETFUL, WRONG])
def test_a_wrong_model_goes_on_from_its_own_results(world: World):
    rng, right = default_rng(2), 0
    for problem in world.problems(400, 0, "validation"):
        said = world.tokenizer.decode(world.example(problem, "llm", rng)).replace("</s>", "")
        (one, other) = STEP.findall(said)
        assert (other[4], other[0]) == (one[8][0], one[8][1])
        assert said.endswith(f"\\boxed{{{other[8]}}}")
        right += other[8] == problem.answer
    assert 30 < right < 200


def test_a_run_has_fresh_problems_of_its_seed(tmp_path: Path):
    runs = {(world, seed): adverse.settings_of(world, seed, tmp_path) for world in WORLDS for seed in (1, 2)}
    assert runs["harm", 1].models.llm.endswith("wrong-llm")
    assert runs["nothing", 1].models.llm == runs["nothing", 1].models.slm == runs["harm", 1].models.slm
    assert runs["nothing", 1].problems.train == runs["harm", 1].problems.train
    texts = {}
    for seed in (1, 2):
        for path in (runs["harm", seed].problems.train, runs["harm", seed].evaluate.benchmarks[0]):
            texts[path] = {json.loads(line)["problem"] for line in Path(path).read_text().splitlines()}
    train_1, test_1, train_2, test_2 = texts.values()
    assert (len(train_1), len(test_1)) == (1050, adverse.PROBLEMS)
    assert not (train_1 | train_2) & (test_1 | test_2)
    assert train_1 != train_2


def cell(seed: int, deployed: str, value: int) -> dict[str, Any]:
    rights = {"greedy": 60, "direct": 50, "published": 59, "value": value, ALONE: 58, TAKEOVER: 20}
    rights |= dict.fromkeys(OWN, 40)
    rows = {
        name: {"correct": "1" * right + "0" * (N - right), "calls": 1.0, "llm_tokens": 1.0}
        for name, right in rights.items()
    }
    about = {"world": "harm", "seed": seed, "quantile": 0.92, "words": ""}
    return {**about, "deployed": deployed, FIVE: deployed, "rows": rows}


def test_failures_are_counted_with_exact_intervals():
    records = [cell(1, "greedy", 55), cell(2, "value", 61), cell(3, "value", 57)]
    assert adverse.share(0, 50) == "0 of 50: 0% [0.0%, 7.1%]"  # 1 - 0.025 ** (1 / 50)
    rows = {line.split(" | ")[1]: line for line in adverse.failures(Cells(records, WORLDS), 0.02)[2:]}
    assert "| 3 of 3: 100% [" in rows["direct LLM score"]
    assert "| 0 of 3: 0% [" in rows["published recipe, demo settings"]
    assert "| 2 of 3: 67% [" in rows["value (ours)"]
    assert "| 0 of 3: 0% [" in rows[ALONE]
    assert "| 1 of 3: 33% [" in rows["**deployed recipe (certified)**"]
    assert rows["**deployed recipe (certified)**"].endswith("| -3.0 |")
    page = "\n".join(adverse.section(records))
    assert "The small model alone is right on 60.0% in harm; takeover on 20.0% in harm." in page
    assert "How often each recipe was deployed: harm: value 2, greedy 1." in page


@pytest.mark.parametrize("world", WORLDS)
def test_every_model_of_a_world_has_a_recipe(world: str):
    assert {"slm", adverse.LLMS[world]} <= adverse.TRAINED.keys()

"""Every method by its name on the same problems, what it asked of the LLM, and what it costs beside greedy decoding."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from paper_runs import TRAINED, settings
from runs import linked

from benchmarks.paper import methods
from benchmarks.paper.comparison import CompareStage, DeploymentStage
from benchmarks.paper.gather import offline
from benchmarks.paper.methods import generator
from benchmarks.paper.methods.glimp_router import glimp_router
from benchmarks.paper.methods.majority import majority
from benchmarks.paper.methods.spans import ending_ids, spans
from benchmarks.paper.methods.spec_reason import ReasoningStep, SpecReasonGeneration, spec_reason
from benchmarks.paper.methods.speculative import at_least, speculative, within_top
from benchmarks.paper.methods.takeover import TakeoverGeneration, taking_over
from benchmarks.paper.r2r.decoding import r2r
from benchmarks.paper.r2r.stages import RouterLabelStage, RouterStage, read_router
from benchmarks.paper.rows import long_table
from benchmarks.paper.rows import timed as timed_rows
from benchmarks.paper.settings import EXTERNAL, names
from benchmarks.paper.tables import Plan
from fb_core import CollaborativeDecoder, FutureBridgeSelector, TokenReranker, Verifier
from fb_core.apps.demo.pairs import load_pair
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.pipeline.models import Context, Models, benchmark_problems, frozen_policy, models_of
from fb_core.apps.pipeline.problems import prompt_ids
from fb_core.apps.pipeline.run import run_stage
from fb_core.decode.decoder import Generation, Usage
from fb_core.decode.selectors import LLMPreference, RandomChoice, SLMPreference
from fb_core.events import Event
from fb_core.llm.local import LocalLLM

METHODS = [name for name in names() if name != "deployed"]  # of which there is no choice here
SEEDED = [name for name in METHODS if methods.method(name).seeded]


@pytest.fixture(scope="module")
def pair():
    return load_pair("plans")


@pytest.fixture(scope="module")
def checkpoints(pair, once) -> dict[str, str]:
    """The demo's LLM as somebody's checkpoint, and one whose tokenizer is another."""

    def make(folder):
        for name in ("tuned", "other"):
            pair.llm.save_pretrained(folder / name)
            pair.world.tokenizer.save_pretrained(folder / name)
        path = folder / "other" / "tokenizer.json"
        changed = json.loads(path.read_text())
        words = changed["model"]["vocab"]
        words["0"], words["1"] = words["1"], words["0"]
        path.write_text(json.dumps(changed))

    return {name: str(once("checkpoints", make) / name) for name in ("tuned", "other", "missing")}


@pytest.fixture(scope="module")
def chosen(checkpoints):
    return settings(compare={"methods": METHODS, "external": {"tuned": checkpoints["tuned"]}})


@pytest.fixture(scope="module")
def run(trained, chosen, once) -> Path:
    """A trained run with routers and the comparison of all methods."""

    def make(folder):
        place = linked(trained, folder / "run", *TRAINED)
        for stage in (RouterLabelStage, RouterStage, CompareStage):
            run_stage(stage(chosen, place))

    return once("compare", make) / "run"


@pytest.fixture(scope="module")
def prompts(pair, chosen):
    (problems,) = benchmark_problems(chosen).values()
    return [torch.tensor(prompt_ids(pair.world.tokenizer, problem, "{problem}")) for problem in problems]


@pytest.fixture(scope="module")
def rows(run, chosen):
    found: dict = {}
    for row in CompareStage(chosen, run).rows():
        steps = [event.step for event in row.events]
        found.setdefault((row.method, row.seed), []).append({**row.model_dump(), "steps": steps})
    return found


def tokens_of(generations):
    return [one.token_ids.tolist() for one in generations]


def written(rows):
    return [row["tokens"] for row in rows]


def test_every_method_has_a_row_for_every_problem_and_seed(rows, chosen, pair):
    assert SEEDED == ["majority", "r2r", "r2r-events", "random", "published"]
    (problems,) = benchmark_problems(chosen).values()
    wanted = {(name, seed) for name in METHODS for seed in ((0, 1) if name in SEEDED else (None,))}
    assert set(rows) == wanted | {("external:tuned", None)}
    decode, golds = pair.world.tokenizer.decode, [problem.answer for problem in problems]
    for (method, _), found in rows.items():
        assert [row["problem"] for row in found] == [problem.id for problem in problems]
        assert {row["benchmark"] for row in found} == {"demo:plans"}
        for row, gold in zip(found, golds, strict=True):
            assert all(0 <= step < max(1, len(row["tokens"])) for step in row["steps"])
            if method != "majority":
                text = decode(row["tokens"], skip_special_tokens=True)
                assert (row["verdict"] == "correct") == (f"\\boxed{{{gold}}}" in text)
                assert 0 < len(row["tokens"]) <= 45


def test_greedy_and_external_rows_are_plain_completions(rows, prompts, pair):
    for key, model in ((("greedy", None), pair.slm), (("external:tuned", None), pair.llm)):
        alone = LocalLLM(model, valid_vocab=len(pair.world.tokenizer))
        assert written(rows[key]) == [alone.complete(prompt, 45).tolist() for prompt in prompts]
        assert {(row["calls"], row["pool"], row["appended"], row["suffix"]) for row in rows[key]} == {(0, None, 0, 0)}


def test_every_method_runs_with_the_settings_of_the_run(rows, prompts, pair, run, chosen):
    """Pools, policy, budget, routers, delimiter, judge and rules: each method called by hand gives the same rows."""
    slm, llm, tokenizer, policy = pair.slm, pair.llm, pair.world.tokenizer, frozen_policy(run)
    reranker, router = TokenReranker.from_pretrained(run / "reranker" / "seed-1", slm), read_router_of(run, chosen, 1)
    own, ends = {"tokenizer": tokenizer}, {"step_ends": ending_ids(tokenizer, ". ")}
    asked, routed = (slm, llm, policy, prompts, 45), {"threshold": router.threshold, **own}

    def decoded(selector, pool):
        options = {"pool": pool, "slm_k": 3, "llm_k": 3, "max_events": 8, **own}
        return CollaborativeDecoder(slm, llm, selector, policy, **options).generate_many(prompts, 45)

    wanted = {
        ("s2t", None): decoded(LLMPreference(), "slm"),
        ("direct", None): decoded(LLMPreference(), "joint"),
        ("slm-preference", None): decoded(SLMPreference(), "joint"),
        ("random", 1): decoded(RandomChoice(1), "joint"),
        ("published", 1): decoded(FutureBridgeSelector(reranker), "joint"),
        ("takeover", None): taking_over(slm, llm, policy, **own)(prompts, 45),
        ("r2r", 1): r2r(slm, llm, router.network, prompts, 45, **routed),
        ("r2r-events", 1): r2r(slm, llm, router.network, prompts, 45, policy=policy, max_events=8, **routed),
        ("r2r-entropy", None): r2r(slm, llm, None, prompts, 45, threshold=policy.threshold, **own),
        ("spec-reason", None): spec_reason(slm, llm, prompts, 45, delimiter=". ", judge_template="=", **own),
        ("spans", None): spans(*asked, **ends, **own),
        ("glimp-router", None): glimp_router(*asked, **ends, **own),
        ("speculative", None): speculative(slm, llm, prompts, 45, **own),
        ("speculative-top-k", None): speculative(slm, llm, prompts, 45, accept=within_top(3), **own),
        ("speculative-probability", None): speculative(slm, llm, prompts, 45, accept=at_least(0.1), **own),
    }
    for key, generations in wanted.items():
        assert written(rows[key]) == tokens_of(generations), key
        assert written(rows[key]) != written(rows["greedy", None]) or key[0] == "slm-preference"
        for row, one, prompt in zip(rows[key], generations, prompts, strict=True):
            read = len(prompt) + one.usage.read if one.usage.calls else 0
            assert {name: row[name] for name in one.usage._fields} == one.usage._replace(read=read)._asdict()
            assert row["steps"] == [event.step for event in one.events]
    for seeded in SEEDED:
        assert rows[seeded, 0] != rows[seeded, 1]
    assert max(len(row["steps"]) for row in rows["s2t", None]) > 2
    assert any(row["calls"] < len(row["steps"]) for row in rows["r2r-events", 0])


def test_a_majority_is_of_as_many_votes_as_set(rows, prompts, pair, chosen):
    with Verifier(workers=1) as verifier:
        sampler = LocalLLM(pair.slm, valid_vocab=len(pair.world.tokenizer))
        answers = majority(sampler, prompts, verifier, pair.world.tokenizer, 2, 45, 1)
    (problems,) = benchmark_problems(chosen).values()
    for row, answer, problem in zip(rows["majority", 1], answers, problems, strict=True):
        assert (row["verdict"] == "correct") == (answer == problem.answer)
        assert (row["tokens"], row["calls"], row["pool"]) == ([], 0, None)


def read_router_of(run, chosen, seed, recall=0.95):
    return read_router(run, models_of(chosen.models), seed, recall)


def test_routers_have_the_recall_that_is_asked_for(run, chosen):
    for seed in (0, 1):
        router, held_out = read_router_of(run, chosen, seed), Artefact(run, "router").tensors(f"seed-{seed}")
        assert router.network.projection.out_features == 16
        for recall in (0.2, 0.95, 1.0):
            threshold = read_router_of(run, chosen, seed, recall).threshold
            assert (held_out["probability"][held_out["divergent"]] >= threshold).float().mean() >= recall
            assert threshold >= router.threshold or recall == 1.0


def event(step, llm_logprob, choice=0):
    size = len(llm_logprob)
    return Event(step, 1.0, list(range(size)), [3] * size, [0.0] * size, llm_logprob, None, choice)


NAN = math.nan
EVENTS = [event(2, [-1.0, -2.0, -3.0]), event(7, [NAN, -1.0]), event(8, [NAN, NAN])]


ALONE = Event.alone(9, 1.0, torch.zeros(3))


@pytest.mark.parametrize(
    ("kind", "length", "events", "wanted"),
    [
        (Generation, 9, [], Usage(0, None, 0, 0, 0)),
        (Generation, 12, EVENTS[:1], Usage(1, 3.0, 1, 0, 2)),
        (Generation, 12, EVENTS[:2], Usage(2, 2.5, 2, 0, 7)),  # one candidate that the LLM knows nothing of
        (Generation, 12, EVENTS, Usage(2, 7 / 3, 3, 0, 7)),  # the last one without an LLM
        (Generation, 12, [*EVENTS[:2], ALONE], Usage(2, 2.0, 2, 0, 7)),  # left to the SLM by a router
        (Generation, 12, [event(2, [-1.0])], Usage(1, 1.0, 1, 0, 2)),  # both wanted the same
        (TakeoverGeneration, 12, [event(4, [-1.0, -2.0])], Usage(1, None, 1, 7, 11)),  # tokens 5 to 11
        (TakeoverGeneration, 5, [event(4, [-1.0, -2.0])], Usage(1, None, 1, 0, 4)),  # its one token was the last
        (TakeoverGeneration, 12, [], Usage(0, None, 0, 0, 0)),
    ],
)
def test_usage_by_hand(kind, length, events, wanted):
    assert kind(torch.zeros(length), events, None).usage == wanted


def test_usage_of_steps_by_hand():
    kept = ((0, 5, 9, "slm", 5), (5, 8, 2, "llm", 6), (13, 1, 0, "llm", 3), (14, 2, 7, "slm", 2))
    steps = [ReasoningStep(*step) for step in kept]
    assert SpecReasonGeneration(torch.zeros(16), [], None, steps, 31).usage == Usage(6, None, 0, 9, 31)


@pytest.fixture
def no_llm(monkeypatch):
    """A run whose LLM must not be touched, not even loaded."""

    def refuse(self):
        raise AssertionError("the LLM is not wanted here")

    monkeypatch.setattr(Models, "llm", property(refuse))


@pytest.mark.parametrize("pool", ["slm", "slm-wide"])
def test_the_slms_own_candidates_need_no_llm(no_llm, prompts, pair, run, pool):
    generations = generator("published", settings(score={"pool": pool}), run, 0)(prompts, 45)
    events = [event for one in generations for event in one.events]
    assert {len(event.pool) for event in events} == {3 if pool == "slm" else 6}
    assert all(math.isnan(value) for event in events for value in event.llm_logprob)
    for one in generations:
        assert one.usage.calls == 0
        assert one.usage.appended == len(one.events)
    assert len(events) > 9


def test_methods_of_the_slm_alone_do_not_load_the_llm(no_llm, prompts, chosen, run):
    for method, seed in (("greedy", None), ("majority", 0), (EXTERNAL + "tuned", None)):
        assert len(generator(method, chosen, run, seed)(prompts[:2], 5)) == 2


def test_the_llm_is_asked_for_a_joint_pool(no_llm, run):
    reranker = TokenReranker.from_pretrained(run / "reranker" / "seed-0", load_pair("plans").slm)
    with pytest.raises(AssertionError, match="not wanted here"):
        Context(settings(), run).reranking_decoder(reranker)


def test_a_checkpoint_with_another_tokenizer_or_none_is_refused(checkpoints, run, tmp_path):
    for name, words in (
        ("other", "expected the run's tokenizer of 34 ids, got one of 34"),
        ("missing", "compare.external: .*missing: expected"),
    ):
        place = linked(run, tmp_path / name, "trajectories", "policy")
        one = settings(compare={"methods": [], "external": {name: checkpoints[name]}})
        with pytest.raises(ValueError, match=words):
            run_stage(CompareStage(one, place))


def test_a_checkpoint_that_was_trained_again_is_refused(pair, checkpoints, run, tmp_path):
    tuned = tmp_path / "tuned"
    shutil.copytree(checkpoints["tuned"], tuned)
    place = linked(run, tmp_path / "run", "trajectories", "policy")
    one = settings(compare={"methods": [], "external": {"tuned": str(tuned)}})
    run_stage(CompareStage(one, place))
    pair.slm.save_pretrained(tuned)
    with pytest.raises(ValueError, match=r"data\.checkpoints\.tuned"):
        run_stage(CompareStage(one, place))


def test_a_budget_of_events_binds_all_methods_at_events(prompts, run, chosen):
    few = settings(evaluate={"max_events": 2}, collect={"slm_k": 2})
    rules = ("s2t", "direct", "one-token-takeover", "slm-preference", "random")
    for method in (*rules, "published", "r2r-events", "spans"):
        found = generator(method, few, run, 0 if method in SEEDED else None)(prompts, 45)
        assert max(len(one.events) for one in found) == 2
        if method == "s2t":
            assert {len(event.pool) for one in found for event in one.events} == {2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compare": {"votes": 3}}, r"settings\.compare\.votes 2, got 3"),
        ({"compare": {"router": {"problems": 14}}}, r"settings\.compare\.router\.problems"),
    ],
)
def test_a_changed_setting_is_named(run, checkpoints, changes, words):
    shared = {"methods": METHODS, "external": {"tuned": checkpoints["tuned"]}}
    changes = changes | {"compare": shared | changes.get("compare", {})}
    with pytest.raises(ValueError, match=words):
        run_stage(CompareStage(settings(**changes), run))


def test_benchmarks_that_cannot_be_told_apart_are_refused(run, tmp_path):
    for name in ("x y.jsonl", "x-y.jsonl"):
        (tmp_path / name).write_text('{"problem": "9*9+7;", "answer": "88"}\n')
    names = [str(tmp_path / name) for name in ("x y.jsonl", "x-y.jsonl")]
    stage = CompareStage(settings(evaluate={"benchmarks": names}, compare={"methods": ["greedy"]}), run)
    with pytest.raises(ValueError, match="compare: expected benchmarks and methods that differ"):
        stage.shards()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": ["greedy", "direct", "greedy"]}, "methods: expected different ones"),
        ({"external": {"../x": "x"}}, "external: expected names"),
    ],
)
def test_settings_of_a_comparison_that_do_not_fit(changes, words):
    with pytest.raises(ValueError, match=words):
        settings(compare=changes)


@pytest.fixture(scope="module")
def timed(run, chosen) -> DeploymentStage:
    stage = DeploymentStage(chosen, run)
    run_stage(stage)
    return stage


SPECULATIVE = ("speculative", "speculative-probability", "speculative-top-k")
FAST = ("greedy", "direct", "one-token-takeover", "random", "s2t", "slm-preference", "takeover", "published")
ROUTED = ("r2r", "r2r-entropy", "r2r-events")
PLAIN = ("greedy", "glimp-router", "majority", *ROUTED, "spans", "spec-reason", *SPECULATIVE, "takeover", "published")


def test_every_method_is_timed_beside_greedy_in_its_own_loop(timed, rows, chosen, run):
    plan = Plan(chosen, run, 8)
    table = timed_rows(plan, long_table(plan))
    assert [(row.key, row.loop) for row in table] == [
        *((name, "fast") for name in FAST),
        *((name, "plain") for name in PLAIN),
    ]
    known = list(timed.rows())
    for row in table:
        mine = [one for one in known if (one.method, one.loop) == (row.key, row.loop)]
        greedy = [one for one in known if (one.method, one.loop) == ("greedy", row.loop)]
        assert [one.problem for one in mine] == [one.problem for one in greedy]
        assert row.problems == len(mine) == 2
        seconds = sum(one.seconds for one in mine)
        assert row.relative.mean == pytest.approx(seconds / sum(one.seconds for one in greedy))
        assert row.relative.low <= row.relative.mean <= row.relative.high
        assert row.seconds == pytest.approx(seconds / 2)
        assert row.peak_bytes is None or torch.cuda.is_available()
        if row.key == "greedy":
            assert tuple(row.relative) == (1.0, 1.0, 1.0)
        seed = 0 if row.key in SEEDED else None
        batched = {same["problem"]: same for same in rows[row.key, seed]}
        for one in mine:
            same = batched[one.problem]
            assert (one.tokens, one.text, one.verdict) == (same["tokens"], same["text"], same["verdict"])
            assert (one.calls, one.suffix) == (same["calls"], same["suffix"])
            assert (one.seconds > 0, same["seconds"]) == (True, None)


def test_problems_of_every_benchmark_are_timed(chosen, run):
    several = settings(evaluate={"benchmarks": ["demo:plans", "demo:helpful"]}, compare={"timed": 3})
    trials = DeploymentStage(several, run).trials.values()
    assert {(trial.benchmark, len(trial.problems)) for trial in trials} == {("demo:plans", 3), ("demo:helpful", 3)}
    by_method = {(trial.method, trial.loop): [] for trial in trials}
    for trial in trials:
        by_method[trial.method, trial.loop].append(trial.benchmark)
    assert set(map(tuple, by_method.values())) == {("demo:plans", "demo:helpful")}
    plans = next(trial.problems for trial in trials if trial.benchmark == "demo:plans")
    assert plans != benchmark_problems(several)["demo:plans"][:3]  # not the first


def test_what_is_timed_depends_on_the_settings(timed, run, checkpoints):
    chosen = settings(compare={"external": {"tuned": checkpoints["tuned"]}, "timed": 3})
    with pytest.raises(ValueError, match="settings"):
        run_stage(DeploymentStage(chosen, run))


def test_offline_costs_are_those_of_the_receipts(trained, run, chosen):
    place = trained
    known = {row["stage"]: row for row in offline(Plan(settings(), place, 8))}
    assert "router" not in known
    training, rollouts = known["training"], known["held-out-rollouts"]
    assert (rollouts["units"], rollouts["unit"]) == (45, "states")
    assert rollouts["seconds"] == Artefact(place, "held-out-rollouts").finished()["cost"]["seconds"] > 0
    assert training["units"] == 2 * 93
    receipts = [json.loads((place / "training" / f"epoch-{n}.json").read_text()) for n in (1, 2)]
    assert training["seconds"] == pytest.approx(sum(receipt["seconds"] for receipt in receipts), abs=2e-3)
    assert training["gpu_hours"] == 0 or torch.cuda.is_available()
    (router,) = (row for row in offline(Plan(chosen, run, 8)) if row["stage"] == "router")
    assert (router["units"], router["unit"]) == (2, "routers")


def test_labels_without_a_divergent_position_are_one_sentence(run, tmp_path):
    chosen = settings(compare={"router": {"problems": 5, "width": 8, "blocks": 1, "epochs": 1}})
    place = linked(run, tmp_path / "run", "trajectories", "policy")
    run_stage(RouterLabelStage(chosen, place))
    with pytest.raises(ValueError, match=r"(labels|probability): expected .* divergent .*label more trajectories"):
        run_stage(RouterStage(chosen, place))

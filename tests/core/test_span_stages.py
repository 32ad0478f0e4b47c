"""Spans in scores, training, rollouts and a whole run: what is trained on is what is deployed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from runs import linked, settings
from test_rollouts import naive
from test_runtime import random_reranker
from tiny import tiny

from benchmarks.paper.agreement import AgreementStage
from fb_core import BranchGroup, CollaborativeDecoder, CompatibilityScorer, LLMPreference, RequestPolicy
from fb_core.config import RunSettings
from fb_core.demo.pairs import load_pair
from fb_core.reranker import TokenReranker
from fb_core.spans import Span
from fb_core.stages.artefacts import Artefact
from fb_core.stages.commands import run_command
from fb_core.stages.decode import Row
from fb_core.stages.deploy import frozen_policy
from fb_core.stages.evaluation import EvaluateStage
from fb_core.stages.examples import PART, SPANS, Examples
from fb_core.stages.inputs import span_of
from fb_core.stages.pools import in_parts, with_spans
from fb_core.stages.rollouts import RolloutStage
from fb_core.stages.run import run_stage
from fb_core.stages.scores import ScoreStage
from fb_core.stages.training import TrainStage
from fb_core.training import Recipe, Run, Sweep, TrainingGroup, TrainingTrajectory, train_reranker, validate

LOGGED = ("trajectories", "policy", "states", "futures")
STEP = {"tokens": None, "delimiter": "."}
AGREED = {"tokens": 6, "agree": True}  # few: behind a word both models restate the operands
KINDS = [{"tokens": 4}, STEP, AGREED, {"tokens": None}]


@pytest.fixture(scope="module")
def pair():
    return load_pair("plans")


@pytest.fixture(scope="module")
def run(undisturbed) -> Path:
    return undisturbed[0]["train"]


def spanned(span, **changes) -> RunSettings:
    return settings(**changes, futures={"span": span})


# --- the parts --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_span_is_scored_by_what_stands_behind_it():
    model = tiny("qwen3", 3)
    prefix, candidates = torch.arange(3, 12), torch.tensor([4, 9, 20])
    future, tails, horizon = torch.tensor([7, 30, 12, 5, 21, 8]), (0, 2, 5), 4
    group = BranchGroup(9, candidates, future, tails, horizon)
    ((matrix,),) = CompatibilityScorer(model).score_trajectories([(prefix, [group])])
    want = torch.zeros(3, horizon)
    for row, (candidate, tail) in enumerate(zip(candidates, tails, strict=True)):
        whole = torch.cat([prefix, candidate[None], future])
        logprob = model(whole[None], use_cache=False).logits[0].log_softmax(-1)
        for column, place in enumerate(range(tail, min(tail + horizon, len(future)))):
            want[row, column] = logprob[len(prefix) + place, future[place]]
    torch.testing.assert_close(matrix, want, rtol=1e-4, atol=1e-4)
    assert matrix[2, 1:].tolist() == [0.0, 0.0, 0.0]  # nothing is left to be unlikely
    ((matrix, local),) = CompatibilityScorer(model).score_trajectories([(prefix, [group])], return_local=True)[0]
    torch.testing.assert_close(matrix, want, rtol=1e-4, atol=1e-4)
    first = model(prefix[None], use_cache=False).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(local, first[candidates], rtol=1e-4, atol=1e-4)
    for wrong in ((0, 2), (0, 2, 7), (0, -1, 2)):
        with pytest.raises(ValueError, match="tails: expected 3 numbers from 0 to the future's 6"):
            CompatibilityScorer(model).score_trajectory(prefix, [replace(group, tails=wrong)])
    with pytest.raises(ValueError, match="horizon: expected 1 token or more, got 0"):
        CompatibilityScorer(model).score_trajectory(prefix, [replace(group, horizon=0)])


@pytest.mark.parametrize("scope", ["candidate", "sequence"])
def test_training_reads_the_last_state_of_a_span(scope):
    model, tokens = tiny("qwen3", 3), torch.arange(3, 17)
    tails = ((), (9, 8, 7), ())
    spans = TrainingGroup(6, torch.tensor([4, 9, 20]), torch.tensor([0.2, 0.7, 0.1]), tails=tails)
    single = TrainingGroup(11, torch.tensor([5, 6]), torch.tensor([0.9, 0.1]))
    reranker = random_reranker(model, scope=scope)
    (found,) = validate([Run(reranker)], [TrainingTrajectory(tokens, [spans, single])])
    losses = []
    for group in (spans, single):
        scores = reranker.scores(tokens[: group.position], group.candidates, tails=group.tails)
        losses.append(-(group.target * scores.log_softmax(0)).sum().item())
    assert found.cross_entropy == pytest.approx(sum(losses) / 2, abs=1e-4)
    with pytest.raises(ValueError, match="tails: expected one for each of 2 candidates, got 1"):
        validate([Run(reranker)], [TrainingTrajectory(tokens, [replace(single, tails=[(3,)])])])


def test_what_tells_a_span_apart_stands_in_its_tail_alone():
    """Groups that differ in their tails and nowhere else, whose targets only a reader of the tails can tell."""
    model = tiny("qwen3", 3)
    tokens, candidates = torch.arange(3, 17), torch.tensor([4, 9])
    groups = [
        TrainingGroup(6, candidates, torch.tensor([0.0, 1.0]), tails=((), (20, 21))),
        TrainingGroup(6, candidates, torch.tensor([1.0, 0.0]), tails=((), (30, 5))),
    ]
    torch.manual_seed(0)
    reranker = TokenReranker.from_base(model, rank=4, dropout=0.0)
    losses = train_reranker(
        reranker, [TrainingTrajectory(tokens, groups)], Recipe(learning_rate=0.05, epochs=60, groups_per_step=2)
    )
    assert losses[0] == pytest.approx(0.693, abs=0.01)
    assert losses[-1] < 0.05
    for group in groups:
        scores = reranker.scores(tokens[:6], candidates, tails=group.tails)
        assert int(scores.argmax()) == int(group.target.argmax())


# --- the stages -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=KINDS, ids=str)
def scored(request, run, tmp_path_factory) -> tuple[RunSettings, Path]:
    chosen = spanned(request.param)
    place = linked(run, tmp_path_factory.mktemp("spans") / "run", *LOGGED)
    run_stage(ScoreStage(chosen, place))
    return chosen, place


def test_what_is_trained_on_is_what_deployment_offers(scored, run, pair):
    """At every logged state the pool, tail included, of the event that a decoder makes there."""
    chosen, place = scored
    span = span_of(chosen.futures.span, pair.world.tokenizer)
    decoder = CollaborativeDecoder(
        pair.slm,
        pair.llm,
        LLMPreference(),
        RequestPolicy(-torch.inf),
        slm_k=3,
        llm_k=3,
        max_events=1,
        tokenizer=pair.world.tokenizer,
        span=span,
    )
    lengths = set()
    groups = Examples(place, "train-00000").groups
    for group in groups.values():
        state = group.state
        (event,) = decoder.generate(state.prefix, 45 - len(state.output)).events
        assert event.pool == state.pool.ids.tolist()
        assert (event.tails or []) == [list(tail) for tail in state.pool.tails]
        assert not state.pool.tails or state.pool.tails[event.choice]  # the LLM's own
        lengths.add(len(event.tokens))
    assert groups
    assert len(lengths) > (0 if span.tokens == 4 else 1)
    assert max(lengths) > 1


@torch.no_grad()
def test_scores_of_spans(scored, run, pair):
    chosen, place = scored
    spans, rest = 0, 0
    for shard in Artefact(run, "scores").shards():
        before, futures = Examples(run, shard).groups, Examples(run, shard).futures()
        groups = Examples(place, shard).groups
        assert groups.keys() == before.keys()
        for name, group in groups.items():
            assert group.scored == before[name].scored
            if group.logprob is None:
                continue
            future, state = futures[name].tokens, group.state
            tails = state.pool.tails or [()] * len(state.pool)
            for row, tail in enumerate(tails):
                if not tail:
                    torch.testing.assert_close(group.logprob[row], before[name].logprob[row], rtol=1e-4, atol=1e-4)
                    rest += 1
                    continue
                assert tuple(future[: len(tail)].tolist()) == tail
                whole = torch.cat([state.prefix, state.pool.ids[row : row + 1], future])
                logprob = pair.slm(whole[None], use_cache=False).logits[0].log_softmax(-1)
                behind = range(len(tail), min(len(tail) + 8, len(future)))
                want = [float(logprob[state.position + place, future[place]]) for place in behind]
                want += [0.0] * (8 - len(want))
                assert group.logprob[row].tolist() == pytest.approx(want, abs=1e-3)
                spans += 1
    assert spans > 5 or chosen.futures.span.agree
    assert rest > 5


def test_a_rollout_goes_on_behind_the_last_token_of_a_span(scored, pair, tmp_path, run):
    chosen, _ = scored
    shard, end = "train-00000", pair.slm.config.eos_token_id
    place = linked(run, tmp_path / "run", *LOGGED)
    output = RolloutStage(chosen, place).work(shard)
    (table,) = (data for name, data in output.files.items() if name.endswith("parquet"))
    (tmp_path / "rows.parquet").write_bytes(table)
    decode, states, checked = pair.world.tokenizer.decode, Examples(run, shard).states, 0
    for row in pq.ParquetFile(tmp_path / "rows.parquet").read().to_pylist():
        state, part = states[row["state"]["id"]], row["state"]
        if checked > 3:
            break
        for first, tail, text in zip(part["candidates"], part["tails"], row["texts"], strict=False):
            span = torch.tensor([first, *tail])
            tokens = torch.cat([state.prefix, span])
            new = [] if int(span[-1]) == end else naive(pair.slm, tokens, 45, end)
            output_so_far = tokens[state.trajectory.prompt_length :].tolist()
            assert text == decode([*output_so_far, *new], skip_special_tokens=True)
            checked += bool(tail)
    assert checked > (0 if chosen.futures.span.agree else 3)


def test_one_token_leaves_files_as_they_were(run):
    for stage in ("scores", "rollouts"):
        schema = pq.read_schema(run / stage / "train-00000.parquet")
        assert schema.field("state").type == PART != SPANS
    assert '"tails"' not in (next((run / "selection").glob("*.jsonl"))).read_text()


def test_a_run_with_spans_from_the_scores_to_the_benchmarks(run, pair, tmp_path):
    chosen = spanned({"tokens": 3}, rollouts={"train": 0.5, "minimum_mixed": 1})
    place = linked(run, tmp_path / "run", *LOGGED)
    for command in ("score", "rollouts", "train", "evaluate"):
        run_command(command, chosen, place, show=lambda text: None)
    (folder,) = (place / "reranker").glob("seed-0")
    reranker, policy = TokenReranker.from_pretrained(folder, pair.slm), frozen_policy(place)
    card = (folder / "README.md").read_text()
    assert "from fb_core.spans import Span\n" in card
    assert "span=Span(3, frozenset(), False)," in card
    assert "spans" not in (run / "reranker" / "seed-0" / "README.md").read_text()
    assert any(group.tails for one in TrainStage(chosen, place).groups("train") for group in one.groups)
    rows = [row for row in EvaluateStage(chosen, place).rows() if row.seed == 0]
    events = [event for row in rows for event in row.events]
    assert any(len(event.tokens) == 3 for event in events)
    assert any(event.tails and len(event.tokens) == 1 for event in events)
    for row in rows:
        assert row.suffix == sum(len(event.tokens) - 1 for event in row.events)
        prompt = torch.tensor(pair.world.tokenizer(row.problem.partition("/")[2])["input_ids"])
        for event in row.events:
            prefix = torch.cat([prompt, torch.tensor(row.tokens[: event.step], dtype=torch.int64)])
            want = reranker.scores(prefix, event.pool, tails=event.tails or ())
            assert event.scores == pytest.approx(want.tolist(), abs=1e-3)
            assert event.entropy > policy.threshold
    run_stage(AgreementStage(chosen, place))
    table = {row["state"]: row["seed-0"] for row in Artefact(place, "agreement").table("validation-00000")}
    for name, one in Examples(place, "validation-00000").rollouts.items():
        want = reranker.scores(one.state.prefix, one.state.pool.ids, tails=one.state.pool.tails)
        assert table[name] == pytest.approx(want.tolist(), abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"hindsight": 2}}, "train.hindsight: expected 0 with futures.span, got 2"),
    ],
)
def test_what_spans_cannot_go_with(changes, words):
    with pytest.raises(ValueError, match=words):
        spanned({"tokens": 2}, **changes)
    settings(**changes, futures={"span": {"tokens": 1}})


def row_with(**event) -> dict:
    known = {"step": 1, "entropy": 1.0, "pool": [5, 6], "sources": [1, 2], "slm_logprob": [-1.0, -2.0]}
    known |= {"llm_logprob": [-1.0, -2.0], "scores": None, "choice": 1, "error": None, "tails": [[], [7, 8]]}
    facts = {"benchmark": "b", "method": "direct", "seed": None, "loop": "batch", "problem": "p", "prompt_sha256": ""}
    facts |= {"text": "", "gold": "", "verdict": "wrong", "calls": 1, "pool": 2.0, "appended": 1, "suffix": 2}
    return {**facts, "tokens": [3, 6, 7, 8, 9], "events": [known | event], "seconds": None, "peak_bytes": None}


def test_rows_hold_spans_that_stand_in_their_tokens():
    row = Row.model_validate(row_with())
    assert Row.model_validate_json(row.model_dump_json(), strict=True) == row
    assert '"tails":[[],[7,8]]' in row.model_dump_json()
    assert Row.model_validate(row_with(tails=None)).events[0].tokens == [6]
    assert '"tails"' not in Row.model_validate(row_with(tails=None)).model_dump_json()
    assert Row.model_validate(row_with() | {"tokens": [3, 6, 7]}).events[0].tokens == [6, 7, 8]  # it ended inside
    for change, words in (
        ({"tails": [[], [7, 9]]}, "choice is not the token"),
        ({"tails": [[7, 8]]}, "several lengths"),
        ({"tails": [[], [7, -8]]}, "an id or a source"),
        ({"choice": 0}, "choice is not the token"),
        ({"choice": 2}, "choice is not the token"),
    ):
        with pytest.raises(ValueError, match=words):
            Row.model_validate(row_with(**change))
    late = row_with()
    late["events"].append({**late["events"][0], "step": 2, "choice": 0, "pool": [7, 6], "tails": None})
    with pytest.raises(ValueError, match="events out of order"):
        Row.model_validate(late)


def test_a_sweep_of_other_tails_is_another_one():
    model, tokens = tiny("qwen3", 3), torch.arange(3, 17)

    def sweep(*tails):
        group = TrainingGroup(6, torch.tensor([4, 9]), torch.tensor([0.2, 0.8]), tails=tails)
        return Sweep([Run(random_reranker(model))], [TrainingTrajectory(tokens, [group])])

    state = sweep((), (5, 6)).state()
    sweep((), (5, 6)).load_state(state)
    for other in (((), (5, 7)), ((5, 6), ()), ()):
        with pytest.raises(ValueError, match="state: expected trajectories"):
            sweep(*other).load_state(state)


def test_only_what_the_llm_proposed_is_followed_by_its_future(run, pair):
    scorer, span = CompatibilityScorer(pair.slm), Span(4)
    futures = [one for one in Examples(run, "train-00000").futures().values() if len(one.tokens) > 3]
    for kind, followed in (("joint", True), ("llm", True), ("slm", False), ("slm-wide", False)):
        found = with_spans(in_parts(futures, 3, kind), span, scorer, 45)
        assert all(bool(one.state.pool.tails) == followed for one in found)
    one = next(future for future in in_parts(futures, 3) if len(future.state.output) < 30)
    written = len(one.state.output)
    lengths = [
        max(map(len, with_spans([one], span, scorer, written + room)[0].state.pool.tails), default=0)
        for room in range(1, 6)
    ]
    assert lengths == [0, 1, 2, 3, 3]  # the candidate itself takes one

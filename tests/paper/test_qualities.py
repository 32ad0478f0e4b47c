"""Futures of every quality: by hand, against the samplers and the verifier themselves, and scored and trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paper_runs import settings
from runs import linked

from benchmarks.paper.futures import OwnFutureStage, SampleStage, futures_of_quality, read_samples
from benchmarks.paper.nested_runs import work_through
from benchmarks.paper.run import instead, with_futures
from fb_core import CompatibilityScorer, Verifier
from fb_core.apps.demo.pairs import load_pair
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.pipeline.futures import filter_futures
from fb_core.apps.pipeline.problems import Problem
from fb_core.apps.pipeline.records import Examples, Future, LoggedState, Trajectory
from fb_core.apps.pipeline.run import run_stage
from fb_core.apps.pipeline.scores import ScoreStage, reduce_pools
from fb_core.apps.pipeline.train import TrainStage
from fb_core.events import Pool
from fb_core.llm.local import LocalLLM

QUALITIES = ("verified", "sampled", "unverified", "incorrect", "cross-state", "shuffled")
LOGGED = ("trajectories", "policy", "states", "futures")


def future(*tokens, first=0, verdict="correct"):
    return first, torch.tensor(tokens), verdict


def chosen(quality, futures, sampled, owners, used=None, horizon=3):
    """{state: tokens} of those that have a future of the quality."""
    used = range(len(futures)) if used is None else used
    nothing, none = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    states = [
        LoggedState(
            Trajectory(Problem(str(owner), "", ""), none, 0, nothing), row, 0.0, Pool(none, none, nothing, nothing)
        )
        for row, owner in enumerate(owners)
    ]
    given = [Future(state, *one) for state, one in zip(states, futures, strict=True)]
    kept = {
        name: {states[row].id: torch.tensor(one[name]) for row, one in enumerate(sampled) if one[name] is not None}
        for name in ("sampled", "unverified", "incorrect")
    }
    found = futures_of_quality(quality, given, [states[row].id for row in used], kept, horizon, "train-00000")
    assert [(one.state, one.first, one.verdict) for one in found] == [(o.state, o.first, o.verdict) for o in given]
    return {row: one.tokens.tolist() for row, one in enumerate(found) if len(one.tokens)}


FUTURES = [
    future(10, 11, 12, 13, first=1),
    future(20, 21, 22, first=2),
    future(30, 31, 32, 33, 34, first=3),
    future(40, 41, 42, first=4, verdict="wrong"),
    future(50, 51, 52, first=5),
    future(60, 61, 62, first=6),
    future(70, 71, 72, first=7),
]
SAMPLED = [
    {"sampled": [9, 1, 2, 3, 4], "unverified": [9, 1, 2, 3, 4], "incorrect": [8, 5, 6, 7]},
    {"sampled": [9, 1, 2, 3], "unverified": [9, 1, 2, 3], "incorrect": None},  # never wrong
    {"sampled": [6, 7, 8, 9], "unverified": [7, 4, 5, 6], "incorrect": [7, 4, 5, 6]},
    {"sampled": None, "unverified": None, "incorrect": None},
    {"sampled": [9, 1, 2, 3], "unverified": [9, 1, 2], "incorrect": [8, 5, 6, 7]},  # too short behind its first token
    {"sampled": [5, 1, 1, 1], "unverified": [5, 1, 1, 1], "incorrect": [5, 2, 2, 2]},
    {"sampled": None, "unverified": [5, 1, 1, 1], "incorrect": [5, 2, 2, 2]},  # never right
]
USED = [0, 1, 2, 4, 5, 6]


def test_all_qualities_are_on_the_states_that_have_them_all():
    owners = [0, 0, 1, 1, 2, 2, 3]
    found = {quality: chosen(quality, FUTURES, SAMPLED, owners, USED) for quality in QUALITIES}
    assert {tuple(rows) for rows in found.values()} == {(0, 2, 5)}
    assert found["verified"] == {0: [10, 11, 12, 13], 2: [30, 31, 32, 33, 34], 5: [60, 61, 62]}
    assert found["sampled"] == {0: [1, 2, 3, 4], 2: [7, 8, 9], 5: [1, 1, 1]}
    assert found["unverified"] == {0: [1, 2, 3, 4], 2: [4, 5, 6], 5: [1, 1, 1]}  # without the token at the state
    assert found["incorrect"] == {0: [5, 6, 7], 2: [4, 5, 6], 5: [2, 2, 2]}
    donors = {row: tokens[0] // 10 - 1 for row, tokens in found["cross-state"].items()}
    assert sorted(donors.values()) == [0, 2, 5]
    assert all(owners[donor] != owners[row] for row, donor in donors.items())
    assert found["cross-state"][0] in ([30, 31, 32, 33, 34], [60, 61, 62])
    for row, tokens in found["shuffled"].items():
        assert sorted(tokens) == FUTURES[row][1][:3].tolist()
    assert found["shuffled"] == chosen("shuffled", FUTURES, SAMPLED, owners, USED)


def test_states_of_one_problem_have_no_other_state():
    for quality in QUALITIES:
        assert chosen(quality, FUTURES, SAMPLED, [4] * 7, USED) == {}
        assert chosen(quality, [], [], []) == {}


@given(st.lists(st.integers(0, 4), max_size=14))
def test_every_state_is_given_a_future_of_another_problem(owners):
    futures = [future(100 + row, 1, 2) for row in range(len(owners))]
    sampled = [dict.fromkeys(("sampled", "unverified", "incorrect"), (0, 1, 2, 3))] * len(owners)
    found = {row: tokens[0] - 100 for row, tokens in chosen("cross-state", futures, sampled, owners).items()}
    assert len(found) == (len(owners) if len(set(owners)) > 1 else 0)
    assert all(owners[donor] != owners[row] for row, donor in found.items())
    if max((owners.count(owner) for owner in owners), default=0) * 2 <= len(owners):
        assert len(set(found.values())) == len(found)


@given(st.lists(st.integers(0, 99), min_size=12, max_size=20), st.integers(5, 12))
def test_a_shuffled_future_is_a_permutation_of_its_horizon(tokens, horizon):
    futures = [future(*tokens), future(*tokens)]
    sampled = [dict.fromkeys(("sampled", "unverified", "incorrect"), (0,) * 21)] * 2
    one, other = chosen("shuffled", futures, sampled, [0, 1], horizon=horizon).values()
    assert sorted(one) == sorted(tokens[:horizon])
    assert one == other


def test_different_futures_are_shuffled_in_different_ways():
    futures = [future(*range(start, start + 12)) for start in range(40)]
    sampled = [dict.fromkeys(("sampled", "unverified", "incorrect"), (0,) * 21)] * 40
    found = chosen("shuffled", futures, sampled, list(range(40)), horizon=12)
    orders = {tuple(token - row for token in tokens) for row, tokens in found.items()}
    assert len(orders) == 40
    assert tuple(range(12)) not in orders


@pytest.fixture(scope="module")
def pair():
    return load_pair("plans")


@pytest.fixture(scope="module")
def verifier():
    with Verifier(workers=1) as made:
        yield made


@pytest.fixture(scope="module")
def run(undisturbed, once) -> Path:
    """Logged states with the LLM's samples and the SLM's own futures."""

    def make(folder):
        place = linked(undisturbed[0]["futures"], folder / "run", *LOGGED)
        for stage in (SampleStage, OwnFutureStage):
            run_stage(stage(settings(), place))

    return once("qualities", make) / "run"


def states_of(run, shard):
    """(prefix, output so far, gold answer) of every state of a shard, by id."""
    states = Examples(run, shard).states
    return {name: (state.prefix, state.output, state.trajectory.problem.answer) for name, state in states.items()}


def used_in(run, shard):
    """Ids of the states with a usable future."""
    return [
        future.state.id for future in filter_futures(reduce_pools(Examples(run, shard).futures().values(), 3), 8)[0]
    ]


def verdict(pair, verifier, output, new, gold):
    text = pair.world.tokenizer.decode([*output.tolist(), *new], skip_special_tokens=True)
    return verifier.verify_many([text], [gold], bad_golds="unparsable")[0]


def test_samples_are_the_llms_and_the_first_right_and_wrong_ones_are_kept(run, pair, verifier):
    llm, kept = LocalLLM(pair.llm, valid_vocab=len(pair.world.tokenizer)), {"sampled": 0, "incorrect": 0}
    for shard in ("validation-00001",):
        used = used_in(run, shard)
        sampled = {row.pop("state"): row for row in Artefact(run, "samples").table(shard)}
        states = states_of(run, shard)
        assert sampled.keys() == states.keys()
        assert [row for row, one in sampled.items() if one["unverified"] is not None] == used
        for row, (prefix, output, gold) in states.items():
            if row not in used:
                assert sampled[row] == {"sampled": None, "unverified": None, "incorrect": None}
                continue
            draws = [
                llm.sample_many([prefix], 1, 45, temperature=1.5, top_p=1.0, top_k=0, seed=seed)[0][0].tolist()
                for seed in range(4)
            ]
            said = [verdict(pair, verifier, output, new, gold) for new in draws]
            assert sampled[row]["unverified"] == draws[0]
            for name, answer in (("sampled", "correct"), ("incorrect", "wrong")):
                first = next((new for new, one in zip(draws, said, strict=True) if one == answer), None)
                assert sampled[row][name] == first
                kept[name] += first is not None
    assert min(kept.values()) > 5
    counts = Artefact(run, "samples").finished()["counts"]
    assert counts["sampled"] >= max(counts["with a right one"], counts["with a wrong one"]) > 50


def test_own_futures_are_the_slms_first_right_sample_from_the_bare_state(run, pair, verifier):
    slm, shard, right = LocalLLM(pair.slm, valid_vocab=len(pair.world.tokenizer)), "train-00001", 0
    states, futures = states_of(run, shard), Examples(run, shard).futures("own-futures")
    assert futures.keys() == states.keys()
    for (prefix, output, gold), found in zip(states.values(), futures.values(), strict=True):
        draws = slm.sample_many([prefix], 2, 45, temperature=0.7, top_p=1.0, top_k=0, seed=0)[0]
        said = [verdict(pair, verifier, output, new.tolist(), gold) for new in draws]
        best = said.index("correct") if "correct" in said else 0
        assert [found.first, *found.tokens.tolist()] == draws[best].tolist()
        assert found.verdict == said[best]
        right += found.verdict == "correct"
    assert 0 < right < len(states)


def run_score(chosen, place) -> None:
    """The stage of the scores under these settings."""
    kinds = instead(chosen)
    run_stage(kinds.get(ScoreStage, ScoreStage)(chosen, place, kinds))


def scored(run, folder, kind) -> Path:
    place = linked(run, folder, *LOGGED, "samples", "own-futures")
    run_score(settings(samples={"future": kind}), place)
    return place


def test_scores_are_of_the_futures_asked_for_on_one_set_of_states(run, pair, tmp_path):
    scorer, shard, sets = CompatibilityScorer(pair.slm), "train-00003", {}
    examples, used = Examples(run, shard), used_in(run, shard)
    llm, own, states = examples.futures(), examples.futures("own-futures"), states_of(run, shard)
    sampled = read_samples(Artefact(run, "samples"), shard)
    for kind in ("llm", "own", *QUALITIES):
        place = scored(run, tmp_path / kind, kind)
        groups = Examples(place, shard).groups
        futures = {"llm": llm, "own": own}.get(kind)
        if futures is None:
            found = futures_of_quality(kind, list(llm.values()), used, sampled, 8, shard)
            futures = {future.state.id: future for future in found}
        sets[kind] = list(groups)
        for row in sets[kind][:4]:
            tokens = futures[row].tokens[:8]
            assert len(tokens) == 8
            wanted = scorer.score(states[row][0], groups[row].state.pool.ids, tokens)
            torch.testing.assert_close(groups[row].logprob, wanted, rtol=1e-4, atol=1e-4)
    assert {tuple(sets[kind]) for kind in QUALITIES} == {tuple(sets["verified"])}
    assert set(sets["verified"]) <= set(sets["llm"])
    assert len(sets["verified"]) > 2
    assert all(own[row].verdict == "correct" for row in sets["own"])
    assert sets["own"]


def test_other_samples_or_a_missing_stage_are_named(run, tmp_path):
    place = linked(run, tmp_path / "run", *LOGGED, "samples")
    with pytest.raises(ValueError, match=r"expected finished own-futures.*run `python -m benchmarks.paper` first"):
        run_score(settings(samples={"future": "own"}), place)
    with pytest.raises(ValueError, match=r"settings\.samples\.llm_temperature 1\.5, got 1\.0; put that back"):
        run_score(settings(samples={"future": "incorrect", "llm_temperature": 1.0}), place)


def test_a_servers_time_is_no_gpu_time(tmp_path):
    served = settings(models={"llm_server": {"url": "http://localhost:1"}})
    assert (SampleStage(served, tmp_path).device, SampleStage(served, tmp_path).served) == ("server", True)
    assert OwnFutureStage(served, tmp_path).device != "server"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", *QUALITIES])
@pytest.mark.sweep(4)
def test_a_run_trains_on_every_kind_of_future(run, tmp_path, kind):
    place = linked(run, tmp_path / "run", *LOGGED)
    for stage in ("samples", "own-futures"):
        (place / stage).symlink_to(run / stage, target_is_directory=True)
    chosen = settings(samples={"future": kind}, train={"seeds": [0], "epochs": 1})
    kinds = [one for command in ("score", "train") for one in with_futures(command, chosen)]
    work_through(kinds, chosen, place, tmp_path, instead(chosen))
    stage = TrainStage(chosen, place, instead(chosen))
    groups = [group for one in stage.groups("train") for group in one.groups]
    assert len(groups) == Artefact(place, "scores").finished()["counts"]["train groups"] > 20
    assert Artefact(place, "reranker").finished()["counts"] == {"adapters": 1}

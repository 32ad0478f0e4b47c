"""The offline stages on tiny random models, against plain loops."""

from __future__ import annotations

import pytest
import torch
from tiny import EOS, V, tiny
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from fb_core import CompatibilityScorer, LocalLLM, RequestPolicy
from fb_core.apps.pipeline.collect import admitted_positions, collect, log_states
from fb_core.apps.pipeline.futures import filter_futures, judge_futures
from fb_core.apps.pipeline.problems import Problem
from fb_core.apps.pipeline.records import Future, LoggedState, Trajectory
from fb_core.apps.pipeline.scores import score_states
from fb_core.events import Pool
from fb_core.models.facts import logits as hf_logits
from fb_core.models.packed import packs
from fb_core.verify.verifier import Verifier

LENGTH = 12


@pytest.fixture(scope="module")
def slm():
    return LocalLLM(tiny("qwen3", 1))


@pytest.fixture(scope="module")
def llm():
    return LocalLLM(tiny("qwen3", 2))


@pytest.fixture(scope="module")
def trajectories(slm):
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, V, (n,), generator=g) for n in (5, 3, 7, 5)]
    problems = [Problem(str(index), "", "7") for index in range(len(prompts))]
    return collect(slm, problems, prompts, LENGTH)


def full(model, ids):
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0]


def test_collect_is_greedy_decoding_with_its_entropies(slm, trajectories):
    for trajectory in trajectories:
        logits = full(slm.model, trajectory.tokens)[trajectory.prompt_length - 1 : -1]
        assert torch.equal(logits.argmax(-1), trajectory.output)
        assert len(trajectory.output) == LENGTH or int(trajectory.output[-1]) == EOS
        p = logits.softmax(-1)
        torch.testing.assert_close(trajectory.entropy, -(p * p.log()).sum(-1), rtol=1e-4, atol=1e-4)


def test_admitted_are_the_first_positions_above_the_threshold(trajectories):
    trajectory = trajectories[0]
    threshold = float(trajectory.entropy.median())
    expected = [trajectory.prompt_length + i for i, nats in enumerate(trajectory.entropy.tolist()) if nats > threshold]
    assert admitted_positions(trajectory, RequestPolicy(threshold)) == expected[:8]
    assert admitted_positions(trajectory, RequestPolicy(threshold), 2) == expected[:2]
    assert admitted_positions(trajectory, RequestPolicy(float("inf"))) == []


def test_logged_pools_are_those_of_full_forwards(slm, llm, trajectories):
    policy = RequestPolicy.calibrate(torch.cat([t.entropy for t in trajectories]), 0.5)
    states = log_states(slm, llm, trajectories, policy, slm_k=3, llm_k=2)
    assert [state.id for state in states] == [
        f"{index}@{position}" for index, t in enumerate(trajectories) for position in admitted_positions(t, policy)
    ]
    for state in states:
        prefix = state.trajectory.tokens[: state.position]
        assert torch.equal(state.prefix, prefix)
        assert torch.equal(state.output, prefix[state.trajectory.prompt_length :])
        small, large = (full(model.model, prefix)[-1].log_softmax(-1) for model in (slm, llm))
        ids = small.topk(3).indices.tolist()
        ids += [token for token in large.topk(2).indices.tolist() if token not in ids]
        assert state.pool.ids.tolist() == ids
        torch.testing.assert_close(state.pool.slm_logprob, small[state.pool.ids], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state.pool.llm_logprob, large[state.pool.ids], rtol=1e-4, atol=1e-4)


def test_usable_counts_every_filter():
    long, short = torch.arange(8), torch.arange(3)

    def future(tokens, verdict, *ids):
        pool = Pool(torch.tensor(ids), torch.ones(len(ids), dtype=torch.int32), torch.zeros(len(ids)), torch.zeros(1))
        trajectory = Trajectory(Problem("a", "", ""), long, 1, torch.zeros(7))
        return Future(LoggedState(trajectory, 1, 0.0, pool), 1, tokens, verdict)

    futures = [future(long, "correct", 1, 2), future(long, "wrong", 1, 2), future(short, "correct", 1, 2)]
    futures += [future(long, "correct", 1), future(long, "correct", 3, 4)]
    kept, filters = filter_futures(futures, 5)
    assert kept == futures[:1]
    assert (filters.admitted, filters.verified, filters.long_enough, filters.valid_group) == (5, 4, 3, 1)


def test_scores_come_back_in_the_order_of_states(slm, llm, trajectories):
    policy = RequestPolicy.calibrate(torch.cat([t.entropy for t in trajectories]), 0.5)
    states = log_states(slm, llm, trajectories, policy, slm_k=3, llm_k=2)[::-1]
    g = torch.Generator().manual_seed(1)
    futures = [Future(state, 0, torch.randint(V, (6,), generator=g), "correct") for state in states]
    scorer = CompatibilityScorer(slm.model)
    seen = []
    matrices = score_states(scorer, futures, 4, seen.append, batch=2)
    for state, future, matrix in zip(states, futures, matrices, strict=True):
        expected = scorer.score(state.prefix, state.pool.ids, future.tokens[:4])
        torch.testing.assert_close(matrix, expected, rtol=1e-5, atol=1e-5)
    assert seen[-1] == len(states)


@pytest.fixture(scope="module")
def tokenizer():
    """Ids 0 to V-1 as words; one of them reads as a box."""
    words = {f"w{i}": i for i in range(V)}
    words["\\boxed{7}"] = words.pop("w9")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="w1")


def test_futures_are_greedy_and_verified(slm, llm, trajectories, tokenizer):
    policy = RequestPolicy.calibrate(torch.cat([t.entropy for t in trajectories]), 0.6)
    states = log_states(slm, llm, trajectories, policy, slm_k=2, llm_k=2)
    with Verifier() as verifier:
        written = llm.complete_many([state.prefix for state in states], LENGTH)
        _, futures = judge_futures(states, written, tokenizer, verifier)
    for state, future in zip(states, futures, strict=True):
        assert future.state is state
        tokens = torch.cat([state.prefix, torch.tensor([future.first]), future.tokens])
        assert torch.equal(full(llm.model, tokens)[state.position - 1 : -1].argmax(-1), tokens[state.position :])
        written = tokens[state.trajectory.prompt_length :].tolist()
        assert (future.verdict == "correct") == (9 in written)


def test_logits_match_the_model():
    for family in ("qwen3", "gemma2"):
        model = tiny(family)
        ids = torch.arange(3, 9)
        with torch.no_grad():
            hidden = model.base_model(input_ids=ids[None]).last_hidden_state[0]
            torch.testing.assert_close(hf_logits(model, hidden), full(model, ids), rtol=1e-5, atol=1e-5)


def test_packs_keep_order_and_budget():
    assert packs([3, 3, 3, 9, 1], 6) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert packs([], 6) == []

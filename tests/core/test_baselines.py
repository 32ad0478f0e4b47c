import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import EOS, V, tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from fb_core.baselines.majority import majority, majority_vote
from fb_core.baselines.takeover import takeover
from fb_core.decoding import CollaborativeDecoder, LLMPreference
from fb_core.llm import LocalLLM
from fb_core.policy import RequestPolicy


def prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, V, (n,), generator=generator) for n in lengths]


def same_number(a, b):
    return float(a) == float(b)


@pytest.mark.parametrize(
    ("answers", "winner"),
    [
        (["1", "2", "1"], 0),
        (["1", "2", "2.0", "3"], 1),
        (["1", "2", "2", "1"], 0),
        (["3", "1", "2", "2", "1"], 1),
        ([None, "2", None], 1),
        ([None, None, None, "5", "6", "6.0"], 4),
        ([None, None], None),
        ([], None),
    ],
)
def test_majority_is_over_classes_of_answers(answers, winner):
    assert majority_vote(answers, same_number) == winner


@settings(deadline=None, max_examples=100)
@given(st.lists(st.one_of(st.none(), st.integers(0, 3).map(str)), max_size=9))
def test_majority_agrees_with_counting(answers):
    votes = [answer for answer in answers if answer is not None]
    wanted = max(votes, key=lambda answer: (votes.count(answer), -votes.index(answer)), default=None)
    winner = majority_vote(answers, same_number)
    assert (winner is None) == (wanted is None)
    if winner is not None:
        assert winner == answers.index(wanted)


class Numbers:
    """What `majority` needs of a Verifier."""

    def equivalent(self, a, b):
        return a.split(".")[0] == b.split(".")[0]


def test_majority_samples_decodes_and_votes():
    sampler = LocalLLM(tiny("qwen3", 1))
    words = {f"\\boxed{{{token % 3}.{token}}}": token for token in range(3, V)} | {"<unk>": 0, "<end>": EOS, "word": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), unk_token="<unk>", eos_token="<end>"
    )
    asked = prompts(4, 7, 5)
    winners = majority(sampler, asked, Numbers(), tokenizer, 6, 12, seed=5)
    assert winners == majority(sampler, asked, Numbers(), tokenizer, 6, 12, seed=5)
    drawn = sampler.sample_many(asked, 6, 12, seed=5)
    for samples, winner in zip(drawn, winners, strict=True):
        last = [[int(token) for token in sample if token >= 3][-1:] for sample in samples]
        answers = [f"{box[0] % 3}.{box[0]}" for box in last if box]
        kinds = [answer[0] for answer in answers]
        wanted = max(answers, key=lambda a: (kinds.count(a[0]), -kinds.index(a[0]), -answers.index(a)))
        assert winner == wanted


@pytest.mark.parametrize("threshold", [-math.inf, 1.5, 2.0, 2.3, math.inf])
def test_takeover_is_greedy_of_one_then_of_the_other(threshold):
    slm, llm = tiny("qwen3", 2), LocalLLM(tiny("qwen3", 3))
    asked = prompts(4, 8, 3, 6, seed=1)
    policy = RequestPolicy(threshold)
    found = takeover(slm, llm, policy, asked, 12)
    alone = LocalLLM(slm).complete_many(asked, 12)
    for ids, small, generation in zip(asked, alone, found, strict=True):
        if not generation.events:
            assert torch.equal(generation.token_ids, small)
            continue
        (event,) = generation.events
        assert torch.equal(generation.token_ids[: event.step], small[: event.step])
        rest = llm.complete(torch.cat([ids, small[: event.step]]), 12 - event.step)
        assert torch.equal(generation.token_ids[event.step :], rest)
        assert event.token == int(rest[0])
        assert event.choice == 0
        assert event.entropy > threshold
        assert generation.text is None
    assert all(bool(generation.events) == (threshold < math.inf) for generation in found) or threshold > 0
    first = CollaborativeDecoder(slm, llm, LLMPreference(), policy, max_events=1).generate_many(asked, 12)
    assert [[event.step for event in one.events] for one in first] == [
        [event.step for event in one.events] for one in found
    ]


def test_takeover_at_the_limit_and_at_eos():
    slm, large = tiny("qwen3", 4), tiny("qwen3", 5)
    llm = LocalLLM(large)
    (ids,) = prompts(5)
    (one,) = takeover(slm, llm, RequestPolicy(-math.inf), [ids], 1)
    assert one.token_ids.tolist() == [one.events[0].token]
    large.generation_config.eos_token_id = one.events[0].token
    (ended,) = takeover(slm, llm, RequestPolicy(-math.inf), [ids], 9)
    assert ended.token_ids.tolist() == one.token_ids.tolist()
    assert takeover(slm, llm, RequestPolicy(1.0), [], 9) == []

"""Speculative decoding against its definition: plain forwards, one position at a time."""

import pytest
import torch
from plain import logits, models
from tiny import EOS, prompts, tiny

from benchmarks.paper.methods.speculative import at_least, exact, speculative, within_top
from fb_core.llm.local import LLM, LocalLLM

RULES = {"exact": exact, "top 3": within_top(3), "p >= 0.1": at_least(0.1)}


def takes(rule, scores, token):
    if rule == "top 3":
        return token in scores.sort(descending=True, stable=True).indices[:3]
    return token == int(scores.argmax()) or (rule == "p >= 0.1" and float(scores.softmax(-1)[token]) >= 0.1)


def naive(slm, llm, ids, limit, rule, draft):
    """(new tokens, rounds, tokens of the LLM, positions that it reads after the prompt)"""
    ids, new, rounds, corrected, read = ids.tolist(), [], 0, 0, -1
    while len(new) < limit and (not new or new[-1] != EOS):
        rounds += 1
        drafted = []
        while len(drafted) < min(draft, limit - len(new) - 1) and (not drafted or drafted[-1] != EOS):
            drafted.append(int(logits(slm, ids + new + drafted).argmax()))
        read += 1 + len(drafted)
        for token in drafted:
            if not takes(rule, logits(llm, ids + new), token):
                break
            new.append(token)
            if token == EOS:
                return new, rounds, corrected, read
        new.append(int(logits(llm, ids + new).argmax()))
        corrected += 1
    return new, rounds, corrected, read


@pytest.mark.parametrize("draft", [1, 3, 8])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.sweep(7)
def test_it_is_its_definition(family, rule, draft):
    slm, llm = models(1, 2, family=family)
    asked = prompts(4, 9, 1, 6)
    for ids, generation in zip(asked, speculative(slm, llm, asked, 30, accept=RULES[rule], draft=draft), strict=True):
        new, rounds, corrected, read = naive(slm, llm, ids, 30, rule, draft)
        assert generation.token_ids.tolist() == new
        assert generation.usage == (rounds, None, 0, corrected, read)


@pytest.mark.parametrize("limit", [1, 2, 7, 40])
def test_exact_is_the_large_models_own_text(limit):
    slm, llm = models(1, 2)
    asked = prompts(5, 3, 8, seed=3)
    own = LocalLLM(llm).complete_many(asked, limit)
    assert [one.token_ids.tolist() for one in speculative(slm, llm, asked, limit)] == [ids.tolist() for ids in own]
    twins = speculative(llm, llm, asked, limit)  # every draft is accepted
    assert [one.token_ids.tolist() for one in twins] == [ids.tolist() for ids in own]
    assert all(one.usage.calls == -(-len(one.token_ids) // 6) or int(one.token_ids[-1]) == EOS for one in twins)


def test_the_last_position_is_used_and_no_more():
    slm, llm = tiny("qwen3", 1, max_position_embeddings=12), models(2)[0]
    for generation, length in zip(speculative(slm, llm, prompts(4, 11), 40), (4, 11), strict=True):
        assert len(generation.token_ids) <= 12 - length
        assert len(generation.token_ids) == 12 - length or int(generation.token_ids[-1]) == EOS


def test_broken_logits_and_a_server_are_refused():
    slm, _ = models(1, 2)

    class Elsewhere(LLM):
        def candidates(self, ids, k, score_ids=None): ...
        def complete(self, ids, max_new_tokens): ...

    broken = tiny("qwen3", 2)
    torch.nn.init.constant_(broken.get_output_embeddings().weight, torch.nan)
    with pytest.raises(ValueError, match="model: expected finite logits"):
        speculative(slm, broken, prompts(4), 8)
    with pytest.raises(ValueError, match="llm: expected a model in this process"):
        speculative(slm, Elsewhere(), prompts(4), 8)

"""GlimpRouter against its definition, one prompt and one token at a time."""

import math

import pytest
import torch
from plain import logits
from tiny import EOS, V, prompts, tiny

from benchmarks.paper.methods.glimp_router import glimp_router
from fb_core.decode.decoder import Usage
from fb_core.decode.policy import RequestPolicy

BREAKS = frozenset(range(20, 26))


def naive(slm, llm, ids, limit, threshold):
    """(new tokens, steps, what was asked of the LLM)"""
    ids, new, steps, calls, written, read = ids.tolist(), [], 0, 0, 0, 0
    while len(new) < limit and (not new or new[-1] != EOS):
        entropy = float(torch.special.entr(logits(slm, ids + new).double().softmax(-1)).sum())
        writer = llm if entropy > threshold else slm
        steps, calls = steps + 1, calls + (writer is llm)
        while len(new) < limit:
            read = len(new) if writer is llm else read
            new.append(int(logits(writer, ids + new).argmax()))
            written += writer is llm
            if new[-1] in (EOS, *BREAKS):
                break
    return new, steps, Usage(calls, None, 0, written, read)


@pytest.mark.parametrize("threshold", [-math.inf, 0.5, 1.0, 2.0, math.inf])
def test_it_is_its_definition(threshold):
    slm, llm = tiny("qwen3", 1), tiny("qwen3", 2)
    asked, steps = prompts(4, 9, 6, 5), 0
    generations = glimp_router(slm, llm, RequestPolicy(threshold, V), asked, 40, step_ends=BREAKS)
    for ids, one in zip(asked, generations, strict=True):
        new, taken, usage = naive(slm, llm, ids, 40, threshold)
        assert (one.token_ids.tolist(), one.usage, one.events) == (new, usage, [])
        steps += taken
    calls = sum(one.usage.calls for one in generations)
    if math.isinf(threshold):
        assert calls == (0 if threshold > 0 else steps)
    elif threshold == 1.0:
        assert 0 < calls < steps


def test_no_prompts_and_the_last_position():
    slm, llm = tiny("qwen3", 1, max_position_embeddings=12), tiny("qwen3", 2)
    assert glimp_router(slm, llm, RequestPolicy(1.0), [], 8, step_ends=BREAKS) == []
    for one in glimp_router(slm, llm, RequestPolicy(1.0), prompts(4, 11), 40, step_ends=BREAKS):
        assert len(one.token_ids) <= 8

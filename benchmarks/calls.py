"""`python -m benchmarks.calls`: microseconds of a small call on the CPU, and of the same arithmetic in eager PyTorch.

At such sizes a call costs more than its work. Both take turns in one process; the fastest of several rounds counts.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from torch.nn.functional import rms_norm as torch_rms_norm

from fb_kernels import (
    candidate_head,
    linear_logprob,
    merge_attention_states,
    qk_norm_rope,
    rms_norm,
    skinny_linear,
    swiglu,
    topk_entropy,
)

EPS = 1e-6
ROUNDS, SECONDS = 15, 0.02  # rounds of each way, seconds per round


class Call(NamedTuple):
    """One op at one size."""

    name: str
    size: str
    ours: Callable[[], object]
    eager: Callable[[], object]


def calls() -> Iterator[Call]:
    """Calls at the sizes of a small decoder's step."""
    x, other, weight, gate_up = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64), torch.randn(4, 128)

    def normed(s: Tensor) -> Tensor:
        return torch_rms_norm(s, (64,), weight, EPS)

    yield Call("rms_norm", "4 x 64", lambda: rms_norm(x, weight, EPS), lambda: normed(x))
    yield Call("rms_norm, residual", "4 x 64", lambda: rms_norm(x, weight, EPS, other), lambda: normed(x + other))
    yield Call("swiglu", "4 x 128", lambda: swiglu(gate_up), lambda: silu(gate_up[:, :64]) * gate_up[:, 64:])
    outs, lses = torch.randn(2, 4, 4, 16), torch.randn(2, 4, 4)

    def merged() -> tuple[Tensor, Tensor]:
        lse = torch.logaddexp(lses[0], lses[1])
        share = torch.sigmoid(lses[1] - lses[0]).T[..., None]
        return torch.lerp(outs[0], outs[1], share), lse

    states = outs[0], lses[0], outs[1], lses[1]
    yield Call("merge_attention_states", "4 x 4 x 16", lambda: merge_attention_states(*states), merged)
    hidden, groups = torch.randn(13, 64), torch.tensor([0, 13], dtype=torch.int32)

    def headed() -> tuple[Tensor, Tensor, Tensor]:
        score = normed(hidden) @ weight
        return score, score.softmax(0), score.argmax()

    yield Call("candidate_head", "13 x 64", lambda: candidate_head(hidden, weight, weight, groups, eps=EPS), headed)
    head, target = torch.randn(512, 64), torch.arange(4)

    def logprobs() -> Tensor:
        return (x @ head.T).log_softmax(-1).gather(-1, target[:, None])

    yield Call("linear_logprob", "4 x 64 x 512", lambda: linear_logprob(x, head, target), logprobs)
    qkv, norm, angles, positions = torch.randn(4, 8 * 16), torch.randn(16), torch.randn(32, 16), torch.arange(4)
    cos, sin = angles.cos(), angles.sin()
    rotate = partial(qk_norm_rope, num_heads=4, num_kv_heads=2, eps=EPS)

    def rotated() -> tuple[Tensor, ...]:
        q, k, v = (part.unflatten(1, (-1, 16)) for part in qkv.split((64, 32, 32), 1))
        c, s = cos[positions][:, None], sin[positions][:, None]
        q, k = (torch_rms_norm(part, (16,), norm, EPS) for part in (q, k))
        return *(y * c + torch.cat((-y[..., 8:], y[..., :8]), -1) * s for y in (q, k)), v

    yield Call("qk_norm_rope", "4 rows", lambda: rotate(qkv, norm, norm, cos, sin, positions), rotated)
    yield Call("skinny_linear", "4 x 64 x 512", lambda: skinny_linear(x, head), lambda: linear(x, head))
    logits = torch.randn(1, 512)

    def top() -> tuple[Tensor, ...]:
        values, indices = logits.topk(8)
        p = values.softmax(-1)
        return torch.special.entr(p).sum(-1), values, indices

    yield Call("topk_entropy", "512, k = 8", lambda: topk_entropy(logits, 8), top)


def microseconds(call: Callable[[], object]) -> float:
    """Microseconds per call, over many calls."""
    timer = timeit.Timer(call)
    number = max(1, int(SECONDS / max(timer.timeit(10) / 10, 1e-7)))
    return timer.timeit(number) / number * 1e6


def main() -> None:
    """Print one row per call."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"| {'op':<24} | {'size':<14} | ours, us | eager, us | eager / ours |\n|---|---|---|---|---|")
    with torch.inference_mode():
        for call in calls():
            pairs = [(microseconds(call.ours), microseconds(call.eager)) for _ in range(ROUNDS)]
            ours, eager = map(min, zip(*pairs, strict=True))
            print(
                f"| {call.name:<24} | {call.size:<14} | {ours:8.1f} | {eager:9.1f} | {eager / ours:12.2f} |", flush=True
            )


if __name__ == "__main__":
    main()

"""How `linear_logprob`, its partials of a vocabulary shard and their combination are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fb_kernels.calls import Call, Calls, Part, by_definition, ids, randn, sample_rows
from fb_kernels.linear_logprob import naive

ALL = ("return_lse", "return_entropy", "return_max")


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(hidden, weight).float()


def _log_softmax(hidden: Tensor, weight: Tensor, target: Tensor, **_: bool) -> Tensor:
    return _logits(hidden, weight).log_softmax(-1).gather(-1, target[:, None])[:, 0]


def _cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, **_: bool) -> Tensor:
    return -F.cross_entropy(_logits(hidden, weight), target, reduction="none")


def _linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, **_: bool) -> Tensor:
    return -F.linear_cross_entropy(hidden, weight, target, reduction="none").float()  # type: ignore[attr-defined]


PLAIN: dict[str, Callable[..., Any]] = {"logits, log_softmax": _log_softmax, "logits, cross_entropy": _cross_entropy}
if hasattr(F, "linear_cross_entropy"):
    PLAIN["torch linear_cross_entropy"] = _linear_cross_entropy


def partials(
    hidden: Tensor, weight_shard: Tensor, target: Tensor, *, vocab_start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain torch, for targets in this shard or before it."""
    products = _logits(hidden, weight_shard)
    top = products.amax(-1)
    local = target - vocab_start
    picked = products.gather(1, local.clamp(0)[:, None])[:, 0].masked_fill(local < 0, -torch.inf)
    return top, (products - top[:, None]).exp().sum(-1), picked


def combine(max: Tensor, sumexp: Tensor, target_logit: Tensor) -> tuple[Tensor, Tensor]:
    """Plain torch."""
    lse = (max + sumexp.log()).logsumexp(0)
    return target_logit.amax(0) - lse, lse


def part(n: int) -> Part:
    """Some of n rows."""
    rows = sample_rows(n)

    def take_rows(call: Call) -> Call:
        return call.with_(**{name: call.arguments[name][rows] for name in ("hidden", "target")})

    return Part(take_rows, lambda results: [x[rows] for x in results])


def linear_logprob(n: int = 1664, d: int = 2048, v: int = 32_768, *, whole: bool = False) -> Call:
    """A call on N rows; if `whole` it returns lse, entropy and maximum too."""
    tensors = {"hidden": randn(n, d), "weight": randn(v, d, heavy=9) * 2 / d**0.5, "target": ids(v, n)}
    return Call(
        "linear_logprob",
        tensors | dict.fromkeys(ALL, whole),
        gradients=("hidden", "weight"),
        outputs=(0, 1, 2)[: 1 + 2 * whole],
        shape=f"N={n} D={d} V={v}",
        scales=(16.0, 16.0, 64.0, 16.0, 4.0, 4.0) if whole else (16.0,),  # an entropy's gradient has log-probs in it
        flops=2.0 * n * d * v,
        bytes=2.0 * (n + v) * d,
        part=part(n),
        plain={} if whole else PLAIN,
    )


def definition(call: Call) -> list[Tensor]:
    """The results that the call returns."""
    arguments = {name: value for name, value in call.arguments.items() if name not in ALL}
    requests = [True, *(call.arguments.get(name, False) for name in ALL)]
    return [x for x, requested in zip(naive.linear_logprob(**arguments), requests, strict=True) if requested]


def linear_logprob_partials(n: int = 13, d: int = 2048, v: int = 16_384) -> Call:
    """A call on the second of two shards."""
    tensors = {"hidden": randn(n, d), "weight_shard": randn(v, d, heavy=9) * 2 / d**0.5, "target": ids(2 * v, n)}
    return Call(
        "linear_logprob_partials",
        tensors | {"vocab_start": v},
        shape=f"N={n} D={d} V={v} (partials of a shard)",
        scales=(16.0, 64.0, 16.0),
        flops=2.0 * n * d * v,
        bytes=2.0 * (n + v) * d,
        part=part(n),
        plain={"torch eager": partials},
    )


def combine_logprob_partials(s: int = 4, n: int = 8192) -> Call:
    """A call on S shards."""
    tensors = {
        "max": 3 * randn(s, n),
        "sumexp": 1 + randn(s, n, seed=1).square(),
        "target_logit": randn(s, n, seed=2),
    }
    return Call(
        "combine_logprob_partials",
        tensors,
        least=dict.fromkeys(tensors, torch.float32),
        shape=f"S={s} N={n} (partials combined)",
        scales=(16.0, 16.0),
        bytes=12.0 * s * n,
        plain={"torch eager": combine},
    )


SHAPES = {"small": ((7,), 40, 300), "checked": ((13, 300), 512, 8200), "timed": ((13, 1664), 2048, 32_768)}


def _checked(size: str) -> Iterator[Call]:
    counts, width, vocabulary = SHAPES[size]
    yield from (linear_logprob(rows, width, vocabulary, whole=True) for rows in counts)
    trained = linear_logprob(counts[-1], width, vocabulary)
    yield replace(trained, gradients=("hidden",), shape=f"{trained.shape} (frozen head)", scales=(16.0, 4.0))


def _checked_partials(size: str) -> Iterator[Call]:
    _, width, vocabulary = SHAPES[size]
    yield linear_logprob_partials(13, width, vocabulary // 2)


def _checked_combination(size: str) -> Iterator[Call]:
    yield combine_logprob_partials(4, {"small": 5, "checked": 300, "timed": 8192}[size])


OPS = (
    Calls(
        "linear_logprob",
        linear_logprob,
        definition,
        checked=_checked,
        takes="hidden[..., D], weight[V, D], target[...] or [..., K], (bias[V])",
        gives="logprob of target's shape, on request lse, entropy and the row's largest log-prob, all fp32",
        cpu="fp32, bf16",
        optional=("bias",),
    ),
    Calls(
        "linear_logprob_partials",
        linear_logprob_partials,
        by_definition(naive.linear_logprob_partials),
        checked=_checked_partials,
        takes="hidden[..., D], weight_shard[Vs, D], target[...], (bias[Vs])",
        gives="max[...], sumexp[...], target_logit[...], fp32",
        optional=("bias",),
    ),
    Calls(
        "combine_logprob_partials",
        combine_logprob_partials,
        by_definition(naive.combine_logprob_partials),
        checked=_checked_combination,
        takes="max[S, N], sumexp[S, N], target_logit[S, N], fp32 or fp64",
        gives="logprob[N], lse[N]",
    ),
)

"""How `decoder_layer` is called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fb_kernels import LayerWeights
from fb_kernels.branch_attention_qkv.calls import CACHES, TABLES, TAKES, after, in_pages, step, with_tables
from fb_kernels.calls import EPS, Call, Calls, randn
from fb_kernels.decoder_layer import naive
from fb_kernels.swiglu.calls import gated


def layer(hidden: Tensor, weights: LayerWeights, eps: float, slots: Tensor, **rest: Any) -> Tensor:
    """Plain torch, for weights without biases."""

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    kv_heads, width = rest["k_cache"].shape[-2:]
    rest |= {"num_heads": weights.o.shape[1] // width, "num_kv_heads": kv_heads, "eps": eps}
    rest |= {"q_weight": weights.q_norm, "k_weight": weights.k_norm}
    qkv = F.linear(normed(hidden, weights.input_norm), weights.qkv)
    hidden = hidden + F.linear(step(qkv=qkv, **rest).flatten(1), weights.o)
    return hidden + F.linear(gated(F.linear(normed(hidden, weights.post_norm), weights.gate_up)), weights.down)


def decoder_layer(
    n: int = 1,
    d: int = 2048,
    f: int = 6144,
    p: int = 2048,
    hq: int = 16,
    hkv: int = 8,
    e: int = 128,
    *,
    lengths: tuple[int, ...] = (),
) -> Call:
    """N rows after P tokens of one sequence, or n rows after each of several in pages."""
    count, attention = n * max(1, len(lengths)), hq * e
    matrices = [((hq + 2 * hkv) * e, d), (d, attention), (2 * f, d), (d, f)]
    qkv, o, gate_up, down = (randn(*shape) / shape[1] ** 0.5 for shape in matrices)
    input_norm, q_norm, k_norm, post_norm = (1 + randn(width, seed=s) / 8 for s, width in enumerate((d, e, e, d)))
    weights = LayerWeights(input_norm, qkv, None, q_norm, k_norm, o, None, post_norm, gate_up, None, down, None)
    cache = in_pages(n, lengths, p, hkv, e) if lengths else after(n, p, hkv, e)
    products, shape = sum(a * b for a, b in matrices), f"N={count} D={d} F={f} P={p}"
    return Call(
        "decoder_layer",
        {"hidden": randn(count, d), "weights": weights} | cache | {"eps": EPS},
        written=CACHES,
        least=dict.fromkeys(TABLES, torch.float32),
        shape=f"G={len(lengths)} {shape} (in pages)" if lengths else shape,
        flops=2.0 * count * products,
        bytes=2.0 * products + 4.0 * sum(lengths or (p,)) * hkv * e,
        plain={"torch eager, SDPA": layer},
    )


def _checked(size: str) -> Iterator[Call]:
    shape = {
        "small": (40, 56, 20, 4, 2, 8),
        "checked": (256, 700, 100, 8, 4, 32),
        "timed": (2048, 6144, 2048, 16, 8, 128),
    }[size]
    held = shape[2]
    for rows, lengths in ((1, ()), (13, ()), (1, (held, held // 2, 1, held))):
        yield decoder_layer(rows, *shape, lengths=lengths)


OPS = (
    Calls(
        "decoder_layer",
        decoder_layer,
        with_tables(naive.decoder_layer, "hidden"),
        checked=_checked,
        takes="hidden[N, D], weights: LayerWeights, cos[S, E], sin[S, E], positions[N], " + TAKES,
        gives="hidden[N, D]; writes k and v to their slots",
        cpu="fp32, bf16",
    ),
)

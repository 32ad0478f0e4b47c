"""How `qk_norm_rope` is called, and its form that also writes a key-value cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fb_kernels.calls import EPS, Call, Calls, angles, by_definition, ids, randn
from fb_kernels.qk_norm_rope import naive


def norm_and_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Heads, normed and rotated by plain torch."""
    first, second = F.rms_norm(x, x.shape[-1:], weight, eps).chunk(2, -1)
    return torch.cat([first, second], -1) * cos + torch.cat([-second, first], -1) * sin


def split(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) by plain torch."""
    q, k, v = qkv.unflatten(-1, (-1, cos.shape[1])).split([num_heads, num_kv_heads, num_kv_heads], 1)
    cos, sin = (table[positions][:, None].to(qkv.dtype) for table in (cos, sin))
    return norm_and_rotate(q, q_weight, cos, sin, eps), norm_and_rotate(k, k_weight, cos, sin, eps), v.contiguous()


def qk_norm_rope(n: int = 4096, hq: int = 16, hkv: int = 8, e: int = 128, *, length: int = 64) -> Call:
    """A call on N tokens, with both norms and no cache."""
    cos, sin = angles(length, e)
    tensors = {
        "qkv": randn(n, (hq + 2 * hkv) * e),
        "q_weight": 1 + randn(e) / 8,
        "k_weight": 1 + randn(e, seed=1) / 8,
        "cos": cos,
        "sin": sin,
        "positions": ids(length, n),
    }
    width = (hq + 2 * hkv) * e
    return Call(
        "qk_norm_rope",
        tensors | {"num_heads": hq, "num_kv_heads": hkv, "eps": EPS},
        gradients=("qkv", "q_weight", "k_weight"),
        outputs=(0, 1, 2),
        shape=f"T={n} Hq={hq} Hkv={hkv} E={e}",
        bytes=4.0 * n * width,
        plain={"torch eager": split},
        launches={
            "_qk_norm_rope_fwd_kernel": 4 * n * (width + e),
            "_qk_norm_rope_bwd_kernel": 2 * n * (3 * width + 2 * e),
        },
    )


def with_cache(call: Call, slots: Tensor, size: int) -> Call:
    """The call with caches of `size` slots."""
    rows, width = len(slots), call.arguments["cos"].shape[1]
    heads, kv_heads = call.arguments["num_heads"], call.arguments["num_kv_heads"]
    return Call(
        "qk_norm_rope",
        call.arguments | {"kv_out": (*(randn(size, kv_heads, width, seed=seed) for seed in (2, 3)), slots)},
        written=("kv_out.0", "kv_out.1"),
        shape=f"{call.shape} (keys and values kept)",
        bytes=4.0 * rows * (heads + 3 * kv_heads) * width,
        launches=call.launches,
    )


def _checked(size: str) -> Iterator[Call]:
    call = qk_norm_rope(*{"small": (5, 4, 2, 8), "checked": (33, 16, 8, 128)}.get(size, ()))
    rows = len(call.arguments["positions"])
    yield from (call, with_cache(call, torch.arange(rows) + 2, rows + 3))


def compiled() -> Iterator[Call]:
    """The heads of Qwen3-1.7B over a decode step that fills a cache, and over packed rows."""
    for rows in (16, 4096):
        call = qk_norm_rope(rows, length=4096)
        call = call.with_(positions=call.arguments["positions"].int())
        bare = replace(call, gradients=("qkv",), shape=f"{call.shape}, no norm").with_(q_weight=None, k_weight=None)
        for variant in (call, bare):
            yield variant.cast(torch.bfloat16)
            yield with_cache(variant, call.arguments["positions"], 4096).cast(torch.bfloat16)


OPS = (
    Calls(
        "qk_norm_rope",
        qk_norm_rope,
        by_definition(naive.qk_norm_rope),
        checked=_checked,
        compiled=compiled,
        takes="qkv[T, (Hq + 2 Hkv) E] or, without v, [T, (Hq + Hkv) E], (q_weight[E]), (k_weight[E]), cos[S, E], "
        "sin[S, E], positions[T], (kv_out)",
        gives="q[T, Hq, E], k[T, Hkv, E], v[T, Hkv, E]; with kv_out writes k and v to their slots",
        cpu="fp32, bf16",
    ),
)

"""How `branch_attention_qkv` is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fb_kernels.branch_attention_qkv import naive
from fb_kernels.calls import EPS, PAGE, Call, Calls, angles, by_definition, randn, sequences
from fb_kernels.qk_norm_rope.calls import split

CACHES, TABLES = ("k_cache", "v_cache"), ("cos", "sin")
TAKES = "k_cache[slots, Hkv, E] or pages[pages, page, Hkv, E], v_cache, held[G], (slots[N]), (block_table[G, n])"


def step(k_cache: Tensor, v_cache: Tensor, held: Tensor, **projected: Any) -> Tensor:
    """Attention of rows that are each one token after one sequence, by plain torch: [N, Hq, E]."""
    q, k, v = split(**projected)
    keys, values = (
        torch.cat([cache[None, : int(held)].expand(len(q), -1, -1, -1), own[:, None]], 1).transpose(1, 2)
        for cache, own in ((k_cache, k), (v_cache, v))
    )
    return F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]


def after(rows: int, p: int, hkv: int, e: int) -> dict[str, Tensor]:
    """Caches, tables and indices of rows after P tokens of one sequence."""
    held = torch.full((rows,), p, dtype=torch.int32)
    caches = {name: randn(p + rows, hkv, e, seed=1 + place, heavy=rows + 5) for place, name in enumerate(CACHES)}
    slots = p + torch.arange(rows, dtype=torch.int32)
    tables = dict(zip(TABLES, angles(p + 1, e), strict=True))
    return caches | tables | {"positions": held, "held": held[:1], "slots": slots}


def in_pages(rows: int, lengths: tuple[int, ...], p: int, hkv: int, e: int) -> dict[str, Tensor]:
    """Caches, tables and indices of `rows` rows after each of several sequences, up to P tokens long."""
    pages, indices = sequences(lengths, rows)
    caches = {name: randn(pages, PAGE, hkv, e, seed=1 + place) for place, name in enumerate(CACHES)}
    return caches | dict(zip(TABLES, angles(p + 1, e), strict=True)) | indices


def with_tables(naive: Callable[..., Any], rows: str) -> Callable[[Call], list[Tensor]]:
    """By the definition, with the rotary tables in the dtype of the argument `rows`, as in plain PyTorch."""

    def definition(call: Call) -> list[Tensor]:
        dtype = call.arguments[rows].dtype
        return by_definition(naive)(call.with_(**{name: call.arguments[name].to(dtype) for name in TABLES}))

    return definition


def branch_attention_qkv(
    n: int = 1,
    hq: int = 16,
    hkv: int = 8,
    e: int = 128,
    p: int = 2048,
    *,
    lengths: tuple[int, ...] = (),
) -> Call:
    """N rows after P tokens of one sequence, or N rows in all after several in pages."""
    rows = n // max(1, len(lengths))
    cache = in_pages(rows, lengths, p, hkv, e) if lengths else after(n, p, hkv, e)
    norms = {"q_weight": 1 + randn(e) / 8, "k_weight": 1 + randn(e, seed=1) / 8}
    options = {"num_heads": hq, "num_kv_heads": hkv, "eps": EPS}
    shape = f"N={n} Hq={hq} Hkv={hkv} E={e} P={p}"
    return Call(
        "branch_attention_qkv",
        {"qkv": randn(n, (hq + 2 * hkv) * e)} | norms | cache | options,
        written=CACHES,
        least=dict.fromkeys(TABLES, torch.float32),
        shape=f"G={len(lengths)} {shape} (in pages)" if lengths else shape,
        flops=4.0 * rows * hq * e * sum(lengths or (p,)),
        bytes=4.0 * sum(lengths or (p,)) * hkv * e,
        plain={"torch eager, SDPA": lambda slots, **rest: step(**rest)},
    )


def _checked(size: str) -> Iterator[Call]:
    *heads, held = {"small": (4, 2, 64, 20), "checked": (16, 8, 128, 300), "timed": (16, 8, 128, 2048)}[size]
    for rows in (1, 13):
        yield branch_attention_qkv(rows, heads[0], heads[1], heads[2], held)
    for rows, lengths in ((1, (held, held // 2, 1, held)), (16, (held, held - 1))):
        yield branch_attention_qkv(rows * len(lengths), heads[0], heads[1], heads[2], held, lengths=lengths)


OPS = (
    Calls(
        "branch_attention_qkv",
        branch_attention_qkv,
        with_tables(naive.branch_attention_qkv, "qkv"),
        checked=_checked,
        compiled=lambda: (),  # its Triton kernels are those of its parts
        takes="qkv[N, (Hq + 2 Hkv) E], (q_weight[E]), (k_weight[E]), cos[S, E], sin[S, E], positions[N], " + TAKES,
        gives="out[N, Hq, E]; writes k and v to their slots",
        cpu="fp32, bf16",
        cuda="bf16, fp16",
    ),
)

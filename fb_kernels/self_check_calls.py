"""The calls by which `fb_kernels.self_check` compares every op with its definition; `fb_kernels.bench` times them.

Inputs are made on the CPU, the same everywhere. The functions in SHAPED take an op's dimensions as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fb_kernels as ops
from fb_kernels.branch_attention import naive as branch_attention
from fb_kernels.branch_attention_qkv import naive as branch_attention_qkv
from fb_kernels.candidate_head import naive as candidate_head
from fb_kernels.commit import naive as commit
from fb_kernels.compatibility_targets import naive as compatibility_targets
from fb_kernels.decoder_layer import naive as decoder_layer
from fb_kernels.group_cross_entropy import naive as group_cross_entropy
from fb_kernels.joint_pool import naive as joint_pool
from fb_kernels.linear_logprob import naive as linear_logprob
from fb_kernels.merge_attention_states import naive as merge_attention_states
from fb_kernels.qk_norm_rope import naive as qk_norm_rope
from fb_kernels.rms_norm import naive as rms_norm
from fb_kernels.skinny_linear import naive as skinny_linear
from fb_kernels.swiglu import naive as swiglu
from fb_kernels.topk_entropy import naive as topk_entropy

Outputs = Tensor | tuple[Tensor, ...]
EPS = 1e-6
DRAWN = 1 << 23  # drawn numbers: drawing more takes longer than the calls
PAGE = 64
CHECKED = 16  # rows of a `Part`
OFFSETS = ("cu_branch", "cu_group", "prefix_start", "prefix_len")
SIZES = ("small", "checked", "timed")  # for a CPU; for a GPU, checked by the definition; a model's, to be timed


class Part(NamedTuple):
    """Some rows of a call's results, for calls whose whole definition takes long.

    Attributes:
        definition: computes these rows from all the call's arguments.
        of: takes the same rows of whole results.
    """

    definition: Callable[..., Outputs]
    of: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Call:
    """An op at one size.

    Attributes:
        op: its folder.
        shape: the size in words.
        ours: calls the op with the floats, then the indices.
        definition: the same by `naive.py`, for tensors on the CPU.
        floats: float32, on the CPU.
        indices: integers, on the CPU.
        wide: how many of the last floats stay float32 when the others are narrower.
        trained: how many of the first floats get a gradient.
        carriers: how many of the first outputs carry it.
        scales: for each output, the magnitude at which ulps count; None for that of its rows.
        flops: of the call.
        bytes: minimum bytes read and written, with floats of 2 bytes.
        part: the rows that are checked, if the whole definition takes long.
    """

    op: str
    shape: str
    ours: Callable[..., Outputs]
    definition: Callable[..., Outputs]
    floats: tuple[Tensor, ...]
    indices: tuple[Tensor, ...] = ()
    wide: int = 0
    trained: int = 0
    carriers: int = 1
    scales: tuple[float | None, ...] = ()
    flops: float = 0.0
    bytes: float = 0.0
    part: Part | None = None

    def moved(self, dtype: torch.dtype) -> float:
        """Minimum bytes read and written with floats of this dtype."""
        return self.bytes if self.wide == len(self.floats) else self.bytes * dtype.itemsize / 2

    def given(self, dtype: torch.dtype, device: str, wide: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """(floats, indices) for one call, the floats rounded to a dtype; with `wide`, these values in float64."""
        narrow = len(self.floats) - self.wide
        floats = [x.to(dtype) if index < narrow else x for index, x in enumerate(self.floats)]
        floats = [x.double() for x in floats] if wide else floats
        return [x.clone().to(device) for x in floats], [x.clone().to(device) for x in self.indices]


def calls(op: str, size: str) -> Iterator[Call]:
    """The calls of the op in a folder, at one of SIZES."""
    return MAKERS[op](SIZES.index(size))


def _randn(*shape: int, seed: int = 0, heavy: int = 0) -> Tensor:
    """Random numbers, repeated in large tensors; the last `heavy` rows are doubled, so that leaving them out shows."""
    count = torch.Size(shape).numel()
    drawn = torch.randn(min(count, DRAWN), generator=torch.Generator().manual_seed(seed + sum(shape)))
    x = drawn.repeat(-(-count // max(len(drawn), 1)))[:count].view(shape)
    if heavy:
        x[-heavy:] *= 2
    return x


def _offsets(groups: int, size: int) -> Tensor:
    return torch.arange(groups + 1, dtype=torch.int32) * size


def _ids(limit: int, count: int) -> Tensor:
    return torch.randint(limit, (count,), generator=torch.Generator().manual_seed(limit + count))


def swiglu_call(n: int = 4096, f: int = 6144) -> Call:
    """A call on [N, 2 F]."""
    return Call(
        "swiglu",
        f"N={n} F={f}",
        ops.swiglu,
        swiglu.swiglu,
        (_randn(n, 2 * f),),
        trained=1,
        bytes=6.0 * n * f,
    )


def _swiglu(size: int) -> Iterator[Call]:
    yield swiglu_call(*((5, 40), (33, 1000), ())[size])


def rms_norm_call(n: int = 4096, d: int = 2048) -> Call:
    """A call on [N, D], with a residual."""
    return Call(
        "rms_norm",
        f"N={n} D={d}",
        lambda x, weight, residual: ops.rms_norm(x, weight, EPS, residual),
        lambda x, weight, residual: rms_norm.rms_norm(x, weight, EPS, residual),
        (_randn(n, d), 1 + _randn(d) / 8, _randn(n, d, seed=1)),
        trained=3,
        carriers=2,
        bytes=8.0 * n * d,
    )


def _rms_norm(size: int) -> Iterator[Call]:
    yield rms_norm_call(*((5, 40), (33, 1000), ())[size])


def _angles(length: int, width: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) of the rotary tables, [S, E]."""
    angle = torch.outer(torch.arange(float(length)), 1e4 ** -(torch.arange(0, width, 2) / width)).repeat(1, 2)
    return angle.cos(), angle.sin()


def qk_norm_rope_call(n: int = 4096, hq: int = 16, hkv: int = 8, e: int = 128) -> Call:
    """A call on N tokens, with both norms and no cache."""
    options: dict[str, Any] = {"num_heads": hq, "num_kv_heads": hkv, "eps": EPS}
    return Call(
        "qk_norm_rope",
        f"T={n} Hq={hq} Hkv={hkv} E={e}",
        lambda *given: ops.qk_norm_rope(*given, **options),
        lambda *given: qk_norm_rope.qk_norm_rope(*given, **options),
        (_randn(n, (hq + 2 * hkv) * e), 1 + _randn(e) / 8, 1 + _randn(e, seed=1) / 8, *_angles(64, e)),
        (_ids(64, n),),
        trained=3,
        carriers=3,
        bytes=4.0 * n * (hq + 2 * hkv) * e,
    )


def _qk_norm_rope(size: int) -> Iterator[Call]:
    rows, heads, kv_heads, width = shape = ((5, 4, 2, 8), (33, 16, 8, 128), (4096, 16, 8, 128))[size]
    options: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "eps": EPS}
    weights = (1 + _randn(width) / 8, 1 + _randn(width, seed=1) / 8)
    tables = _angles(64, width)
    yield qk_norm_rope_call(*shape)

    def written(function: Callable[..., Outputs]) -> Callable[..., Outputs]:
        def run(*given: Tensor) -> Outputs:
            *first, k_cache, v_cache, positions, slots = given
            out = function(*first, positions, kv_out=(k_cache, v_cache, slots), **options)
            return *out, k_cache, v_cache

        return run

    yield Call(
        "qk_norm_rope",
        f"T={rows} Hq={heads} Hkv={kv_heads} E={width} (keys and values kept)",
        written(ops.qk_norm_rope),
        written(qk_norm_rope.qk_norm_rope),
        (
            *(_randn(rows, (heads + 2 * kv_heads) * width), *weights, *tables),
            *(_randn(rows + 3, kv_heads, width, seed=seed) for seed in (2, 3)),
        ),
        (_ids(64, rows), torch.arange(rows) + 2),
        bytes=4.0 * rows * (heads + 3 * kv_heads) * width,
    )


def merge_attention_states_call(n: int = 4096, hq: int = 16, e: int = 128) -> Call:
    """A call on N rows."""

    def states(function: Callable[..., Outputs]) -> Callable[..., Outputs]:
        return lambda out_a, out_b, lse_a, lse_b: function(out_a, lse_a, out_b, lse_b)

    return Call(
        "merge_attention_states",
        f"T={n} Hq={hq} E={e}",
        states(ops.merge_attention_states),
        states(merge_attention_states.merge_attention_states),
        (*(_randn(n, hq, e, seed=s) for s in (0, 1)), *(_randn(hq, n, seed=s) for s in (2, 3))),
        wide=2,
        trained=4,
        carriers=2,
        scales=(None, 4.0),
        bytes=6.0 * n * hq * e,
    )


def _merge_attention_states(size: int) -> Iterator[Call]:
    yield merge_attention_states_call(*((5, 4, 8), (33, 16, 128), ())[size])


def candidate_head_call(g: int = 8, k: int = 13, d: int = 2048) -> Call:
    """A call on G groups of K candidates, with the norm."""
    return Call(
        "candidate_head",
        f"G={g} K={k} D={d}",
        lambda hidden, norm, head, cu: ops.candidate_head(hidden, norm, head, cu, eps=EPS),
        lambda hidden, norm, head, cu: candidate_head.candidate_head(hidden, norm, head, cu, eps=EPS),
        (_randn(g * k, d), 1 + _randn(d) / 8, _randn(d, seed=1) / d**0.5),
        (_offsets(g, k),),
        trained=3,
        scales=(4.0, 1.0, None),
        bytes=2.0 * g * k * d,
    )


def _candidate_head(size: int) -> Iterator[Call]:
    yield candidate_head_call(*((3, 13, 40), (3, 13, 1000), ())[size])


def topk_entropy_call(n: int = 1, v: int = 151_936, k: int = 64) -> Call:
    """A call on N rows of V logits."""
    return Call(
        "topk_entropy",
        f"N={n} V={v} k={k}",
        lambda logits: ops.topk_entropy(logits, k),
        lambda logits: topk_entropy.topk_entropy(logits, k),
        (3 * _randn(n, v),),
        scales=(8.0, None, None),
        bytes=2.0 * n * v,
    )


def _topk_entropy(size: int) -> Iterator[Call]:
    yield topk_entropy_call(*((2, 300, 5), (2, 40_000, 64), ())[size])


def _some(rows: int) -> Tensor:
    return torch.linspace(0, rows - 1, min(rows, CHECKED)).long()


def linear_logprob_call(n: int = 1664, d: int = 2048, v: int = 32_768, *, whole: bool = False) -> Call:
    """With `whole` also lse, entropy and maximum."""
    rows, results = _some(n), 4 if whole else 1

    def ours(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        return ops.linear_logprob(hidden, weight, target, return_lse=whole, return_entropy=whole, return_max=whole)

    def some(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        return linear_logprob.linear_logprob(hidden[rows], weight, target[rows])[:results]

    return Call(
        "linear_logprob",
        f"N={n} D={d} V={v}",
        ours,
        lambda *given: linear_logprob.linear_logprob(*given)[:results],
        (_randn(n, d), _randn(v, d, heavy=9) * 2 / d**0.5),
        (_ids(v, n),),
        trained=2,
        carriers=min(2, results),
        scales=(16.0, 16.0, 64.0, 16.0)[:results],
        flops=2.0 * n * d * v,
        bytes=2.0 * (n + v) * d,
        part=Part(some, lambda outputs: tuple(x[rows] for x in outputs)),
    )


def linear_logprob_partials_call(n: int = 13, d: int = 2048, v: int = 16_384) -> Call:
    """A call on the second of two shards."""
    rows = _some(n)
    return Call(
        "linear_logprob",
        f"N={n} D={d} V={v} (partials of a shard)",
        partial(ops.linear_logprob_partials, vocab_start=v),
        partial(linear_logprob.linear_logprob_partials, vocab_start=v),
        (_randn(n, d), _randn(v, d, heavy=9) * 2 / d**0.5),
        (_ids(2 * v, n),),
        scales=(16.0, 64.0, 16.0),
        flops=2.0 * n * d * v,
        bytes=2.0 * (n + v) * d,
        part=Part(
            lambda hidden, weight, target: linear_logprob.linear_logprob_partials(
                hidden[rows], weight, target[rows], vocab_start=v
            ),
            lambda outputs: tuple(x[rows] for x in outputs),
        ),
    )


def combine_logprob_partials_call(s: int = 4, n: int = 8192) -> Call:
    """A call on S shards."""
    return Call(
        "linear_logprob",
        f"S={s} N={n} (partials combined)",
        ops.combine_logprob_partials,
        linear_logprob.combine_logprob_partials,
        (3 * _randn(s, n), 1 + _randn(s, n, seed=1).square(), _randn(s, n, seed=2)),
        wide=3,
        scales=(16.0, 16.0),
        bytes=12.0 * s * n,
    )


def _linear_logprob(size: int) -> Iterator[Call]:
    vocabulary, width = ((300, 40), (8200, 512), (32_768, 2048))[size]
    for rows in ((7,), (13, 300), (13, 1664))[size]:
        yield linear_logprob_call(rows, width, vocabulary, whole=True)
    yield linear_logprob_partials_call(13, width, vocabulary // 2)
    yield combine_logprob_partials_call(4, (5, 300, 8192)[size])


def branch_attention_call(
    g: int = 1,
    k: int = 13,
    l: int = 1,  # noqa: E741
    p: int = 2048,
    hq: int = 16,
    hkv: int = 8,
    e: int = 128,
    *,
    whole: bool = False,
) -> Call:
    """With `whole` also lse."""
    results = 2 if whole else 1

    def layout(branches: int, device: torch.device | str) -> ops.BranchLayout:
        return ops.BranchLayout.of([[l] * branches] * g, [(group * p, p) for group in range(g)], device=device)

    def definition(branches: int, *given: Tensor) -> Outputs:
        offsets = {name: getattr(layout(branches, "cpu"), name) for name in OFFSETS}
        return branch_attention.branch_attention(*given, **offsets)[:results]

    on_device = cache(partial(layout, k))

    def ours(*given: Tensor) -> Outputs:
        q, own_k, own_v, prefix_k, prefix_v = given
        seen = on_device(q.device)
        if whole:
            return ops.branch_attention(q, own_k, own_v, prefix_k, prefix_v, seen, return_lse=True)
        return ops.branch_attention(q, own_k, own_v, prefix_k, prefix_v, seen)

    last = (torch.arange(g)[:, None] * k * l + torch.arange((k - 1) * l, k * l)).flatten()  # each group's last branch

    def some(q: Tensor, own_k: Tensor, own_v: Tensor, *prefix: Tensor) -> Outputs:
        return definition(1, q[last], own_k[last], own_v[last], *prefix)

    rows, pairs = g * k * l, g * k * l * p + g * k * l * (l + 1) // 2
    own = (_randn(rows, hkv, e, seed=seed) for seed in (1, 2))
    shared = (_randn(g * p, hkv, e, seed=seed, heavy=5) for seed in (3, 4))
    return Call(
        "branch_attention",
        f"G={g} K={k} L={l} P={p} E={e}",
        ours,
        partial(definition, k),
        (_randn(rows, hq, e), *own, *shared),
        trained=5,
        scales=(None, 8.0)[:results],
        flops=4.0 * hq * e * pairs,
        bytes=4.0 * ((g * p + rows) * hkv + rows * hq) * e,
        part=Part(some, lambda outputs: (outputs[0][last], *(lse[:, last] for lse in outputs[1:]))),
    )


def _branch_attention(size: int) -> Iterator[Call]:
    sizes = ((2, 3, 20, 4, 2, 16), (2, 4, 300, 8, 4, 128), (4, 13, 2048, 16, 8, 128))[size]
    groups, candidates, *rest = sizes
    for length in ((1, 3), (1, 8), (1, 128))[size]:
        yield branch_attention_call(groups, candidates, length, *rest, whole=True)


def _sequences(lengths: tuple[int, ...], rows: int) -> tuple[int, tuple[Tensor, ...]]:
    """(pages, (positions, held, slots, block_table)) of rows after sequences in pages of PAGE."""
    held, groups = torch.tensor(lengths, dtype=torch.int32), len(lengths)
    columns = -(-(max(lengths) + rows) // PAGE)
    order = torch.randperm(groups * columns, generator=torch.Generator().manual_seed(groups))
    table = order.view(groups, columns).int()
    token = held[:, None] + torch.arange(rows, dtype=torch.int32)
    slots = table.gather(1, (token // PAGE).long()) * PAGE + token % PAGE
    return groups * columns, (held.repeat_interleave(rows), held, slots.flatten(), table)


def _ordered_qkv(heads: int, kv_heads: int) -> Callable[[Callable[..., Tensor], bool], Callable[..., Outputs]]:
    """Turns the op or its definition into a function of floats, then indices."""
    options = {"num_heads": heads, "num_kv_heads": kv_heads, "eps": EPS}

    def ordered(function: Callable[..., Tensor], definition: bool) -> Callable[..., Outputs]:
        def run(qkv: Tensor, q: Tensor, k: Tensor, *rest: Tensor) -> Outputs:
            k_cache, v_cache, cos, sin, positions, length, slots, *table = rest
            tables = (x.to(qkv.dtype) for x in (cos, sin)) if definition else (cos, sin)
            pages = {"block_table": table[0] if table else None}
            out = function(qkv, q, k, *tables, positions, k_cache, v_cache, length, slots, **pages, **options)
            return out, k_cache, v_cache

        return run

    return ordered


def branch_attention_qkv_call(n: int = 1, hq: int = 16, hkv: int = 8, e: int = 128, p: int = 2048) -> Call:
    """N rows after P tokens of one sequence."""
    held, ordered = torch.full((n,), p, dtype=torch.int32), _ordered_qkv(hq, hkv)
    return Call(
        "branch_attention_qkv",
        f"N={n} Hq={hq} Hkv={hkv} E={e} P={p}",
        ordered(ops.branch_attention_qkv, False),
        ordered(branch_attention_qkv.branch_attention_qkv, True),
        (
            *(_randn(n, (hq + 2 * hkv) * e), 1 + _randn(e) / 8, 1 + _randn(e, seed=1) / 8),
            *(_randn(p + n, hkv, e, seed=seed, heavy=n + 5) for seed in (1, 2)),
            *_angles(p + 1, e),
        ),
        (held, held[:1], p + torch.arange(n, dtype=torch.int32)),
        wide=2,
        flops=4.0 * n * hq * e * p,
        bytes=4.0 * p * hkv * e,
    )


def _branch_attention_qkv(size: int) -> Iterator[Call]:
    held, heads, kv_heads, width = ((20, 4, 2, 64), (300, 16, 8, 128), (2048, 16, 8, 128))[size]
    ordered = _ordered_qkv(heads, kv_heads)
    for rows in (1, 13):
        yield branch_attention_qkv_call(rows, heads, kv_heads, width, held)
    for rows, lengths in ((1, (held, held // 2, 1, held)), (16, (held, held - 1))):
        pages, indices = _sequences(lengths, rows)
        count = rows * len(lengths)
        yield Call(
            "branch_attention_qkv",
            f"G={len(lengths)} N={count} Hq={heads} Hkv={kv_heads} E={width} P={held} (in pages)",
            ordered(ops.branch_attention_qkv, False),
            ordered(branch_attention_qkv.branch_attention_qkv, True),
            (
                *(_randn(count, (heads + 2 * kv_heads) * width), 1 + _randn(width) / 8, 1 + _randn(width, seed=1) / 8),
                *(_randn(pages, PAGE, kv_heads, width, seed=seed) for seed in (1, 2)),
                *_angles(held + 1, width),
            ),
            indices,
            wide=2,
            flops=4.0 * rows * heads * width * sum(lengths),
            bytes=4.0 * sum(lengths) * kv_heads * width,
        )


def decoder_layer_call(
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
    outputs, attention = (hq + 2 * hkv) * e, hq * e

    def ordered(function: Callable[..., Tensor], definition: bool) -> Callable[..., Outputs]:
        def run(hidden: Tensor, *rest: Tensor) -> Outputs:
            input_norm, qkv, q_norm, k_norm, o, post_norm, gate_up, down, k_cache, v_cache, cos, sin = rest[:12]
            weights = ops.LayerWeights(
                *(input_norm, qkv, None, q_norm, k_norm, o, None, post_norm, gate_up, None, down, None)
            )
            tables = (x.to(hidden.dtype) for x in (cos, sin)) if definition else (cos, sin)
            positions, length, slots, *table = rest[12:]
            pages = {"block_table": table[0] if table else None}
            out = function(hidden, weights, *tables, positions, k_cache, v_cache, length, slots, **pages, eps=EPS)
            return out, k_cache, v_cache

        return run

    held = torch.full((n,), p, dtype=torch.int32)
    indices: tuple[Tensor, ...] = (held, held[:1], p + torch.arange(n, dtype=torch.int32))
    shape: tuple[int, ...] = (p + n,)
    count, pages = n * max(1, len(lengths)), 0
    if lengths:
        pages, indices = _sequences(lengths, n)
        shape = (pages, PAGE)
    matrices = [(outputs, d), (d, attention), (2 * f, d), (d, f)]
    qkv, o, gate_up, down = (_randn(*shape) / shape[1] ** 0.5 for shape in matrices)
    norms = [1 + _randn(width, seed=seed) / 8 for seed, width in enumerate((d, e, e, d))]
    return Call(
        "decoder_layer",
        f"G={len(lengths)} " * bool(lengths) + f"N={count} D={d} F={f} P={p}" + " (in pages)" * bool(lengths),
        ordered(ops.decoder_layer, False),
        ordered(decoder_layer.decoder_layer, True),
        (
            *(_randn(count, d), norms[0], qkv, norms[1], norms[2], o, norms[3], gate_up, down),
            *(_randn(*shape, hkv, e, seed=seed, heavy=0 if lengths else n + 5) for seed in (1, 2)),
            *_angles(p + 1, e),
        ),
        indices,
        wide=2,
        flops=2.0 * count * sum(a * b for a, b in matrices),
        bytes=2.0 * sum(a * b for a, b in matrices) + 4.0 * sum(lengths or (p,)) * hkv * e,
    )


def _decoder_layer(size: int) -> Iterator[Call]:
    shape = ((40, 56, 20, 4, 2, 8), (256, 700, 100, 8, 4, 32), (2048, 6144, 2048, 16, 8, 128))[size]
    held = shape[2]
    for rows, lengths in ((1, ()), (13, ()), (1, (held, held // 2, 1, held))):
        yield decoder_layer_call(rows, *shape, lengths=lengths)


def skinny_linear_call(n: int = 1, k: int = 2048, m: int = 12_288, *, gated: bool = True) -> Call:
    """Normed and gated, or with a bias and a residual."""

    def run(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def gate(x: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
            return function(x, weight, norm_weight=norm, eps=EPS, swiglu=True)

        def add(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
            return function(x, weight, bias, residual=residual)

        return gate if gated else add

    rest = (1 + _randn(k) / 8,) if gated else (_randn(m), _randn(n, m))
    return Call(
        "skinny_linear",
        f"N={n} K={k} M={m}{', gated' if gated else ', residual'}",
        run(ops.skinny_linear),
        run(skinny_linear.skinny_linear),
        (_randn(n, k), _randn(m, k, seed=1) / k**0.5, *rest),
        flops=2.0 * n * m * k,
        bytes=2.0 * m * k,
    )


def _skinny_linear(size: int) -> Iterator[Call]:
    width, outputs = ((40, 24), (1000, 520), (2048, 6144))[size]
    for rows in (1, 16):
        for gated in (True, False):
            yield skinny_linear_call(rows, width, outputs * (1 + gated), gated=gated)


def commit_call() -> Call:
    """Five rows, one for each way to end."""
    ints = torch.int32

    def run(function: Callable[..., None], state: Callable[..., tuple]) -> Callable[..., Outputs]:
        def outputs(entropy: Tensor, threshold: Tensor, *indices: Tensor) -> Outputs:
            *held, token, eos_ids, most = indices
            function(state(held), token, entropy, threshold=threshold, eos_ids=eos_ids, max_length=most)
            return tuple(held)

        return outputs

    return Call(
        "commit",
        "B=5",
        run(ops.commit_, lambda held: ops.DecodeState(*held)),
        run(commit.commit_, tuple),
        (torch.tensor([0.5, 2.0, 0.1, 0.2, 0.3]), torch.ones(5, dtype=torch.float64)),
        (
            torch.arange(35).view(5, 7),
            *(torch.tensor(values, dtype=ints) for values in ([3, 4, 2, 6, 5], [0, 0, 3, 0, 0], [1, 1, 2, 1, 0])),
            *(torch.tensor([9, 5, 6, 9, 8]), torch.tensor([7, 8]), torch.full((5,), 6, dtype=ints)),
        ),
        wide=2,
    )


def joint_pool_call(n: int = 2, k: int = 8) -> Call:
    """N pools of K and K ids."""
    lists = tuple(_ids(20, 2 * n * k).view(2, n, k)[index] + shift for index, shift in enumerate((-1, 4)))
    return Call("joint_pool", f"N={n} K={k} + {k}", ops.joint_pool, joint_pool.joint_pool, (), lists)


def compatibility_targets_call(g: int = 2, k: int = 13, h: int = 32) -> Call:
    """A call on G groups of K, with horizons H / 4 and H."""
    horizons = sorted({max(1, h // 4), h})
    return Call(
        "compatibility_targets",
        f"G={g} K={k} H={h}",
        partial(ops.compatibility_targets, horizons=horizons),
        partial(compatibility_targets.compatibility_targets, horizons=horizons),
        (-_randn(g * k, h).abs(),),
        (_offsets(g, k),),
        wide=1,
        scales=(None, 8.0),
        bytes=4.0 * g * k * h,
    )


def group_cross_entropy_call(g: int = 2, k: int = 13) -> Call:
    """A call on G groups of K."""
    return Call(
        "group_cross_entropy",
        f"G={g} K={k}",
        ops.group_cross_entropy,
        group_cross_entropy.group_cross_entropy,
        (_randn(g * k), _randn(g * k, seed=1).softmax(0)),
        (_offsets(g, k),),
        wide=2,
        trained=1,
        scales=(8.0,),
        bytes=8.0 * g * k,
    )


def _ragged(call: Call) -> Call:
    """The same rows, in groups of six and eight instead of two groups of seven."""
    return replace(call, indices=(torch.tensor([0, 6, 14], dtype=torch.int32),))


SHAPED: dict[str, Callable[..., Call]] = {  # by the op's public name; positional arguments are dimensions
    "branch_attention": branch_attention_call,
    "branch_attention_qkv": branch_attention_qkv_call,
    "candidate_head": candidate_head_call,
    "combine_logprob_partials": combine_logprob_partials_call,
    "commit_": commit_call,
    "compatibility_targets": compatibility_targets_call,
    "decoder_layer": decoder_layer_call,
    "group_cross_entropy": group_cross_entropy_call,
    "joint_pool": joint_pool_call,
    "linear_logprob": linear_logprob_call,
    "linear_logprob_partials": linear_logprob_partials_call,
    "merge_attention_states": merge_attention_states_call,
    "qk_norm_rope": qk_norm_rope_call,
    "rms_norm": rms_norm_call,
    "skinny_linear": skinny_linear_call,
    "swiglu": swiglu_call,
    "topk_entropy": topk_entropy_call,
}
MAKERS: dict[str, Callable[[int], Iterator[Call]]] = {
    "branch_attention": _branch_attention,
    "branch_attention_qkv": _branch_attention_qkv,
    "candidate_head": _candidate_head,
    "commit": lambda _: iter([commit_call()]),
    "compatibility_targets": lambda _: iter([_ragged(compatibility_targets_call(2, 7))]),
    "decoder_layer": _decoder_layer,
    "group_cross_entropy": lambda _: iter([_ragged(group_cross_entropy_call(2, 7))]),
    "joint_pool": lambda _: iter([joint_pool_call()]),
    "linear_logprob": _linear_logprob,
    "merge_attention_states": _merge_attention_states,
    "qk_norm_rope": _qk_norm_rope,
    "rms_norm": _rms_norm,
    "skinny_linear": _skinny_linear,
    "swiglu": _swiglu,
    "topk_entropy": _topk_entropy,
}

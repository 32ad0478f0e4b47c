"""The calls by which `fb_kernels.self_check` holds every op to its definition: made on the CPU, the same everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

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
DRAWN = 1 << 23  # numbers: more take longer to draw than the calls
PAGE = 64
OFFSETS = ("cu_branch", "cu_group", "prefix_start", "prefix_len")
SIZES = ("small", "checked", "timed")  # of a CPU; of a GPU where the definition is to follow; as a model has them


@dataclass(frozen=True)
class Call:
    """An op at one size.

    Attributes:
        op: its folder.
        shape: the size in words.
        ours: the op, of the floats and then the indices.
        definition: the same by `naive.py`, of tensors on the CPU.
        floats: float32, on the CPU.
        indices: integers, on the CPU.
        wide: how many of the last floats stay float32 where the others are narrower.
        trained: how many of the leading floats get a gradient.
        carriers: through how many of the leading outputs.
        scales: of each output, the magnitude at which units in the last place count, None for that of its rows.
        flops: of the call.
        bytes: read and written at least, where its floats have 2 bytes.
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

    def given(self, dtype: torch.dtype, device: str, wide: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """(floats, indices) of one call's own, rounded to a dtype; `wide`, in float64 with these values."""
        narrow = len(self.floats) - self.wide
        floats = [x.to(dtype) if place < narrow else x for place, x in enumerate(self.floats)]
        floats = [x.double() for x in floats] if wide else floats
        return [x.clone().to(device) for x in floats], [x.clone().to(device) for x in self.indices]


def calls(op: str, size: str) -> Iterator[Call]:
    """The calls of an op, by its folder, at one of SIZES."""
    return MAKERS[op](SIZES.index(size))


def _randn(*shape: int, seed: int = 0, heavy: int = 0) -> Tensor:
    """Of the last `heavy` rows twice the size, so that a result without them is another one; large ones repeat."""
    count = torch.Size(shape).numel()
    drawn = torch.randn(min(count, DRAWN), generator=torch.Generator().manual_seed(seed + sum(shape)))
    x = drawn.repeat(-(-count // max(len(drawn), 1)))[:count].view(shape)
    if heavy:
        x[-heavy:] *= 2
    return x


def _ids(limit: int, count: int) -> Tensor:
    return torch.randint(limit, (count,), generator=torch.Generator().manual_seed(limit + count))


def _swiglu(size: int) -> Iterator[Call]:
    rows, width = ((5, 40), (33, 1000), (4096, 6144))[size]
    yield Call(
        "swiglu",
        f"N={rows} F={width}",
        ops.swiglu,
        swiglu.swiglu,
        (_randn(rows, 2 * width),),
        trained=1,
        bytes=6.0 * rows * width,
    )


def _rms_norm(size: int) -> Iterator[Call]:
    rows, width = ((5, 40), (33, 1000), (4096, 2048))[size]
    yield Call(
        "rms_norm",
        f"N={rows} D={width}",
        lambda x, weight, residual: ops.rms_norm(x, weight, EPS, residual),
        lambda x, weight, residual: rms_norm.rms_norm(x, weight, EPS, residual),
        (_randn(rows, width), 1 + _randn(width) / 8, _randn(rows, width, seed=1)),
        trained=3,
        carriers=2,
        bytes=8.0 * rows * width,
    )


def _angles(length: int, width: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) of the rotary tables, [S, E]."""
    angle = torch.outer(torch.arange(float(length)), 1e4 ** -(torch.arange(0, width, 2) / width)).repeat(1, 2)
    return angle.cos(), angle.sin()


def _qk_norm_rope(size: int) -> Iterator[Call]:
    rows, heads, kv_heads, width = ((5, 4, 2, 8), (33, 16, 8, 128), (4096, 16, 8, 128))[size]
    options: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "eps": EPS}
    weights = (1 + _randn(width) / 8, 1 + _randn(width, seed=1) / 8)
    tables = _angles(64, width)
    yield Call(
        "qk_norm_rope",
        f"T={rows} Hq={heads} Hkv={kv_heads} E={width}",
        lambda *given: ops.qk_norm_rope(*given, **options),
        lambda *given: qk_norm_rope.qk_norm_rope(*given, **options),
        (_randn(rows, (heads + 2 * kv_heads) * width), *weights, *tables),
        (_ids(64, rows),),
        trained=3,
        carriers=3,
        bytes=4.0 * rows * (heads + 2 * kv_heads) * width,
    )

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


def _merge_attention_states(size: int) -> Iterator[Call]:
    rows, heads, width = ((5, 4, 8), (33, 16, 128), (4096, 16, 128))[size]

    def states(function: Callable[..., Outputs]) -> Callable[..., Outputs]:
        return lambda out_a, out_b, lse_a, lse_b: function(out_a, lse_a, out_b, lse_b)

    yield Call(
        "merge_attention_states",
        f"T={rows} Hq={heads} E={width}",
        states(ops.merge_attention_states),
        states(merge_attention_states.merge_attention_states),
        (*(_randn(rows, heads, width, seed=s) for s in (0, 1)), *(_randn(heads, rows, seed=s) for s in (2, 3))),
        wide=2,
        trained=4,
        carriers=2,
        scales=(None, 4.0),
        bytes=6.0 * rows * heads * width,
    )


def _candidate_head(size: int) -> Iterator[Call]:
    groups, width = ((3, 40), (3, 1000), (8, 2048))[size]
    rows = 13 * groups
    yield Call(
        "candidate_head",
        f"N={rows} D={width}",
        lambda hidden, norm, head, cu: ops.candidate_head(hidden, norm, head, cu, eps=EPS),
        lambda hidden, norm, head, cu: candidate_head.candidate_head(hidden, norm, head, cu, eps=EPS),
        (_randn(rows, width), 1 + _randn(width) / 8, _randn(width, seed=1) / width**0.5),
        (torch.arange(groups + 1, dtype=torch.int32) * 13,),
        trained=3,
        scales=(4.0, 1.0, None),
        bytes=2.0 * rows * width,
    )


def _topk_entropy(size: int) -> Iterator[Call]:
    rows, width, k = ((2, 300, 5), (2, 40_000, 64), (1, 151_936, 64))[size]
    yield Call(
        "topk_entropy",
        f"N={rows} V={width} k={k}",
        lambda logits: ops.topk_entropy(logits, k),
        lambda logits: topk_entropy.topk_entropy(logits, k),
        (3 * _randn(rows, width),),
        scales=(8.0, None, None),
        bytes=2.0 * rows * width,
    )


def _linear_logprob(size: int) -> Iterator[Call]:
    vocabulary, width = ((300, 40), (8200, 512), (32_768, 2048))[size]
    for rows in ((7,), (13, 300), (13, 1664))[size]:
        yield Call(
            "linear_logprob",
            f"N={rows} D={width} V={vocabulary}",
            lambda hidden, weight, target: ops.linear_logprob(
                hidden, weight, target, return_lse=True, return_entropy=True, return_max=True
            ),
            linear_logprob.linear_logprob,
            (_randn(rows, width), _randn(vocabulary, width, heavy=9) * 2 / width**0.5),
            (_ids(vocabulary, rows),),
            trained=2,
            carriers=2,
            scales=(16.0, 16.0, 64.0, 16.0),
            flops=2.0 * rows * width * vocabulary,
            bytes=2.0 * (rows + vocabulary) * width,
        )
    start = vocabulary // 2
    shard = _randn(vocabulary - start, width, heavy=9) * 2 / width**0.5
    yield Call(
        "linear_logprob",
        f"N=13 D={width} V={len(shard)} (partials of a shard)",
        lambda hidden, weight, target: ops.linear_logprob_partials(hidden, weight, target, vocab_start=start),
        lambda hidden, weight, target: linear_logprob.linear_logprob_partials(
            hidden, weight, target, vocab_start=start
        ),
        (_randn(13, width), shard),
        (_ids(vocabulary, 13),),
        scales=(16.0, 64.0, 16.0),
        flops=26.0 * shard.numel(),
        bytes=2.0 * shard.numel(),
    )
    shards, rows = 4, (5, 300, 8192)[size]
    parts = (3 * _randn(shards, rows), 1 + _randn(shards, rows, seed=1).square(), _randn(shards, rows, seed=2))
    yield Call(
        "linear_logprob",
        f"S={shards} N={rows} (partials combined)",
        ops.combine_logprob_partials,
        linear_logprob.combine_logprob_partials,
        parts,
        wide=3,
        scales=(16.0, 16.0),
        bytes=12.0 * shards * rows,
    )


def _branch_attention(size: int) -> Iterator[Call]:
    groups, candidates, prefix, heads, kv_heads, width = (
        (2, 3, 20, 4, 2, 16),
        (2, 4, 300, 8, 4, 128),
        (4, 13, 2048, 16, 8, 128),
    )[size]
    for length in ((1, 3), (1, 8), (1, 128))[size]:
        rows = groups * candidates * length
        lengths, slices = [[length] * candidates] * groups, [(group * prefix, prefix) for group in range(groups)]
        layout = cache(partial(ops.BranchLayout.of, lengths, slices))
        offsets = {each: getattr(layout(device="cpu"), each) for each in OFFSETS}

        def ours(*given: Tensor, layout: Callable[..., ops.BranchLayout] = layout) -> Outputs:
            q, k, v, prefix_k, prefix_v = given
            return ops.branch_attention(q, k, v, prefix_k, prefix_v, layout(device=q.device), return_lse=True)

        own = (_randn(rows, kv_heads, width, seed=seed) for seed in (1, 2))
        shared = (_randn(groups * prefix, kv_heads, width, seed=seed, heavy=5) for seed in (3, 4))
        pairs = rows * prefix + groups * candidates * length * (length + 1) // 2
        yield Call(
            "branch_attention",
            f"G={groups} K={candidates} L={length} P={prefix} E={width}",
            ours,
            lambda *given, offsets=offsets: branch_attention.branch_attention(*given, **offsets),
            (_randn(rows, heads, width), *own, *shared),
            trained=5,
            scales=(None, 8.0),
            flops=4.0 * heads * width * pairs,
            bytes=4.0 * ((groups * prefix + rows) * kv_heads + rows * heads) * width,
        )


def _sequences(lengths: tuple[int, ...], each: int) -> tuple[int, tuple[Tensor, ...]]:
    """(pages, (positions, held, slots, block_table)) of rows behind sequences in pages of PAGE."""
    held, groups = torch.tensor(lengths, dtype=torch.int32), len(lengths)
    columns = -(-(max(lengths) + each) // PAGE)
    order = torch.randperm(groups * columns, generator=torch.Generator().manual_seed(groups))
    table = order.view(groups, columns).int()
    token = held[:, None] + torch.arange(each, dtype=torch.int32)
    slots = table.gather(1, (token // PAGE).long()) * PAGE + token % PAGE
    return groups * columns, (held.repeat_interleave(each), held, slots.flatten(), table)


def _branch_attention_qkv(size: int) -> Iterator[Call]:
    held, heads, kv_heads, width = ((20, 4, 2, 64), (300, 16, 8, 128), (2048, 16, 8, 128))[size]
    options = {"num_heads": heads, "num_kv_heads": kv_heads, "eps": EPS}

    def ordered(function: Callable[..., Tensor], definition: bool) -> Callable[..., Outputs]:
        def run(qkv: Tensor, q: Tensor, k: Tensor, *rest: Tensor) -> Outputs:
            k_cache, v_cache, cos, sin, positions, length, slots, *table = rest
            tables = (x.to(qkv.dtype) for x in (cos, sin)) if definition else (cos, sin)
            pages = {"block_table": table[0] if table else None}
            out = function(qkv, q, k, *tables, positions, k_cache, v_cache, length, slots, **pages, **options)
            return out, k_cache, v_cache

        return run

    for rows in (1, 13):
        one = torch.full((rows,), held, dtype=torch.int32)
        yield Call(
            "branch_attention_qkv",
            f"N={rows} Hq={heads} Hkv={kv_heads} E={width} P={held}",
            ordered(ops.branch_attention_qkv, False),
            ordered(branch_attention_qkv.branch_attention_qkv, True),
            (
                *(_randn(rows, (heads + 2 * kv_heads) * width), 1 + _randn(width) / 8, 1 + _randn(width, seed=1) / 8),
                *(_randn(held + rows, kv_heads, width, seed=seed, heavy=rows + 5) for seed in (1, 2)),
                *_angles(held + 1, width),
            ),
            (one, one[:1], held + torch.arange(rows, dtype=torch.int32)),
            wide=2,
            flops=4.0 * rows * heads * width * held,
            bytes=4.0 * held * kv_heads * width,
        )
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


def _decoder_layer(size: int) -> Iterator[Call]:
    model, inner, held, heads, kv_heads, width = (
        (40, 56, 20, 4, 2, 8),
        (256, 700, 100, 8, 4, 32),
        (2048, 6144, 2048, 16, 8, 128),
    )[size]
    outputs, attention = (heads + 2 * kv_heads) * width, heads * width

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

    for rows, lengths in ((1, ()), (13, ()), (1, (held, held // 2, 1, held))):
        one = torch.full((rows,), held, dtype=torch.int32)
        indices: tuple[Tensor, ...] = (one, one[:1], held + torch.arange(rows, dtype=torch.int32))
        shape: tuple[int, ...] = (held + rows,)
        count, pages = rows * max(1, len(lengths)), 0
        if lengths:
            pages, indices = _sequences(lengths, rows)
            shape = (pages, PAGE)
        matrices = [(outputs, model), (model, attention), (2 * inner, model), (model, inner)]
        qkv, o, gate_up, down = (_randn(*shape) / shape[1] ** 0.5 for shape in matrices)
        norms = [1 + _randn(n, seed=seed) / 8 for seed, n in enumerate((model, width, width, model))]
        yield Call(
            "decoder_layer",
            f"G={len(lengths)} " * bool(lengths)
            + f"N={count} D={model} F={inner} P={held}"
            + " (in pages)" * bool(lengths),
            ordered(ops.decoder_layer, False),
            ordered(decoder_layer.decoder_layer, True),
            (
                *(_randn(count, model), norms[0], qkv, norms[1], norms[2], o, norms[3], gate_up, down),
                *(_randn(*shape, kv_heads, width, seed=seed, heavy=0 if lengths else rows + 5) for seed in (1, 2)),
                *_angles(held + 1, width),
            ),
            indices,
            wide=2,
            flops=2.0 * count * sum(a * b for a, b in matrices),
            bytes=2.0 * sum(a * b for a, b in matrices) + 4.0 * sum(lengths or (held,)) * kv_heads * width,
        )


def _skinny_linear(size: int) -> Iterator[Call]:
    width, outputs = ((40, 24), (1000, 520), (2048, 6144))[size]

    def run(function: Callable[..., Tensor], gated: bool) -> Callable[..., Tensor]:
        def gate(x: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
            return function(x, weight, norm_weight=norm, eps=EPS, swiglu=True)

        def add(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
            return function(x, weight, bias, residual=residual)

        return gate if gated else add

    for rows in (1, 16):
        for gated in (True, False):
            weight = _randn(outputs * (1 + gated), width, seed=1) / width**0.5
            rest = (1 + _randn(width) / 8,) if gated else (_randn(outputs), _randn(rows, outputs))
            yield Call(
                "skinny_linear",
                f"N={rows} K={width} M={len(weight)}{', gated' if gated else ', residual'}",
                run(ops.skinny_linear, gated),
                run(skinny_linear.skinny_linear, gated),
                (_randn(rows, width), weight, *rest),
                flops=2.0 * rows * weight.numel(),
                bytes=2.0 * weight.numel(),
            )


def _commit(size: int) -> Iterator[Call]:
    ints = torch.int32

    def run(function: Callable[..., None], state: Callable[..., tuple]) -> Callable[..., Outputs]:
        def outputs(entropy: Tensor, threshold: Tensor, *indices: Tensor) -> Outputs:
            *held, token, eos_ids, most = indices
            function(state(held), token, entropy, threshold=threshold, eos_ids=eos_ids, max_length=most)
            return tuple(held)

        return outputs

    yield Call(
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


def _joint_pool(size: int) -> Iterator[Call]:
    lists = tuple(_ids(20, 16).view(2, 8) + shift for shift in (-1, 4))
    yield Call("joint_pool", "2 x (8 + 8)", ops.joint_pool, joint_pool.joint_pool, (), lists)


def _compatibility_targets(size: int) -> Iterator[Call]:
    yield Call(
        "compatibility_targets",
        "N=13 H=32",
        lambda logprob, cu: ops.compatibility_targets(logprob, cu, horizons=[8, 32]),
        lambda logprob, cu: compatibility_targets.compatibility_targets(logprob, cu, horizons=[8, 32]),
        (-_randn(13, 32).abs(),),
        (torch.tensor([0, 6, 13], dtype=torch.int32),),
        wide=1,
        scales=(None, 8.0),
    )


def _group_cross_entropy(size: int) -> Iterator[Call]:
    yield Call(
        "group_cross_entropy",
        "N=13",
        ops.group_cross_entropy,
        group_cross_entropy.group_cross_entropy,
        (_randn(13), _randn(13, seed=1).softmax(0)),
        (torch.tensor([0, 6, 13], dtype=torch.int32),),
        wide=2,
        trained=1,
        scales=(8.0,),
    )


MAKERS: dict[str, Callable[[int], Iterator[Call]]] = {
    "branch_attention": _branch_attention,
    "branch_attention_qkv": _branch_attention_qkv,
    "candidate_head": _candidate_head,
    "commit": _commit,
    "compatibility_targets": _compatibility_targets,
    "decoder_layer": _decoder_layer,
    "group_cross_entropy": _group_cross_entropy,
    "joint_pool": _joint_pool,
    "linear_logprob": _linear_logprob,
    "merge_attention_states": _merge_attention_states,
    "qk_norm_rope": _qk_norm_rope,
    "rms_norm": _rms_norm,
    "skinny_linear": _skinny_linear,
    "swiglu": _swiglu,
    "topk_entropy": _topk_entropy,
}

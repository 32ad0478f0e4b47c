"""The small ops around the matrix products against plain torch, eager and compiled; bound by launches and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness, shapes
from benchmarks.harness import DEVICE, LATENCY, OURS, Cost, Implementation, Output, Timing
from benchmarks.shapes import CANDIDATES, DTYPE, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, ROWS, VOCABULARY, WIDTH
from fb_kernels import (
    DecodeState,
    backend,
    branch_attention_qkv,
    candidate_head,
    commit_,
    merge_attention_states,
    qk_norm_rope,
    rms_norm,
    skinny_linear,
    swiglu,
    topk_entropy,
)

EPS, TOP = 1e-6, 64


@dataclass(frozen=True)
class Case:
    """An op, the same computation in plain torch, and inputs of one size."""

    shape: str
    ours: Callable[..., Output]
    plain: Callable[..., Output]
    floats: tuple[Tensor, ...]
    others: tuple[Tensor, ...] = field(default=())
    unread: int = 0  # bytes of the inputs


def randn(*shape: int, dtype: torch.dtype = DTYPE, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


def widened(x: Tensor) -> Tensor:
    """x in the dtype of the sums: float32, or float64 for the truth."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm_case(rows: int) -> Case:
    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> Output:
        summed = x + residual
        return F.rms_norm(summed, (x.shape[-1],), weight, EPS), summed

    tensors = (randn(rows, HIDDEN), randn(rows, HIDDEN), 1 + randn(HIDDEN) / 8)
    return Case(f"N={rows} D={HIDDEN}", lambda x, r, w: rms_norm(x, w, EPS, r), plain, tensors)


def qk_norm_rope_case(rows: int) -> Case:
    angle = torch.outer(torch.arange(4096.0), 1e6 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)).repeat(1, 2)
    cos, sin = angle.cos().to(DEVICE, DTYPE), angle.sin().to(DEVICE, DTYPE)
    positions = torch.arange(rows, device=DEVICE) % 4096

    def plain(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Output:
        q, k, v = qkv.unflatten(-1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], 1)
        cos, sin = cos[positions][:, None], sin[positions][:, None]
        out = []
        for x, weight in ((q, q_weight), (k, k_weight)):
            normed = F.rms_norm(x, (HEAD_DIM,), weight, EPS)
            first, second = normed.chunk(2, -1)
            out.append(normed * cos + torch.cat([-second, first], -1) * sin)
        return out[0], out[1], v.contiguous()

    def ours(*tensors: Tensor) -> Output:
        return qk_norm_rope(*tensors, num_heads=HEADS, num_kv_heads=KV_HEADS, eps=EPS)

    floats = (randn(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM), 1 + randn(HEAD_DIM) / 8, 1 + randn(HEAD_DIM) / 8)
    unread = 2 * cos[rows:].nbytes
    shape = f"T={rows} Hq={HEADS} Hkv={KV_HEADS} E={HEAD_DIM}"
    return Case(shape, ours, plain, (*floats, cos, sin), (positions,), unread)


def swiglu_case(rows: int) -> Case:
    def plain(gate_up: Tensor) -> Output:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    return Case(f"N={rows} F={WIDTH}", swiglu, plain, (randn(rows, 2 * WIDTH),))


def merge_attention_states_case(rows: int) -> Case:
    def plain(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Output:
        lse = torch.logaddexp(lse_a, lse_b)
        parts = [out * (own - lse).exp().T[..., None] for out, own in ((out_a, lse_a), (out_b, lse_b))]
        return (parts[0] + parts[1]).to(out_a.dtype), lse

    lse = torch.float32
    tensors = (
        *(randn(rows, HEADS, HEAD_DIM), 2 + randn(HEADS, rows, dtype=lse)),
        *(randn(rows, HEADS, HEAD_DIM), randn(HEADS, rows, dtype=lse)),
    )
    return Case(f"T={rows} Hq={HEADS} E={HEAD_DIM}", merge_attention_states, plain, tensors)


def candidate_head_case(rows: int) -> Case:
    groups = -(-rows // CANDIDATES)
    offsets = torch.arange(groups + 1, dtype=torch.int32, device=DEVICE) * CANDIDATES

    def plain(hidden: Tensor, norm: Tensor, head: Tensor, _: Tensor) -> Output:
        score = F.linear(widened(F.rms_norm(hidden, (hidden.shape[-1],), norm, EPS)), widened(head)[None])
        score = score.view(groups, CANDIDATES)
        return score.flatten(), score.softmax(-1).flatten(), score.argmax(-1)

    def ours(hidden: Tensor, norm: Tensor, head: Tensor, offsets: Tensor) -> Output:
        return candidate_head(hidden, norm, head, offsets, eps=EPS)

    floats = (randn(groups * CANDIDATES, HIDDEN), 1 + randn(HIDDEN) / 8, randn(HIDDEN) / HIDDEN**0.5)
    return Case(f"G={groups} K={CANDIDATES} D={HIDDEN}", ours, plain, floats, (offsets,))


def topk_entropy_case(rows: int) -> Case:
    def plain(logits: Tensor) -> Output:
        values = widened(logits.topk(TOP).values)
        logprob = values.log_softmax(-1)
        return -(logprob.exp() * logprob).sum(-1), values  # no indices: torch.topk picks any of equal values

    return Case(
        f"N={rows} V={VOCABULARY} k={TOP}", lambda x: topk_entropy(x, TOP), plain, (3 * randn(rows, VOCABULARY),)
    )


CASES = {
    "rms_norm": rms_norm_case,
    "qk_norm_rope": qk_norm_rope_case,
    "swiglu": swiglu_case,
    "merge_attention_states": merge_attention_states_case,
    "candidate_head": candidate_head_case,
    "topk_entropy": topk_entropy_case,
}


@pytest.mark.parametrize("timing", LATENCY if shapes.ON_GPU else (Timing.COLD,))
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("op", CASES)
@torch.no_grad()
def test_neighbours(compare: Callable, op: str, rows: int, timing: Timing) -> None:
    case = CASES[op](1 if op == "topk_entropy" and rows == min(ROWS) else rows)
    inputs = (*case.floats, *case.others)
    expected = tuple_of(case.plain(*(x.double() for x in case.floats), *case.others))
    expected = tuple(x for x in expected if x.is_floating_point())  # no indices: near ties go either way
    plain = tuple_of(case.plain(*inputs))[: len(expected)]
    compiled = torch.compile(case.plain, dynamic=False, fullgraph=True)
    runs = {
        OURS: lambda: case.ours(*inputs),
        "torch eager": lambda: case.plain(*inputs),
        "torch.compile": lambda: compiled(*inputs),
    }
    traffic = float(sum(x.nbytes for x in (*inputs, *plain)) - case.unread)
    compare(
        op,
        case.shape,
        {name: Implementation(run, expected, compiled="compile" in name) for name, run in runs.items()},
        rounds=100 if shapes.ON_GPU else 20,
        tolerance=harness.allowed_error(plain, expected),
        timing=timing,
        cost=Cost(0.0, traffic),
        dtype=case.floats[0].dtype,
    )


def tuple_of(output: Output) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


# --- further ops of a decode step -------------------------------------------------------------------------------------

PROJECTIONS = {  # of a layer, and the head: inputs, outputs, what is fused with the product
    "q k v": (HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, "norm"),
    "o": (HEADS * HEAD_DIM, HIDDEN, "residual"),
    "gate and up": (HIDDEN, 2 * WIDTH, "norm, swiglu"),
    "down": (WIDTH, HIDDEN, "residual"),
    "head": (HIDDEN, VOCABULARY, "norm"),
}


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("name", PROJECTIONS)
@torch.no_grad()
def test_skinny_linear(compare: Callable, name: str, rows: int) -> None:
    inputs, outputs, beside = PROJECTIONS[name]
    x, weight = randn(rows, inputs), randn(outputs, inputs) / inputs**0.5
    norm, residual = 1 + randn(inputs) / 8, randn(rows, outputs, seed=1)

    def plain(x: Tensor, weight: Tensor, norm: Tensor, residual: Tensor) -> Tensor:
        if "norm" in beside:
            x = F.rms_norm(x, (inputs,), norm, EPS)
        y = F.linear(x, weight)
        if "swiglu" in beside:
            gate, up = y.chunk(2, -1)
            return F.silu(gate) * up
        return y + residual if "residual" in beside else y

    def ours() -> Tensor:
        return skinny_linear(
            x,
            weight,
            norm_weight=norm if "norm" in beside else None,
            residual=residual if "residual" in beside else None,
            swiglu="swiglu" in beside,
        )

    tensors = (x, weight, norm, residual)
    expected = plain(*(value.to(shapes.WIDE) for value in tensors))
    runs: dict[str, Callable[[], Output]] = {OURS: ours, "torch eager": partial(plain, *tensors)}
    implementations = {key: Implementation(run, expected) for key, run in runs.items()}
    implementations["the matrix product alone"] = Implementation(
        lambda: F.linear(x, weight), F.linear(x.to(shapes.WIDE), weight.to(shapes.WIDE))
    )
    compare(
        "skinny_linear",
        f"{name} ({beside}): N={rows} K={inputs} M={outputs}",
        implementations,
        rounds=50 if shapes.ON_GPU else 20,
        tolerance=harness.allowed_error(plain(*tensors), expected),
        timing=Timing.GRAPH_COLD,
        cost=Cost(2.0 * rows * inputs * outputs, float(weight.nbytes + x.nbytes + expected.numel() * x.itemsize)),
        dtype=shapes.DTYPE,
    )


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("held", shapes.CONTEXTS)
@torch.no_grad()
def test_branch_attention_qkv(compare: Callable, held: int, rows: int) -> None:
    """A step (one row, written to the cache) and the candidates of an event (16 rows, not written)."""
    angle = torch.outer(torch.arange(held + 1.0), 1e6 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)).repeat(1, 2)
    qkv, q_norm, k_norm = (
        randn(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
        1 + randn(HEAD_DIM) / 8,
        1 + randn(HEAD_DIM, seed=1) / 8,
    )
    cos, sin = angle.cos().to(DEVICE), angle.sin().to(DEVICE)
    caches = (randn(held + 1, KV_HEADS, HEAD_DIM), randn(held + 1, KV_HEADS, HEAD_DIM, seed=1))
    tensors = (qkv, q_norm, k_norm, cos, sin, *caches)
    positions = torch.full((rows,), held, dtype=torch.int32, device=DEVICE)
    position = positions[:1]

    def plain(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, *caches: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(-1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], 1)
        cos, sin = (table[held].to(qkv.dtype) for table in (cos, sin))
        turned = []
        for x, weight in ((q, q_norm), (k, k_norm)):
            normed = F.rms_norm(x, (HEAD_DIM,), weight, EPS)
            first, second = normed.chunk(2, -1)
            turned.append(normed * cos + torch.cat([-second, first], -1) * sin)
        keys, values = (
            torch.cat([cache[None, :held].expand(rows, -1, -1, -1), own[:, None]], 1).transpose(1, 2)
            for cache, own in zip(caches, (turned[1], v), strict=True)
        )
        return F.scaled_dot_product_attention(turned[0][:, :, None], keys, values, enable_gqa=True)[:, :, 0]

    def ours() -> Tensor:
        slots = position if rows == 1 else None
        tables = (cos, sin, positions, *caches, position, slots)
        return branch_attention_qkv(qkv, q_norm, k_norm, *tables, num_heads=HEADS, num_kv_heads=KV_HEADS, eps=EPS)

    expected = plain(*(value.to(shapes.WIDE) for value in tensors))
    runs: dict[str, Callable[[], Output]] = {OURS: ours, "torch eager, SDPA": partial(plain, *tensors)}
    compare(
        "branch_attention_qkv",
        f"N={rows} Hq={HEADS} Hkv={KV_HEADS} E={HEAD_DIM} P={held}",
        {key: Implementation(run, expected) for key, run in runs.items()},
        rounds=50 if shapes.ON_GPU else 20,
        tolerance=harness.allowed_error(plain(*tensors), expected),
        timing=Timing.GRAPH_COLD,
        cost=Cost(4.0 * rows * HEADS * HEAD_DIM * (held + 1), float(sum(x.nbytes for x in caches))),
        dtype=shapes.DTYPE,
    )


@pytest.mark.skipif(not shapes.ON_GPU, reason="what matters here are launches")
def test_commit(compare: Callable) -> None:
    """The end of a step against the same with tensor operations; the state is halted, so all calls are equal."""
    state = DecodeState(
        torch.zeros(1, 64, dtype=torch.int64, device=DEVICE),
        *(torch.ones(1, dtype=torch.int32, device=DEVICE) for _ in range(3)),
    )
    arguments = {
        "token": torch.ones(1, dtype=torch.int64, device=DEVICE),
        "entropy": torch.ones(1, device=DEVICE),
        "threshold": torch.ones((), dtype=torch.float64, device=DEVICE),
        "eos_ids": torch.zeros(1, dtype=torch.int64, device=DEVICE),
        "max_length": torch.full((), 64, dtype=torch.int32, device=DEVICE),
    }

    def ours() -> Tensor:
        commit_(state, **arguments)
        return state.halt

    def by_tensors() -> Tensor:
        with backend.override("reference"):
            return ours()

    runs = {OURS: ours, "tensor operations": by_tensors}
    compare(
        "commit_",
        "B=1",
        {key: Implementation(run, torch.ones_like(state.halt)) for key, run in runs.items()},
        rounds=100,
        timing=Timing.GRAPH_WARM,
        dtype=torch.int64,
    )

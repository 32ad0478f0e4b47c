"""The small ops around the matrix products against plain torch, eager and compiled; bound by launches and memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness, shapes
from benchmarks.harness import DEVICE, LATENCY, OURS, Cost, Implementation, Output
from benchmarks.shapes import CANDIDATES, DTYPE, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, ROWS, VOCABULARY, WIDTH
from fb_kernels import DecodeState, branch_attention_qkv, calls, commit_, skinny_linear
from fb_kernels._runtime import backend
from fb_kernels._runtime.timing import Timing
from fb_kernels.calls import Call
from fb_kernels.qk_norm_rope.calls import qk_norm_rope as rotated

EPS, POSITIONS = 1e-6, 4096
SIZES: dict[str, Callable[[int], tuple[int, ...]]] = {  # of calls on so many rows
    "rms_norm": lambda rows: (rows, HIDDEN),
    "qk_norm_rope": lambda rows: (rows, HEADS, KV_HEADS, HEAD_DIM),
    "swiglu": lambda rows: (rows, WIDTH),
    "merge_attention_states": lambda rows: (rows, HEADS, HEAD_DIM),
    "candidate_head": lambda rows: (-(-rows // CANDIDATES), CANDIDATES, HIDDEN),
    "topk_entropy": lambda rows: (rows, VOCABULARY, 64),
}


def neighbour(op: str, rows: int) -> Call:
    """A call of an op on so many rows."""
    with torch.device(DEVICE):
        if op == "qk_norm_rope":
            call = rotated(*SIZES[op](rows), length=POSITIONS).with_(positions=torch.arange(rows) % POSITIONS)
        else:
            call = calls.by_name()[op][1].shaped(*SIZES[op](rows))
    return call.cast(DTYPE)


def randn(*shape: int, dtype: torch.dtype = DTYPE, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


@pytest.mark.parametrize("timing", LATENCY if shapes.ON_GPU else (Timing.COLD,))
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("op", SIZES)
@torch.no_grad()
def test_neighbours(compare: Callable, op: str, rows: int, timing: Timing) -> None:
    call = neighbour(op, 1 if op == "topk_entropy" and rows == min(ROWS) else rows)
    way = call.plain["torch eager"]
    expected = harness.tensors_of(way(**call.cast(torch.float64).arguments))
    expected = tuple(x for x in expected if x.is_floating_point())  # no indices: near ties go either way
    plain = harness.tensors_of(way(**call.arguments))[: len(expected)]
    compiled = torch.compile(way, dynamic=False, fullgraph=True)
    runs = {
        OURS: partial(call.function, **call.arguments),
        "torch eager": partial(way, **call.arguments),
        "torch.compile": partial(compiled, **call.arguments),
    }
    unread = 2 * call.arguments["cos"][rows:].nbytes if op == "qk_norm_rope" else 0
    compare(
        op,
        call.shape,
        {name: Implementation(run, expected, compiled="compile" in name) for name, run in runs.items()},
        rounds=100 if shapes.ON_GPU else 20,
        tolerance=harness.allowed_error(plain, expected),
        timing=timing,
        cost=Cost(0.0, float(sum(x.nbytes for x in (*call.tensors.values(), *plain)) - unread)),
        dtype=DTYPE,
    )


# --- further ops of a decode step -------------------------------------------------------------------------------------

PROJECTIONS = {  # of a layer, and the head: inputs, outputs, what is fused with the product
    "q k v": (HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, "norm"),
    "o": (HEADS * HEAD_DIM, HIDDEN, "residual"),
    "gate and up": (HIDDEN, 2 * WIDTH, "norm, swiglu"),
    "down": (WIDTH, HIDDEN, "residual"),
    "head": (HIDDEN, VOCABULARY, "norm"),
}


@pytest.mark.parametrize(
    ("name", "rows"),
    [(name, rows) for rows in (1, 16, *shapes.PACKED_ROWS) for name in PROJECTIONS if rows <= 16 or name != "head"],
)
@torch.no_grad()
def test_skinny_linear(compare: Callable, name: str, rows: int) -> None:
    """Packed rows are cuBLAS's: their product alone is what a layer's products take at least."""
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
@pytest.mark.parametrize("timing", LATENCY)
def test_commit(compare: Callable, timing: Timing) -> None:
    """The end of a step, and what a launch takes; the state is halted, so all calls are equal."""
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
    runs |= {"an empty kernel": partial(state.halt.mul_, 1), "an empty graph": lambda: state.halt}
    compare(
        "commit_",
        "B=1",
        {key: Implementation(run, torch.ones_like(state.halt)) for key, run in runs.items()},
        rounds=100,
        timing=timing,
        dtype=torch.int64,
    )

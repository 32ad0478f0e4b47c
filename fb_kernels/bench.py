"""Benchmarks of one op at a given shape: its kernels and plain torch, checked first, then timed.

`futurebridge bench` shows the results. An implementation that fails its check against the definition is not timed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

from fb_kernels import backend, self_check
from fb_kernels.self_check_calls import EPS, SHAPED, Call, Outputs
from fb_kernels.testing import assert_close_to_reference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LEAST, MOST = 0.2, 3.0  # seconds of timing for each; more if the times are noisy
Way = Callable[..., Outputs]


@dataclass(frozen=True)
class Timed:
    """One way to compute the op.

    Attributes:
        name: of an implementation ("cuda", "triton", "cpu", "reference") or of a way in plain torch.
        ours: whether it is an implementation of the op.
        used: whether a call of the op runs it here.
        fault: why it was not timed; empty if it was.
        seconds: median time of a call; on a GPU from a cold cache.
    """

    name: str
    ours: bool = False
    used: bool = False
    fault: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class Found:
    """The results for an op at one shape.

    Attributes:
        op: its public name.
        shape: the size in words.
        device: its name.
        dtype: of the floats.
        flops: of a call.
        bytes: minimum bytes that a call reads and writes.
        copied: seconds that a copy of that many bytes takes on this device.
        multiplied: seconds that a matrix product with that many operations takes on this device.
        rows: what was timed, ours first.
    """

    op: str
    shape: str
    device: str
    dtype: str
    flops: float
    bytes: float
    copied: float
    multiplied: float
    rows: tuple[Timed, ...]

    @property
    def floor(self) -> float:
        """Seconds that torch's copy or product takes, whichever is longer; 0 if too little is moved to tell."""
        return max(self.copied, self.multiplied)

    def ratio(self, row: Timed) -> float | None:
        """The time of the fastest other way divided by this one's; None if either is missing."""
        others = [other.seconds for other in self.rows if other is not row and other.seconds]
        return min(others) / row.seconds if others and row.seconds else None

    def rate(self, row: Timed) -> str:
        """TFLOP/s if operations set the floor, else GB/s; empty if it was not timed or moves too little."""
        if row.seconds is None or not self.floor:
            return ""
        if self.multiplied > self.copied:
            return f"{self.flops / row.seconds * 1e-12:.3g} TFLOP/s"
        return f"{self.bytes / row.seconds * 1e-9:.3g} GB/s"


def dimensions() -> dict[str, dict[str, int]]:
    """{op: {dimension: default}} of all ops that can be timed."""
    sizes = {}
    for op, make in SHAPED.items():
        parameters = inspect.signature(make).parameters.values()
        sizes[op] = {x.name: x.default for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD}
    return sizes


def bench(op: str, sizes: Mapping[str, int], dtype: str | None = None, device: str | None = None) -> Found:
    """Check and time the implementations of an op and ways to do the same in plain torch.

    Args:
        op: a public name, such as "linear_logprob".
        sizes: by dimension, at least 1 each; a dimension that is left out has its default.
        dtype: float32, bfloat16 or float16; by default bfloat16 on a GPU and float32 on a CPU.
        device: "cpu" or "cuda"; by default a GPU if there is one.

    Raises:
        ValueError: an unknown op, dimension, dtype or device, or a device that is not there.
    """
    defaults = dimensions()
    if op not in defaults:
        _refuse("an op of " + ", ".join(defaults), repr(op), "name one")
    if wrong := [name for name in sizes if name not in defaults[op]]:
        wanted = ", ".join(f"--{name}" for name in defaults[op]) or "no dimension"
        _refuse(f"{wanted} for {op}", f"--{wrong[0]}", "leave it out")
    if small := [name for name, size in sizes.items() if size < 1]:
        _refuse(f"--{small[0]} of at least 1", str(sizes[small[0]]), "give another size")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        _refuse("cpu, or cuda where there is a GPU", repr(device), "see `futurebridge env`")
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    if dtype is not None and dtype not in DTYPES:
        _refuse(", ".join(DTYPES), repr(dtype), "give one of them as --dtype")
    kind = DTYPES[dtype] if dtype else kind
    chosen = {**defaults[op], **sizes}
    call = SHAPED[op](**chosen)
    copy, product = self_check.ceilings(device, kind)
    return Found(
        op,
        " ".join(f"{name.capitalize()}={size}" for name, size in chosen.items()) or call.shape,
        torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)",
        str(kind).removeprefix("torch."),
        call.flops,
        call.moved(kind),
        call.moved(kind) / copy,
        call.flops / product,
        tuple(_rows(call, plain_ways(op, chosen), kind, device)),
    )


def _refuse(expected: str, got: str, remedy: str) -> NoReturn:
    raise ValueError(f"bench: expected {expected}, got {got}; {remedy}")


def _rows(call: Call, plain: Mapping[str, Way], dtype: torch.dtype, device: str) -> list[Timed]:
    """All ways, checked and timed."""
    definition = call.part.definition if call.part else call.definition
    with torch.no_grad():
        truth, native = (_tuple(definition(*_given(call, dtype, device, wide))) for wide in (True, False))
        emulated = ("cuda", "triton") if device == "cpu" else ()
        kernels = {name: why for name, why in backend.kernels(call.op, device).items() if name not in emulated}
        with backend.seen() as ran:
            call.ours(*_given(call, dtype, device))
        taken = set(ran.values()) or {self_check.REFERENCE}
        rows = []
        for kernel, absent in {**kernels, self_check.REFERENCE: ""}.items():
            row = Timed(kernel, ours=True, used=kernel in taken, fault=absent)
            with backend.override(f"auto,{call.op}={kernel}"):
                rows.append(row if absent else _timed(row, call, call.ours, dtype, device, truth, native))
        for name, way in plain.items():
            rows.append(_timed(Timed(name), call, way, dtype, device, truth, native))
    return rows


def _given(call: Call, dtype: torch.dtype, device: str, wide: bool = False) -> list[Tensor]:
    floats, indices = call.given(dtype, device, wide)
    return [*floats, *indices]


def _tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _timed(
    row: Timed,
    call: Call,
    way: Way,
    dtype: torch.dtype,
    device: str,
    truth: tuple[Tensor, ...],
    native: tuple[Tensor, ...],
) -> Timed:
    """The row with its time, or with the reason why it has none."""
    given = _given(call, dtype, device)
    try:
        with backend.seen() as ran:
            results = _tuple(way(*given))
        if row.ours and row.name != self_check.REFERENCE and row.name not in ran.values():
            return replace(row, fault="it has none for this call")
        shown = call.part.of(results) if call.part else results
        for index, (got, expected, plain) in enumerate(zip(shown, truth, native, strict=False)):
            if not expected.is_floating_point():
                if not torch.equal(got.long(), expected.long()):
                    return replace(row, fault=f"wrong: result {index} has other integers")
                continue
            scale = call.scales[index] if index < len(call.scales) else None
            assert_close_to_reference(got, expected, plain, scale=scale)
    except AssertionError as problem:
        return replace(row, fault=f"wrong: {problem}")
    except backend.NotTakenError:
        return replace(row, fault="it has none for this call")
    except RuntimeError as problem:  # no memory, or not for this size
        return replace(row, fault=f"did not run: {str(problem).strip().partition(chr(10))[0][:160]}")
    run = partial(way, *given)
    if device == "cuda":
        return replace(row, seconds=self_check.elapsed(run, device))
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return replace(row, seconds=timer.adaptive_autorange(min_run_time=LEAST, max_run_time=MOST).median)


# --- plain torch, of a call's floats and then its indices -------------------------------------------------------------


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(hidden, weight).float()


def _log_softmax(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _logits(hidden, weight).log_softmax(-1).gather(-1, target[:, None])[:, 0]


def _cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return -F.cross_entropy(_logits(hidden, weight), target, reduction="none")


def _linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return -F.linear_cross_entropy(hidden, weight, target, reduction="none").float()  # type: ignore[attr-defined]


def _partials(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = _logits(hidden, weight)
    top = logits.amax(-1)
    local = target - len(weight)  # the shard is the second of two
    picked = logits.gather(1, local.clamp(0)[:, None])[:, 0].masked_fill(local < 0, -torch.inf)
    return top, (logits - top[:, None]).exp().sum(-1), picked


def _combined(top: Tensor, sumexp: Tensor, picked: Tensor) -> Outputs:
    lse = (top + sumexp.log()).logsumexp(0)
    return picked.amax(0) - lse, lse


def _sdpa(shape: Mapping[str, int], *given: Tensor) -> Tensor:
    """SDPA over copies of the prefix, which every call makes."""
    q, k, v, prefix_k, prefix_v = given
    g, n, rows, p = (shape[name] for name in ("g", "k", "l", "p"))
    own = [x.unflatten(0, (g * n, rows)).transpose(1, 2) for x in (q, k, v)]
    shared = (x.unflatten(0, (g, p)).transpose(1, 2).repeat_interleave(n, 0) for x in (prefix_k, prefix_v))
    keys, values = (torch.cat(parts, 2) for parts in zip(shared, own[1:], strict=True))
    mask = torch.ones(rows, p + rows, dtype=torch.bool, device=q.device).tril(p) if rows > 1 else None
    out = F.scaled_dot_product_attention(own[0], keys, values, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def _rotated(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = F.rms_norm(x, x.shape[-1:], weight, EPS).chunk(2, -1)
    return torch.cat([first, second], -1) * cos + torch.cat([-second, first], -1) * sin


def _split(hkv: int, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) of the rows, normed and rotated."""
    qkv, q_norm, k_norm, cos, sin, at = given
    heads = qkv.unflatten(-1, (-1, q_norm.shape[0]))
    q, k, v = heads.split([heads.shape[1] - 2 * hkv, hkv, hkv], 1)
    cos, sin = (table[at][:, None].to(qkv.dtype) for table in (cos, sin))
    return _rotated(q, q_norm, cos, sin), _rotated(k, k_norm, cos, sin), v.contiguous()


def _step(qkv: Tensor, norms: tuple[Tensor, Tensor], caches: tuple[Tensor, Tensor], *rest: Tensor) -> Tensor:
    """Attention of rows that are each one token after one sequence, [N, Hq, E]."""
    cos, sin, at, held = rest
    k_cache, v_cache = caches
    q, k, v = _split(k_cache.shape[1], qkv, *norms, cos, sin, at)
    keys, values = (
        torch.cat([cache[None, : int(held)].expand(len(q), -1, -1, -1), own[:, None]], 1).transpose(1, 2)
        for cache, own in ((k_cache, k), (v_cache, v))
    )
    return F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]


def _attention_qkv(qkv: Tensor, *rest: Tensor) -> Tensor:
    q_norm, k_norm, k_cache, v_cache, cos, sin, at, held, _ = rest
    return _step(qkv, (q_norm, k_norm), (k_cache, v_cache), cos, sin, at, held)


def _gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _layer(hidden: Tensor, *rest: Tensor) -> Tensor:
    input_norm, qkv, q_norm, k_norm, o, post_norm, gate_up, down, k_cache, v_cache, cos, sin, at, held, _ = rest
    normed = F.rms_norm(hidden, hidden.shape[-1:], input_norm, EPS)
    seen = _step(F.linear(normed, qkv), (q_norm, k_norm), (k_cache, v_cache), cos, sin, at, held)
    hidden = hidden + F.linear(seen.flatten(1), o)
    return hidden + F.linear(_gated(F.linear(F.rms_norm(hidden, hidden.shape[-1:], post_norm, EPS), gate_up)), down)


def _rms_norm(x: Tensor, weight: Tensor, residual: Tensor) -> Outputs:
    summed = x + residual
    return F.rms_norm(summed, x.shape[-1:], weight, EPS), summed


def _skinny(x: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
    return _gated(F.linear(F.rms_norm(x, x.shape[-1:], norm, EPS), weight))


def _top(logits: Tensor, k: int) -> Outputs:
    values = logits.topk(k).values.float()
    logprob = values.log_softmax(-1)
    return -(logprob.exp() * logprob).sum(-1), values  # no indices: torch.topk picks any of equal values


def _merged(out_a: Tensor, out_b: Tensor, lse_a: Tensor, lse_b: Tensor) -> Outputs:
    lse = torch.logaddexp(lse_a, lse_b)
    parts = [out * (own - lse).exp().T[..., None] for out, own in ((out_a, lse_a), (out_b, lse_b))]
    return (parts[0] + parts[1]).to(out_a.dtype), lse


def _head(hidden: Tensor, norm: Tensor, head: Tensor, cu_group: Tensor) -> Outputs:
    score = F.linear(F.rms_norm(hidden, hidden.shape[-1:], norm, EPS).float(), head.float()[None])
    score = score.view(len(cu_group) - 1, -1)
    return score.flatten(), score.softmax(-1).flatten(), score.argmax(-1)


def plain_ways(op: str, sizes: Mapping[str, int]) -> dict[str, Way]:
    """The ways in plain torch to do an op at these sizes, by name; empty if its reference is what one would write."""
    losses: dict[str, Way] = {"logits, log_softmax": _log_softmax, "logits, cross_entropy": _cross_entropy}
    if hasattr(F, "linear_cross_entropy"):
        losses["torch linear_cross_entropy"] = _linear_cross_entropy
    ways: dict[str, dict[str, Way]] = {
        "branch_attention": {"SDPA over copies of the prefix": partial(_sdpa, sizes)},
        "branch_attention_qkv": {"torch eager, SDPA": _attention_qkv},
        "candidate_head": {"torch eager": _head},
        "combine_logprob_partials": {"torch eager": _combined},
        "decoder_layer": {"torch eager, SDPA": _layer},
        "linear_logprob": losses,
        "linear_logprob_partials": {"torch eager": _partials},
        "merge_attention_states": {"torch eager": _merged},
        "qk_norm_rope": {"torch eager": lambda *given: _split(sizes["hkv"], *given)},
        "rms_norm": {"torch eager": _rms_norm},
        "skinny_linear": {"torch eager": _skinny},
        "swiglu": {"torch eager": _gated},
        "topk_entropy": {"torch eager": lambda logits: _top(logits, sizes["k"])},
    }
    return ways.get(op, {})

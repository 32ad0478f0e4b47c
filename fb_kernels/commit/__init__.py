"""The device-side end of a decode step: append the token, or halt."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import checks
from fb_kernels._runtime.op import Op
from fb_kernels.commit.arguments import Commit
from fb_kernels.commit.arguments import DecodeState as DecodeState
from fb_kernels.commit.reference import Halt as Halt


def commit_(
    state: DecodeState,
    token: Tensor,
    entropy: Tensor,
    *,
    threshold: Tensor,
    eos_ids: Tensor,
    max_length: Tensor,
    outcome: Tensor | None = None,
) -> None:
    """End a decode step in place: each running row of `state` takes its token or halts.

    A row that has halted stays as it is, so a step enqueued before the host noticed the halt changes nothing. Otherwise
    the first of these conditions that holds sets `halt` and changes nothing else: entropy or threshold is NaN
    (`Halt.NAN`); entropy > threshold and budget > 0 (`Halt.EVENT`); token is one of eos_ids (`Halt.EOS`);
    length >= max_length or the buffer is full (`Halt.LENGTH`). If none holds, tokens[b, length[b]] = token[b] and
    length[b] += 1.

    Everything that may change between two replays of a captured step is a tensor.

    Args:
        state: written in place, except `budget`; the written tensors may share no memory with any other argument.
        token: [B] int32 or int64.
        entropy: [B] float, in nats.
        threshold: [] or [B] float, in nats; inf for no events.
        eos_ids: [n] int32 or int64, n may be 0.
        max_length: [] or [B] int32 or int64: total length, prompt included.
        outcome: [B, 3] float32 or float64, written in place, or None: for every row its halt after the step, its token
            (exact below 2^24 in float32) and its entropy. For a state on a GPU it may be in pinned host memory; the
            host may read it once an event recorded after the call has completed.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape or device, a written tensor that overlaps another, or an argument that requires grad;
            on the CPU also a NaN threshold or a negative length.
    """
    op = "commit_"
    if not isinstance(state, DecodeState):
        raise checks.error(op, "state", "a DecodeState", type(state).__name__, "build one from its tensors", TypeError)
    for name, value in state._asdict().items():
        checks.is_tensor(op, f"state.{name}", value)
        checks.same_device(op, f"state.{name}", value, state.tokens)
        dtype = torch.int64 if name == "tokens" else torch.int32
        if value.dtype != dtype:
            raise checks.error(op, f"state.{name}", f"dtype {dtype}", value, "convert it", TypeError)
    checks.shape(op, "state.tokens", state.tokens, (None, None), "[B, S]", "give each row its buffer")
    for name in ("tokens", "length", "halt"):
        checks.writable(op, f"state.{name}", getattr(state, name))
    rows = state.tokens.shape[0]
    for name, value in (("length", state.length), ("halt", state.halt), ("budget", state.budget)):
        checks.shape(op, f"state.{name}", value, (rows,), "[B]", "give one value to each row")
    checks.index(op, "token", token, like=state.tokens)
    checks.shape(op, "token", token, (rows,), "[B]", "give one token to each row")
    checks.floating(op, "entropy", entropy)
    checks.same_device(op, "entropy", entropy, state.tokens)
    checks.shape(op, "entropy", entropy, (rows,), "[B]", "give one entropy to each row")
    checks.floating(op, "threshold", threshold)
    checks.same_device(op, "threshold", threshold, state.tokens)
    checks.index(op, "eos_ids", eos_ids, like=state.tokens, ndim=1)
    checks.index(op, "max_length", max_length, like=state.tokens)
    for name, value in (("threshold", threshold), ("max_length", max_length)):
        if value.ndim:
            checks.shape(op, name, value, (rows,), "[] or [B]", "give one value, or one to each row")
    limits = (("threshold", threshold), ("eos_ids", eos_ids), ("max_length", max_length))
    *written, budget = ((f"state.{name}", value) for name, value in state._asdict().items())
    if outcome is not None:
        checks.is_tensor(op, "outcome", outcome)
        if not (state.tokens.is_cuda and outcome.is_cpu and _may_be_pinned(outcome)):
            checks.same_device(op, "outcome", outcome, state.tokens)
        checks.shape(op, "outcome", outcome, (rows, 3), "[B, 3]", "give halt, token and entropy of each row a place")
        if outcome.dtype not in (torch.float32, torch.float64):
            raise checks.error(op, "outcome", "dtype torch.float32 or float64", outcome, "convert it", TypeError)
        checks.writable(op, "outcome", outcome)
        written.append(("outcome", outcome))
    checks.apart(op, written, (budget, ("token", token), ("entropy", entropy), *limits))
    _commit(Commit(state, token, entropy, threshold, eos_ids, max_length, outcome))


def _may_be_pinned(outcome: Tensor) -> bool:
    """Whether it is in pinned memory, as the call before a capture has checked: a capture must not ask the driver."""
    return torch.cuda.is_current_stream_capturing() or outcome.is_pinned()


_commit = Op(
    "commit_",
    Commit,
    "()",
    folder="commit",
    fake=lambda _: None,
    writes=("tokens", "length", "halt", "outcome"),
    cuda=True,
)
_commit.has_no_gradient()

"""Argument checks shared by every op: one sentence naming op, argument, what was expected, what came, and the remedy.

Shapes, dtypes and devices are checked in the public functions, without reading a tensor's contents. Values inside index
tensors are checked by the CPU implementations (`*_values`); on a device the host never reads them.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDICES = (torch.int32, torch.int64)


def error(
    op: str, argument: str, expected: str, got: object, remedy: str, kind: type[Exception] = ValueError
) -> Exception:
    """The exception for a bad argument; a Tensor in `got` is described by dtype, shape and device."""
    shown = describe(got) if isinstance(got, Tensor) else got
    return kind(f"{op}: {argument}: expected {expected}, got {shown}; {remedy}")


def describe(tensor: Tensor) -> str:
    """`float32[3, 4] on cpu`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def is_tensor(op: str, argument: str, value: object) -> None:
    """TypeError unless `value` is a torch tensor."""
    if not isinstance(value, Tensor):
        raise error(op, argument, "a torch.Tensor", type(value).__name__, "convert it with torch.as_tensor", TypeError)


def floating(op: str, argument: str, value: object, like: Tensor | None = None) -> None:
    """A float32, bfloat16, float16 or float64 tensor; with `like`, of the same dtype and device."""
    is_tensor(op, argument, value)
    assert isinstance(value, Tensor)
    if value.dtype not in FLOATS:
        raise error(
            op,
            argument,
            "a float32, bfloat16, float16 or float64 tensor",
            value,
            "convert it with .to(dtype)",
            TypeError,
        )
    if like is not None:
        if value.dtype != like.dtype:
            raise error(op, argument, f"dtype {like.dtype}", value, "give all tensors one dtype", TypeError)
        same_device(op, argument, value, like)


def index(op: str, argument: str, value: object, like: Tensor, ndim: int | None = None) -> None:
    """An int32 or int64 tensor on `like`'s device, of `ndim` dimensions."""
    is_tensor(op, argument, value)
    assert isinstance(value, Tensor)
    if value.dtype not in INDICES:
        raise error(op, argument, "an int32 or int64 tensor", value, "convert it with .to(torch.int32)", TypeError)
    if ndim is not None and value.ndim != ndim:
        raise error(op, argument, f"{ndim} dimension(s)", value, "reshape it")
    same_device(op, argument, value, like)


def offsets(op: str, argument: str, value: object, like: Tensor) -> None:
    """A one-dimensional offset tensor with at least one entry."""
    index(op, argument, value, like, ndim=1)
    assert isinstance(value, Tensor)
    if value.shape[0] == 0:
        raise error(op, argument, "n + 1 offsets beginning with 0", value, "pass tensor([0]) for nothing")


def same_device(op: str, argument: str, value: Tensor, like: Tensor) -> None:
    """Both tensors on one device."""
    if value.device != like.device:
        raise error(op, argument, f"a tensor on {like.device}", value, f"move it with .to('{like.device}')")


def shape(op: str, argument: str, value: Tensor, expected: tuple[int | None, ...], names: str, remedy: str) -> None:
    """The exact shape; None matches any size. `names` shows the shape in the contract's letters."""
    fits = value.ndim == len(expected) and all(
        want is None or have == want for have, want in zip(value.shape, expected, strict=True)
    )
    if not fits:
        sizes = ", ".join("*" if want is None else str(want) for want in expected)
        raise error(op, argument, f"shape {names} = [{sizes}]", value, remedy)


def positive(op: str, argument: str, value: float, remedy: str) -> None:
    """A finite number above zero."""
    if not 0.0 < value < float("inf"):
        raise error(op, argument, "a finite number above 0", value, remedy)


def offset_values(op: str, argument: str, value: Tensor, total: int) -> list[int]:
    """The offsets as a list, after checking that they begin with 0, never fall and end with `total` (CPU only)."""
    entries = value.tolist()
    if entries[0] != 0 or entries[-1] != total or any(b < a for a, b in pairwise(entries)):
        shown = entries if len(entries) <= 8 else f"{entries[:4]} ... {entries[-2:]}"
        raise error(op, argument, f"offsets that begin with 0, never fall and end with {total}", shown, "rebuild them")
    return entries

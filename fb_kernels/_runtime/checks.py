"""Argument checks shared by every op: one sentence naming op, argument, what was expected, what came, and the remedy.

Shapes, dtypes and devices are checked in the public functions, without reading a tensor's contents. Values inside index
tensors are checked by the CPU implementations; on a device the host never reads them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDICES = (torch.int32, torch.int64)
LARGEST = torch.iinfo(torch.int64).max
DENSE = "convert it with .to_dense(), or .to_padded_tensor() if it is nested"
SEARCH = 10_000  # maximum steps of the search for two elements at one address


def disjoint(written: tuple[Tensor, ...], *others: Tensor | None) -> bool:
    """Whether the written tensors share no byte with each other or the others; False if unsure (not contiguous)."""
    spans: list[tuple[int, int]] = []
    for position, x in enumerate((*written, *others)):
        if x is None:
            continue
        if not x.is_contiguous():
            return False
        first = x.data_ptr()
        last = first + x.nbytes
        for start, end in spans:
            if first < end and start < last:
                return False
        if position < len(written):
            spans.append((first, last))
    return True


def error(
    op: str, argument: str, expected: str, got: object, remedy: str, kind: type[Exception] = ValueError
) -> Exception:
    """The exception for a bad argument; in `got`, a tensor is described and a huge int shown by its size."""
    shown = describe(got) if isinstance(got, Tensor) else got
    if isinstance(got, int) and not -LARGEST <= got <= LARGEST:
        shown = f"an int of {got.bit_length()} bits"
    return kind(f"{op}: {argument}: expected {expected}, got {shown}; {remedy}")


def describe(tensor: Tensor) -> str:
    """`float32[3, 4] on cpu`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def has_memory(x: Tensor) -> bool:
    """Whether a tensor's elements lie somewhere; not so if it is sparse, an efficient zero, freed, or wraps another."""
    try:
        return x.data_ptr() != 0 or x.numel() == 0
    except RuntimeError:
        return False


def is_tensor(op: str, argument: str, value: object) -> None:
    """Raise unless the value is a dense torch tensor in memory; any strides are allowed."""
    if not isinstance(value, Tensor):
        raise error(op, argument, "a torch.Tensor", type(value).__name__, "convert it with torch.as_tensor", TypeError)
    if value.layout != torch.strided or value.is_nested:
        raise error(op, argument, "a dense tensor", f"one of {value.layout}" + ", nested" * value.is_nested, DENSE)
    if is_astray(value):
        raise error(op, argument, "a tensor in memory", "one without any", "clone it where it still has its values")


def is_astray(x: Tensor) -> bool:
    """Whether a dense tensor's elements lie nowhere, though neither compilation nor a transform now is the reason."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter) or has_memory(x):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        level = torch._C._functorch.maybe_current_level()
        return level is None or not 0 < torch._C._functorch.maybe_get_level(x) <= level
    return x.device.type != "meta" and not torch._is_functional_tensor(x)


def floating(op: str, argument: str, value: object, like: Tensor | None = None) -> None:
    """Raise unless it is a float32, bfloat16, float16 or float64 tensor; with `like`, of its dtype and device."""
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
    """Raise unless it is an int32 or int64 tensor on `like`'s device, of `ndim` dimensions."""
    is_tensor(op, argument, value)
    assert isinstance(value, Tensor)
    if value.dtype not in INDICES:
        raise error(op, argument, "an int32 or int64 tensor", value, "convert it with .to(torch.int32)", TypeError)
    if ndim is not None and value.ndim != ndim:
        raise error(op, argument, f"{ndim} dimension(s)", value, "reshape it")
    same_device(op, argument, value, like)


def offsets(op: str, argument: str, value: object, like: Tensor) -> None:
    """Raise unless it is a one-dimensional offset tensor with at least one entry."""
    index(op, argument, value, like, ndim=1)
    assert isinstance(value, Tensor)
    if value.shape[0] == 0:
        raise error(op, argument, "n + 1 offsets beginning with 0", value, "pass tensor([0]) for nothing")


def same_device(op: str, argument: str, value: Tensor, like: Tensor) -> None:
    """Raise unless both tensors are on one device."""
    if value.device != like.device:
        raise error(op, argument, f"a tensor on {like.device}", value, f"move it with .to('{like.device}')")


def shape(op: str, argument: str, value: Tensor, expected: tuple[int | None, ...], names: str, remedy: str) -> None:
    """Raise unless the shape is exactly this; None matches any size. `names` is the shape in the docs' letters."""
    have = value.shape
    if len(have) == len(expected):
        for size, want in zip(have, expected, strict=True):
            if want is not None and want != size:
                break
        else:
            return
    sizes = ", ".join("*" if want is None else str(want) for want in expected)
    raise error(op, argument, f"shape {names} = [{sizes}]", value, remedy)


def writable(op: str, argument: str, value: Tensor) -> None:
    """Raise if elements share memory, as in an expanded tensor or in overlapping windows."""
    if value.is_contiguous():
        return
    expanded = any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True))
    if expanded or (_span(value) is not None and _repeats(value)):
        raise error(op, argument, "a tensor with memory for every element", "one whose elements share it", "clone it")


def apart(op: str, written: Iterable[tuple[str, Tensor]], others: Iterable[tuple[str, Tensor | None]]) -> None:
    """Raise if a written tensor shares a byte with another argument; interleaved elements are fine.

    Host arithmetic on addresses, sizes and strides; tensors without memory, as in tracing, pass.
    """
    first = [(name, value, _span(value)) for name, value in written]
    rest = [(name, value, _span(value)) for name, value in others if value is not None]
    for position, (name, mine, here) in enumerate(first):
        for other, theirs, there in (*first[position + 1 :], *rest):
            if here and there and here[0] < there[1] and there[0] < here[1] and _overlap(mine, theirs):
                raise error(op, name, f"memory of its own, apart from {other}", "tensors that overlap", "clone one")


def _span(value: Tensor) -> tuple[int, int] | None:
    """The addresses of a tensor's first byte and of the byte after its last; None without elements or memory."""
    if type(value) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return None
    try:
        address = value.data_ptr()
    except RuntimeError:  # inside a transform of torch.func
        return None
    if not address or not (size := value.nbytes):
        return None
    if not value.is_contiguous():
        last = sum((length - 1) * stride for length, stride in zip(value.shape, value.stride(), strict=True))
        size = (last + 1) * value.element_size()
    return address, address + size


def _overlap(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors share a byte: whether some difference of offsets equals the distance of their first bytes."""
    bounds: dict[int, list[int]] = {}  # stride in bytes -> least and largest difference of the two indices
    for value, end in ((right, 0), (left, 1)):
        size = value.element_size()
        strides = (*(stride * size for stride in value.stride()), 1)
        for stride, length in zip(strides, (*value.shape, size), strict=True):
            bounds.setdefault(stride, [0, 0])[end] += (length - 1) * (1 if end else -1)
    terms = sorted(((stride, low, high) for stride, (low, high) in bounds.items()), reverse=True)
    return _reaches(terms, right.data_ptr() - left.data_ptr())


def _repeats(value: Tensor) -> bool:
    """Whether two elements of a tensor share memory; they differ by 1 or more in their outermost differing index."""
    terms = sorted(((stride, size - 1) for size, stride in zip(value.shape, value.stride(), strict=True)), reverse=True)
    inner = [sum(stride * most for stride, most in terms[position + 1 :]) for position in range(len(terms))]
    return any(
        _reaches([(stride, 1, most), *((within, -times, times) for within, times in terms[position + 1 :])], 0)
        for position, (stride, most) in enumerate(terms)
        if most and stride <= inner[position]
    )


def _reaches(terms: list[tuple[int, int, int]], goal: int, left: list[int] | None = None) -> bool:
    """Whether strides, each times a number within its bounds, can sum to the goal; true if the search gets too long.

    Terms are (stride, least, most), the largest stride first; `left` counts the steps of the search that are left.
    """
    left = [SEARCH] if left is None else left
    left[0] -= 1
    if left[0] < 0 or not terms:
        return left[0] < 0 or goal == 0
    (stride, low, high), rest = terms[0], terms[1:]
    if stride == 0:
        return _reaches(rest, goal, left)
    least = sum(inner * bound for inner, bound, _ in rest)
    most = sum(inner * bound for inner, _, bound in rest)
    times = range(max(low, -((most - goal) // stride)), min(high, (goal - least) // stride) + 1)
    return any(_reaches(rest, goal - stride * number, left) for number in times)


def integer(op: str, argument: str, value: Any, remedy: str, least: int | None = None, most: int | None = None) -> None:
    """Raise unless it is an int from `least` to `most` that 64 bits hold."""
    kind = isinstance(value, int | torch.SymInt) and not isinstance(value, bool)
    if kind and isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        raise error(op, argument, "an int that 64 bits hold", value, remedy)
    if not kind or (least is not None and value < least) or (most is not None and value > most):
        expected = "an int" if least is None else f"an int of {least} or more"
        expected = expected if most is None else f"an int from {least} to {most}"
        if not kind:
            raise error(op, argument, expected, type(value).__name__, "convert it with int()", TypeError)
        raise error(op, argument, expected, value, remedy)


def number(op: str, argument: str, value: Any, remedy: str, expected: str = "a finite number") -> None:
    """Raise unless it is a finite int or float."""
    if isinstance(value, bool) or not isinstance(value, float | int | torch.SymFloat | torch.SymInt):
        raise error(op, argument, expected, type(value).__name__, "convert it with float()", TypeError)
    if not -sys.float_info.max <= value <= sys.float_info.max:
        raise error(op, argument, expected, value, remedy)


def positive(op: str, argument: str, value: Any, remedy: str) -> None:
    """Raise unless it is a finite number above zero."""
    expected = "a finite number above 0"
    number(op, argument, value, remedy, expected)
    if not value > 0:
        raise error(op, argument, expected, value, remedy)


def not_negative(op: str, argument: str, value: Any, remedy: str) -> None:
    """Raise unless it is a finite number, zero or more."""
    expected = "a finite number, 0 or more"
    number(op, argument, value, remedy, expected)
    if not value >= 0:
        raise error(op, argument, expected, value, remedy)


def offset_values(op: str, argument: str, entries: list[int], total: int) -> None:
    """Raise unless offsets begin with 0, never fall and end with `total`."""
    if entries[0] != 0 or entries[-1] != total or any(b < a for a, b in pairwise(entries)):
        shown = entries if len(entries) <= 8 else f"{entries[:4]} ... {entries[-2:]}"
        raise error(op, argument, f"offsets that begin with 0, never fall and end with {total}", shown, "rebuild them")

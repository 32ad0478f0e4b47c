"""Helpers to test ops and code that calls them: compare with a reference, poison memory, watch what is dispatched."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def assert_close_to_reference(
    actual: Tensor, reference64: Tensor, native: Tensor, *, ulps: float = 4.0, scale: Tensor | float | None = None
) -> None:
    """Assert that maximum and RMS error are at most twice those of plain PyTorch, plus a few ulps at the row's scale.

    Args:
        actual: [..., D], the result to test.
        reference64: the same shape, the truth in float64.
        native: the same shape, plain PyTorch in the tested dtype.
        ulps: allowance in units of the last place of actual's dtype.
        scale: magnitude at which these units count, broadcast to actual; by default the largest finite |reference64|
            of each row. If terms may cancel, give the magnitude of the terms, not of their sum: the formula applied to
            `magnitude(x)`, or for a log-prob that of the logits, since it is a difference of two of them.

    Raises:
        AssertionError: an error above its bound, different shapes, NaN or infinities where the reference has none or
            the reverse, or a finite number whose scale is not finite, so that anything would pass.
    """
    if not actual.shape == reference64.shape == native.shape:
        raise AssertionError(f"shapes {[tuple(value.shape) for value in (actual, reference64, native)]} differ")
    if not actual.numel():
        return
    got, truth, plain = (
        value.detach().double().cpu().reshape(-1, value.shape[-1] if value.ndim else 1)
        for value in (actual, reference64, native)
    )
    rounded = truth.to(actual.dtype).double()  # what overflows the tested dtype is an infinity there
    finite = rounded.isfinite()
    strange = torch.where(finite, ~got.isfinite(), ~((got == rounded) | (got.isnan() & rounded.isnan())))
    if strange.any():
        where = strange.nonzero()[0].tolist()
        raise AssertionError(
            f"{int(strange.sum())} elements are NaN or infinite in one tensor only, the first at {where}: "
            f"got {got[tuple(where)]:g}, expected {rounded[tuple(where)]:g}"
        )
    zero = torch.zeros((), dtype=torch.float64)
    if scale is None:
        scale = torch.where(finite, truth.abs(), zero).amax(-1, keepdim=True).expand(truth.shape)
    else:
        scale = torch.as_tensor(scale, dtype=torch.float64).cpu().expand(actual.shape).reshape(truth.shape)
        if (finite & ~scale.isfinite()).any():
            raise AssertionError("the scale is NaN or infinite at numbers that are finite")
    allowance = torch.where(finite, ulps * torch.finfo(actual.dtype).eps * scale, zero)
    error = torch.where(finite, (got - truth).abs(), zero)
    plain_error = torch.where(finite & plain.isfinite(), (plain - truth).abs(), zero)
    excess = error - allowance - 2 * plain_error.max()
    if (excess > 0).any():
        row, column = divmod(int(excess.argmax()), error.shape[-1])
        raise AssertionError(
            f"error {error[row, column]:.3g} at [{row}, {column}] is above twice plain PyTorch's maximum "
            f"{plain_error.max():.3g} plus {allowance[row, column]:.3g}"
        )
    rms, plain_rms, rms_allowance = (value.square().mean().sqrt() for value in (error, plain_error, allowance))
    if rms > 2 * plain_rms + rms_allowance:
        raise AssertionError(
            f"RMS error {rms:.3g} is above twice plain PyTorch's {plain_rms:.3g} plus {rms_allowance:.3g}"
        )


def magnitude(tensor: Tensor) -> Tensor:
    """|tensor| in float64, 0 where it is not finite: terms that cannot cancel, to compute a `scale` from."""
    return tensor.detach().double().nan_to_num(0.0, 0.0, 0.0).abs()


def poison_(tensor: Tensor) -> Tensor:
    """Fill a tensor with NaN or the largest integer, values that must never be read, and return it."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(torch.nan)
        return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN, or the largest integer, until they are written; other results are unchanged."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@dataclass
class Counts:
    """The counts of a counting context; they may be read inside the context and after it."""

    by_op: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """The sum of all counts."""
        return self.by_op.total()


@dataclass
class Largest:
    """The largest tensor that a context saw; it may be read inside the context and after it."""

    numel: int = 0
    shape: tuple[int, ...] = ()
    op: str = ""


@contextmanager
def count_launches() -> Iterator[Counts]:
    """Count dispatched operations that do work; views and allocations do not count, and an `fb::` op counts as one.

    ```python
    with count_launches() as launches:
        rms_norm(x, weight, 1e-6)
    assert launches.total == 1
    ```
    """
    counts = Counts()

    def see(func: OpOverload, args: tuple, out: Any, inside: bool) -> None:
        if not (inside or func.is_view or _name(func) in _NO_WORK):
            counts.by_op[_name(func)] += 1

    with _watch(see):
        yield counts


@contextmanager
def count_syncs() -> Iterator[Counts]:
    """Count operations that make the host wait for a tensor's contents.

    These are `.item()`, `.tolist()`, `.numpy()`, `if tensor:`, boolean indexing, `nonzero`, `unique` and copies to the
    host. They count for CPU tensors too, so that device code can be tested without a device. Inside an `fb::` op they
    count only on a device, since on the CPU an op may check the values of its index tensors.
    """
    counts = Counts()

    def see(func: OpOverload, args: tuple, out: Any, inside: bool) -> None:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        on_device = any(tensor.device.type != "cpu" for tensor in tensors)
        if (on_device or not inside) and _waits(func, tensors, on_device, out):
            counts.by_op[_name(func)] += 1

    with _HostReads(counts), _watch(see):
        yield counts


@contextmanager
def largest_tensor() -> Iterator[Largest]:
    """Find the largest tensor created, including those in `fb::` ops that run as plain PyTorch and in backward.

    ```python
    with largest_tensor() as largest:
        linear_logprob(hidden, weight, target)
    assert largest.numel < rows * vocabulary
    ```
    """
    largest = Largest()

    def see(func: OpOverload, args: tuple, out: Any, inside: bool) -> None:
        if func.is_view:
            return
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(out):
            if not isinstance(leaf, Tensor) or leaf.untyped_storage().data_ptr() in given:
                continue
            if leaf.numel() > largest.numel:
                largest.numel, largest.shape, largest.op = leaf.numel(), tuple(leaf.shape), _name(func)

    with _watch(see):
        yield largest


_NO_WORK = {
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"),
    *("aten::_unsafe_view", "aten::_local_scalar_dense"),
}


def _name(func: OpOverload) -> str:
    return str(func._schema.name)


def _waits(func: OpOverload, tensors: list[Tensor], on_device: bool, out: Any) -> bool:
    name = _name(func)
    if name in ("aten::index", "aten::index_put", "aten::index_put_"):
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])
    if name in ("aten::_to_copy", "aten::copy_"):
        return on_device and isinstance(out, Tensor) and out.device.type == "cpu"
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


See = Callable[[OpOverload, tuple, Any, bool], None]
_watching: ContextVar[_Watch | None] = ContextVar("_watching", default=None)


@contextmanager
def _watch(see: See) -> Iterator[None]:
    """Show every operation to `see(func, arguments, result, inside an fb:: op)`; nested contexts share one mode."""
    mode = _watching.get()
    if mode is not None:
        mode.observers.append(see)
        try:
            yield
        finally:
            mode.observers.remove(see)
        return
    mode = _Watch([see])
    token = _watching.set(mode)
    try:
        with mode:
            yield
    finally:
        _watching.reset(token)


class _Watch(TorchDispatchMode):
    """Shows the parts of composite operations, and an fb:: op after the operations of its implementation."""

    def __init__(self, observers: list[See]) -> None:
        super().__init__()
        self.observers = observers
        self.inside = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "fb":
            out = self._enter(func, args, kwargs)
        else:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
            out = func(*args, **kwargs)
        for see in self.observers:
            see(func, (args, kwargs), out, self.inside)
        return out

    def _enter(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an fb:: op's implementation with this mode still on."""
        device = next((leaf.device.type for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), "cpu")
        key = getattr(torch._C.DispatchKey, "Meta" if device == "meta" else device.upper())
        outer, self.inside = self.inside, True
        try:
            with self:
                return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        finally:
            self.inside = outer


class _HostReads(TorchFunctionMode):
    """Counts the reads of CPU tensors that never reach the dispatcher."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__) and args[0].device.type == "cpu":
            self.counts.by_op[f"Tensor.{func.__name__}"] += 1
        return func(*args, **(kwargs or {}))

"""How an op is registered with torch.library, and how a call of it bypasses the dispatcher.

A call that needs only the result, on plain tensors in eager mode, goes straight to the implementation, and past the
checks if a call of the same `signature` has passed them. All other calls (gradients, compilation, modes, subclasses,
autocast, transforms, profiling) are checked and go through torch's dispatcher, and give the same result.

An op of many arguments has them as a NamedTuple, which its implementations take. The operator's arguments are its
fields in order; a field that is a NamedTuple itself stands for its own fields.

Under the transforms of torch.func the operators run inside a `torch.autograd.Function`, which their kernel for the
dispatch key of transforms calls, compiled or not: grad, vjp, jacrev and vmap work (vmap as a loop); forward mode and
ops that write to an argument are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial, wraps
from importlib import import_module
from operator import itemgetter
from types import NoneType
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from fb_kernels._runtime import PACKAGE, backend, checks

LIBRARY = torch.library.Library("fb" if PACKAGE == "fb_kernels" else PACKAGE, "DEF")  # a copy has its own
OPERATORS = getattr(torch.ops, LIBRARY.ns)

_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.maybe_current_level
_autocast = torch._C._is_any_autocast_enabled
_tracing = torch._C._get_tracing_state
_FLOATS, _INTS = frozenset((float, NoneType)), frozenset((int, NoneType))
_PLAIN = (Tensor, Parameter)
_profiling = torch._C._autograd._profiler_enabled
MOST = 4096  # most signatures that an op remembers
_TYPES: dict[Any, str] = {Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool", list[bool]: "bool[]"}
_TYPES |= {kind | None: f"{name}?" for kind, name in _TYPES.items()}


def signature(
    tensors: tuple[Any, ...], floats: tuple[object, ...] = (), ints: tuple[object, ...] = (), *others: Hashable
) -> tuple | None:
    """Everything that the checks of a call depend on, if the call needs only its result; None for any other call.

    It holds dtype, device and shape of each tensor (a plain one, without gradient), the types of `floats` and `ints`
    (Python's), and their values; each argument may be None.
    """
    if (
        torch.compiler.is_compiling()
        or _modes()
        or _transform() is not None
        or forward_ad._current_level >= 0
        or _autocast()
        or _profiling()
        or _tracing() is not None
        or not _FLOATS.issuperset(map(type, floats))
        or not _INTS.issuperset(map(type, ints))
    ):
        return None
    grad_enabled = torch.is_grad_enabled()
    key: list[object] = [floats, ints, others]
    try:
        for x in tensors:
            if x is None:
                key.append(x)
                continue
            if type(x) not in _PLAIN or (grad_enabled and x.requires_grad):
                return None
            if x.is_nested or x.is_neg() or (not x.data_ptr() and x.numel()):
                return None
            key += (x.dtype, x.device, x.shape)
    except RuntimeError:  # it has no memory: sparse, or the wrapper of a transform
        return None
    return tuple(key)


class Op:
    """`fb::<name>`, called through torch's dispatcher or, by `checked[signature]`, past it."""

    def __init__(
        self,
        name: str,
        signature: str | type[tuple],
        results: str = "",
        *,
        fake: Callable,
        writes: Sequence[str] = (),
        folder: str = "",
        triton: bool = False,
        cuda: bool = False,
        cpu: bool = False,
    ) -> None:
        """Define the operator and register implementations and fake.

        The signature is in the schema language, or the NamedTuple of the arguments; then `results` are the types of the
        results in that language, and `writes` names the arguments that are written to. The fake gives the shapes and
        dtypes of the results. The function `name` of the folder's `reference.py` is the plain PyTorch one; `triton`,
        `cuda` and `cpu` say whether `triton.py`, `cuda.py` and `cpu.py` have one. By default the folder has the
        operator's name.
        """
        self.name = name
        self.kinds = [kind for kind, has in (("cuda", cuda), ("triton", triton), ("cpu", cpu)) if has]
        self._pack: Callable[[tuple], tuple] | None = None
        if isinstance(signature, type):
            self._pack, signature = _packer(signature), f"({_declared(signature, writes)}) -> {results}"
        LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
        self.stem = stem = folder or name
        self.checked: dict[tuple, Callable] = {}
        reference = getattr(import_module(f"{PACKAGE}.{stem}.reference"), name)
        self._run = {
            device: backend.implementation(name, stem, reference, self.kinds, device) for device in ("cpu", "cuda")
        }
        for device, run in self._run.items():
            LIBRARY.impl(name, _without_autocast(self._packed(run), device), device.upper())
        torch.library.register_fake(f"{LIBRARY.ns}::{name}", self._packed(fake), lib=LIBRARY)
        self._op = getattr(OPERATORS, name).default
        self._arguments = [argument.name for argument in self._op._schema.arguments]
        self._function: type[torch.autograd.Function] | None = None
        self._differentiable: Sequence[str] = ()
        if self._op._schema.is_mutable:
            self._transforms()

    def __call__(self, *arguments: Any) -> Any:
        """Call through the dispatcher."""
        if self._pack is not None:
            arguments = tuple(backend.flat(arguments))
        if torch.compiler.is_compiling() or forward_ad._current_level < 0:
            return self._op(*arguments)
        return self._transformed(*arguments)

    def _packed(self, run: Callable) -> Callable:
        """What takes the operator's arguments in a row."""
        pack = self._pack
        return run if pack is None else wraps(run)(lambda *given: run(pack(given)))

    def _transforms(self) -> None:
        """Run `_transformed` where a transform of torch.func is active: below, torch refuses opaque operators."""
        LIBRARY.impl(self.name, self._transformed, "FuncTorchDynamicLayerFrontMode")

    def _transformed(self, *arguments: Any) -> Any:
        """Call under a transform of torch.func or forward-mode differentiation."""
        if self._op._schema.is_mutable:
            raise NotImplementedError(
                f"{self.name}: expected a call outside torch.func and forward-mode differentiation, since it writes to "
                "an argument, got one inside; loop over the calls"
            )
        return self._function.apply(*arguments) if self._function else self._op(*arguments)

    def passed(self, key: tuple | None, first: Tensor) -> Callable:
        """Record that a call has passed its checks; returns what runs it, and all later calls of its signature."""
        if key is None:
            return self
        if len(self.checked) >= MOST:
            self.checked.clear()
        return self.checked.setdefault(key, self._run.get(first.device.type, self))

    def differentiate(
        self, *, to: Sequence[str], backward: Callable, setup_context: Callable | None = None, by: Op | None = None
    ) -> None:
        """Register the gradient to the arguments `to`, by name; others that require one are refused.

        `backward(ctx, *grads)` returns the gradients to these arguments in order; ctx.needs says which are needed, and
        the others are dropped. By default the context saves all tensors, and the other arguments as ctx.options. `by`
        is the operator that computes the gradient, if any; it has no gradient of its own.
        """
        places = [self._arguments.index(name) for name in to]
        is_tensor = [str(argument.type).endswith(("Tensor", "Tensor]")) for argument in self._op._schema.arguments]

        def setup(ctx: Any, inputs: tuple, output: Any) -> None:
            self._refuse(name for name, need in zip(self._arguments, ctx.needs_input_grad, strict=False) if need)
            ctx.needs = [ctx.needs_input_grad[place] for place in places]
            if setup_context is None:
                ctx.save_for_backward(*(x for x, tensor in zip(inputs, is_tensor, strict=True) if tensor))
                ctx.options = [x for x, tensor in zip(inputs, is_tensor, strict=True) if not tensor]
            else:
                setup_context(ctx, inputs, output)

        def pull(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
            results = backward(ctx, *grads)
            results = results if isinstance(results, tuple) else (results,)
            given = {place: x for place, x, need in zip(places, results, ctx.needs, strict=True) if need}
            return tuple(map(given.get, range(len(self._arguments))))

        self._differentiable = to
        torch.library.register_autograd(f"{LIBRARY.ns}::{self.name}", pull, setup_context=setup, lib=LIBRARY)
        self._function = _function(self.name, self.name, setup, pull)
        self._transforms()
        if by is not None:

            def refuse(*_: Any) -> None:
                raise NotImplementedError(
                    f"{self.name}: only first derivatives exist; call it without create_graph=True"
                )

            torch.library.register_autograd(f"{LIBRARY.ns}::{by.name}", refuse, lib=LIBRARY)
            by._function = _function(self.name, by.name, lambda *_: None, refuse)
            by._transforms()

    def has_no_gradient(self) -> None:
        """Refuse every argument that requires one, or has a tangent."""

        def refuse_or_run(keys: Any, *arguments: Any) -> Any:
            self._refuse(name for name, x in zip(self._arguments, arguments, strict=False) if _needs_gradient(x))
            with torch._C._AutoDispatchBelowAutograd():
                return self._op.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

        LIBRARY.impl(self.name, refuse_or_run, "Autograd", with_keyset=True)

    def _refuse(self, needed: Iterable[str]) -> None:
        """Raise if an argument without a gradient is among those that need one."""
        for name in needed:
            if name not in self._differentiable:
                remedy = "call it under torch.no_grad(), or pass it with .detach()"
                raise checks.error(self.name, name, "a tensor that needs no gradient", "one that needs one", remedy)


def _fields(arguments: type[tuple]) -> Iterator[tuple[str, Any]]:
    """Names and types of a NamedTuple's fields, those of tuples inside in their place."""
    for name, kind in get_type_hints(arguments).items():
        yield from _fields(kind) if hasattr(kind, "_fields") else ((name, kind),)


def _declared(arguments: type[tuple], writes: Sequence[str]) -> str:
    """The fields as the schema language declares arguments; what is written to has a letter."""
    declared = []
    for name, kind in _fields(arguments):
        letter = f"({chr(ord('a') + writes.index(name))}!)" if name in writes else ""
        declared.append(f"{_TYPES[kind].replace('Tensor', 'Tensor' + letter)} {name}")
    return ", ".join(declared)


def _packer(arguments: type[tuple]) -> Callable[[tuple], tuple]:
    """What makes the NamedTuple of an operator's arguments."""
    parts: list[Callable[[tuple], Any]] = []
    place = 0
    for kind in get_type_hints(arguments).values():
        if hasattr(kind, "_fields"):
            end = place + sum(1 for _ in _fields(kind))
            parts.append(partial(_pack_part, _packer(kind), slice(place, end)))
            place = end
        else:
            parts.append(itemgetter(place))
            place += 1
    make = arguments._make  # type: ignore[attr-defined]
    return make if place == len(parts) else lambda given: make([part(given) for part in parts])


def _pack_part(pack: Callable[[tuple], tuple], part: slice, given: tuple) -> tuple:
    return pack(given[part])


def _needs_gradient(x: Any) -> bool:
    """Whether it is a tensor that needs a gradient, backward or forward."""
    if not isinstance(x, Tensor):
        return False
    if torch.is_grad_enabled() and x.requires_grad:
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def fake_gradients(like: Tensor, tensors: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor, ...]:
    """For a fake: gradients to the tensors; those that are not needed are empty, of None empty and like `like`."""
    pairs = zip(tensors, needs, strict=True)
    return tuple(like.new_empty(0) if x is None else x.new_empty(x.shape if need else 0) for x, need in pairs)


def _function(op: str, name: str, setup: Callable, gradient: Callable) -> type[torch.autograd.Function]:
    """The operator `name` of `op` with its gradient, for torch.func transforms; forward mode is refused."""

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            return getattr(OPERATORS, name).default(*arguments)

        @staticmethod
        def vmap(info: Any, dims: tuple[Any, ...], *arguments: Any) -> Any:
            pairs = zip(arguments, dims, strict=True)
            columns = (x.unbind(dim) if isinstance(dim, int) else [x] * info.batch_size for x, dim in pairs)
            results = [Transformed.apply(*sample) for sample in zip(*columns, strict=True)]
            if isinstance(results[0], Tensor):
                return torch.stack(results), 0
            stacked = tuple(map(torch.stack, zip(*results, strict=True)))
            return stacked, (0,) * len(stacked)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
            setup(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return gradient(ctx, *grads)

        @staticmethod
        def jvp(ctx: Any, *_: Any) -> Any:
            raise NotImplementedError(
                f"{op}: expected differentiation in reverse, got forward mode; use torch.func.grad, vjp or jacrev"
            )

    return Transformed


def _without_autocast(run: Callable, device: str) -> Callable:
    """The implementation with autocast off, since autocast would lower the precision of its products."""

    def plain(*arguments: Any) -> Any:
        if not torch.is_autocast_enabled(device):
            return run(*arguments)
        with torch.autocast(device, enabled=False):
            return run(*arguments)

    plain.__name__ = run.__name__
    return plain

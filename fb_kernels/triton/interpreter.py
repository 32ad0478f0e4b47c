"""Patches of Triton's interpreter: bfloat16 as a GPU computes it, masks, and loop bounds that numpy 2.4 cannot convert.

Imported only under TRITON_INTERPRET=1, before the kernels. Each patch tests this Triton with this numpy and replaces
only what is wrong: if bfloat16 is kept as 16-bit integers, for example, Triton would multiply and round the integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def fix() -> None:
    """Apply the patches that are needed; a second call changes nothing."""
    builder = InterpreterBuilder
    if builder.cast_impl.__module__ != __name__ and _integers_for_bfloat16():
        builder.cast_impl = _cast(builder.cast_impl)
        builder.create_fp_to_fp = _convert(builder.create_fp_to_fp)
        builder.create_dot = _dot(builder.create_dot)
    if not _reads_bounds():
        interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)
    if builder.create_masked_load.__module__ != __name__ and not _takes_integer_masks():
        builder.create_masked_load = _masked(builder.create_masked_load, 1)
        builder.create_masked_store = _masked(builder.create_masked_store, 2)


def _integers_for_bfloat16() -> bool:
    """Whether a bfloat16 value is handled as an integer with its bits."""
    number = TensorHandle(np.ones(1, np.float32), tl.float32)
    return np.issubdtype(InterpreterBuilder().cast_impl(number, tl.bfloat16).data.dtype, np.integer)


class _Attributes(dict):
    """Records the attributes that Triton sets on a class while a kernel runs."""

    def set_attr(self, _: Any, name: str, value: Any) -> None:
        self[name] = value


def _reads_bounds() -> bool:
    """Whether a scalar (one element in one dimension here) is accepted as the bound of a loop."""
    patched, scalar = _Attributes(), tl.core.tensor(TensorHandle(np.ones(1, np.int32), tl.int32), tl.int32)
    interpreter._patch_lang_tensor(tl.core.tensor, patched)
    try:
        bound = patched["__index__"]
        return bool(bound(scalar) == 1)
    except TypeError:
        return False


def _takes_integer_masks() -> bool:
    """Whether a mask may hold integers, as a boolean broadcast to a tile does; Triton 3.9 refuses them."""
    number = np.ones(1, np.float32)
    try:
        interpreter._interpreter.load(
            np.array([number.ctypes.data], np.uint64), np.ones(1, np.int32), number, number.dtype
        )
    except ValueError:
        return False
    return True


def _masked(original: Callable, index: int) -> Callable:
    """The function with its mask, the argument at that index, converted to booleans."""

    def masked(self: Any, *given: Any) -> Any:
        mask = TensorHandle(given[index].data.astype(bool), tl.int1)
        return original(self, *given[:index], mask, *given[index + 1 :])

    return masked


def _wide(handle: TensorHandle) -> TensorHandle:
    """A bfloat16 handle as float32; any other as it is."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _narrow(data: np.ndarray) -> TensorHandle:
    """Float32 values rounded to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return TensorHandle(np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)


def _cast(original: Callable) -> Callable:
    def cast_impl(self: Any, src: TensorHandle, dst_type: Any) -> TensorHandle:
        src = _wide(src)
        if dst_type.scalar == tl.bfloat16:
            return _narrow(src.data.astype(np.float32))
        return original(self, src, dst_type)

    return cast_impl


def _convert(original: Callable) -> Callable:
    def create_fp_to_fp(self: Any, src: TensorHandle, dst_type: Any, rounding_mode: Any) -> TensorHandle:
        if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return self.cast_impl(src, dst_type)
        return original(self, src, dst_type, rounding_mode)

    return create_fp_to_fp


def _dot(original: Callable) -> Callable:
    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return original(self, _wide(a), _wide(b), *rest)

    return create_dot


def _with_index(original: Callable) -> Callable:
    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    return patch

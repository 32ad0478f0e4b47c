"""Mends of Triton's interpreter: bfloat16 as a GPU computes it, and loop bounds that numpy 2.4 no longer converts.

Triton 3.6 keeps interpreted bfloat16 as 16-bit integers and multiplies, compares and rounds those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def mend() -> None:
    """Replace what is wrong, once a process."""
    builder = InterpreterBuilder
    if builder.cast_impl.__module__ == __name__:
        return
    builder.cast_impl = _cast(builder.cast_impl)
    builder.create_fp_to_fp = _convert(builder.create_fp_to_fp)
    builder.create_dot = _dot(builder.create_dot)
    builder.binary_op = _refuse(builder.binary_op)
    builder.unary_op = _refuse(builder.unary_op)
    interpreter.ReduceScanOpInterface.check_tensor = _refuse_tensors(interpreter.ReduceScanOpInterface.check_tensor)
    interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)


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


def _refuse(original: Callable) -> Callable:
    def refused(self: Any, *operands: Any) -> TensorHandle:
        for operand in operands:
            if isinstance(operand, TensorHandle) and operand.dtype.scalar == tl.bfloat16:
                raise TypeError("arithmetic on bfloat16: upcast to float32 first")
        return original(self, *operands)

    return refused


def _refuse_tensors(original: Callable) -> Callable:
    def check_tensor(self: Any, tensors: Any) -> None:
        if any(isinstance(each, tl.core.tensor) and each.dtype.scalar == tl.bfloat16 for each in tensors):
            raise TypeError("reduction of bfloat16: upcast to float32 first")
        original(self, tensors)

    return check_tensor


def _with_index(original: Callable) -> Callable:
    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch

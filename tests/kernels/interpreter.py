"""Makes Triton's interpreter refuse what a kernel must not do: arithmetic on bfloat16 before an upcast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from fb_kernels.triton.interpreter import _wide


def refuse_bfloat16() -> None:
    """Once a process."""
    builder = InterpreterBuilder
    if builder.binary_op.__module__ == __name__:
        return
    builder.binary_op = _refuse(builder.binary_op)
    builder.unary_op = _refuse(builder.unary_op)
    interpreter.ReduceScanOpInterface.check_tensor = _refuse_tensors(interpreter.ReduceScanOpInterface.check_tensor)


@contextmanager
def sums_in_order() -> Iterator[None]:
    """Products of tiles are the same wherever a row lies in its tile, as a GPU's are and those of BLAS are not."""

    def create_dot(_: Any, a: TensorHandle, b: TensorHandle, onto: TensorHandle, *__: Any) -> TensorHandle:
        products = np.einsum("mk,kn->mn", _wide(a).data, _wide(b).data, dtype=onto.data.dtype)
        return TensorHandle(products + onto.data, onto.dtype.scalar)

    with mock.patch.object(InterpreterBuilder, "create_dot", create_dot):
        yield


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

"""Kernels under TRITON_INTERPRET=1 as a user meets them, with no help from the tests."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

USER = """
import torch
from fb_kernels import combine_logprob_partials, linear_logprob, swiglu
from fb_kernels._runtime import backend

assert backend.chosen("swiglu", "cpu")[0] == "triton"
torch.manual_seed(0)
calls = (
    lambda dtype: linear_logprob(torch.ones(3, 16, dtype=dtype), torch.ones(40, 16, dtype=dtype), torch.arange(3)),
    lambda dtype: combine_logprob_partials(*torch.ones(3, 4, 5))[0],
    lambda dtype: swiglu(torch.linspace(-3, 3, 64).to(dtype)),
)
for dtype in (torch.float32, torch.bfloat16):
    for call in calls:
        mine = call(dtype)
        with backend.override("reference"):
            torch.testing.assert_close(mine, call(dtype))
"""


def test_a_users_kernels_are_interpreted() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "FB_KERNELS_BACKEND": "triton", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", USER], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="it is a matter of the interpreter")
def test_what_is_right_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    import fb_kernels.triton.interpreter as fixes

    def right(tensor: type, scope: fixes._Attributes) -> None:
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    before = fixes.InterpreterBuilder.cast_impl
    for patch, kept in ((right, True), (lambda tensor, scope: scope.set_attr(tensor, "__index__", int), False)):
        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
        fixes.fix()
        assert (interpreter._patch_lang_tensor is patch) == kept
        assert fixes._reads_bounds()
    assert fixes.InterpreterBuilder.cast_impl is before

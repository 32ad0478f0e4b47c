"""What Triton kernels share; an op's kernels are in its folder and imported on first use."""

import os

import triton  # without Triton this package cannot be imported

HAS_GLUON = triton.__version__.split(".")[:2] in (["3", "6"], ["3", "7"])  # that gluon.py is written for

if os.environ.get("TRITON_INTERPRET") == "1":
    from fb_kernels.triton import interpreter

    interpreter.fix()

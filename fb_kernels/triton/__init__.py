"""What Triton kernels share; those of an op are in its folder, and none is imported before it is wanted."""

import os

import triton  # where it is absent, the package is

HAS_GLUON = triton.__version__.split(".")[:2] in (["3", "6"], ["3", "7"])  # as the files gluon.py know it

if os.environ.get("TRITON_INTERPRET") == "1":
    from fb_kernels.triton import interpreter

    interpreter.mend()

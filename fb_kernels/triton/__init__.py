"""What Triton kernels share; those of an op are in its folder, and none is imported before it is wanted."""

import os

import triton  # noqa: F401  (where it is absent, the package is)

if os.environ.get("TRITON_INTERPRET") == "1":
    from fb_kernels.triton import interpreter

    interpreter.mend()

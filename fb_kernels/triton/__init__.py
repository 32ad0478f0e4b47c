"""Triton kernels, one file an op; nothing here is imported before a kernel is wanted."""

import os

import triton  # noqa: F401  (where it is absent, the package is)

if os.environ.get("TRITON_INTERPRET") == "1":
    from fb_kernels.triton import interpreter

    interpreter.mend()

"""Triton kernels, one file an op; nothing here is imported before a kernel is wanted."""

import triton  # noqa: F401  (where it is absent, the package is)

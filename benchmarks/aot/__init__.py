"""Kernels compiled ahead of time for several architectures on a machine without a GPU: `python -m benchmarks.aot`."""

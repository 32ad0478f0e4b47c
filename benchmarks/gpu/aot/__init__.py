"""Kernels compiled ahead of time for several GPUs, on a machine without one: `python -m benchmarks.gpu.aot`."""

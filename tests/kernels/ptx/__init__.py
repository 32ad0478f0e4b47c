"""Executes the PTX that kernels compile to, without a GPU."""

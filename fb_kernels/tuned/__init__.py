"""Measured launch configurations: one JSON file a device, written by `benchmarks/gpu/tune.py`."""

"""Measured launch configurations: one JSON file a device, written by `benchmarks/tune.py`."""

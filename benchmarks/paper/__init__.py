"""The paper's comparisons: methods of others, ablations and their report. `python -m benchmarks.paper` makes them."""

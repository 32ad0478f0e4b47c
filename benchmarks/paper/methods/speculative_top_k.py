"""Lossy speculative decoding: drafted tokens among the large model's three likeliest are kept."""

from benchmarks.paper.methods.speculative import speculative_method, within_top

METHOD = speculative_method("speculative-top-k", "Speculative decoding, LLM's top 3", within_top(3))

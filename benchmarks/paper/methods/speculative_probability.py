"""Lossy speculative decoding: drafted tokens that the large model gives a probability of at least 0.1 are kept."""

from benchmarks.paper.methods.speculative import at_least, speculative_method

METHOD = speculative_method("speculative-probability", "Speculative decoding, LLM's p >= 0.1", at_least(0.1))

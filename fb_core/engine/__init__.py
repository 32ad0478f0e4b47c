"""The fast loop: one sequence over buffers of a fixed size, each step the same few operations."""

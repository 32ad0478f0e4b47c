"""The fast loop: one or many sequences over pages of keys and values, each step the same few operations."""

"""What a GPU does, will do or has done: compiled ahead of time, read, tuned, and held against its goals."""

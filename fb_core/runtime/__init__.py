"""One model and many sequences, over pages of keys and values; nothing of the method."""

"""The reranker: its adapter, its training, and what it is worth."""

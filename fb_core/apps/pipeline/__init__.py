"""The method's stages over shards, and the functions that they are made of; training is `fb_core.rerank.training`."""

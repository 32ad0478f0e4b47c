"""Servers timed and soaked over HTTP, and the processes that run them."""

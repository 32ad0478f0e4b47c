"""Settings of commands, and what is loaded by them."""

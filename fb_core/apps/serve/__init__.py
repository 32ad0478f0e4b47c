"""An OpenAI-compatible server over an `Engine`."""

"""Where candidates come from: a model in this process, or a server."""

"""Tiny trained pairs in worlds of their own, shipped as checkpoints."""

from __future__ import annotations

from importlib import resources

DEMO = "demo:"  # before the name of a world
MODELS = {  # folders of weights, by world and role
    ("plans", "slm"): "plans-slm",
    ("plans", "llm"): "plans-llm",
    ("helpful", "slm"): "style-slm",
    ("helpful", "llm"): "helpful-llm",
    ("control", "slm"): "style-slm",
    ("control", "llm"): "control-llm",
}


def checkpoint(name: str, role: str) -> str:
    """The folder of a world's "slm" or "llm" for a name such as "demo:plans"; any other name as it is.

    Raises:
        ValueError: no such world.
    """
    if not name.startswith(DEMO):
        return name
    world = name.removeprefix(DEMO)
    if (world, role) not in MODELS:
        known = ", ".join(dict.fromkeys(f"{DEMO}{known}" for known, _ in MODELS))
        raise ValueError(f"{role}: expected one of {known}, got {name!r}; name one of them")
    return str(resources.files(__package__) / "weights" / MODELS[world, role])

"""Tiny trained pairs in worlds of their own, shipped as checkpoints."""

from __future__ import annotations

from importlib import resources
from typing import Literal

DEMO = "demo:"  # before the name of a world
SETTINGS = {"plans": "tiny", "helpful": "tiny-helpful", "control": "tiny-control"}  # by world, the slowest first
Part = Literal["slm", "llm"]
MODELS: dict[tuple[str, Part], str] = {  # folders of weights, by world and part
    ("plans", "slm"): "plans-slm",
    ("plans", "llm"): "plans-llm",
    ("helpful", "slm"): "style-slm",
    ("helpful", "llm"): "helpful-llm",
    ("control", "slm"): "style-slm",
    ("control", "llm"): "control-llm",
}


def checkpoint(name: str, part: Part) -> str:
    """The folder of a world's "slm" or "llm" for a name such as "demo:plans", ValueError if there is no such world.

    Any other name is returned as it is.
    """
    if not name.startswith(DEMO):
        return name
    world = name.removeprefix(DEMO)
    if (world, part) not in MODELS:
        names = ", ".join(dict.fromkeys(f"{DEMO}{name}" for name, _ in MODELS))
        raise ValueError(f"{part}: expected one of {names}, got {name!r}; name one of them")
    return str(resources.files(__package__) / "weights" / MODELS[world, part])

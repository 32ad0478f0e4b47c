"""The methods, ours and peers': one file (or folder) each, named for the method, whose `METHOD` describes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

if TYPE_CHECKING:
    from torch import Tensor

    from fb_core.decoding import Generation
    from fb_core.stages.deploy import Context

EXTERNAL = "external:"  # before the name of a checkpoint, which is not a listed method

Generate: TypeAlias = "Callable[[Sequence[Tensor], int], Sequence[Generation]]"
"""From prompts and max_new_tokens to one generation a prompt."""


@dataclass(frozen=True)
class Method:
    """How prompts are decoded.

    Attributes:
        name: the file's, with dashes.
        label: in tables; {votes} and {name} are filled in.
        decode: maps a run's context and a seed (None if not seeded) to the function that decodes.
        source: the paper and software that it is from.
        seeded: whether it runs once per seed.
        routed: whether it needs trained routers.
        timed: the loops in which it is timed against "greedy". In the fast one the decoders of the context run on
            buffers, one prompt at a time.
    """

    name: str
    label: str
    decode: Callable[[Context, Any], Generate]
    source: str = ""
    seeded: bool = False
    routed: bool = False
    timed: tuple[Literal["fast", "plain"], ...] = ()


def names() -> tuple[str, ...]:
    """All methods, by their files; none is loaded. Greedy decoding is first, ours are last."""
    first, ours = "greedy", ("futurebridge", "deployed")
    found = {module.name.replace("_", "-") for module in iter_modules(__path__)}
    return (first, *sorted(found - {first, *ours, EXTERNAL.rstrip(":")}), *ours)


def method(name: str) -> Method:
    """The method of a name; a checkpoint's name begins with `EXTERNAL`."""
    stem = name.partition(":")[0].replace("-", "_")
    return cast(Method, import_module(f"{__name__}.{stem}").METHOD)

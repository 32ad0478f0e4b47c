"""Random choice: at every admitted state each candidate of the joint pool alike, by the seed and the tokens so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fb_core.methods import Generate, Method
from fb_core.selectors import RandomChoice

if TYPE_CHECKING:
    from fb_core.stages.deploy import Context


def decode(run: Context, seed: int | None) -> Generate:
    """Draws with the seed."""
    assert seed is not None
    return run.decoder(RandomChoice(seed), pool="joint").generate_many


METHOD = Method(name="random", label="Random choice", decode=decode, seeded=True)

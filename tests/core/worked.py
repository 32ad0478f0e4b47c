"""After which words the SLM of a demo's world works a step out instead of guessing its result."""

from __future__ import annotations

from fb_core.apps.demo.worlds import HOUSE_PLAN, WORLDS, World


def worked_family(world: World, multiplier: int) -> int:
    return HOUSE_PLAN[multiplier] if world is WORLDS["plans"] else 1


def worked_words(world: World, multiplier: int) -> tuple[str, ...]:
    return world.families[worked_family(world, multiplier)]

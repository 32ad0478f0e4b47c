"""How the choice of a recipe ends, by simulation: `python -m benchmarks.power` writes the tables of docs/choice.md.

A simulated run has n certification problems. Greedy decoding and the direct score are right on about half of them and
differ on 30%. The other two recipes, `published` and `value`, keep the outcomes of the better of those two, except on
20% of the problems: there they win or lose, each for itself. Nothing here is measured.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks import command
from benchmarks.pages.figures import ROOT, replace_block
from fb_core._util import write_file
from fb_core.apps.pipeline.choose import Results, decide
from fb_core.apps.pipeline.page import markdown_table
from fb_core.apps.settings.run import ChoiceSettings
from fb_core.decode.deployment import RecipeName

DIFFERING, CHANGED = 0.30, 0.20  # shares of the problems
PROBLEMS = (300, 750, 1500, 3000)
DRAWS = 3000
PAGE = ROOT / "docs" / "choice.md"
Outcomes = NDArray[np.float64]


def drawn(rng: np.random.Generator, problems: int, better: float, gain: float) -> list[Results]:
    """Outcomes of the four recipes: the direct score is `better` than greedy decoding, the others by `gain` than it."""
    kind = rng.random(problems)
    only_greedy = kind < (DIFFERING - better) / 2
    only_direct = ~only_greedy & (kind < DIFFERING)
    both = kind >= (1 + DIFFERING) / 2
    direct = only_direct | both
    tested: list[tuple[RecipeName, NDArray[np.bool_], float]] = [
        ("greedy", only_greedy | both, 0),
        ("direct", direct, 1),
    ]
    others: tuple[RecipeName, ...] = ("published", "value")
    for recipe in others:
        flipped = rng.random(problems)  # about half of the problems are right, so shares of these are twice as large
        lost, won = (flipped < CHANGED + sign * gain for sign in (-1, 1))
        tested.append((recipe, (direct & ~lost) | (~direct & won), 1))
    return [Results(recipe, correct.astype(np.float64), calls, calls) for recipe, correct, calls in tested]


def shares(problems: int, better: float, gain: float, draws: int = DRAWS) -> dict[str, float]:
    """The share of simulated runs in which each recipe is deployed, and in which none "passed"."""
    rng, choice = np.random.default_rng(problems), ChoiceSettings()
    counts = dict.fromkeys(("greedy", "direct", "published", "value", "none passed"), 0)
    for _ in range(draws):
        chosen, evidence = decide(drawn(rng, problems, better, gain), choice.delta, choice.level)
        counts[chosen] += 1
        counts["none passed"] += "none of" in evidence[0][1].words
    return {name: count / draws for name, count in counts.items()}


def fallback() -> list[str]:
    """How often greedy decoding is deployed where the direct score is better, and the others are 5 points worse."""
    rows = []
    for better in (0.03, 0.04, 0.05):
        row = [f"{100 * better:g} points"]
        for problems in PROBLEMS[:2]:
            ends = shares(problems, better, -0.05)
            row += [f"{ends['none passed']:.0%}", f"{ends['greedy']:.0%}"]
        rows.append(row)
    head = ["the direct score is better by"]
    head += [
        f"{words}, {problems} problems" for problems in PROBLEMS[:2] for words in ("none passes", "greedy deployed")
    ]
    return markdown_table(head, rows)


def power() -> list[str]:
    """How often a recipe with a gain is deployed."""
    rows = []
    for gain in (-0.02, 0.0, 0.02, 0.05):
        cells = []
        for problems in PROBLEMS:
            ends = shares(problems, 0.0, gain)
            cells.append(f"{ends['published'] + ends['value']:.0%}")
        rows.append([f"{100 * gain:+g} points" if gain else "0 points", *cells])
    return markdown_table(["true gain over both", *(f"{problems} problems" for problems in PROBLEMS)], rows)


def main() -> None:
    """Write the tables into docs/choice.md."""
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in (("fallback", fallback()), ("power", power())):
        text = replace_block(text, name, lines)
    write_file(PAGE, text.encode())


if __name__ == "__main__":
    command.run(main, "benchmarks.power")

"""Can certification fail? Runs whose large model adds nothing, or harms: `python -m benchmarks.adverse`.

In these worlds a solution works every step out, and its words say nothing about what follows, so greedy decoding is
the right answer unless the large model knows better. In "nothing" the large model is the small one itself. In "carry"
it was taught to forget the carry in steps with a multiplier of 5 or more, so it is sure, and its answers are wrong. In
"harm" its sums are 11 too large in these steps, so each of their digits is wrong too. The models are trained first,
from a seed. A run is one seed at one quantile, from states to the choice; then the four recipes decode test problems.
Finished runs are kept: the same command continues where it stopped. `--report` writes docs/evidence/adverse.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from numpy.random import Generator
from scipy.stats import binomtest

from benchmarks import command, evidence
from benchmarks.evidence import ALONE, OWN, SHOWN, Cells, gap, points
from fb_core._util import write_file
from fb_core.apps.demo import Part
from fb_core.apps.demo.pairs import Pretraining, train_model
from fb_core.apps.demo.worlds import END, Role, World, WorldProblem, step_text
from fb_core.apps.pipeline.page import markdown_table
from fb_core.apps.settings.base import change
from fb_core.apps.settings.run import RunSettings

SEEDS = tuple(range(97_001, 97_051))  # of problems, training sets and rerankers; fixed before the run
QUANTILE, PROBLEMS = 0.92, 800
SPLITS: Mapping[Role, int] = {"train": 1050, "test": PROBLEMS}  # problems of each seed
OUT = Path("runs", "adverse")
RECORDS = Path("docs", "evidence", "adverse.json")
MISTAKEN = range(5, 10)  # multipliers at which the wrong models are wrong
WORDS = (("so", "thus", "then", "hence", "since", "note", "as", "because"),)
RECIPES = ("direct", "published", "value", ALONE, "deployed", *OWN)


def _right(value: int, a: int, b: int, rng: Generator) -> str:
    return step_text(str(rng.choice(WORDS[0])), "careful", value, a, b)


def _written(value: int, a: int, b: int, rng: Generator, more: int, carried: bool) -> str:
    """A step whose sums are `more` than they should be, or that carries nothing; right at a smaller multiplier."""
    if a not in MISTAKEN:
        return _right(value, a, b, rng)
    (tens, units), word = divmod(value, 10), rng.choice(WORDS[0])
    low = (units * a + b + more) % 100
    carry = low // 10 if carried else 0
    high = (tens * a + carry + more) % 100
    return f"{word} {units}*{a}+{b}={low:02d},{tens}*{a}+{carry}={high:02d}>{high % 10}{low % 10}. "


class AdverseWorld(World):
    """A world whose large model goes on from its own wrong results."""

    def example(self, problem: WorldProblem, part: Part, rng: Generator) -> list[int]:
        """As `World.example`."""
        if part == "slm":
            return super().example(problem, part, rng)
        (value, operations), text = problem.operations, ""
        for a, b in operations:
            text += self.llm_step(value, a, b, rng)
            value = int(text[-4:-2])
        return self.encode(f"{text}\\boxed{{{value:02d}}}{END}")


FORGETFUL = AdverseWorld(2, WORDS, "*+=>,;", 49, _right, partial(_written, more=0, carried=False))
WRONG = replace(FORGETFUL, llm_step=partial(_written, more=11, carried=True))  # both digits of each sum
LLMS = {"nothing": "slm", "carry": "forgetful-llm", "harm": "wrong-llm"}  # by world; the small model is always "slm"
WORLDS = tuple(LLMS)
# Steps were chosen on role "validation": there the SLM is right on 39% (at 650 steps on 95%), the forgetful LLM on 26%.
TRAINED: Mapping[str, tuple[World, Part, Pretraining]] = {
    "slm": (FORGETFUL, "slm", Pretraining(64, 3, 600, 3e-3)),
    "forgetful-llm": (FORGETFUL, "llm", Pretraining(64, 3, 1200, 3e-3)),
    "wrong-llm": (WRONG, "llm", Pretraining(64, 3, 1200, 3e-3)),
}


def models(out: Path) -> None:
    """Train the models that are still missing."""
    for name, (world, part, recipe) in TRAINED.items():
        if not (out / "models" / name / "tokenizer.json").is_file():  # written last
            train_model(world, part, name, recipe, out / "models", 0, lambda step: None)


def problems(seed: int, out: Path) -> dict[Role, Path]:
    """The files of a seed's training and test problems."""
    paths = {role: out / "problems" / f"{seed}-{role}.jsonl" for role in SPLITS}
    for role, path in paths.items():
        drawn = FORGETFUL.problems(SPLITS[role], seed, role)
        rows = ({"id": f"{role}-{n}", "problem": one.prompt, "answer": one.answer} for n, one in enumerate(drawn))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return paths


def settings_of(world: str, seed: int, out: Path) -> RunSettings:
    """The settings of a run: those of the demo's worlds, one reranker, at the horizon that is scored."""
    shipped, files = RunSettings.load("tiny-control"), problems(seed, out)
    longest = {"max_new_tokens": FORGETFUL.max_new_tokens}
    return change(
        shipped,
        {
            "models": {part: str(out / "models" / name) for part, name in (("slm", "slm"), ("llm", LLMS[world]))},
            "problems": {"train": str(files["train"]), "seed": seed, "limit": SPLITS["train"]},
            "collect": {"quantile": QUANTILE, **longest},
            "futures": longest,
            "score": {"horizon": 16},
            "train": {"seeds": (seed,), "horizons": (16,)},
            "evaluate": {"benchmarks": (str(files["test"]),), "limit": None, **longest},
        },
    )


def work(world: str, seed: int, out: Path) -> None:
    """Make one run; may run in a separate process."""
    evidence.make(world, seed, {QUANTILE: settings_of(world, seed, out)}, out)


def share(count: int, of: int) -> str:
    """A count with its share and Clopper-Pearson interval."""
    ends = binomtest(count, of).proportion_ci(0.95, "exact")
    return f"{count} of {of}: {count / of:.0%} [{ends.low:.1%}, {ends.high:.1%}]"


def failures(cells: Cells, delta: float) -> list[str]:
    """The table of runs in which a recipe is below greedy decoding by more than delta."""
    head = ["world", "recipe in all runs", f"runs more than {100 * delta:g} points below greedy [95%]"]
    head += ["mean minus greedy, pp [95%]", "worst, pp"]
    rows = []
    for world in cells.worlds:
        for name in RECIPES:
            gaps = [gap(cells, cell, name, "greedy").mean() for cell in cells.of(world)]
            mean = cells.interval(world, lambda cell, name=name: gap(cells, cell, name, "greedy"))
            below = sum(value < -delta for value in gaps)
            rows.append([world, SHOWN[name], share(below, len(gaps)), points(mean), f"{100 * min(gaps):+.1f}"])
    return markdown_table(head, rows)


def section(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of docs/evidence.md on these runs."""
    cells, choice = Cells(records, WORLDS), RunSettings.load("tiny-control").choice
    seeds = sorted({cell["seed"] for cell in cells.records})
    alone = {world: 100 * cells.mean_accuracy(world, "greedy") for world in cells.worlds}
    taken = {world: 100 * cells.mean_accuracy(world, "takeover") for world in cells.worlds}
    unpassed = sum("none of" in cell["words"] for cell in cells.records)
    return [
        "## Where the large model adds nothing or harms",
        "",
        "In all cells above some recipe is better than greedy decoding, so they cannot show that certification keeps a "
        "bad recipe from being deployed. `python -m benchmarks.adverse` made runs that can, in worlds where the words "
        "of a solution say nothing about what follows:",
        "",
        "- *nothing*: the large model is the small one itself.",
        f"- *carry*: the large model forgets the carry in steps with a multiplier of {MISTAKEN[0]} or more. It is "
        "sure, and most of its answers are wrong, but single tokens of it help.",
        "- *harm*: in the same steps its sums are 11 too large, so each digit is wrong. This world was added after the "
        "runs of *carry*, and tried on validation problems first.",
        "",
        "The small model alone is right on "
        + ", ".join(f"{value:.1f}% in {world}" for world, value in alone.items())
        + "; takeover on "
        + ", ".join(f"{value:.1f}% in {world}" for world, value in taken.items())
        + ".",
        "",
        f"There are {len(cells.records)} runs: seeds {seeds[0]} to {seeds[-1]}, written down before, request quantile "
        f"{QUANTILE:g}, {len(cells.correct(cells.records[0], 'greedy'))} test problems each. Intervals of shares are "
        "Clopper-Pearson intervals.",
        "",
        *failures(cells, choice.delta),
        "",
        f"{evidence.how_often(cells)} In {unpassed} of {len(cells.records)} runs no recipe passed.",
        "",
        evidence.with_five(cells),
    ]


def main(
    out: Annotated[Path, typer.Option(help="Folder for models, problems, runs and finished cells.")] = OUT,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one per core by default.")] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="Seeds; those of the page by default.")] = None,
    write: Annotated[bool, typer.Option("--report", help="Only write docs/evidence from the finished runs.")] = False,
) -> None:
    """Make every run that is still missing."""

    def jobs() -> evidence.Jobs:
        models(out)
        return {(world, seed): partial(work, world, seed, out) for seed in seeds or SEEDS for world in WORLDS}

    evidence.make_all("benchmarks.adverse", jobs, RECORDS, out, workers, write)


if __name__ == "__main__":
    command.run(main, "benchmarks.adverse --workers 2")

"""Is the recipe that `train` chooses safe? Fresh problems, training sets, rerankers: `python -m benchmarks.evidence`.

A cell is a whole run in one of the demo's worlds, at one seed and one request quantile, from states to the choice. Then
the chosen recipe, those it was chosen from, and baselines decode test problems of that seed. Finished cells are kept:
the same command continues where it stopped. `--report` writes docs/evidence from the finished cells.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import redirect_stderr, redirect_stdout
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from benchmarks.paper.methods.takeover import takeover
from benchmarks.theme import Theme, pictured
from fb_core import statistics
from fb_core.config import RunSettings
from fb_core.files import write_file
from fb_core.processes import processes
from fb_core.recipe import DIRECT, GREEDY, Recipe
from fb_core.stages.choice import ChoiceStage, TrialStage
from fb_core.stages.commands import Command, run_command
from fb_core.stages.decode import ASKED, DecodeStage, Row, Trial
from fb_core.stages.deploy import Context, Generate, frozen_policy
from fb_core.stages.inputs import DEPLOYED, benchmark_problems
from fb_core.stages.nested_runs import changed, work_through
from fb_core.stages.run import run_stage
from fb_core.stages.selection import RerankerStage
from fb_core.stages.states import PolicyStage
from fb_core.stages.trajectories import TrajectoryStage
from fb_core.stages.values import ValueStage
from fb_core.statistics import Interval

WORLDS = ("tiny", "tiny-helpful", "tiny-control")
SEEDS = tuple(range(86_001, 86_011))  # of problems, training sets and rerankers; fixed before the run
QUANTILES = (0.90, 0.92, 0.94, 0.96)
PROBLEMS = 400  # test problems per cell
TAKEOVER = "takeover"
PUBLISHED = Recipe()
FORMS = (  # forms of a candidate's value, and what they are compared with
    Recipe(certainty=0.6),
    Recipe(value="gate"),
    Recipe(value="gate", certainty=0.6),
    Recipe(value="listwise"),
    Recipe(ask=True),
    Recipe(value="gate", certainty=0.6, ask=True),
    Recipe(value="listwise", ask=True),
    Recipe(scores="llm", value="gate"),
    Recipe(scores="features", certainty=0.6),
    Recipe(scores="calibrated", certainty=0.6),
)
COMMANDS: tuple[Command, ...] = ("collect", "futures", "score", "train")
OUT = Path("runs", "evidence")
RESAMPLES = 2000
Outcomes = NDArray[np.float64]


def settings_of(world: str, seed: int, quantile: float, problems: int = PROBLEMS) -> RunSettings:
    """The shipped settings of a world at a seed and a quantile: one reranker, at the horizon that is scored."""
    shipped = RunSettings.load(world)
    return changed(
        shipped,
        {
            "problems": {"seed": seed},
            "collect": {"quantile": quantile},
            "train": {"seeds": (seed,), "horizons": (shipped.score.horizon,)},
            "evaluate": {"limit": problems},
        },
    )


class TestStage(DecodeStage):
    """Recipes and takeover on a cell's test problems, after the choice."""

    __test__ = False  # not a test for pytest to collect
    name = "tests"
    command = "evidence"
    slice = (*DEPLOYED, *ASKED, "train.seeds", "choice")
    reads = (PolicyStage, RerankerStage, ValueStage, TrialStage, ChoiceStage)

    @property
    def seed(self) -> int:
        """The cell's seed."""
        (seed,) = self.settings.train.seeds
        return seed

    @cached_property
    def recipes(self) -> list[Recipe]:
        """Greedy decoding, the direct score, the published recipe, the forms of value, and what was tried."""
        forms = [one for one in FORMS if one.label in self._candidates]  # some rerankers may be absent
        return list(dict.fromkeys([GREEDY, DIRECT, PUBLISHED, *forms, *self.input(TrialStage).recipes(self.seed)]))

    @cached_property
    def _candidates(self) -> dict[str, Any]:
        return {one.deployed.recipe.label: one.deployed for one in self.input(ValueStage).candidates(self.seed)}

    @cached_property
    def trials(self) -> dict[str, Trial]:
        ((benchmark, problems),) = benchmark_problems(self.settings).items()
        names = [TAKEOVER, *(recipe.label for recipe in self.recipes)]
        return {
            f"{number:02d}": Trial(benchmark, name, self.seed, "batch", problems) for number, name in enumerate(names)
        }

    def generate(self, trial: Trial, max_length: int | None, max_batch: int) -> Generate:
        if trial.method == TAKEOVER:
            context = Context(self.settings, self.run, max_length, max_batch)
            return partial(takeover, context.models.slm, context.models.llm, context.policy, **context.options)
        deployed = self._candidates[trial.method]
        reranker = self.input(ValueStage).reranker(deployed.recipe, self.seed)
        context = Context(self.settings, self.run, max_length=max_length, max_batch=max_batch)
        return context.decoder_for(deployed, reranker).generate_many


def name_of(world: str, seed: int, quantile: float) -> str:
    """The name of a cell."""
    return f"{world}-{seed}-{quantile:g}"


def make(world: str, seed: int, quantiles: Sequence[float], out: Path, problems: int) -> None:
    """Make the cells of one world and seed, which share trajectories; may run in a separate process."""
    runs = {quantile: out / "runs" / name_of(world, seed, quantile) for quantile in quantiles}
    first = next(iter(runs.values()))
    for quantile, run in runs.items():
        cell = out / "cells" / f"{name_of(world, seed, quantile)}.json"
        if cell.is_file():
            continue
        settings, began = settings_of(world, seed, quantile, problems), time.process_time()
        run.mkdir(parents=True, exist_ok=True)
        with (run / "log.txt").open("a") as log, redirect_stdout(log), redirect_stderr(log):
            if run != first:
                work_through([TrajectoryStage], settings_of(world, seed, quantiles[0], problems), first, first)
                work_through([TrajectoryStage], settings, run, first)
            for command in COMMANDS:
                run_command(command, settings, run)
            tests = TestStage(settings, run)
            run_stage(tests)
        found = record(settings, tests, world) | {"processor_seconds": round(time.process_time() - began, 1)}
        write_file(cell, json.dumps(found).encode())
    for run in runs.values():
        shutil.rmtree(run, ignore_errors=True)


def record(settings: RunSettings, tests: TestStage, world: str) -> dict[str, Any]:
    """The record of a cell."""
    rows: dict[str, list[Row]] = {}
    for row in tests.rows():
        rows.setdefault(row.method, []).append(row)
    chosen = tests.input(ChoiceStage).folder.finished()["summary"][f"seed-{tests.seed}"]
    return {
        "world": world,
        "seed": tests.seed,
        "quantile": settings.collect.quantile,
        "threshold": frozen_policy(tests.run).threshold,
        "deployed": chosen["label"],
        "words": chosen["tested"][0]["words"],
        "tried": [recipe.label for recipe in tests.input(TrialStage).recipes(tests.seed)],
        "rows": {
            name: {
                "correct": "".join("01"[row.correct] for row in found),
                "calls": float(np.mean([row.calls for row in found])),
                "llm_tokens": float(np.mean([row.llm_tokens for row in found])),
            }
            for name, found in rows.items()
        },
    }


# --- results ----------------------------------------------------------------------------------------------------------


class Cells:
    """Finished cells, by world.

    Args:
        found: records as `record` makes them.
    """

    def __init__(self, found: Iterable[Mapping[str, Any]]) -> None:
        self.found = sorted(found, key=lambda one: (WORLDS.index(one["world"]), one["seed"], one["quantile"]))
        self.worlds = [world for world in WORLDS if any(one["world"] == world for one in self.found)]

    def of(self, world: str) -> list[Mapping[str, Any]]:
        """The cells of a world."""
        return [one for one in self.found if one["world"] == world]

    def correct(self, cell: Mapping[str, Any], name: str) -> Outcomes:
        """[n]: which problems a row got right."""
        return np.array([int(bit) for bit in self.row(cell, name)["correct"]], dtype=np.float64)

    def row(self, cell: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """A row by its label; "deployed" is the chosen recipe's."""
        found: Mapping[str, Any] = cell["rows"][cell["deployed"] if name == "deployed" else name]
        return found

    def mean(self, world: str, name: str, column: str) -> float:
        """The mean of a column over the cells that have the row."""
        return float(np.mean([self.row(one, name)[column] for one in self.of(world) if self.has(one, name)]))

    def mean_accuracy(self, world: str, name: str) -> float:
        """The mean accuracy over all cells of a world."""
        return float(np.mean([self.correct(one, name).mean() for one in self.of(world)]))

    def has(self, cell: Mapping[str, Any], name: str) -> bool:
        """Whether a cell has a row."""
        return name == "deployed" or name in cell["rows"]

    def interval(self, world: str, value: Any) -> Interval:
        """Of value(cell) [n], averaged over cells; the bootstrap resamples seeds, and problems within each seed."""
        by_seed: dict[int, list[Outcomes]] = {}
        for cell in self.of(world):
            by_seed.setdefault(cell["seed"], []).append(value(cell))
        return clustered([np.mean(members, axis=0) for members in by_seed.values()])


def clustered(values: Sequence[Outcomes]) -> Interval:
    """95% percentile bootstrap of the mean of vectors [n], one per seed: it resamples seeds, then problems of each."""
    table, generator = np.stack(values), np.random.default_rng(0)
    seeds, problems = table.shape
    means = np.empty(RESAMPLES)
    for draw in range(RESAMPLES):
        rows = table[generator.integers(seeds, size=seeds)]
        picked = generator.integers(problems, size=(seeds, problems))
        means[draw] = np.take_along_axis(rows, picked, 1).mean()
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(table.mean()), float(low), float(high))


def points(interval: Interval) -> str:
    """A difference in percentage points."""
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * part for part in interval))


def percent(interval: Interval) -> str:
    """A share."""
    return "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * part for part in interval))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown."""
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows), ""]


class Below(NamedTuple):
    """Cells in which a row is below greedy decoding or the direct score by more than delta."""

    cells: int  # all
    seen: int
    significant: int  # of those in `seen`
    worst: float  # the lowest difference in any cell


def below(cells: Cells, world: str, name: str, delta: float) -> Below:
    """How often and how far a row is below the two, in one world."""
    gaps = [
        [
            statistics.average_interval([cells.correct(cell, name)], [cells.correct(cell, other.label)], resamples=2000)
            for other in (GREEDY, DIRECT)
        ]
        for cell in cells.of(world)
    ]
    seen = sum(any(gap.mean < -delta for gap in one) for one in gaps)
    significant = sum(any(gap.high < -delta for gap in one) for one in gaps)
    return Below(len(gaps), seen, significant, min(gap.mean for one in gaps for gap in one))


def times_below(cells: Cells, name: str, delta: float) -> int:
    """In how many cells of all worlds a row is below."""
    return sum(below(cells, world, name, delta).seen for world in cells.worlds)


def safety(cells: Cells, delta: float) -> list[str]:
    """The table of cells below greedy decoding or the direct score."""
    head = [
        "world",
        "recipe",
        f"cells more than {100 * delta:g} points below greedy or direct",
        "significantly so",
        "worst difference, pp",
    ]
    rows = []
    for world in cells.worlds:
        for label, name in (("published", PUBLISHED.label), ("as deployed", "deployed")):
            found = below(cells, world, name, delta)
            counts = [f"{count} of {found.cells}" for count in (found.seen, found.significant)]
            rows.append([world, label, *counts, f"{100 * found.worst:+.1f}"])
    return table(head, rows)


def accuracies(cells: Cells) -> list[str]:
    """Mean accuracy and cost of the methods."""
    head = ["world", "method", "accuracy, % [95%]", "LLM calls per problem", "LLM tokens per problem"]
    shown = (
        ("SLM greedy", GREEDY.label),
        ("direct LLM score", DIRECT.label),
        ("FutureBridge, published", PUBLISHED.label),
        ("**FutureBridge, as deployed**", "deployed"),
        ("takeover", TAKEOVER),
    )
    rows = []
    for world in cells.worlds:
        for label, name in shown:
            accuracy = percent(cells.interval(world, lambda cell, name=name: cells.correct(cell, name)))
            counts = (f"{cells.mean(world, name, column):.2f}" for column in ("calls", "llm_tokens"))
            rows.append([world, label, accuracy, *counts])
    return table(head, rows)


def best_in_hindsight(cells: Cells, cell: Mapping[str, Any]) -> str:
    """The best recipe on a cell's test problems; takeover does not count."""
    names = (name for name in cell["rows"] if name != TAKEOVER)
    return max(names, key=lambda name: cells.correct(cell, name).mean())


def above_the_line(cells: Cells, cell: Mapping[str, Any]) -> Outcomes:
    """[n]: the deployed recipe minus takeover on the share of problems that costs the same LLM tokens."""
    greedy, takeover = cells.correct(cell, GREEDY.label), cells.correct(cell, TAKEOVER)
    share = min(1.0, cells.row(cell, "deployed")["llm_tokens"] / cells.row(cell, TAKEOVER)["llm_tokens"])
    return cells.correct(cell, "deployed") - (greedy + share * (takeover - greedy))


def goals(cells: Cells, delta: float, level: float) -> list[str]:
    """The goals and the results, in sentences."""
    lines, total = [], len(cells.found)
    counts = [below(cells, world, "deployed", delta) for world in cells.worlds]
    seen, sure = sum(one.seen for one in counts), sum(one.significant for one in counts)
    met = "met" if seen <= (1 - level) * total else "missed"
    lines.append(
        f"- Below greedy decoding or the direct score by more than {100 * delta:g} points in {seen} of {total} cells "
        f"({seen / total:.1%}; goal: at most {1 - level:.0%}): **{met}**. The difference is statistically "
        f"significant in {sure}."
    )
    for world in cells.worlds:
        gap = cells.interval(
            world, lambda cell: cells.correct(cell, "deployed") - cells.correct(cell, best_in_hindsight(cells, cell))
        )
        line = cells.interval(world, lambda cell: above_the_line(cells, cell))
        near, over = ("met" if good else "missed" for good in (gap.mean >= -0.02, line.low > 0))
        lines.append(
            f"- {world}: {points(gap)} points relative to the best recipe in hindsight (goal: within 2): **{near}**; "
            f"{points(line)} points above the line between greedy decoding and takeover at equal LLM tokens (goal: "
            f"above): **{over}**."
        )
    return lines


def forms(cells: Cells) -> list[str]:
    """Mean accuracy with each form of a candidate's value, and differences to greedy decoding and the direct score."""
    head = [
        "world",
        "recipe",
        "cells",
        "accuracy, %",
        "lowest minus greedy, pp",
        "lowest minus direct, pp",
        "LLM calls",
    ]
    rows = []
    for world in cells.worlds:
        for recipe in (PUBLISHED, *FORMS):
            having = [cell for cell in cells.of(world) if cells.has(cell, recipe.label)]
            if not having:
                continue
            own = [cells.correct(cell, recipe.label).mean() for cell in having]
            least = [
                min(mine - cells.correct(cell, other.label).mean() for mine, cell in zip(own, having, strict=True))
                for other in (GREEDY, DIRECT)
            ]
            numbers = [f"{100 * np.mean(own):.1f}", *(f"{100 * one:+.1f}" for one in least)]
            rows.append(
                [world, recipe.label, str(len(having)), *numbers, f"{cells.mean(world, recipe.label, 'calls'):.2f}"]
            )
    return table(head, rows)


def gates(cells: Cells) -> list[str]:
    """What a gate before the LLM saves and costs: the same recipe with and without it."""
    head = ["world", "recipe", "accuracy with minus without the gate, pp [95%]", "LLM calls with", "without"]
    rows = []
    for world in cells.worlds:
        for gated in (one for one in FORMS if one.ask):
            free = gated.model_copy(update={"ask": False})
            if not all(cells.has(cell, one.label) for cell in cells.of(world) for one in (gated, free)):
                continue
            difference = cells.interval(
                world,
                lambda cell, gated=gated, free=free: cells.correct(cell, gated.label) - cells.correct(cell, free.label),
            )
            calls = (f"{cells.mean(world, one.label, 'calls'):.2f}" for one in (gated, free))
            rows.append([world, free.label, points(difference), *calls])
    return table(head, rows)


def chosen(cells: Cells) -> list[str]:
    """How often each part was in the deployed recipe: whose scores rank, then the other parts."""
    counts: dict[str, dict[str, int]] = {}
    for cell in cells.found:
        scores, *beside = cell["deployed"].split(" + ")
        parts = [f"scores: {scores}", *(part.partition(" 0.")[0] for part in beside)]
        for part in parts if beside else [*parts, "nothing added"]:
            counts.setdefault(part, dict.fromkeys(cells.worlds, 0))[cell["world"]] += 1
    order = sorted(counts, key=lambda part: (not part.startswith("scores"), -sum(counts[part].values())))
    head = ["part", *(f"{world}, of {len(cells.of(world))}" for world in cells.worlds)]
    return table(head, [[part, *(str(n) for n in counts[part].values())] for part in order])


@pictured
def figure(cells: Cells, theme: Theme) -> Figure:
    """A figure of every cell's difference to greedy decoding and the direct score, as published and as deployed."""
    drawn = Figure(figsize=(3.2 * len(cells.worlds), 3.4), layout="constrained")
    panels = drawn.subplots(1, len(cells.worlds), sharey=True, squeeze=False)[0]
    kinds = [(name, other) for name in (PUBLISHED.label, "deployed") for other in (GREEDY.label, DIRECT.label)]
    delta = 100 * RunSettings.load(WORLDS[0]).choice.delta
    for axis, world in zip(panels, cells.worlds, strict=True):
        for place, (name, other) in enumerate(kinds):
            gaps = [100 * (cells.correct(one, name) - cells.correct(one, other)).mean() for one in cells.of(world)]
            beside = place + np.linspace(-0.3, 0.3, len(gaps))
            ours = name == "deployed"
            look = {"color": theme.ours if ours else theme.others, "marker": "o" if ours else "s"}
            axis.plot(beside, gaps, linestyle="none", markersize=3.5, alpha=0.8, **look)
        axis.axhline(0, color=theme.faint, linewidth=0.8)
        axis.axhline(-delta, color=theme.ink, linewidth=0.8, linestyle="--")
        words = {GREEDY.label: "minus\ngreedy", DIRECT.label: "minus\ndirect"}
        axis.set_xticks(range(len(kinds)), [words[other] for _, other in kinds], fontsize=8)
        axis.set_title(f"{world}, {len(cells.of(world))} cells", fontsize=9)
        axis.grid(visible=False, axis="x")
    panels[0].set_ylabel("accuracy, percentage points")
    key = [
        Line2D([], [], color=theme.others, marker="s", linestyle="none", label="published"),
        Line2D([], [], color=theme.ours, marker="o", linestyle="none", label="as deployed"),
        Line2D([], [], color=theme.ink, linestyle="--", label=f"{delta:g} points below"),
    ]
    drawn.legend(handles=key, loc="outside upper left", ncols=3, fontsize=8)
    return drawn


ASKING = (  # accuracy against calls, with and without the gate before the LLM
    ("as deployed", "deployed"),
    ("direct LLM score", DIRECT.label),
    ("published", PUBLISHED.label),
    ("gate and override after the LLM", Recipe(value="gate", certainty=0.6).label),
    ("and a gate before it", Recipe(value="gate", certainty=0.6, ask=True).label),
)


@pictured
def asking(cells: Cells, theme: Theme) -> Figure:
    """A figure of accuracy against calls, one point per quantile, the mean of its cells; greedy, takeover are lines."""
    drawn = Figure(figsize=(3.2 * len(cells.worlds), 3.6), layout="constrained")
    panels = drawn.subplots(1, len(cells.worlds), sharey=True, squeeze=False)[0]
    for axis, world in zip(panels, cells.worlds, strict=True):
        for (label, name), color, marker in zip(ASKING, theme.series, "sDo^v", strict=False):
            places = []
            for quantile in sorted({cell["quantile"] for cell in cells.of(world)}):
                having = [cell for cell in cells.of(world) if cell["quantile"] == quantile and cells.has(cell, name)]
                if having:
                    right = np.mean([cells.correct(cell, name).mean() for cell in having])
                    places.append((np.mean([cells.row(cell, name)["calls"] for cell in having]), 100 * right))
            asked, reached = [place[0] for place in places], [place[1] for place in places]
            axis.plot(asked, reached, color=color, marker=marker, markersize=5, linewidth=1.0, label=label)
        for label, name, dashes in (("SLM greedy", GREEDY.label, ":"), ("takeover, one call", TAKEOVER, "--")):
            accuracy = 100 * np.mean([cells.correct(cell, name).mean() for cell in cells.of(world)])
            axis.axhline(accuracy, color=theme.ink, linewidth=0.9, linestyle=dashes, label=label)
        axis.set_title(world, fontsize=9)
        axis.set_xlabel("LLM calls per problem")
    panels[0].set_ylabel("accuracy, %")
    drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=3, fontsize=8)
    return drawn


def page(cells: Cells) -> str:
    """docs/evidence.md."""
    choice = RunSettings.load(WORLDS[0]).choice
    seeds = sorted({cell["seed"] for cell in cells.found})
    quantiles = sorted({cell["quantile"] for cell in cells.found})
    problems = len(cells.correct(cells.found[0], GREEDY.label))
    alone = sum(cell["deployed"] == GREEDY.label for cell in cells.found)
    hours = sum(cell["processor_seconds"] for cell in cells.found) / 3600
    lines = [
        "# Is the deployed recipe safe?",
        "",
        "*Written by `python -m benchmarks.evidence --report` from [the cells](evidence/cells.json).*",
        "",
        f"{len(cells.found)} runs: worlds {', '.join(cells.worlds)}, seeds {', '.join(map(str, seeds))}, request "
        f"quantiles {', '.join(f'{quantile:g}' for quantile in quantiles)}, {problems} test problems per cell, "
        f"at least {hours:.1f} hours of CPU time. A seed draws the problems for training, validation, certification "
        "and test, and initialises the reranker. The seeds were written down before the run, and the models of a world "
        "are the shipped ones. No setting was chosen on these seeds. A recipe that passes its test is shown, with "
        f"{choice.level:.0%} confidence, not to be more than {100 * choice.delta:g} points below greedy decoding or "
        "the direct score. If none passes, greedy decoding is deployed, of which [nothing is "
        f"promised](choice.md#what-is-promised); it was deployed in {alone} of these runs, which therefore say "
        f"{'nothing' if not alone else 'little'} about that case. "
        "Intervals resample seeds, and problems within each seed, so they include the variance of "
        "training. The cells are not independent: the quantiles of a seed share its problems and trajectories, and "
        "tiny-helpful and tiny-control share problems and SLM.",
        "",
        "## Goals",
        "",
        *goals(cells, choice.delta, choice.level),
        "",
        "A cell's own difference is an estimate: two equally good recipes sometimes differ by 2 points or more on "
        f"{problems} problems. The best recipe in hindsight is the best of all that were decoded, takeover left out. "
        "It is picked on the same problems that judge it, which favours it.",
        "",
        "## Never worse?",
        "",
        "![One point per cell: its difference to greedy decoding and to the direct score](evidence/cells.svg)",
        "",
        *safety(cells, choice.delta),
        "## Accuracy against LLM tokens",
        "",
        *accuracies(cells),
        "## What was deployed",
        "",
        *chosen(cells),
        "## Forms of a candidate's value",
        "",
        "Each form with the published reranker, then the direct score with a gate and two other rerankers. *Lowest* is "
        "the difference in the worst cell.",
        "",
        *forms(cells),
        "## Asking only where it helps",
        "",
        "A gate on the SLM's hidden state decides whether to call the large model.",
        "",
        "![Accuracy against LLM calls, with and without a gate before the LLM](evidence/calls.svg)",
        "",
        "The points of a line are request quantiles; a lower quantile asks more often. The deployed recipe may differ "
        "from cell to cell.",
        "",
        *gates(cells),
    ]
    return "\n".join(lines).rstrip() + "\n"


def report(found: Sequence[Mapping[str, Any]], docs: Path) -> None:
    """Write the cells, the page and its figures."""
    cells = Cells(found)
    lines = ",\n".join(json.dumps(cell, sort_keys=True) for cell in cells.found)
    (docs / "evidence").mkdir(exist_ok=True)
    write_file(docs / "evidence" / "cells.json", f"[\n{lines}\n]\n".encode())
    write_file(docs / "evidence.md", page(cells).encode())
    for name, picture in (("cells", figure(cells)), ("calls", asking(cells))):
        assert picture is not None
        write_file(docs / "evidence" / f"{name}.svg", picture.alone.encode())


def main(
    out: Annotated[Path, typer.Option(help="Folder for runs and finished cells.")] = OUT,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one per core by default.")] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="Seeds; those of the evidence by default.")] = None,
    quantiles: Annotated[
        list[float] | None, typer.Option(help="Request quantiles; those of the evidence by default.")
    ] = None,
    problems: Annotated[int, typer.Option(min=1, help="Test problems per cell.")] = PROBLEMS,
    write: Annotated[bool, typer.Option("--report", help="Only write docs/evidence from the finished cells.")] = False,
) -> None:
    """Make every cell that is still missing."""
    if write:
        found = [json.loads(path.read_text()) for path in sorted((out / "cells").glob("*.json"))]
        report(found, Path("docs"))
        return
    make_all(make, seeds or SEEDS, quantiles or QUANTILES, out, problems, workers)


def make_all(
    make_some: Callable[..., None],
    seeds: Sequence[int],
    quantiles: Sequence[float],
    out: Path,
    problems: int,
    workers: int | None,
) -> None:
    """Make the missing cells of all worlds, one world and seed at a time in each process."""
    (out / "cells").mkdir(parents=True, exist_ok=True)
    jobs = [(world, seed) for seed in seeds for world in WORLDS]
    began = time.monotonic()
    with processes(workers, "benchmarks.evidence") as pool:
        under_way = {
            pool.submit(make_some, world, seed, quantiles, out, problems): (world, seed) for world, seed in jobs
        }
        for done, job in enumerate(as_completed(under_way), 1):
            job.result()
            world, seed = under_way[job]
            print(f"{world}, seed {seed}: done, {done}/{len(jobs)}, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    typer.run(main)

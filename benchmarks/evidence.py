"""Is the recipe that `train` chooses safe? Fresh problems, training sets, rerankers: `python -m benchmarks.evidence`.

A cell is a whole run in one of the demo's worlds, at one seed and one request quantile, from states to the choice. Then
the four recipes decode test problems of that seed, beside takeover, the value head without the reranker's terms, and
the reranker over the SLM's own likeliest tokens, which calls no LLM. With 8 of these it is also certified as a fifth
recipe, and the cell says what would then be deployed. Fixed before the first such cell: `train` certifies five if, in
no world of this command and of `benchmarks.adverse`, their mean accuracy on test problems is below that of four.
Finished cells are kept: the same command continues where it stopped, and `--report` puts them into docs/evidence.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from scipy.stats import binomtest
from torch import Tensor

from benchmarks import command
from benchmarks.paper.cells import percent
from benchmarks.paper.methods.takeover import taking_over
from benchmarks.paper.nested_runs import work_through
from fb_core._util import write_file
from fb_core.apps.demo import SETTINGS
from fb_core.apps.pipeline import statistics
from fb_core.apps.pipeline.choose import CertificationStage, ChoiceStage, RerankerStage, Results, ValueStage, decide
from fb_core.apps.pipeline.collect import PolicyStage, TrajectoryStage
from fb_core.apps.pipeline.commands import Command, run_command
from fb_core.apps.pipeline.decode import ASKED, DecodeStage, Row, Trial, read_rows
from fb_core.apps.pipeline.models import DEPLOYED, Context, Generate, benchmark_problems, frozen_policy, pool_options
from fb_core.apps.pipeline.page import markdown_table
from fb_core.apps.pipeline.run import run_stage
from fb_core.apps.pipeline.statistics import Interval
from fb_core.apps.processes import processes
from fb_core.apps.settings.base import change
from fb_core.apps.settings.run import RunSettings
from fb_core.decode.deployment import LABELS, RecipeName
from fb_core.decode.selectors import FutureBridgeSelector, ScoringSelector, State, ValueSelector
from fb_core.events import Pool
from fb_core.rerank.value_head import ValueHead, fit_value, value_terms

SEEDS = tuple(range(86_011, 86_021))  # of problems, training sets and rerankers; fixed before the run
QUANTILES = (0.90, 0.92, 0.94, 0.96)
PROBLEMS = 400  # test problems per cell
TAKEOVER, ALONE = "takeover", "value without the reranker"
OWN = {f"own-{count}": count for count in (8, 16)}  # the reranker over so many of the SLM's likeliest tokens, no LLM
FIFTH, FIVE = "own-8", "deployed of five"  # the recipe that is certified beside the four, and what is then deployed
REFERENCES = ("greedy", "direct")
SHOWN = {  # labels of rows
    "greedy": LABELS["greedy"],
    "direct": LABELS["direct"],
    "deployed": "**deployed recipe (certified)**",
    "published": "published recipe, demo settings",
    "value": "value (ours)",
    ALONE: ALONE,
    **{name: f"SLM's own top {count}, no LLM" for name, count in OWN.items()},
    TAKEOVER: TAKEOVER,
}
COMMANDS: tuple[Command, ...] = ("collect", "futures", "score", "train")
OUT = Path("runs", "evidence")
CELLS = Path("docs", "evidence", "cells.json")  # the finished cells
RESAMPLES = 2000
Outcomes = NDArray[np.float64]


def settings_of(world: str, seed: int, quantile: float) -> RunSettings:
    """The shipped settings of a world at a seed and a quantile: one reranker, at the horizon that is scored."""
    shipped = RunSettings.load(SETTINGS[world])
    return change(
        shipped,
        {
            "problems": {"seed": seed},
            "collect": {"quantile": quantile},
            "train": {"seeds": (seed,), "horizons": (shipped.score.horizon,)},
            "evaluate": {"limit": PROBLEMS},
        },
    )


class NoScores(ScoringSelector):
    """Zero for every candidate, so that a value head has nothing but log-probs, certainties and entropy."""

    def scores_many(self, states: Sequence[State], pools: Sequence[Pool]) -> list[Tensor]:
        return [torch.zeros_like(pool.slm_logprob) for pool in pools]


class TestStage(DecodeStage):
    """The recipes, takeover and the head without scores on a cell's test problems, after the choice."""

    __test__ = False  # not a test for pytest to collect
    name = "tests"
    command = "evidence"
    slice = (*DEPLOYED, *ASKED, "train.seeds", "choice")
    reads = (PolicyStage, RerankerStage, ValueStage, CertificationStage, ChoiceStage)

    @property
    def seed(self) -> int:
        """The cell's seed."""
        (seed,) = self.settings.train.seeds
        return seed

    @cached_property
    def trials(self) -> dict[str, Trial]:
        ((benchmark, problems),) = benchmark_problems(self.settings).items()
        certification = self.input(CertificationStage)
        names = (*certification.recipes(self.seed), ALONE, TAKEOVER, *OWN)
        trials = [Trial(benchmark, name, self.seed, "batch", problems) for name in names]
        trials.append(Trial(certification.name, FIFTH, self.seed, "batch", certification.problems))
        return {f"{number:02d}": trial for number, trial in enumerate(trials)}

    def generate(self, trial: Trial, max_length: int | None, max_batch: int) -> Generate:
        context = Context(self.settings, self.run, max_length, max_batch)
        if trial.method == TAKEOVER:
            return taking_over(context.models.slm, context.models.llm, context.policy, **context.options)
        if trial.method == ALONE:
            selector = ValueSelector(NoScores(), self._without_scores)
            return context.decoder(selector, **pool_options(self.settings)).generate_many
        if trial.method in OWN:
            own = FutureBridgeSelector(context.reranker(self.seed))
            return context.decoder(own, ask=False, pool="slm", slm_k=OWN[trial.method]).generate_many
        deployed = self.input(CertificationStage).deployed(cast(RecipeName, trial.method), self.seed)
        return context.decoder_for(deployed, context.reranker(self.seed)).generate_many

    def of_five(self) -> str:
        """What would be deployed if certification tested the fifth recipe too."""
        certification, choice = self.input(CertificationStage), self.settings.choice
        rows = [row for row in self.rows() if row.benchmark == certification.name]
        tested = [*certification.results(self.seed), Results.of(cast(RecipeName, FIFTH), rows)]
        return decide(tested, choice.delta, choice.level)[0]

    @cached_property
    def _without_scores(self) -> ValueHead:
        """The head fitted to the rollouts of the training states without scores."""
        rollouts = self.input(ValueStage).rollouts()
        terms = [
            value_terms(state.pool, torch.zeros_like(state.pool.slm_logprob), state.entropy)
            for state in (rollout.state for rollout in rollouts)
        ]
        return fit_value(terms, [rollout.correct for rollout in rollouts])


def name_of(cell: Mapping[str, Any]) -> str:
    """The name of a cell."""
    return "{world}-{seed}-{quantile:g}".format(**cell) + (f"-x{cell['scale']}" if "scale" in cell else "")


def keep(cell: Path, run: Path, work: Callable[[], dict[str, Any]]) -> None:
    """Write a cell's record, unless it is there; what `work` prints goes to the run's folder."""
    if cell.is_file():
        return
    began = time.process_time()
    run.mkdir(parents=True, exist_ok=True)
    with (run / "log.txt").open("a") as log, redirect_stdout(log), redirect_stderr(log):
        contents = work()
    contents |= {"processor_seconds": round(time.process_time() - began, 1)}
    write_file(cell, json.dumps(contents).encode())


def make(world: str, seed: int, by_quantile: Mapping[float, RunSettings], out: Path) -> None:
    """Make the cells of one world and seed, which share trajectories; may run in a separate process."""
    at = {"world": world, "seed": seed}
    runs = {quantile: out / "runs" / name_of(at | {"quantile": quantile}) for quantile in by_quantile}
    first, first_settings = next(iter(runs.values())), next(iter(by_quantile.values()))

    def work(quantile: float) -> dict[str, Any]:
        settings, run = by_quantile[quantile], runs[quantile]
        if run != first:
            work_through([TrajectoryStage], first_settings, first, first)
            work_through([TrajectoryStage], settings, run, first)
        for name in COMMANDS:
            run_command(name, settings, run)
        tests = TestStage(settings, run)
        run_stage(tests)
        return record(settings, tests, world)

    for quantile, run in runs.items():
        keep(out / "cells" / f"{run.name}.json", run, partial(work, quantile))
    for run in runs.values():
        shutil.rmtree(run, ignore_errors=True)


Jobs = Mapping[tuple[str, int], Callable[[], None]]  # by world and seed


def make_all(
    module: str, jobs: Callable[[], Jobs], file: Path, out: Path, workers: int | None = None, write: bool = False
) -> None:
    """Do jobs in worker processes that have imported a module; or only `write` the finished cells into a file."""
    finished, began = finished_cells(file, out), time.monotonic()
    if write:
        write_cells(finished, file)
        return
    with processes(workers, module) as pool:
        under_way = {pool.submit(job): of for of, job in jobs().items()}
        for done, job in enumerate(as_completed(under_way), 1):
            job.result()
            world, seed = under_way[job]
            print(f"{world}, seed {seed}: done, {done}/{len(under_way)}, {time.monotonic() - began:.0f} s", flush=True)


def finished_cells(file: Path, out: Path) -> list[dict[str, Any]]:
    """The records of a file, which are finished in `out` from now on, and those of `out` in their place."""
    cells, folder = {name_of(cell): cell for cell in json.loads(file.read_text())}, out / "cells"
    folder.mkdir(parents=True, exist_ok=True)
    for name, cell in cells.items():
        if not (made := folder / f"{name}.json").is_file():
            write_file(made, json.dumps(cell).encode())
    return [*(cells | {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}).values()]


def write_cells(records: Iterable[Mapping[str, Any]], file: Path) -> None:
    """Write records, one a line."""
    lines = ",\n".join(json.dumps(cell, sort_keys=True) for cell in records)
    write_file(file, f"[\n{lines}\n]\n".encode())


def record(settings: RunSettings, tests: TestStage, world: str) -> dict[str, Any]:
    """The record of a cell."""
    own = {at: trial.method for at, trial in tests.trials.items() if trial.benchmark != CertificationStage.name}
    chosen = tests.input(ChoiceStage).folder.finished()["summary"][f"seed-{tests.seed}"]
    return {
        "world": world,
        "seed": tests.seed,
        "quantile": settings.collect.quantile,
        "threshold": frozen_policy(tests.run).threshold,
        "deployed": chosen["recipe"],
        FIVE: tests.of_five(),
        "words": chosen["tested"][0]["words"],
        "rows": {name: row_of(list(read_rows(tests.folder, at))) for at, name in own.items()},
    }


def row_of(rows: Sequence[Row]) -> dict[str, Any]:
    """A method's row of a record."""
    return {
        "correct": "".join("01"[row.correct] for row in rows),
        "calls": float(np.mean([row.calls for row in rows])),
        "llm_tokens": float(np.mean([row.llm_tokens for row in rows])),
    }


# --- results ----------------------------------------------------------------------------------------------------------


class Cells:
    """Finished cells as `record` makes them, by world."""

    def __init__(self, records: Iterable[Mapping[str, Any]], worlds: Sequence[str] = tuple(SETTINGS)) -> None:
        self.records = sorted(records, key=lambda cell: (worlds.index(cell["world"]), cell["seed"], cell["quantile"]))
        self.worlds = [world for world in worlds if any(cell["world"] == world for cell in self.records)]

    def of(self, world: str) -> list[Mapping[str, Any]]:
        """The cells of a world."""
        return [cell for cell in self.records if cell["world"] == world]

    def at_quantiles(self, world: str) -> dict[float, Cells]:
        """The cells of a world by quantile."""
        by: dict[float, list[Mapping[str, Any]]] = {}
        for cell in self.of(world):
            by.setdefault(cell["quantile"], []).append(cell)
        return {at: Cells(own, self.worlds) for at, own in by.items()}

    def correct(self, cell: Mapping[str, Any], name: str) -> Outcomes:
        """[n]: which problems a row got right."""
        return np.array([int(bit) for bit in self.row(cell, name)["correct"]], dtype=np.float64)

    def row(self, cell: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """A row by its label; "deployed" is the chosen recipe's."""
        return cell["rows"][cell["deployed"] if name == "deployed" else name]

    def mean(self, world: str, name: str, column: str) -> float:
        """The mean of a column over all cells of a world."""
        return float(np.mean([self.row(cell, name)[column] for cell in self.of(world)]))

    def mean_accuracy(self, world: str, name: str) -> float:
        """The mean accuracy over all cells of a world."""
        return float(np.mean([self.correct(cell, name).mean() for cell in self.of(world)]))

    def interval(self, world: str, value: Any) -> Interval:
        """Of value(cell) [n], averaged over cells; the bootstrap resamples seeds, and problems within each seed."""
        by_seed: dict[int, list[Outcomes]] = {}
        for cell in self.of(world):
            by_seed.setdefault(cell["seed"], []).append(value(cell))
        return clustered([np.mean(members, axis=0) for members in by_seed.values()])


def clustered(values: Sequence[Outcomes]) -> Interval:
    """95% percentile bootstrap of the mean of vectors [n], one per seed: it resamples seeds, then problems of each."""
    table = np.stack(values)
    means = drawn(*table.shape) @ table.ravel() / table.size
    return Interval(float(table.mean()), *map(float, np.quantile(means, [0.025, 0.975])))


@cache
def drawn(seeds: int, problems: int) -> NDArray[np.uint16]:
    """[RESAMPLES, seeds * problems]: how often each value is in each resample."""
    counts, generator = np.empty((RESAMPLES, seeds * problems), np.uint16), np.random.default_rng(0)
    for row in counts:
        first = generator.integers(seeds, size=(seeds, 1)) * problems
        row[:] = np.bincount((first + generator.integers(problems, size=(seeds, problems))).ravel(), minlength=row.size)
    return counts


points = partial(percent, signed=True)  # of a difference


def is_below(cells: Cells, cell: Mapping[str, Any], name: str, delta: float) -> bool:
    """Whether a row is below greedy decoding or the direct score by more than delta in a cell."""
    return any(gap(cells, cell, name, other).mean() < -delta for other in REFERENCES)


def below(cells: Cells, world: str, name: str, delta: float) -> tuple[int, int, float]:
    """Cells of a world where a row is below greedy or direct by more than delta; those significantly so; the worst."""
    gaps = [
        [
            statistics.average_interval([cells.correct(cell, name)], [cells.correct(cell, other)], resamples=2000)
            for other in REFERENCES
        ]
        for cell in cells.of(world)
    ]
    seen = sum(is_below(cells, cell, name, delta) for cell in cells.of(world))
    significant = sum(any(gap.high < -delta for gap in pair) for pair in gaps)
    return seen, significant, min(gap.mean for pair in gaps for gap in pair)


def times_below(cells: Cells, name: str, delta: float) -> int:
    """In how many cells of all worlds a row is below."""
    return sum(is_below(cells, cell, name, delta) for cell in cells.records)


def methods(cells: Cells, delta: float) -> list[str]:
    """Accuracy and cost of the methods, and how often and how far rerankers are below greedy or direct.

    The last columns are: the cells below by more than delta, those of them that are significantly so, and the worst.
    """
    head = ["world", "method", "accuracy, % [95%]", "LLM calls", "LLM tokens", "cells below", "significantly"]
    head.append("worst, pp")
    rows = []
    for world in cells.worlds:
        for name, label in SHOWN.items():
            if name == ALONE:
                continue
            accuracy = percent(cells.interval(world, lambda cell, name=name: cells.correct(cell, name)))
            counts = (f"{cells.mean(world, name, column):.2f}" for column in ("calls", "llm_tokens"))
            falls = ["", "", ""]
            if name in ("deployed", "published", "value"):
                seen, sure, worst = below(cells, world, name, delta)
                falls = [f"{seen}", f"{sure}", f"{100 * worst:+.1f}"]
            rows.append([world, label, accuracy, *counts, *falls])
    return markdown_table(head, rows)


def parts(cells: Cells) -> list[str]:
    """What the reranker and the head each add: value against either alone, in all cells and at each quantile."""
    rows = []
    for world in cells.worlds:
        for other in (ALONE, "published"):
            groups = (cells, *cells.at_quantiles(world).values())
            gaps = (some.interval(world, lambda cell, other=other: gap(cells, cell, "value", other)) for some in groups)
            rows.append([world, SHOWN[other], *map(points, gaps)])
    quantiles = (f"{quantile:g}" for quantile in sorted({cell["quantile"] for cell in cells.records}))
    return markdown_table(["world", "value minus, pp", "all quantiles", *quantiles], rows)


def by_quantile(cells: Cells) -> list[str]:
    """Accuracy by world and quantile with and without the LLM."""
    names = ("greedy", "deployed", "published", *OWN)
    rows = [
        [world, f"{at:g}", *(f"{100 * own.mean_accuracy(world, name):.1f}" for name in names)]
        for world in cells.worlds
        for at, own in cells.at_quantiles(world).items()
    ]
    seeds, problems = len({cell["seed"] for cell in cells.records}), len(cells.correct(cells.records[0], "greedy"))
    note = f"*Accuracy, %; seeds: {seeds}, problems of each: {problems}.*"
    return [*markdown_table(["world", "quantile", *(SHOWN[name] for name in names)], rows), "", note]


def with_five(cells: Cells) -> str:
    """What certification deploys with the fifth recipe."""
    gaps = {world: [gap(cells, cell, cell[FIVE], "deployed") for cell in cells.of(world)] for world in cells.worlds}
    words = ", ".join(f"{100 * np.mean(own):+.2f} in {world}" for world, own in gaps.items())
    count, made = sum(cell[FIVE] == FIFTH for cell in cells.records), len(cells.records)
    lost = [world for world, own in gaps.items() if np.mean(own) < 0]
    rest = f"Five lose in {', '.join(lost)}, so `train` keeps four." if lost else "Five lose in no world here."
    said = f"Certified as a fifth recipe, the SLM's own top 8 would be deployed in {count} of {made} runs"
    return f"{said}; five recipes minus four, pp: {words}. {rest}"


def how_often(cells: Cells) -> str:
    """How often each recipe was deployed in each world."""
    counts = {world: Counter(cell["deployed"] for cell in cells.of(world)).most_common() for world in cells.worlds}
    words = (f"{world}: " + ", ".join(f"{name} {count}" for name, count in own) for world, own in counts.items())
    return f"How often each recipe was deployed: {'; '.join(words)}."


def gap(cells: Cells, cell: Mapping[str, Any], name: str, other: str) -> Outcomes:
    """[n]: one row minus another."""
    return cells.correct(cell, name) - cells.correct(cell, other)


def best_in_hindsight(cells: Cells, cell: Mapping[str, Any]) -> str:
    """The best recipe on a cell's test problems."""
    names = (name for name in cell["rows"] if name in LABELS)
    return max(names, key=lambda name: cells.correct(cell, name).mean())


def above_the_line(cells: Cells, cell: Mapping[str, Any]) -> Outcomes:
    """[n]: The deployed recipe minus takeover on the share of problems that costs the same LLM tokens."""
    greedy, takeover = cells.correct(cell, "greedy"), cells.correct(cell, TAKEOVER)
    share = min(1.0, cells.row(cell, "deployed")["llm_tokens"] / cells.row(cell, TAKEOVER)["llm_tokens"])
    return cells.correct(cell, "deployed") - (greedy + share * (takeover - greedy))


def goals(cells: Cells, delta: float, level: float) -> list[str]:
    """The goals and the results, in sentences."""
    lines, total = [], len(cells.records)
    seen, sure, _ = map(sum, zip(*(below(cells, world, "deployed", delta) for world in cells.worlds), strict=True))
    met = "met" if seen <= (1 - level) * total else "missed"
    seeds = {cell["seed"] for cell in cells.records}
    failing = {cell["seed"] for cell in cells.records if is_below(cells, cell, "deployed", delta)}
    bound = binomtest(len(failing), len(seeds)).proportion_ci(0.90, "exact").high  # one-sided 95%
    lines.append(
        f"- The deployed recipe is below in {seen} of {total} cells ({seen / total:.1%}; goal: at most "
        f"{1 - level:.0%}): **{met}**. In {sure} cells the difference is statistically significant. {len(failing)} of "
        f"{len(seeds)} seeds have such a cell; with 95% confidence, at most {bound:.0%} of all seeds do."
    )
    fixed = ", ".join(f"{times_below(cells, name, delta)} for {name}" for name in ("value", "direct", "greedy"))
    best = sum(best_in_hindsight(cells, cell) == "greedy" for cell in cells.records)
    lines.append(
        f"- That says little about the choice. One recipe deployed in all cells would be below in {fixed}, and greedy "
        f"decoding is the best of the four in {best} cells."
    )
    rows = []
    for world in cells.worlds:
        gap = cells.interval(
            world, lambda cell: cells.correct(cell, "deployed") - cells.correct(cell, best_in_hindsight(cells, cell))
        )
        line = cells.interval(world, lambda cell: above_the_line(cells, cell))
        near, over = ("met" if good else "missed" for good in (gap.mean >= -0.02, line.low > 0))
        rows.append([world, f"{points(gap)} {near}", f"{points(line)} {over}"])
    head = ["the deployed recipe, pp", "minus the best recipe in hindsight (goal: at least -2)"]
    head.append("minus a mix of greedy decoding and takeover at equal LLM tokens (goal: above 0)")
    return [*lines, "", *markdown_table(head, rows)]


def page(cells: Cells, before: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of docs/evidence.md on these cells; `benchmarks.adverse` has the rest."""
    choice = RunSettings.load(SETTINGS["plans"]).choice
    seeds = sorted({cell["seed"] for cell in cells.records})
    quantiles = sorted({cell["quantile"] for cell in cells.records})
    problems = len(cells.correct(cells.records[0], "greedy"))
    failed = sum("none of" in cell["words"] for cell in cells.records)
    hours = sum(cell["processor_seconds"] for cell in cells.records) / 3600
    gained = max(row["minus value"][0] for row in before if row["recipe"] == "as it was deployed")
    return [
        "# Is the deployed recipe safe?",
        "",
        "*Written by `make figures` from [the cells](evidence/cells.json) and [the runs](evidence/adverse.json).*",
        "",
        "A recipe that passes its certification is, with "
        f"{choice.level:.0%} confidence, at most {100 * choice.delta:g} points below greedy decoding and below the "
        "direct LLM score ([the choice](choice.md)). This page tests whether that holds for the recipe "
        f"that a run deploys. *Below* means here: more than {100 * choice.delta:g} points below either of the two.",
        "",
        "## Where the large model helps",
        "",
        f"`python -m benchmarks.evidence` made {len(cells.records)} runs, called cells: one for each world "
        f"({', '.join(cells.worlds)}), each of {len(seeds)} seeds ({seeds[0]} to {seeds[-1]}) and each request "
        f"quantile ({', '.join(f'{quantile:g}' for quantile in quantiles)}), with {problems} test problems each, in "
        f"{hours:.1f} hours of CPU time. A seed draws all problems and initialises the reranker; the models are the "
        "shipped ones. The seeds were written down before the runs, and no setting was chosen on them. "
        f"In {failed} cells no recipe passed, so these runs say {'nothing' if not failed else 'little'} about that "
        "case, in which [nothing is promised](choice.md#what-is-promised).",
        "",
        *goals(cells, choice.delta, choice.level),
        "",
        "Intervals resample seeds, and problems within each seed. Cells are not independent: the quantiles of a seed "
        "share problems and trajectories, and helpful and control share problems and SLM. Two equally good recipes "
        f"sometimes differ by 2 points or more on {problems} problems. The best recipe in hindsight is picked and "
        "judged on the same test problems, so its accuracy is overestimated.",
        "",
        *methods(cells, choice.delta),
        "",
        "*Calls and tokens are per problem.*",
        "",
        how_often(cells),
        "",
        "### Is the reranker needed?",
        "",
        f"*{ALONE.capitalize()}* is the head of *value* with the reranker's scores set to 0; it is never deployed.",
        "",
        *parts(cells),
        "",
        "### Are the LLM's candidates needed?",
        "",
        "Here the run's reranker, which both models' candidates trained, takes one of the SLM's likeliest tokens. It "
        "calls no LLM.",
        "",
        *by_quantile(cells),
        "",
        with_five(cells),
        "",
        "More recipes were tried in 120 earlier runs ([figures](evidence/dropped.json)). What was chosen among all of "
        f"them was at most {100 * gained:.1f} points above the value head alone, so only that was kept.",
        "",
    ]


def main(
    out: Annotated[Path, typer.Option(help="Folder for runs and finished cells.")] = OUT,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one per core by default.")] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="Seeds; those of the evidence by default.")] = None,
    write: Annotated[bool, typer.Option("--report", help="Only write docs/evidence from the finished cells.")] = False,
) -> None:
    """Make every cell that is still missing."""

    def jobs() -> Jobs:
        cells = [(world, seed) for seed in seeds or SEEDS for world in SETTINGS]
        return {at: partial(make, *at, {q: settings_of(*at, q) for q in QUANTILES}, out) for at in cells}

    make_all("benchmarks.evidence", jobs, CELLS, out, workers, write)


if __name__ == "__main__":
    command.run(main, "benchmarks.evidence --seeds 86011 --workers 2")

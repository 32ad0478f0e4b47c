"""Stage 5: FutureBridge, as `train` deploys it, and the published recipe on benchmarks, next to greedy decoding."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from fb_core._util import write_file
from fb_core.apps.demo import DEMO
from fb_core.apps.pipeline.choose import ChoiceStage, RerankerStage
from fb_core.apps.pipeline.collect import PolicyStage
from fb_core.apps.pipeline.decode import ASKED, DecodeStage, Row, Trial
from fb_core.apps.pipeline.models import DEPLOYED, LABELS, benchmark_problems, file_stem, problems_hash
from fb_core.apps.pipeline.page import Table, markdown_table, page
from fb_core.apps.pipeline.problems import BENCHMARKS, Benchmark
from fb_core.apps.pipeline.run import Stage
from fb_core.apps.pipeline.statistics import average_interval
from fb_core.apps.settings.run import AVERAGE

SEEDED = ("deployed", "published")  # run once per reranker seed
REFERENCES = ("greedy", "direct")  # which every method is compared with
PAGE = "evaluation.html"  # in the run's folder
NOTE = (
    "Brackets hold 95% intervals: problems and training seeds are resampled, and differences are paired. Calls and "
    "tokens are per problem. FutureBridge is the recipe that `train` deploys, the published recipe the paper's."
)

log = logging.getLogger(__name__)


class EvaluateStage(DecodeStage):
    """Greedy decoding, S2T, the direct LLM score, FutureBridge and the published recipe on the benchmarks.

    FutureBridge is what `train` deploys, and is there if it chose a recipe. It and the published recipe run once for
    every reranker seed; with the three published seeds these are AIME's three repeats. On a benchmark with repeats
    greedy decoding has as many runs, although they are all alike; on others it has one.
    """

    name = "evaluation"
    command = "futurebridge evaluate"
    slice = (*DEPLOYED, *ASKED, "evaluate", "train.seeds", "problems.certification")

    @property
    def reads(self) -> Sequence[type[Stage]]:  # type: ignore[override]
        return (PolicyStage, RerankerStage, *((ChoiceStage,) if self.settings.problems.certification else ()))

    @property
    def _methods(self) -> list[str]:
        return [name for name in LABELS if name != "deployed" or self.settings.problems.certification]

    def data(self) -> dict[str, Any]:
        return {name: problems_hash(problems) for name, problems in benchmark_problems(self.settings).items()}

    @cached_property
    def trials(self) -> dict[str, Trial]:
        size, seeds = self.settings.evaluate.per_shard, self.settings.train.seeds
        trials: dict[str, Trial] = {}
        for name, problems in benchmark_problems(self.settings).items():
            repeats, stem = BENCHMARKS.get(name.partition("=")[0], Benchmark()).repeats, file_stem(name)
            if repeats > len(seeds):
                log.warning("%s: %d runs instead of %d, one per seed of train.seeds", name, len(seeds), repeats)
            if any(shard.startswith(f"{stem}.") for shard in trials):
                raise ValueError(f"evaluate.benchmarks: expected names that differ, got {name!r} again; rename a file")
            for key in self._methods:
                seeded = key in SEEDED or (repeats > 1 and key == "greedy")
                for seed in seeds if seeded else (None,):
                    method = key if seed is None else f"{key}-{seed}"
                    for start in range(0, len(problems), size):
                        trial = Trial(name, key, seed, "batch", problems[start : start + size])
                        trials[f"{stem}.{method}.{start // size:05d}"] = trial
        return trials

    def summary(self) -> dict[str, Any]:
        """Accuracy and its differences with intervals, calls and tokens, per benchmark and on their average.

        Also writes them as a page into the run's folder.
        """
        rows: dict[tuple[str, str], dict[str, list[Row]]] = {}
        for row in self.rows():
            rows.setdefault((row.benchmark, row.method), {}).setdefault(row.problem, []).append(row)
        names, table = list(benchmark_problems(self.settings)), []
        members = {name: [name] for name in names} | ({AVERAGE: names} if len(names) > 1 else {})

        def outcomes(benchmark: str, method: str) -> list[list[list[bool]]]:
            """Whether each run solved each problem of each member of a row's benchmark."""
            cells = (rows[member, method].values() for member in members[benchmark])
            return [[[row.correct for row in runs] for runs in cell] for cell in cells]

        for name in members:
            for key in self._methods:
                own, decoded = outcomes(name, key), [list(rows[member, key].values()) for member in members[name]]
                flat = [[row for runs in cell for row in runs] for cell in decoded]
                differences = {
                    f"minus {other}": None if key == other else list(average_interval(own, outcomes(name, other)))
                    for other in REFERENCES
                }
                table.append(
                    {
                        "benchmark": name,
                        "method": LABELS[key],
                        "problems": sum(map(len, decoded)),
                        "runs": len(decoded[0][0]),
                        "accuracy": list(average_interval(own)),
                        **differences,
                        "calls": float(np.mean([np.mean([row.calls for row in cell]) for cell in flat])),
                        "tokens": float(np.mean([np.mean([len(row.tokens) for row in cell]) for cell in flat])),
                    }
                )
        write_file(self.run / PAGE, page("evaluation.html", title="Evaluation", table=table_of(table)).encode())
        return {"table": table}

    def report(self, manifest: dict[str, Any]) -> str:
        return tables_of(manifest["summary"]["table"])


def tables_of(results: Sequence[dict[str, Any]]) -> str:
    """A table in Markdown for each benchmark of an evaluation's rows; on a terminal of 80 columns no word is cut."""
    parts = []
    for name in dict.fromkeys(row["benchmark"] for row in results):
        own = [row for row in results if row["benchmark"] == name]
        table = table_of(own)
        several = ", ".join(f"{row['runs']} runs of {row['method']}" for row in own if row["runs"] > 1)
        title = f"**{table.rows[0][0]}**, {own[0]['problems']} problems{several and f'; {several}'}"
        cells = [[cell.replace(", ", ",") for cell in (row[1], *row[3:])] for row in table.rows]  # intervals stay whole
        parts += [title, "", *markdown_table((table.head[1], *table.head[3:]), cells, "l" + table.sides[3:]), ""]
    return "\n".join([*parts, NOTE])


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    """Accuracy and its differences with 95% intervals, calls and tokens of an evaluation's rows."""
    differences = [f"minus {name}, pp" for name in REFERENCES]
    head = ("benchmark", "method", "problems x runs", "accuracy, %", *differences, "LLM calls", "tokens")
    rows = []
    for row in results:
        spread = [_percent(row["accuracy"]), *(_percent(row[f"minus {name}"], sign="+") for name in REFERENCES)]
        size, calls, tokens = f"{row['problems']} x {row['runs']}", f"{row['calls']:.2f}", f"{row['tokens']:.1f}"
        rows.append((row["benchmark"].removeprefix(DEMO), row["method"], size, *spread, calls, tokens))
    return Table("Evaluation", head, rows, NOTE, "ll" + "r" * (len(head) - 2))


def _percent(interval: Sequence[float] | None, sign: str = "") -> str:
    if interval is None:
        return ""
    mean, low, high = (f"{100 * share:{sign}.1f}" for share in interval)
    return f"{mean} [{low}, {high}]"

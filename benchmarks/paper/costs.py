"""The costs of a run: of its offline stages, from their receipts, and of its methods, timed one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, get_args

import numpy as np

from benchmarks.paper import intervals
from benchmarks.paper.comparison import METHODS
from benchmarks.paper.methods import generator, label_of, method, seed_of
from benchmarks.paper.r2r.stages import RouterStage
from benchmarks.paper.settings import PaperSettings
from fb_core.stages.artefacts import Artefact
from fb_core.stages.decode import ASKED, DecodeStage, Loop, Row, Trial
from fb_core.stages.deploy import DEPLOYED_STAGE, Generate, chosen_digest
from fb_core.stages.inputs import DEPLOYED, benchmark_problems, problems_hash
from fb_core.stages.problems import Problem
from fb_core.stages.selection import RerankerStage
from fb_core.stages.stage import Stage
from fb_core.stages.states import PolicyStage

COUNTS = ("calls", "appended", "suffix")  # fields of `Row` that are averaged


class DeploymentStage(DecodeStage):
    """Methods on the first problems of the first benchmark, one problem at a time.

    "fast" is `LowLatencyDecoder`, "plain" the loop that works for every method. A method is compared with greedy
    decoding in the same loop, problem by problem.
    """

    name = "deployment"
    command = "python -m benchmarks.paper"
    settings: PaperSettings
    slice = (*DEPLOYED, *ASKED, *METHODS, "compare.timed")
    parallel = False

    def inputs(self) -> Sequence[type[Stage]]:
        return (
            PolicyStage,
            RerankerStage,
            *((RouterStage,) if any(method(name).routed for name in self._methods) else ()),
        )

    def data(self) -> dict[str, Any]:
        chosen = {"deployed": chosen_digest(self.run)} if "deployed" in self._methods else {}
        return {"timed": problems_hash(self._problems), "methods": self._methods} | chosen

    @cached_property
    def _problems(self) -> list[Problem]:
        first = next(iter(benchmark_problems(self.settings).values()))
        return first[: self.settings.compare.timed]

    @cached_property
    def trials(self) -> dict[str, Trial]:
        benchmark, loops = next(iter(benchmark_problems(self.settings))), get_args(Loop)
        return {
            f"{loop}.{name}": Trial(benchmark, name, seed_of(name, self.settings), loop, self._problems)
            for loop in loops
            for name in self._methods
            if loop in method(name).timed
        }

    @cached_property
    def _methods(self) -> list[str]:
        """The methods of the settings, without those whose router or deployed recipe does not exist."""
        routed, chosen = (
            (Artefact(self.run, stage).manifest() or {}).get("complete", False)
            for stage in (RouterStage.name, DEPLOYED_STAGE)
        )
        return [
            name
            for name in self.settings.compare.methods
            if (routed or not method(name).routed) and (chosen or name != "deployed")
        ]

    def generate(self, trial: Trial, max_length: int | None, max_batch: int) -> Generate:
        return generator(trial.method, self.settings, self.run, trial.seed, max_length, max_batch)

    def report(self, manifest: dict[str, Any]) -> str:
        per_problem = "LLM calls | candidates per event | tokens chosen at events | further LLM tokens | seconds"
        lines = [f"| method | loop | {per_problem} | × greedy [95%] |", "|---|---|---|---|---|---|---|---|"]
        for row in deployment_rows(self):
            pool = "" if row["pool"] is None else f"{row['pool']:.1f}"
            ratio = "" if row["relative"] is None else "{:.2f} [{:.2f}, {:.2f}]".format(*row["relative"])
            lines.append(
                f"| {row['method']} | {row['loop']} | {row['calls']:.2f} | {pool} | {row['appended']:.2f} | "
                f"{row['suffix']:.1f} | {row['seconds']:.3f} | {ratio} |"
            )
        return "\n".join(lines)


def deployment_rows(stage: DeploymentStage) -> list[dict[str, Any]]:
    """One row per method and loop: mean costs per problem, and the paired ratio of its time to greedy decoding's."""
    by_method: dict[tuple[str, Loop], list[Row]] = {}
    for row in stage.rows():
        by_method.setdefault((row.method, row.loop), []).append(row)
    seconds = {one: [row.seconds or 0.0 for row in rows] for one, rows in by_method.items()}
    table = []
    for (name, loop), rows in by_method.items():
        pools = [row.pool for row in rows if row.pool is not None]
        peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None]
        greedy = seconds.get(("greedy", loop))
        relative = greedy and intervals.ratio_interval(seconds[name, loop], greedy)
        table.append(
            {
                "method": label_of(name, stage.settings),
                "key": name,
                "loop": loop,
                "problems": len(rows),
                "pool": float(np.mean(pools)) if pools else None,
                **{column: float(np.mean([getattr(row, column) for row in rows])) for column in COUNTS},
                "seconds": float(np.mean(seconds[name, loop])),
                "relative": relative,
                "peak_bytes": max(peaks) if peaks else None,
            }
        )
    return table


def offline_rows(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """One row per finished stage: units, seconds of work and GPU hours, from its receipts."""
    table = []
    for stage in stages:
        manifest = stage.folder.manifest()
        if manifest is not None and manifest["complete"]:
            row = {"stage": stage.name, "units": stage.units(manifest), "unit": stage.unit}
            table.append(row | manifest["cost"])
    return table

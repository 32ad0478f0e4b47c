"""Stage 5: the chosen rerankers on benchmarks, as published and as deployed, compared with greedy decoding."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from fb_core import statistics
from fb_core.config import AVERAGE
from fb_core.methods import method
from fb_core.stages.choice import ChoiceStage
from fb_core.stages.decode import ASKED, DecodeStage, Row, Trial
from fb_core.stages.inputs import DEPLOYED, benchmark_problems, file_stem, problems_hash
from fb_core.stages.problems import BENCHMARKS
from fb_core.stages.selection import RerankerStage
from fb_core.stages.stage import Stage
from fb_core.stages.states import PolicyStage

log = logging.getLogger(__name__)


class EvaluateStage(DecodeStage):
    """Greedy decoding and the rerankers on the benchmarks: as published and, if `train` chose a recipe, as deployed.

    FutureBridge runs once for every reranker seed; with the three published seeds these are AIME's three repeats. On a
    benchmark with repeats greedy decoding has as many runs, although they are all alike; on others it has one.
    """

    name = "evaluation"
    command = "evaluate"
    slice = (*DEPLOYED, *ASKED, "evaluate", "train.seeds", "problems.certification")

    def inputs(self) -> Sequence[type[Stage]]:
        return (PolicyStage, RerankerStage, *((ChoiceStage,) if self.settings.problems.certification else ()))

    @property
    def _methods(self) -> list[str]:
        return ["greedy", "futurebridge", *(("deployed",) if self.settings.problems.certification else ())]

    def data(self) -> dict[str, Any]:
        return {name: problems_hash(problems) for name, problems in benchmark_problems(self.settings).items()}

    @cached_property
    def trials(self) -> dict[str, Trial]:
        size, seeds = self.settings.evaluate.per_shard, self.settings.train.seeds
        trials: dict[str, Trial] = {}
        for name, problems in benchmark_problems(self.settings).items():
            known = BENCHMARKS.get(name.partition("=")[0])
            if known is not None and known.repeats > len(seeds):
                log.warning("%s: %d runs instead of %d, one per seed", name, len(seeds), known.repeats)
            stem = file_stem(name)
            if any(shard.startswith(f"{stem}.") for shard in trials):
                raise ValueError(f"evaluate.benchmarks: expected names that differ, got {name!r} again; rename a file")
            repeated = known is not None and known.repeats > 1
            for key in self._methods:
                runs: Sequence[int | None] = (None,) if key == "greedy" and not repeated else seeds
                for seed in runs:
                    for start in range(0, len(problems), size):
                        shard = f"{stem}.{key}{'' if seed is None else f'-{seed}'}.{start // size:05d}"
                        trials[shard] = Trial(name, key, seed, "batch", problems[start : start + size])
        return trials

    def summary(self) -> dict[str, Any]:
        """Accuracy and difference to greedy with intervals, events and tokens, per benchmark and on their average."""
        rows: dict[tuple[str, str], dict[str, list[Row]]] = {}
        for row in self.rows():
            rows.setdefault((row.benchmark, row.method), {}).setdefault(row.problem, []).append(row)
        right = {
            cell: [float(np.mean([row.correct for row in runs])) for runs in by_problem.values()]
            for cell, by_problem in rows.items()
        }
        table = []
        for name, members in self._shown().items():
            for key in self._methods:
                own, plain = ([right[member, kind] for member in members] for kind in (key, "greedy"))
                decoded = [rows[member, key] for member in members]
                flat = [[row for runs in by_problem.values() for row in runs] for by_problem in decoded]
                table.append(
                    {
                        "benchmark": name,
                        "method": key if key == "greedy" else method(key).label,
                        "problems": sum(map(len, decoded)),
                        "runs": len(next(iter(decoded[0].values()))),
                        "accuracy": list(statistics.average_interval(own)),
                        "minus greedy": None if key == "greedy" else list(statistics.average_interval(own, plain)),
                        "events": float(np.mean([np.mean([len(row.events) for row in one]) for one in flat])),
                        "tokens": float(np.mean([np.mean([len(row.tokens) for row in one]) for one in flat])),
                    }
                )
        return {"table": table}

    def _shown(self) -> dict[str, list[str]]:
        """The benchmarks that each row covers: every one alone, and all of them for the average if several."""
        names = list(benchmark_problems(self.settings))
        return {name: [name] for name in names} | ({AVERAGE: names} if len(names) > 1 else {})

    def report(self, manifest: dict[str, Any]) -> str:
        accuracy, per_problem = "accuracy, % [95%] | minus greedy, pp [95%]", "events per problem | tokens per problem"
        lines = [
            f"| benchmark | method | problems x runs | {accuracy} | {per_problem} |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in manifest["summary"]["table"]:
            spread = [
                "" if value is None else "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * part for part in value))
                for value in (row["accuracy"], row["minus greedy"])
            ]
            lines.append(
                f"| {row['benchmark']} | {row['method']} | {row['problems']} x {row['runs']} | {' | '.join(spread)} | "
                f"{row['events']:.2f} | {row['tokens']:.1f} |"
            )
        return "\n".join(lines)

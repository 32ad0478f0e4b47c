"""What a run costs: its offline stages by their receipts, and its methods decoding one prompt at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from fb_core import statistics
from fb_core.methods import method
from fb_core.stages.artefacts import Artefact
from fb_core.stages.comparison import METHODS
from fb_core.stages.deploy import generator, label_of, seed_of
from fb_core.stages.evaluation import ASKED, benchmark_problems, longest_decoded
from fb_core.stages.inputs import DEPLOYED, problems_hash
from fb_core.stages.problems import Problem
from fb_core.stages.router import RouterStage
from fb_core.stages.selection import RerankerStage
from fb_core.stages.stage import Cost, Output, Stage
from fb_core.stages.states import PolicyStage

WARM_UP = 3  # prompts


class Timing(NamedTuple):
    """A method in one of the two loops."""

    method: str
    fast: bool


class DeploymentStage(Stage):
    """Methods on the first problems of the first benchmark, one at a time, each beside greedy decoding in its loop.

    "fast" is `LowLatencyDecoder`, "plain" the loop that works for every method; a method is compared with greedy
    decoding in the same loop, problem by problem.
    """

    name = "deployment"
    command = "experiment"
    slice = (*DEPLOYED, *ASKED, *METHODS, "compare.timed")
    uses = ("slm", "llm", "tokenizer")
    parallel = False

    def inputs(self) -> Sequence[type[Stage]]:
        return (
            PolicyStage,
            RerankerStage,
            *((RouterStage,) if any(method(name).routed for name in self._methods) else ()),
        )

    def data(self) -> dict[str, Any]:
        return {"timed": problems_hash(self._problems), "methods": self._methods}

    @cached_property
    def _problems(self) -> list[Problem]:
        first = next(iter(benchmark_problems(self.settings).values()))
        return first[: self.settings.compare.timed]

    @cached_property
    def _timings(self) -> dict[str, Timing]:
        timed = [(loop, name) for loop in ("fast", "plain") for name in self._methods if loop in method(name).timed]
        return {f"{loop}.{name}": Timing(name, loop == "fast") for loop, name in timed}

    @cached_property
    def _methods(self) -> list[str]:
        """Those asked for, but for those of a router where none could be made."""
        router = Artefact(self.run, RouterStage.name).manifest()
        routed = router is not None and router["complete"]
        return [name for name in self.settings.compare.methods if routed or not method(name).routed]

    def shards(self) -> dict[str, int]:
        return {shard: len(self._problems) for shard in self._timings}

    def work(self, shard: str) -> Output:
        timing, settings, device = self._timings[shard], self.settings, self.models.slm.device
        prompts = self.models.prompts(self._problems, settings.problems.prompt)
        longest = max(map(len, prompts)) + settings.evaluate.max_new_tokens if timing.fast else None
        generate = generator(timing.method, settings, self.run, seed_of(timing.method, settings), longest)
        for prompt in prompts[:WARM_UP]:
            generate([prompt], settings.evaluate.max_new_tokens)
        rows = []
        for done, (problem, prompt) in enumerate(zip(self._problems, prompts, strict=True)):
            self.on_progress(done)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            began = time.perf_counter()
            generation = generate([prompt], settings.evaluate.max_new_tokens)[0]
            tokens = len(generation.token_ids.tolist())  # waits for the device
            seconds = time.perf_counter() - began
            peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
            row = {"problem": problem.id, "tokens": tokens, "seconds": round(seconds, 5), "peak_bytes": peak}
            rows.append({**timing._asdict(), **row, **generation.usage._asdict()})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        return Output({f"{shard}.jsonl": lines.encode()}, {"decoded": len(rows)})

    def rows(self) -> Iterator[dict[str, Any]]:
        """Of all finished shards."""
        for shard in self._timings:
            yield from (json.loads(line) for line in self.folder.read(shard, "jsonl").splitlines())

    def report(self, manifest: dict[str, Any]) -> str:
        lines = ["| method | loop | calls | pool | appended | suffix | seconds | of greedy [95%] |"]
        lines.append("|---|---|---|---|---|---|---|---|")
        for row in deployment_rows(self):
            pool = "" if row["pool"] is None else f"{row['pool']:.1f}"
            ratio = "" if row["relative"] is None else "{:.2f} [{:.2f}, {:.2f}]".format(*row["relative"])
            lines.append(
                f"| {row['method']} | {row['loop']} | {row['calls']:.2f} | {pool} | {row['appended']:.2f} | "
                f"{row['suffix']:.1f} | {row['seconds']:.3f} | {ratio} |"
            )
        return "\n".join(lines)

    def cost(self) -> Cost:
        return Cost("decoded one prompt at a time", longest_decoded(self))


def deployment_rows(stage: DeploymentStage) -> list[dict[str, Any]]:
    """A row a method and loop: what a problem takes on average, and its time relative to greedy decoding, paired."""
    by_method: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for row in stage.rows():
        by_method.setdefault((row["method"], row["fast"]), []).append(row)
    table = []
    for (name, fast), rows in by_method.items():
        pools = [row["pool"] for row in rows if row["pool"] is not None]
        peaks = [row["peak_bytes"] for row in rows if row["peak_bytes"] is not None]
        greedy = by_method.get(("greedy", fast))
        relative = greedy and statistics.ratio_interval(
            [row["seconds"] for row in rows], [row["seconds"] for row in greedy]
        )
        table.append(
            {
                "method": label_of(name, stage.settings),
                "key": name,
                "loop": "fast" if fast else "plain",
                "problems": len(rows),
                "pool": float(np.mean(pools)) if pools else None,
                **{column: float(np.mean([row[column] for row in rows])) for column in ("calls", "appended", "suffix")},
                "seconds": float(np.mean([row["seconds"] for row in rows])),
                "relative": relative,
                "peak_bytes": max(peaks) if peaks else None,
            }
        )
    return table


def offline_rows(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """A row for every finished stage among these: units, seconds of work and GPU hours, as its receipts say."""
    table = []
    for stage in stages:
        manifest = stage.folder.manifest()
        if manifest is not None and manifest["complete"]:
            row = {"stage": stage.name, "units": stage.units(manifest), "unit": stage.unit}
            table.append(row | manifest["cost"])
    return table

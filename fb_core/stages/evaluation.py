"""Stage 5: the chosen rerankers on benchmarks, beside greedy decoding."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from fb_core import statistics
from fb_core.config import AVERAGE, RunSettings, VerifierSettings
from fb_core.methods import Generate
from fb_core.stages.deploy import generator
from fb_core.stages.inputs import DEPLOYED, problems_hash, read_problems, verifier_of
from fb_core.stages.problems import BENCHMARKS, Problem, prompt_ids
from fb_core.stages.selection import RerankerStage
from fb_core.stages.stage import Cost, Output, Stage
from fb_core.stages.states import PolicyStage
from fb_core.verify import tally

ASKED = (
    "evaluate.benchmarks",
    "evaluate.limit",
    "evaluate.max_new_tokens",
    "problems.prompt",
    "problems.seed",
    "verify",
)
WARM_UP = 3  # prompts at most, so that no problem's time holds what is done once

log = logging.getLogger(__name__)


def benchmark_problems(settings: RunSettings) -> dict[str, list[Problem]]:
    """The problems of every benchmark, those left out whose gold answer is right by no answer, not even itself.

    Raises:
        OSError: a set that is not there.
        ValueError: a damaged file, a world without a limit, or gold answers that take too long to judge.
    """
    chosen = settings.evaluate
    return _benchmark_problems(chosen.benchmarks, chosen.limit, settings.verify, settings.problems.seed)


@lru_cache(maxsize=4)
def _benchmark_problems(
    benchmarks: Sequence[str], limit: int | None, verify: VerifierSettings, seed: int
) -> dict[str, list[Problem]]:
    found, verifier = {}, verifier_of(verify)
    for name in benchmarks:
        problems = read_problems(name, limit, "test", seed)
        golds = [problem.answer for problem in problems]
        verdicts = verifier.verify_many([f"\\boxed{{{gold}}}" for gold in golds], golds, bad_golds="unparsable")
        if "timeout" in verdicts:
            late = problems[verdicts.index("timeout")].id
            raise ValueError(f"{name}: expected gold answers judged in time, got {late} not; raise verify.timeout")
        found[name] = [p for p, verdict in zip(problems, verdicts, strict=True) if verdict == "correct"]
        if left := len(problems) - len(found[name]):
            log.warning("%s: left out %d problems whose gold answer cannot be judged", name, left)
    return found


def longest_decoded(stage: Stage) -> int:
    """Tokens of a benchmark's problem with its answer at most, prompts left out where no tokenizer is here."""
    settings = stage.settings
    problems = [problem for members in benchmark_problems(settings).values() for problem in members]
    return stage.models.longest_prompt(problems, settings.problems.prompt) + settings.evaluate.max_new_tokens


class EvaluateStage(Stage):
    """The chosen rerankers and plain greedy decoding on the benchmarks, one prompt at a time, as deployed.

    A shard is a JSONL file with a row a problem. All is deterministic, so repeats are seeds: FutureBridge runs once for
    every reranker of the sweep (the published three are AIME's three repeats), greedy decoding once.
    """

    name = "evaluation"
    command = "evaluate"
    slice = (*DEPLOYED, *ASKED, "evaluate", "train.seeds")
    reads = (PolicyStage, RerankerStage)
    uses = ("slm", "llm", "tokenizer")

    def data(self) -> dict[str, Any]:
        return {name: problems_hash(problems) for name, problems in benchmark_problems(self.settings).items()}

    def _trials(self) -> dict[str, tuple[str, int | None, list[Problem]]]:
        """(benchmark, seed of the reranker or None for greedy, problems) of every shard."""
        size = self.settings.evaluate.per_shard
        trials: dict[str, tuple[str, int | None, list[Problem]]] = {}
        for name, problems in benchmark_problems(self.settings).items():
            seeds = self.settings.train.seeds
            known = BENCHMARKS.get(name.partition("=")[0])
            if known is not None and known.repeats > len(seeds):
                log.warning("%s: %d runs instead of %d, one a seed", name, len(seeds), known.repeats)
            methods: list[tuple[str, int | None]] = [("greedy", None)]
            methods += [(f"futurebridge-{seed}", seed) for seed in seeds]
            stem = "-".join(re.findall(r"[\w.]+", name))[-80:]
            if any(shard.startswith(f"{stem}.") for shard in trials):
                raise ValueError(f"evaluate.benchmarks: expected names that differ, got {name!r} again; rename a file")
            for method, seed in methods:
                for start in range(0, len(problems), size):
                    shard = f"{stem}.{method}.{start // size:05d}"
                    trials[shard] = (name, seed, problems[start : start + size])
        return trials

    def shards(self) -> dict[str, int]:
        return {shard: len(problems) for shard, (_, _, problems) in self._trials().items()}

    def work(self, shard: str) -> Output:
        benchmark, seed, problems = self._trials()[shard]
        tokenizer, device = self.models.tokenizer, self.models.slm.device
        prompts = [self._prompts[benchmark][problem.id] for problem in problems]
        generate = self._generate(benchmark, seed)
        rows = []
        for done, (problem, prompt) in enumerate(zip(problems, prompts, strict=True)):
            self.on_progress(done)
            began = time.perf_counter()
            prompts_now = [torch.tensor(prompt, device=device)]
            generation = generate(prompts_now, self.settings.evaluate.max_new_tokens)[0]
            tokens = generation.token_ids.tolist()  # waits for the device
            seconds = time.perf_counter() - began
            rows.append(
                {
                    "benchmark": benchmark,
                    "problem": problem.id,
                    "prompt_sha256": hashlib.sha256(str(prompt).encode()).hexdigest(),
                    "seed": seed,
                    "tokens": tokens,
                    "events": [asdict(event) for event in generation.events],
                    "text": tokenizer.decode(tokens, skip_special_tokens=True),
                    "gold": problem.answer,
                    "seconds": round(seconds, 4),
                }
            )
        verdicts = verifier_of(self.settings.verify).verify_many(
            [row["text"] for row in rows], [problem.answer for problem in problems]
        )
        for row, verdict in zip(rows, verdicts, strict=True):
            row["verdict"] = verdict
        counts = {"decoded": len(rows), "tokens": sum(len(row["tokens"]) for row in rows)}
        counts |= tally([row["text"] for row in rows], verdicts)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        return Output({f"{shard}.jsonl": lines.encode()}, counts)

    @cached_property
    def _prompts(self) -> dict[str, dict[str, list[int]]]:
        """Token ids by benchmark and problem."""
        tokenizer, template = self.models.tokenizer, self.settings.problems.prompt
        return {
            name: {problem.id: prompt_ids(tokenizer, problem, template) for problem in problems}
            for name, problems in benchmark_problems(self.settings).items()
        }

    def _generate(self, benchmark: str, seed: int | None) -> Generate:
        """A decoder that has been through an event, where there is one early on; the last one is kept."""
        key = (benchmark, seed)
        if self._kept is not None and self._kept[0] == key:
            return self._kept[1]
        self._kept = None  # its memory first
        slm, settings = self.models.slm, self.settings
        prompts = list(self._prompts[benchmark].values())
        longest = max(map(len, prompts)) + settings.evaluate.max_new_tokens
        generate = generator("greedy" if seed is None else "futurebridge", settings, self.run, seed, longest)
        for prompt in prompts[:WARM_UP]:
            if generate([torch.tensor(prompt, device=slm.device)], settings.evaluate.max_new_tokens)[0].events:
                break
        self._kept = (key, generate)
        return generate

    _kept: tuple[tuple[str, int | None], Generate] | None = None

    def summary(self) -> dict[str, Any]:
        """Accuracy with its interval, the difference to greedy, and what it cost, by benchmark and on their average."""
        rows: dict[tuple[str, bool], dict[str, list[dict[str, Any]]]] = {}
        for shard, (benchmark, seed, _) in self._trials().items():
            for line in self.folder.read(shard, "jsonl").splitlines():
                row = json.loads(line)
                rows.setdefault((benchmark, seed is None), {}).setdefault(row["problem"], []).append(row)
        right = {
            cell: [float(np.mean([row["verdict"] == "correct" for row in runs])) for runs in by_problem.values()]
            for cell, by_problem in rows.items()
        }
        table = []
        for name, members in self._shown().items():
            for greedy in (True, False):
                own, plain = ([right[member, kind] for member in members] for kind in (greedy, True))
                decoded = [rows[member, greedy] for member in members]
                flat = [[row for runs in by_problem.values() for row in runs] for by_problem in decoded]
                table.append(
                    {
                        "benchmark": name,
                        "method": "greedy" if greedy else "FutureBridge",
                        "problems": sum(map(len, decoded)),
                        "runs": len(next(iter(decoded[0].values()))),
                        "accuracy": list(statistics.average_interval(own)),
                        "minus greedy": None if greedy else list(statistics.average_interval(own, plain)),
                        "events": float(np.mean([np.mean([len(row["events"]) for row in one]) for one in flat])),
                        "tokens": float(np.mean([np.mean([len(row["tokens"]) for row in one]) for one in flat])),
                    }
                )
        return {"table": table}

    def _shown(self) -> dict[str, list[str]]:
        """The benchmarks of every row: each by itself, and all together where there are several."""
        names = list(benchmark_problems(self.settings))
        return {name: [name] for name in names} | ({AVERAGE: names} if len(names) > 1 else {})

    def report(self, manifest: dict[str, Any]) -> str:
        seconds: dict[tuple[str, bool], list[float]] = {}
        for shard, (benchmark, seed, _) in self._trials().items():
            found = [json.loads(line)["seconds"] for line in self.folder.read(shard, "jsonl").splitlines()]
            seconds.setdefault((benchmark, seed is None), []).extend(found)
        lines = [
            "| benchmark | method | problems x runs | accuracy, % [95%] | minus greedy | events | tokens | seconds a "
            "problem | of greedy |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in manifest["summary"]["table"]:
            greedy, own = (
                float(np.mean([np.mean(seconds[name, kind]) for name in self._shown()[row["benchmark"]]]))
                for kind in (True, row["method"] == "greedy")
            )
            spread = [
                "" if value is None else "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * part for part in value))
                for value in (row["accuracy"], row["minus greedy"])
            ]
            lines.append(
                f"| {row['benchmark']} | {row['method']} | {row['problems']} x {row['runs']} | {' | '.join(spread)} | "
                f"{row['events']:.2f} | {row['tokens']:.1f} | {own:.3f} | {own / greedy:.2f}x |"
            )
        return "\n".join(lines)

    def cost(self) -> Cost:
        return Cost("decoded one prompt at a time", longest_decoded(self))

"""All methods on the same benchmark problems, in batches: what each of them gets right."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from fb_core import hf
from fb_core.methods import EXTERNAL, Generate, method
from fb_core.stages.deploy import generator, label_of
from fb_core.stages.evaluation import ASKED, benchmark_problems, longest_decoded
from fb_core.stages.inputs import DEPLOYED, problems_hash, verifier_of
from fb_core.stages.problems import Problem
from fb_core.stages.router import RouterStage
from fb_core.stages.selection import RerankerStage
from fb_core.stages.stage import Cost, Output, Stage
from fb_core.stages.states import PolicyStage
from fb_core.verify import tally

METHODS = ("compare.methods", "compare.votes", "compare.delimiter", "compare.judge", "train.seeds")
AT_ONCE = 256  # problems of a shard


class Trial(NamedTuple):
    """One method on some problems of a benchmark."""

    benchmark: str
    method: str
    seed: int | None
    problems: Sequence[Problem]


class CompareStage(Stage):
    """A JSONL file for every method, seed and part of a benchmark, a row a problem."""

    name = "comparison"
    command = "experiment"
    slice = (*DEPLOYED, *ASKED, *METHODS, "compare.external")
    uses = ("slm", "llm", "tokenizer")

    def inputs(self) -> Sequence[type[Stage]]:
        methods = self.settings.compare.methods
        routers = (RouterStage,) if any(method(name).routed for name in methods) else ()
        return (PolicyStage, *((RerankerStage,) if "futurebridge" in methods else ()), *routers)

    def data(self) -> dict[str, Any]:
        hashes = {name: problems_hash(problems) for name, problems in benchmark_problems(self.settings).items()}
        return hashes | {"checkpoints": self._checkpoints()}

    def _checkpoints(self) -> dict[str, str]:
        """Hashes of the external ones."""
        try:
            return {name: hf.checkpoint_hash(path) for name, path in self.settings.compare.external.items()}
        except OSError as problem:  # the row cannot be made, the others can
            raise ValueError(f"compare.external: {problem}") from None

    @cached_property
    def _trials(self) -> dict[str, Trial]:
        compare, trials = self.settings.compare, {}
        methods = [*compare.methods, *(EXTERNAL + name for name in compare.external)]
        for benchmark, problems in benchmark_problems(self.settings).items():
            for name in methods:
                for seed in self.settings.train.seeds if method(name).seeded else (None,):
                    for start in range(0, len(problems), AT_ONCE):
                        stem = "-".join(re.findall(r"[\w.]+", f"{benchmark}.{name}"))[-100:]
                        shard = f"{stem}.{'only' if seed is None else seed}.{start // AT_ONCE:05d}"
                        if shard in trials:
                            raise ValueError(
                                "compare: expected benchmarks and methods that differ by letters and digits, got "
                                f"{benchmark!r} and {name!r} again; rename one"
                            )
                        trials[shard] = Trial(benchmark, name, seed, problems[start : start + AT_ONCE])
        return trials

    def shards(self) -> dict[str, int]:
        return {shard: len(trial.problems) for shard, trial in self._trials.items()}

    def work(self, shard: str) -> Output:
        trial, settings, tokenizer = self._trials[shard], self.settings, self.models.tokenizer
        prompts = self.models.prompts(trial.problems, settings.problems.prompt)
        found = self._generate(trial.method, trial.seed)(prompts, settings.evaluate.max_new_tokens)
        texts = [
            tokenizer.decode(one.token_ids.tolist(), skip_special_tokens=True) if one.text is None else one.text
            for one in found
        ]
        golds = [problem.answer for problem in trial.problems]
        verdicts = verifier_of(settings.verify).verify_many(texts, golds, bad_golds="unparsable")
        rows = [
            {
                "benchmark": trial.benchmark,
                "method": trial.method,
                "seed": trial.seed,
                "problem": problem.id,
                "verdict": verdict,
                "tokens": one.token_ids.tolist(),
                "steps": [event.step for event in one.events],
                **one.usage._asdict(),
            }
            for problem, one, verdict in zip(trial.problems, found, verdicts, strict=True)
        ]
        counts = {"decoded": len(rows), "tokens": sum(len(row["tokens"]) for row in rows)}
        counts |= tally(texts, verdicts)
        return Output({f"{shard}.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()}, counts)

    def _generate(self, name: str, seed: int | None) -> Generate:
        """What decodes; the last one is kept."""
        if self._kept is None or self._kept[0] != (name, seed):
            self._kept = None  # its memory first
            self._kept = ((name, seed), generator(name, self.settings, self.run, seed))
        return self._kept[1]

    _kept: tuple[tuple[str, int | None], Generate] | None = None

    def rows(self) -> Iterator[dict[str, Any]]:
        """Of all finished shards."""
        for shard in self._trials:
            yield from (json.loads(line) for line in self.folder.read(shard, "jsonl").splitlines())

    def report(self, manifest: dict[str, Any]) -> str:
        right: dict[tuple[str, str], list[bool]] = {}
        for row in self.rows():
            right.setdefault((row["benchmark"], row["method"]), []).append(row["verdict"] == "correct")
        lines = ["| benchmark | method | accuracy, % | runs |", "|---|---|---|---|"]
        for (benchmark, name), outcomes in right.items():
            accuracy = 100 * sum(outcomes) / len(outcomes)
            lines.append(f"| {benchmark} | {label_of(name, self.settings)} | {accuracy:.1f} | {len(outcomes)} |")
        return "\n".join(lines)

    def cost(self) -> Cost:
        return Cost("decoded in batches", longest_decoded(self))

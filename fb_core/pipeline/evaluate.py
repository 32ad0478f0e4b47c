"""Stage 5: methods on problems, end to end, verified."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar, get_args

import numpy as np
import torch
from torch import Tensor

from fb_core import hf, statistics
from fb_core.decoding import FutureBridgeSelector, Generation, Selector, SLMPreference
from fb_core.pipeline.collect import frozen_policy
from fb_core.pipeline.inputs import problems_hash, read_problems, verifier_of
from fb_core.pipeline.problems import BENCHMARKS, Problem, prompt_ids
from fb_core.pipeline.stage import Output, Stage
from fb_core.policy import RequestPolicy
from fb_core.reranker import TokenReranker
from fb_core.runtime import LowLatencyDecoder
from fb_core.verify import Verdict, Verifier

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """One method on one set of problems.

    Attributes:
        correct: bool [n], problem by problem.
        generations: one a problem.
        seconds: wall time of decoding, verification left out.
    """

    correct: np.ndarray
    generations: list[Generation]
    seconds: float

    @property
    def events(self) -> float:
        """Events a problem, on average."""
        return float(np.mean([len(generation.events) for generation in self.generations]))

    @property
    def new_tokens(self) -> float:
        """Tokens a problem, on average."""
        return float(np.mean([len(generation.token_ids) for generation in self.generations]))


def evaluate(
    generate: Callable[[Sequence[Tensor], int], list[Generation]],
    prompts: Sequence[Tensor],
    golds: Sequence[str],
    tokenizer: hf.Tokenizer,
    verifier: Verifier,
    max_new_tokens: int,
) -> Evaluation:
    """Run `generate` (such as `CollaborativeDecoder.generate_many`) on all prompts and verify what comes out."""
    began = time.perf_counter()
    generations = generate(prompts, max_new_tokens)
    seconds = time.perf_counter() - began
    texts = [tokenizer.decode(g.token_ids.tolist(), skip_special_tokens=True) for g in generations]
    verdicts = verifier.verify_many(texts, golds, bad_golds="unparsable")
    return Evaluation(np.array([verdict == "correct" for verdict in verdicts], dtype=bool), generations, seconds)


class EvaluateStage(Stage):
    """The chosen rerankers and plain greedy decoding on the benchmarks, one prompt at a time, as deployed.

    A shard is a JSONL file with a row a problem. FutureBridge runs once for every seed, and as often as the benchmark
    wants repeats; greedy decoding is deterministic and runs once.
    """

    name = "evaluation"
    reads: ClassVar = {"trajectories": "collect", "reranker": "train"}
    uses = ("slm", "llm", "tokenizer")

    def relevant(self) -> dict[str, Any]:
        settings = self.settings
        return {
            **settings.evaluate.model_dump(),
            "slm_k": settings.collect.slm_k,
            "llm_k": settings.futures.llm_k,
            "prompt": settings.problems.prompt,
            "verify": settings.verify.model_dump(exclude={"workers"}),
            "hash": {name: problems_hash(problems) for name, problems in self._benchmarks.items()},
        }

    @cached_property
    def _benchmarks(self) -> dict[str, list[Problem]]:
        """The problems of every benchmark, those left out whose gold answer is right by no answer, not even itself."""
        settings, verifier = self.settings.evaluate, verifier_of(self.settings.verify)
        found = {}
        for name in settings.benchmarks:
            problems = read_problems(name, settings.limit, "test", self.settings.problems.seed)
            golds = [problem.answer for problem in problems]
            verdicts = verifier.verify_many([f"\\boxed{{{gold}}}" for gold in golds], golds, bad_golds="unparsable")
            found[name] = [p for p, verdict in zip(problems, verdicts, strict=True) if verdict == "correct"]
            if left := len(problems) - len(found[name]):
                log.warning("%s: left out %d problems whose gold answer cannot be judged", name, left)
        return found

    def _trials(self) -> dict[str, tuple[str, int | None, list[Problem]]]:
        """(benchmark, seed of the reranker or None for greedy, problems) of every shard."""
        size, trials = self.settings.evaluate.per_shard, {}
        for name, problems in self._benchmarks.items():
            seeds = self.settings.train.seeds
            known = BENCHMARKS.get(name.partition("=")[0])
            runs = max(len(seeds), 1 if known is None else known.repeats)
            methods: list[tuple[str, int | None]] = [("greedy", None)]
            methods += [(f"futurebridge-{run}", seeds[run % len(seeds)]) for run in range(runs)]
            stem = "-".join(re.findall(r"[\w.]+", name))
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
        prompts = [self._prompt(problem) for problem in problems]
        decoder = self._decoder(seed, max(len(self._prompt(problem)) for problem in self._benchmarks[benchmark]))
        rows = []
        for done, (problem, prompt) in enumerate(zip(problems, prompts, strict=True)):
            self.on_progress(done)
            began = time.perf_counter()
            generation = decoder.generate(torch.tensor(prompt, device=device), self.settings.evaluate.max_new_tokens)
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
        counts |= {verdict: verdicts.count(verdict) for verdict in get_args(Verdict)}
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        return Output({f"{shard}.jsonl": lines.encode()}, counts)

    def _prompt(self, problem: Problem) -> list[int]:
        return prompt_ids(self.models.tokenizer, problem, self.settings.problems.prompt)

    def _decoder(self, seed: int | None, longest_prompt: int) -> LowLatencyDecoder:
        """A warm decoder; the last one is kept."""
        key = (seed, longest_prompt)
        if self._kept is not None and self._kept[0] == key:
            return self._kept[1]
        self._kept = None  # its memory first
        slm, settings = self.models.slm, self.settings
        selector: Selector = SLMPreference()
        policy = RequestPolicy(math.inf)
        if seed is not None:
            folder = self.source("reranker").path / f"seed-{seed}"
            selector, policy = FutureBridgeSelector(TokenReranker.from_pretrained(folder, slm)), frozen_policy(self.run)
        decoder = LowLatencyDecoder(
            slm,
            self.models.llm,
            selector,
            policy,
            max_length=longest_prompt + settings.evaluate.max_new_tokens,
            slm_k=settings.collect.slm_k,
            llm_k=settings.futures.llm_k,
            max_events=settings.evaluate.max_events,
            tokenizer=self.models.tokenizer,
        )
        decoder.generate(torch.tensor(self._prompt(next(iter(self._benchmarks.values()))[0]), device=slm.device), 2)
        self._kept = (key, decoder)
        return decoder

    _kept: tuple[tuple[int | None, int], LowLatencyDecoder] | None = None

    def summary(self) -> dict[str, Any]:
        """Of every benchmark and method accuracy with its interval, the difference to greedy, and what it cost."""
        rows: dict[tuple[str, bool], dict[str, list[dict[str, Any]]]] = {}
        for shard, (benchmark, seed, _) in self._trials().items():
            for line in self.folder.read(shard, "jsonl").splitlines():
                row = json.loads(line)
                rows.setdefault((benchmark, seed is None), {}).setdefault(row["problem"], []).append(row)
        table = []
        for (benchmark, greedy), by_problem in rows.items():
            right = {
                kind: [float(np.mean([row["verdict"] == "correct" for row in runs])) for runs in members.values()]
                for kind, members in ((True, rows[benchmark, True]), (greedy, by_problem))
            }
            flat = [row for runs in by_problem.values() for row in runs]
            table.append(
                {
                    "benchmark": benchmark,
                    "method": "greedy" if greedy else "FutureBridge",
                    "problems": len(by_problem),
                    "runs": len(next(iter(by_problem.values()))),
                    "accuracy": list(statistics.interval(right[greedy])),
                    "minus greedy": None if greedy else list(statistics.paired_interval(right[False], right[True])),
                    "events": float(np.mean([len(row["events"]) for row in flat])),
                    "tokens": float(np.mean([len(row["tokens"]) for row in flat])),
                }
            )
        return {"table": table}

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
                float(np.mean(seconds[row["benchmark"], kind])) for kind in (True, row["method"] == "greedy")
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

    def cost(self) -> str:
        return self.tokens_cost("slm", self.settings.evaluate.max_new_tokens, "decoded one prompt at a time")

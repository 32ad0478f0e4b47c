"""All methods on the same benchmark problems: decoded in batches, and some timed one at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks.paper.methods import generator, method, seed_of
from benchmarks.paper.r2r.stages import RouterStage
from benchmarks.paper.settings import EXTERNAL, PaperSettings
from fb_core.apps.pipeline.choose import RerankerStage
from fb_core.apps.pipeline.collect import PolicyStage
from fb_core.apps.pipeline.decode import ASKED, Decoded, DecodeStage, Loop, Trial
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.pipeline.models import (
    DEPLOYED,
    DEPLOYED_STAGE,
    Generate,
    benchmark_problems,
    file_stem,
    problems_hash,
)
from fb_core.apps.pipeline.problems import Problem, draw_problems
from fb_core.apps.pipeline.run import Stage
from fb_core.models.checkpoints import checkpoint_hash

METHODS = ("compare.methods", "compare.votes", "compare.delimiter", "compare.judge", "compare.recall", "train.seeds")
AT_ONCE = 256  # problems per shard
WARM_UP = 3  # at most so many prompts are decoded before times are taken, so that no time includes one-time work


def chosen_in(run: Path, methods: Sequence[str]) -> dict[str, str]:
    """The digest of the recipe that the run chose, if that is among the methods."""
    return {"deployed": Artefact(run, DEPLOYED_STAGE).finished()["digest"]} if "deployed" in methods else {}


def routers_of(methods: Sequence[str]) -> tuple[type[Stage], ...]:
    """The stage of the routers, if a method needs them."""
    return (RouterStage,) if any(method(name).routed for name in methods) else ()


class CompareStage(DecodeStage):
    """Every method and seed on every benchmark."""

    name = "comparison"
    command = "python -m benchmarks.paper"
    settings: PaperSettings
    slice = (*DEPLOYED, *ASKED, *METHODS, "compare.external")

    @property
    def reads(self) -> Sequence[type[Stage]]:  # type: ignore[override]
        methods = self.settings.compare.methods
        return (PolicyStage, *((RerankerStage,) if "published" in methods else ()), *routers_of(methods))

    def data(self) -> dict[str, Any]:
        hashes = {name: problems_hash(problems) for name, problems in benchmark_problems(self.settings).items()}
        return hashes | {"checkpoints": self._checkpoints()} | chosen_in(self.run, self.settings.compare.methods)

    def _checkpoints(self) -> dict[str, str]:
        """Hashes of the external checkpoints."""
        try:
            return {name: checkpoint_hash(path) for name, path in self.settings.compare.external.items()}
        except OSError as problem:  # as a ValueError it ends only this row
            raise ValueError(f"compare.external: {problem}") from None

    @cached_property
    def trials(self) -> dict[str, Trial]:
        compare, trials = self.settings.compare, dict[str, Trial]()
        methods = [*compare.methods, *(EXTERNAL + name for name in compare.external)]
        for benchmark, problems in benchmark_problems(self.settings).items():
            for name in methods:
                for seed in self.settings.train.seeds if method(name).seeded else (None,):
                    for start in range(0, len(problems), AT_ONCE):
                        stem = file_stem(f"{benchmark}.{name}")
                        shard = f"{stem}.{'only' if seed is None else seed}.{start // AT_ONCE:05d}"
                        if shard in trials:
                            raise ValueError(
                                "compare: expected benchmarks and methods that differ by letters and digits, got "
                                f"{benchmark!r} and {name!r} again; rename one"
                            )
                        trials[shard] = Trial(benchmark, name, seed, "batch", problems[start : start + AT_ONCE])
        return trials

    def generate(self, trial: Trial, max_length: int | None, max_batch: int) -> Generate:
        return generator(trial.method, self.settings, self.run, trial.seed, max_length, max_batch)


class DeploymentStage(DecodeStage):
    """Methods on some problems of every benchmark, one problem at a time.

    "fast" is `LowLatencyDecoder`, "plain" the loop that works for every method. A method is compared with greedy
    decoding in the same loop, problem by problem.
    """

    name = "deployment"
    command = "python -m benchmarks.paper"
    settings: PaperSettings
    slice = (*DEPLOYED, *ASKED, *METHODS, "compare.timed")
    parallel = False

    @property
    def reads(self) -> Sequence[type[Stage]]:  # type: ignore[override]
        return (PolicyStage, RerankerStage, *routers_of(self._methods))

    def data(self) -> dict[str, Any]:
        timed = {name: problems_hash(problems) for name, problems in self._problems.items()}
        return {"timed": timed, "methods": self._methods} | chosen_in(self.run, self._methods)

    @cached_property
    def _problems(self) -> dict[str, list[Problem]]:
        count, seed = self.settings.compare.timed, self.settings.problems.seed
        return {
            name: draw_problems(problems, count, seed) for name, problems in benchmark_problems(self.settings).items()
        }

    @cached_property
    def trials(self) -> dict[str, Trial]:
        return {
            f"{loop}.{name}.{file_stem(benchmark)}": Trial(
                benchmark, name, seed_of(name, self.settings), loop, problems
            )
            for loop in get_args(Loop)
            for name in self._methods
            if loop in method(name).timed
            for benchmark, problems in self._problems.items()
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
        length = max_length if trial.loop == "fast" else None
        return generator(trial.method, self.settings, self.run, trial.seed, length)

    def decode(self, trial: Trial, prompts: Sequence[Tensor]) -> list[Decoded]:
        """The prompts decoded one at a time, each with its time and its peak of memory."""
        generate = self.generator(trial)
        for prompt in prompts[:WARM_UP]:
            if generate([prompt], self.max_new_tokens)[0].events:
                break
        return [self._alone(generate, prompt, done) for done, prompt in enumerate(prompts)]

    def _alone(self, generate: Generate, prompt: Tensor, done: int) -> Decoded:
        self.on_progress(done)
        on_gpu = prompt.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(prompt.device)
        began = time.perf_counter()
        (generation,) = generate([prompt], self.max_new_tokens)
        generation.token_ids.tolist()  # waits for the device
        seconds = round(time.perf_counter() - began, 5)
        return generation, seconds, torch.cuda.max_memory_allocated(prompt.device) if on_gpu else None

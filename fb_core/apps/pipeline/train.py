"""Stage 4, first part: the training of all rerankers of the sweep."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor

from fb_core.apps.pipeline.collect import StateStage, TrajectoryStage
from fb_core.apps.pipeline.files import Artefact, count_all, tensor_bytes
from fb_core.apps.pipeline.futures import FutureStage
from fb_core.apps.pipeline.models import verifier_of
from fb_core.apps.pipeline.records import Examples, Group
from fb_core.apps.pipeline.run import Output, Stage
from fb_core.apps.pipeline.scores import ScoreStage
from fb_core.rerank.reranker import TokenReranker
from fb_core.rerank.training import Optimisation, RerankerRun, Sweep, TrainingGroup, TrainingTrajectory, validate
from fb_core.score.targets import group_targets
from fb_core.verify.verifier import tally_words

CHECKPOINT = re.compile(r"step-(\d{7})")

log = logging.getLogger(__name__)


class TrainStage(Stage):
    """All rerankers of the sweep, one epoch per shard; `step-*` files are checkpoints, removed after the last epoch.

    A seed sets the data order, initialisation and dropout. The horizons of a seed share one sweep, in which every
    trajectory's prefix is computed once; the sweeps advance together, step by step.
    """

    name = "training"
    command = "futurebridge train"
    slice: ClassVar[Sequence[str]] = ("train",)
    reads = (TrajectoryStage, StateStage, FutureStage, ScoreStage)
    unit = "groups"
    parallel = False
    sweep: ClassVar[type[Sweep]] = Sweep

    def shards(self) -> dict[str, int]:
        groups = self.input(ScoreStage).folder.finished()["counts"].get("train groups", 0)
        return {f"epoch-{epoch}": groups for epoch in range(1, self.settings.train.epochs + 1)}

    def most(self) -> int:
        problems = len(self.input(TrajectoryStage).splits["train"])
        return self.settings.train.epochs * problems * self.input(StateStage).settings.collect.max_states

    def runs(self) -> list[tuple[int, int]]:
        """(horizon, seed) of every run, in order."""
        return [(horizon, seed) for seed in self.settings.train.seeds for horizon in self.settings.train.horizons]

    def reranker(self, seed: int) -> TokenReranker:
        """A fresh reranker, initialised by a seed."""
        settings = self.settings.train
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            lora = (settings.rank, settings.lora_alpha, settings.dropout)
            return TokenReranker.from_base(self.models.slm, *lora, scope=settings.scope)

    def reranker_after(self, epoch: int, horizon: int, seed: int) -> TokenReranker:
        """One run's reranker at the end of an epoch."""
        reranker, name = self.reranker(seed), run_name(horizon, seed)
        saved = self.folder.tensors(f"epoch-{epoch}")
        for key, tensor in reranker.tensors().items():
            tensor.data.copy_(saved[f"{name}/{key}"])
        return reranker

    def work(self, shard: str) -> Output:
        epoch, began, groups = int(shard.removeprefix("epoch-")), time.perf_counter(), self.shards()[shard]
        sweeps, seconds = self._sweeps_for(epoch)
        first = sweeps[0]  # all have the same numbers of steps
        end = first.epoch_ends[epoch - 1]
        begin = first.epoch_ends[epoch - 2] if epoch > 1 else 0
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        while first.step < end:
            for sweep in sweeps:
                sweep.advance()
            self.on_progress(round(groups * max(0, first.step - begin) / (end - begin)))
            if first.step == end or first.step % self.settings.train.checkpoint_steps == 0:
                self._checkpoint(sweeps, seconds + processes * (time.perf_counter() - began))
        if not self.is_main:
            return Output({}, {})
        at_once = -(-self.settings.train.groups_per_step // self.settings.train.microbatches)
        runs = [run for sweep in sweeps for run in sweep.runs]
        metrics = validate(runs, self.groups("validation"), at_once)
        losses = [own for sweep in sweeps for own in zip(*sweep.losses[begin:end], strict=True)]
        tensors, lines = dict[str, Tensor](), ""
        for (horizon, seed), run, loss, measured in zip(self.runs(), runs, losses, metrics, strict=True):
            tensors |= {f"{run_name(horizon, seed)}/{name}": x for name, x in run.reranker.tensors().items()}
            row = {"epoch": epoch, "horizon": horizon, "seed": seed, "loss": loss}
            for name, value in measured._asdict().items():
                row[f"validation_{name}"] = None if math.isnan(value) else value
            lines += json.dumps(row) + "\n"
        files = {f"{shard}.safetensors": tensor_bytes(tensors), f"{shard}.jsonl": lines.encode()}
        others = (processes - 1) * (time.perf_counter() - began)
        return Output(files, {"steps": end - begin}, seconds + others)

    def metrics(self) -> list[dict[str, Any]]:
        """What was logged at the end of every epoch, one row per run."""
        return [json.loads(line) for shard in self.shards() for line in self.folder.read(shard, "jsonl").splitlines()]

    def summary(self) -> dict[str, Any]:
        for path in self.folder.path.glob("step-*"):
            path.unlink()
        return {"runs": [run_name(*run) for run in self.runs()]}

    def groups(self, split: str) -> list[TrainingTrajectory]:
        """The groups of a split, with one target column per horizon."""
        device, trajectories = self.models.slm.device, []
        for shard in Artefact(self.run, ScoreStage.name).shards(split):
            groups = list(Examples(self.run, shard, device).groups.values())
            members: dict[str, tuple[Tensor, list[TrainingGroup]]] = {}
            for group, target in zip(groups, self.targets(groups), strict=True):
                trajectory, ids = group.state.trajectory, group.state.pool.ids.to(device)
                own = members.setdefault(trajectory.problem.id, (trajectory.tokens, []))[1]
                own.append(TrainingGroup(group.state.position, ids, target.to(device)))
            trajectories += [TrainingTrajectory(*member) for member in members.values()]
        return trajectories

    def targets(self, groups: Sequence[Group]) -> list[Tensor]:
        """Targets [K, h] of every group."""
        settings = self.settings.train
        return group_targets(
            [group.logprob for group in groups],
            settings.horizons,
            temperature=settings.temperature,
            local=[group.state.pool.llm_logprob for group in groups],
            alpha=settings.alpha,
        )[1]

    def _sweeps_for(self, epoch: int) -> tuple[Sequence[Sweep], float]:
        """(each seed's sweep where an epoch continues, seconds that earlier processes spent on that epoch)."""
        if self._kept and self._kept[0].step <= self._kept[0].epoch_ends[epoch - 1]:
            return self._kept, 0.0
        sweeps, seconds = self._fresh(), 0.0
        for step, name in self._checkpoints():
            if step > sweeps[0].epoch_ends[epoch - 1]:
                continue  # it is past this epoch, which is made anew
            try:
                state, receipt = self.folder.tensors(name), self.folder.receipt(name)
            except ValueError as problem:
                log.warning("%s; resuming from an earlier checkpoint", problem)
                continue
            for place, sweep in enumerate(sweeps):
                own = f"{place}/"
                sweep.load_state({key.removeprefix(own): x for key, x in state.items() if key.startswith(own)})
            seconds = 0.0 if receipt is None else receipt.seconds
            break
        for sweep in sweeps:
            sweep.check_step()
        self._kept = sweeps
        return sweeps, seconds

    _kept: Sequence[Sweep] = ()

    def _fresh(self) -> list[Sweep]:
        """Each seed's sweep before its first step."""
        settings, accelerator = self.settings.train, self._accelerator()  # first, since it sets this process's device
        options = settings.model_dump(include={field.name for field in fields(Optimisation)})
        groups = {split: self.groups(split) for split in ("train", "validation")}
        for split, trajectories in groups.items():
            if not trajectories:
                raise ValueError(self._no_groups(split))
        sweeps = []
        for seed in settings.seeds:
            runs = [RerankerRun(self.reranker(seed), seed, column) for column in range(len(settings.horizons))]
            sweeps.append(self.sweep(runs, groups["train"], Optimisation(**options, seed=seed), accelerator))
        return sweeps

    def _no_groups(self, split: str) -> str:
        """The error message for a split without groups: what its states were lost to, and the remedy."""
        folders = [self.input(kind).folder for kind in (FutureStage, ScoreStage)]
        futures, scored = (count_all(folder.receipts(folder.shards(split)).values()) for folder in folders)
        horizon = self.input(ScoreStage).settings.score.horizon
        settings = self.input(TrajectoryStage).settings
        prompt, form = settings.problems.prompt, verifier_of(settings.verify).judge.form
        remedy = f'check that problems.prompt, "{prompt}", asks for {form}, and that the LLM gives it'
        if not scored["admitted"]:
            remedy = "lower collect.quantile or take more problems"
        elif scored["long_enough"]:
            remedy = "take more candidates (collect.slm_k, futures.llm_k)"
        elif scored["verified"]:
            remedy = (
                f"every right one is shorter than score.horizon {horizon}: lower it and train.horizons with it, delete "
                f"{folders[1].path} and run `{ScoreStage.command}` again, which keeps the futures"
            )
        return (
            f"{self.name}: expected scored groups of the {split} problems, got none of {scored['admitted']} states "
            f"with futures: {tally_words(futures) or 'none'}; {remedy}"
        )

    def _accelerator(self) -> Any:
        """Accelerate's accelerator, if this process is one of several; else None."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return None
        from accelerate import Accelerator, InitProcessGroupKwargs

        patient = InitProcessGroupKwargs(timeout=timedelta(hours=12))  # the others wait while the first one validates
        return Accelerator(cpu=self.models.device == "cpu", kwargs_handlers=[patient])

    def _checkpoints(self) -> list[tuple[int, str]]:
        """(step, shard) of the checkpoints, latest first."""
        names = (CHECKPOINT.fullmatch(path.stem) for path in self.folder.path.glob("step-*.json"))
        return sorted(((int(match[1]), match[0]) for match in names if match), reverse=True)

    def _checkpoint(self, sweeps: Sequence[Sweep], seconds: float) -> None:
        """Write the sweeps' states and remove earlier checkpoints; `seconds` is the epoch's time so far."""
        if not self.is_main:
            return
        before, name = self._checkpoints(), f"step-{sweeps[0].step:07d}"
        if sweeps[0].step in sweeps[0].epoch_ends:
            seconds = 0.0  # they are in the epoch's own receipt
        state = {f"{place}/{key}": x for place, sweep in enumerate(sweeps) for key, x in sweep.state().items()}
        self.folder.put(name, {f"{name}.safetensors": tensor_bytes(state)}, {}, seconds, self.device)
        for _, old in before:
            if old != name:
                (self.folder.path / f"{old}.json").unlink()
                (self.folder.path / f"{old}.safetensors").unlink(missing_ok=True)


def run_name(horizon: int, seed: int) -> str:
    """A run's name in files."""
    return f"h{horizon}-s{seed}"

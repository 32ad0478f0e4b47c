"""Stage 4: the sweep of rerankers, the choice among them on validation problems, and the adapters that are kept."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load

from fb_core.decoding import CollaborativeDecoder, FutureBridgeSelector
from fb_core.pipeline.artefacts import table_bytes, tensor_bytes
from fb_core.pipeline.collect import TrajectoryStage, frozen_policy, read_trajectories
from fb_core.pipeline.evaluate import evaluate
from fb_core.pipeline.inputs import DEMO, splits_of, verifier_of
from fb_core.pipeline.problems import prompt_ids
from fb_core.pipeline.score import filter_table
from fb_core.pipeline.stage import Output, Stage
from fb_core.reranker import TokenReranker
from fb_core.targets import group_targets
from fb_core.training import Recipe, Run, Sweep, TrainingGroup, TrainingTrajectory, validate

CHECKPOINT = re.compile(r"step-(\d{7})")

log = logging.getLogger(__name__)


class TrainStage(Stage):
    """All rerankers of the sweep, an epoch a shard; `step-*` files are checkpoints, which the last epoch removes.

    The seeds share one data order, so that every trajectory's prefix is computed once for all runs; they differ in
    initialisation and dropout.
    """

    name = "training"
    reads: ClassVar = {"trajectories": "collect", "states": "collect", "futures": "futures", "scores": "score"}
    unit = "groups"
    parallel = False

    def relevant(self) -> dict[str, Any]:
        return self.settings.train.model_dump(exclude={"checkpoint_steps"})

    def shards(self) -> dict[str, int]:
        groups = self.source("scores").finished()["counts"].get("train groups", 0)
        return {f"epoch-{epoch}": groups for epoch in range(1, self.settings.train.epochs + 1)}

    def runs(self) -> list[tuple[int, int]]:
        """(horizon, seed) of every run, in order."""
        return [(horizon, seed) for horizon in self.settings.train.horizons for seed in self.settings.train.seeds]

    def reranker(self, seed: int) -> TokenReranker:
        """A fresh one, initialised by a seed."""
        settings = self.settings.train
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return TokenReranker.from_base(self.models.slm, settings.rank, settings.lora_alpha, settings.dropout)

    def trained(self, epoch: int, horizon: int, seed: int) -> TokenReranker:
        """One run's reranker at the end of an epoch."""
        reranker, name = self.reranker(seed), _run_name(horizon, seed)
        found = self.folder.tensors(f"epoch-{epoch}")
        for key, tensor in reranker.tensors().items():
            tensor.data.copy_(found[f"{name}/{key}"])
        return reranker

    def work(self, shard: str) -> Output:
        sweep, epoch = self._sweep, int(shard.removeprefix("epoch-"))
        end = sweep.epoch_ends[epoch - 1]
        if sweep.step > end:  # an earlier epoch is to be made anew
            del self._sweep
            sweep = self._sweep
        begin = sweep.epoch_ends[epoch - 2] if epoch > 1 else 0
        while sweep.step < end:
            sweep.advance()
            self.on_progress(round(self.shards()[shard] * max(0, sweep.step - begin) / (end - begin)))
            if sweep.step < end and sweep.step % self.settings.train.checkpoint_steps == 0:
                self._checkpoint(sweep)
        if not self.leads:
            return Output({}, {})
        self._checkpoint(sweep)
        metrics = [
            {name: None if math.isnan(value) else value for name, value in found._asdict().items()}
            for found in validate(sweep.runs, self.groups("validation"))
        ]
        tensors = {
            f"{_run_name(*key)}/{name}": tensor
            for key, run in zip(self.runs(), sweep.runs, strict=True)
            for name, tensor in run.reranker.tensors().items()
        }
        rows = [
            {
                "epoch": epoch,
                "horizon": horizon,
                "seed": seed,
                "loss": [losses[index] for losses in sweep.losses[begin:end]],
                **{f"validation_{name}": value for name, value in metrics[index].items()},
            }
            for index, (horizon, seed) in enumerate(self.runs())
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        files = {f"{shard}.safetensors": tensor_bytes(tensors), f"{shard}.jsonl": lines}
        return Output(files, {"steps": end - begin})

    def metrics(self) -> list[dict[str, Any]]:
        """What was logged at the end of every epoch, a row a run."""
        return [json.loads(line) for shard in self.shards() for line in self.folder.read(shard, "jsonl").splitlines()]

    def summary(self) -> dict[str, Any]:
        for path in self.folder.path.glob("step-*"):
            path.unlink()
        return {"runs": [_run_name(*run) for run in self.runs()], "order_seed": self.settings.train.order_seed}

    def groups(self, split: str) -> list[TrainingTrajectory]:
        """The scored groups of a split, with a target column for every horizon."""
        settings, device = self.settings.train, self.models.slm.device
        found = []
        for shard in TrajectoryStage(self.settings, self.run).shards():
            if not shard.startswith(split):
                continue
            scores = self.source("scores").tensors(shard)
            used = scores["state"].tolist()
            if not used:
                continue
            states, futures = self.source("states").table(shard), self.source("futures").table(shard)
            sizes = scores["cu_group"].diff().tolist()
            _, targets = group_targets(
                scores["logprob"].split(sizes),
                settings.horizons,
                temperature=settings.temperature,
                local=[torch.tensor(futures[row]["pool_llm_logprob"]) for row in used],
                alpha=settings.alpha,
            )
            members: dict[int, list[TrainingGroup]] = {}
            for row, target in zip(used, targets, strict=True):
                pool = torch.tensor(futures[row]["pool_ids"], device=device)
                group = TrainingGroup(states[row]["position"], pool, target.to(device))
                members.setdefault(states[row]["trajectory"], []).append(group)
            trajectories = read_trajectories(self.source("trajectories"), shard, device)
            found += [TrainingTrajectory(trajectories[index].tokens, groups) for index, groups in members.items()]
        return found

    @cached_property
    def _sweep(self) -> Sweep:
        """The sweep, at its last checkpoint where there is one."""
        settings, accelerator = self.settings.train, _accelerator()  # which sets this process's device
        columns = {horizon: column for column, horizon in enumerate(settings.horizons)}
        runs = [Run(self.reranker(seed), seed, columns[horizon]) for horizon, seed in self.runs()]
        recipe = Recipe(
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            warmup=settings.warmup,
            clip=settings.clip,
            groups_per_step=settings.groups_per_step,
            epochs=settings.epochs,
            seed=settings.order_seed,
            microbatches=settings.microbatches,
        )
        trajectories = self.groups("train")
        if not trajectories:
            raise ValueError(f"{self.name}: expected scored groups to train on, got none; see the counts of the scores")
        sweep = Sweep(runs, trajectories, recipe, accelerator)
        for name in self._checkpoints():
            try:
                sweep.load_state(load(self.folder.read(name, "safetensors")))
                break
            except ValueError as problem:
                log.warning("%s; going on from an earlier one", problem)
        return sweep

    def _checkpoints(self) -> list[str]:
        """Finished checkpoints, the last first."""
        found = (CHECKPOINT.fullmatch(path.stem) for path in self.folder.path.glob("step-*.json"))
        return sorted((match[0] for match in found if match), reverse=True)

    def _checkpoint(self, sweep: Sweep) -> None:
        if not self.leads:
            return
        before, name = self._checkpoints(), f"step-{sweep.step:07d}"
        self.folder.put(name, {f"{name}.safetensors": tensor_bytes(sweep.state())}, {}, 0.0, self.models.device)
        for old in before:
            if old != name:
                (self.folder.path / f"{old}.json").unlink()
                (self.folder.path / f"{old}.safetensors").unlink(missing_ok=True)

    def cost(self) -> str:
        settings = self.settings.train
        return f"{settings.groups_per_step} groups a step for each of {len(self.runs())} runs behind one shared prefix"


class SelectionStage(Stage):
    """Every run and epoch tried end to end on the validation problems; the best horizon and epoch over the seeds."""

    name = "selection"
    reads: ClassVar = {"trajectories": "collect", "training": "train"}
    uses = ("slm", "llm", "tokenizer")

    def relevant(self) -> dict[str, Any]:
        collect, futures = self.settings.collect, self.settings.futures
        return {
            "slm_k": collect.slm_k,
            "llm_k": futures.llm_k,
            "max_events": self.settings.evaluate.max_events,
            "max_new_tokens": collect.max_new_tokens,
            "verify": self.settings.verify.model_dump(exclude={"workers"}),
        }

    def shards(self) -> dict[str, int]:
        return {shard: len(splits_of(self.settings.problems)["validation"]) for shard in self._trials()}

    def _trials(self) -> dict[str, tuple[int, int, int]]:
        """(epoch, horizon, seed) of every shard."""
        return {
            f"epoch-{epoch}-{_run_name(horizon, seed)}": (epoch, horizon, seed)
            for epoch in range(1, self.settings.train.epochs + 1)
            for horizon, seed in TrainStage(self.settings, self.run).runs()
        }

    def work(self, shard: str) -> Output:
        reranker = TrainStage(self.settings, self.run).trained(*self._trials()[shard])
        problems = splits_of(self.settings.problems)["validation"]
        tokenizer, collect = self.models.tokenizer, self.settings.collect
        decoder = CollaborativeDecoder(
            self.models.slm,
            self.models.llm,
            FutureBridgeSelector(reranker),
            frozen_policy(self.run),
            slm_k=collect.slm_k,
            llm_k=self.settings.futures.llm_k,
            max_events=self.settings.evaluate.max_events,
            tokenizer=tokenizer,
            batch_tokens=self.settings.models.batch_tokens,
        )
        device = self.models.slm.device
        prompts = [
            torch.tensor(prompt_ids(tokenizer, problem, self.settings.problems.prompt), device=device)
            for problem in problems
        ]
        found = evaluate(
            decoder.generate_many,
            prompts,
            [problem.answer for problem in problems],
            tokenizer,
            verifier_of(self.settings.verify),
            collect.max_new_tokens,
        )
        columns = {
            "problem": pa.array([problem.id for problem in problems]),
            "correct": pa.array(found.correct),
            "tokens": pa.array([len(one.token_ids) for one in found.generations], pa.int32()),
            "events": pa.array([len(one.events) for one in found.generations], pa.int32()),
        }
        counts = {"decoded": len(problems), "correct": int(found.correct.sum())}
        return Output({f"{shard}.parquet": table_bytes(columns)}, counts)

    def summary(self) -> dict[str, Any]:
        """The table, and what is chosen: the highest accuracy averaged over seeds, ties to the first epoch, horizon."""
        logged = {
            (row["epoch"], row["horizon"], row["seed"]): row for row in TrainStage(self.settings, self.run).metrics()
        }
        cells: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for shard, (epoch, horizon, seed) in self._trials().items():
            correct = [row["correct"] for row in self.folder.table(shard)]
            cells.setdefault((epoch, horizon), []).append(
                {
                    "seed": seed,
                    "accuracy": float(np.mean(correct)),
                    **{
                        name: logged[epoch, horizon, seed][f"validation_{name}"]
                        for name in ("cross_entropy", "pairwise_accuracy")
                    },
                }
            )
        table: list[dict[str, Any]] = [
            {
                "epoch": epoch,
                "horizon": horizon,
                "seeds": seeds,
                **{
                    name: _mean([seed[name] for seed in seeds])
                    for name in ("accuracy", "cross_entropy", "pairwise_accuracy")
                },
            }
            for (epoch, horizon), seeds in cells.items()
        ]
        best = max(table, key=lambda row: row["accuracy"])
        return {"epoch": best["epoch"], "horizon": best["horizon"], "table": table}

    def report(self, manifest: dict[str, Any]) -> str:
        return selection_table(manifest["summary"], len(splits_of(self.settings.problems)["validation"]))

    def cost(self) -> str:
        return self.tokens_cost("slm", self.settings.collect.max_new_tokens, "decoded together with the LLM")


class RerankerStage(Stage):
    """The chosen adapters, a folder a seed: each a PEFT checkpoint with a model card."""

    name = "reranker"
    reads: ClassVar = {"trajectories": "collect", "scores": "score", "training": "train", "selection": "train"}
    unit = "adapters"
    parallel = False

    def relevant(self) -> dict[str, Any]:
        return {"slm": self.settings.models.slm, "llm": self.settings.models.llm}

    def shards(self) -> dict[str, int]:
        return {f"seed-{seed}": 1 for seed in self.settings.train.seeds}

    def work(self, shard: str) -> Output:
        chosen = self.source("selection").finished()["summary"]
        seed = int(shard.removeprefix("seed-"))
        reranker = TrainStage(self.settings, self.run).trained(chosen["epoch"], chosen["horizon"], seed)
        with tempfile.TemporaryDirectory() as folder:
            reranker.save_pretrained(folder)
            files = {f"{shard}/{path.name}": path.read_bytes() for path in sorted(Path(folder).iterdir())}
        files[f"{shard}/README.md"] = self._card(seed, chosen).encode()
        return Output(files, {"adapters": 1})

    def _card(self, seed: int, chosen: dict[str, Any]) -> str:
        models, settings = self.settings.models, self.settings.train
        filters = self.source("scores").finished()["counts"]
        policy = frozen_policy(self.run)
        validation = len(splits_of(self.settings.problems)["validation"])
        names = {"slm": models.slm, "llm": models.llm}
        loading = LOADING.format(**names)
        if models.slm.startswith(DEMO):
            loading = LOADING_DEMO.format(world=models.slm.removeprefix(DEMO))
            names = {role: f"the {role.upper()} of the {name.removeprefix(DEMO)} demo" for role, name in names.items()}
        return CARD.format(
            loading=loading,
            **names,
            base=models.slm,
            horizon=chosen["horizon"],
            epoch=chosen["epoch"],
            seed=seed,
            rank=settings.rank,
            alpha=settings.lora_alpha,
            dropout=settings.dropout,
            rate=settings.learning_rate,
            temperature=settings.temperature,
            groups=settings.groups_per_step,
            threshold=policy.threshold,
            top_k=policy.top_k,
            quantile=self.settings.collect.quantile,
            slm_k=self.settings.collect.slm_k,
            llm_k=self.settings.futures.llm_k,
            max_events=self.settings.evaluate.max_events,
            filters=filter_table(filters),
            selection=selection_table(chosen, validation),
            problems=self.settings.problems.train,
        )

    def cost(self) -> str:
        return "a copy of a trained adapter"


def selection_table(chosen: dict[str, Any], problems: int) -> str:
    """Validation results of every horizon and epoch, the chosen one in bold."""
    lines = []
    for row in chosen["table"]:
        seeds = ", ".join(f"{100 * seed['accuracy']:.1f}" for seed in row["seeds"])
        cells = [
            str(row["horizon"]),
            str(row["epoch"]),
            f"{100 * row['accuracy']:.1f}",
            seeds,
            f"{row['cross_entropy']:.4f}",
            "" if row["pairwise_accuracy"] is None else f"{100 * row['pairwise_accuracy']:.1f}",
        ]
        if (row["epoch"], row["horizon"]) == (chosen["epoch"], chosen["horizon"]):
            cells = [f"**{cell}**" for cell in cells]
        lines.append(f"| {' | '.join(cells)} |")
    head = f"| H | epoch | accuracy, % of {problems} problems | by seed | cross-entropy, nats | pairwise accuracy, % |"
    return "\n".join([head, "|---|---|---|---|---|---|", *lines])


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]  # no pairs to compare, no accuracy
    return float(np.mean(known)) if known else None


def _run_name(horizon: int, seed: int) -> str:
    return f"h{horizon}-s{seed}"


def _accelerator() -> Any:
    """Accelerate's, where this process is one of several."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    from accelerate import Accelerator

    return Accelerator(cpu=not torch.cuda.is_available())


LOADING = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

slm = AutoModelForCausalLM.from_pretrained("{slm}").eval()
llm = AutoModelForCausalLM.from_pretrained("{llm}").eval()
tokenizer = AutoTokenizer.from_pretrained("{slm}")"""

LOADING_DEMO = """\
from fb_core.demo.pairs import load_pair

pair = load_pair("{world}")
slm, llm, tokenizer = pair.slm, pair.llm, pair.world.tokenizer"""

CARD = """\
---
library_name: peft
base_model: {base}
tags: [futurebridge, reranker, lora]
---

# FutureBridge reranker for {slm} with {llm}

A LoRA adapter with a scalar head that scores next-token candidates for {slm}: which of the tokens that it and {llm}
propose at an uncertain step it can best continue from. It was distilled from the log-likelihood of one answer-verified
continuation by {llm} behind every candidate.

```python
from fb_core import CollaborativeDecoder, FutureBridgeSelector, RequestPolicy, TokenReranker
{loading}
reranker = TokenReranker.from_pretrained("path/to/this/folder", slm)
decoder = CollaborativeDecoder(
    slm,
    llm,
    FutureBridgeSelector(reranker),
    RequestPolicy({threshold!r}, top_k={top_k}),
    slm_k={slm_k},
    llm_k={llm_k},
    max_events={max_events},
    tokenizer=tokenizer,
)
```

| | |
|---|---|
| horizon of the future | {horizon} tokens |
| epoch, seed | {epoch}, {seed} |
| adapter | LoRA rank {rank}, alpha {alpha:g}, dropout {dropout:g}, on the candidate token alone |
| training | AdamW {rate:g}, {groups} groups a step, soft targets at temperature {temperature:g} |
| request threshold | {threshold:.6g} nats of the top {top_k}, quantile {quantile:g} on validation |
| problems | {problems} |

## States

{filters}

## Choice on validation problems

{selection}
"""

"""Stage 4, second part: the selection among the sweep's rerankers on validation problems, and the kept adapters."""

from __future__ import annotations

import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fb_core import hf
from fb_core.config import ProblemSettings
from fb_core.demo import DEMO
from fb_core.recipe import Deployed, Recipe
from fb_core.stages.decode import DecodeStage, Trial, read_rows
from fb_core.stages.deploy import Context, Generate, frozen_policy, needs_llm, pool_options
from fb_core.stages.inputs import DEPLOYED
from fb_core.stages.problems import Problem, drawn
from fb_core.stages.scores import ScoreStage, filter_table
from fb_core.stages.stage import Cost, Output, Stage
from fb_core.stages.states import PolicyStage
from fb_core.stages.training import TrainStage, run_name
from fb_core.stages.trajectories import TrajectoryStage


class SelectionStage(DecodeStage):
    """Decodes the validation problems with every reranker of every epoch, and chooses the best horizon and epoch."""

    name = "selection"
    command = "futurebridge train"
    slice = (*DEPLOYED, "selection", "collect.max_new_tokens", "train.epochs", "verify")
    reads = (TrajectoryStage, PolicyStage, TrainStage)
    unit = "decodes"

    @cached_property
    def _problems(self) -> list[Problem]:
        held, few = self.input(TrajectoryStage), self.settings.selection.problems
        validation = held.splits["validation"]
        return validation if few is None else drawn(validation, few, held.settings.problems.seed)

    @cached_property
    def _rerankers(self) -> dict[str, tuple[int, int, int]]:
        """(epoch, horizon, seed) by shard, which is the method's name in the rows."""
        return {
            f"epoch-{epoch}-{run_name(horizon, seed)}": (epoch, horizon, seed)
            for epoch in range(1, self.settings.train.epochs + 1)
            for horizon, seed in self.input(TrainStage).runs()
        }

    @cached_property
    def trials(self) -> dict[str, Trial]:
        return {
            name: Trial("validation", name, seed, "batch", self._problems)
            for name, (_, _, seed) in self._rerankers.items()
        }

    @property
    def asked(self) -> ProblemSettings:
        return self.input(TrajectoryStage).settings.problems

    @property
    def max_new_tokens(self) -> int:
        return self.settings.collect.max_new_tokens

    def generate(self, trial: Trial, max_length: int | None, max_batch: int) -> Generate:
        reranker = self.input(TrainStage).trained(*self._rerankers[trial.method])
        context = Context(self.settings, self.run, max_length=max_length, max_batch=max_batch)
        return context.reranking_decoder(reranker).generate_many

    def summary(self) -> dict[str, Any]:
        """The table and the choice: highest accuracy averaged over seeds; ties go to the first epoch and horizon."""
        logged = {(row["epoch"], row["horizon"], row["seed"]): row for row in self.input(TrainStage).metrics()}
        tried: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for shard, (epoch, horizon, seed) in self._rerankers.items():
            correct = [row.correct for row in read_rows(self.folder, shard)]
            tried.setdefault((epoch, horizon), []).append(
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
            for (epoch, horizon), seeds in tried.items()
        ]
        right = {
            one: round(sum(seed["accuracy"] for seed in seeds) * len(self._problems)) for one, seeds in tried.items()
        }  # whole numbers, so that ties are exact
        best = max(table, key=lambda row: right[row["epoch"], row["horizon"]])
        return {"epoch": best["epoch"], "horizon": best["horizon"], "problems": len(self._problems), "table": table}

    def report(self, manifest: dict[str, Any]) -> str:
        return selection_table(manifest["summary"])

    def cost(self) -> Cost:
        """The LLM reads every token of a decode at most once, and none if it is not asked."""
        words = f"decoded in batches, {len(self._problems)} problems with each of {len(self._rerankers)} rerankers"
        longest = max(self._longest.values(), default=0)
        return Cost(words, longest, llm_tokens=longest if needs_llm(self.settings) else 0)


class RerankerStage(Stage):
    """The chosen adapters, one folder per seed: each is a PEFT checkpoint with a model card."""

    name = "reranker"
    command = "futurebridge train"
    slice = (*DEPLOYED, "train")
    reads = (TrajectoryStage, PolicyStage, ScoreStage, TrainStage, SelectionStage)
    unit = "adapters"
    parallel = False

    def data(self) -> dict[str, Any]:
        return {"slm": self.settings.models.slm, "llm": self.settings.models.llm}  # named in the model cards

    def shards(self) -> dict[str, int]:
        return {f"seed-{seed}": 1 for seed in self.settings.train.seeds}

    def work(self, shard: str) -> Output:
        chosen = self.input(SelectionStage).folder.finished()["summary"]
        seed = int(shard.removeprefix("seed-"))
        reranker = self.input(TrainStage).trained(chosen["epoch"], chosen["horizon"], seed)
        with tempfile.TemporaryDirectory() as folder:
            reranker.save_pretrained(folder)
            self._deployed().save(folder)
            files = {f"{shard}/{path.name}": path.read_bytes() for path in sorted(Path(folder).iterdir())}
        files[f"{shard}/README.md"] = self._card(seed, chosen).encode()
        return Output(files, {"adapters": 1})

    def _deployed(self) -> Deployed:
        """The plain reranker as the run decodes with it."""
        settings = self.settings
        return Deployed(
            Recipe(certainty=settings.evaluate.certainty),
            None,
            frozen_policy(self.run),
            pool_options(settings),
            None,
            self.input(TrajectoryStage).settings.problems.thinking,
        )

    def _card(self, seed: int, chosen: dict[str, Any]) -> str:
        models, settings = self.settings.models, self.settings.train
        filters = self.input(ScoreStage).folder.finished()["counts"]
        policy = frozen_policy(self.run)
        asked = self.input(TrajectoryStage)
        lines = [f"    {name}={value!r}," for name, value in pool_options(self.settings).items()]
        names = {"slm": _public(models.slm), "llm": _public(models.llm)}
        loading = LOADING.format(**names)
        if models.slm.startswith(DEMO):
            loading = LOADING_DEMO.format(world=models.slm.removeprefix(DEMO))
            names = {role: f"the {role.upper()} of the {name.removeprefix(DEMO)} demo" for role, name in names.items()}
        return CARD.format(
            loading=loading,
            **names,
            base=f"base_model: {models.slm}\n" if hf.is_hub_id(models.slm) else "",  # the hub refuses other names
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
            quantile=self.input(PolicyStage).settings.collect.quantile,
            options="\n".join(lines),
            load=", scope='sequence'" if settings.scope == "sequence" else "",
            wrapped=WRAPPED.format(certainty) if (certainty := self.settings.evaluate.certainty) is not None else PLAIN,
            scope="the whole sequence" if settings.scope == "sequence" else "the candidate token alone",
            features=", ".join(settings.features) or "none",
            target=settings.target,
            filters=filter_table(filters),
            selection=selection_table(chosen),
            problems=_public(asked.settings.problems.train),
            thinking="on" if asked.settings.problems.thinking else "off",
        )

    def cost(self) -> Cost:
        return Cost("a copy of a trained adapter")


def _public(name: str) -> str:
    """A hub id or a known name as it is; only the last part of a path, since cards are published."""
    return name if hf.is_hub_id(name) else Path(name).name


def selection_table(chosen: dict[str, Any]) -> str:
    """Validation results of every horizon and epoch in Markdown, the chosen one in bold."""
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
    accuracy = f"accuracy, % of {chosen['problems']} problems"
    head = f"| H | epoch | {accuracy} | by seed | cross-entropy, nats | pairwise accuracy, % |"
    return "\n".join([head, "|---|---|---|---|---|---|", *lines])


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]  # None: there are no pairs to compare
    return float(np.mean(known)) if known else None


PLAIN = "FutureBridgeSelector(reranker)"
WRAPPED = "CertainLLM(FutureBridgeSelector(reranker), {})"

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
{base}tags: [futurebridge, reranker, lora]
---

# FutureBridge reranker for {slm} with {llm}

A LoRA adapter with a scalar head that scores next-token candidates for {slm}. The score says how well {slm} can
continue from a token that it or {llm} proposes at an uncertain step. It was distilled from the log-likelihood of one
answer-verified continuation by {llm} after every candidate.

```python
from fb_core import CertainLLM, CollaborativeDecoder, FutureBridgeSelector, RequestPolicy, TokenReranker
{loading}
reranker = TokenReranker.from_pretrained("path/to/this/folder", slm{load})
decoder = CollaborativeDecoder(
    slm,
    llm,
    {wrapped},
    RequestPolicy({threshold!r}, top_k={top_k}),
{options}
    tokenizer=tokenizer,
)
```

| | |
|---|---|
| horizon of the future | {horizon} tokens |
| epoch, seed | {epoch}, {seed} |
| adapter | LoRA rank {rank}, alpha {alpha:g}, dropout {dropout:g}, on {scope}; candidate features: {features} |
| training | AdamW {rate:g}, {groups} groups per step, target "{target}", temperature {temperature:g} |
| request threshold | {threshold:.6g} nats over the top {top_k}, the {quantile:g} quantile on validation problems |
| problems | {problems}, asked with thinking {thinking} |

## States

{filters}

## Selection on validation problems

{selection}
"""

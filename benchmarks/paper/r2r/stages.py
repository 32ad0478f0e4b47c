"""R2R inside a run: labels from the LLM's own solutions, and one router per seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from torch import Tensor

from benchmarks.paper.r2r.network import R2RRouter, router_features
from benchmarks.paper.r2r.training import divergence_labels, recall_threshold, train_router
from benchmarks.paper.settings import PaperSettings
from fb_core.apps.pipeline.files import Artefact, table_bytes, tensor_bytes
from fb_core.apps.pipeline.models import Models, problems_hash, splits_of, verifier_of
from fb_core.apps.pipeline.problems import Problem
from fb_core.apps.pipeline.records import IDS
from fb_core.apps.pipeline.run import Output, Stage

LABELS = {"prompt": IDS, "solution": IDS, "differs": pa.list_(pa.bool_()), "divergent": pa.list_(pa.bool_())}
WEIGHTS = "router."  # before the names of its weights in a shard
HELD_OUT = 5  # every fifth solution is held out to set the threshold


class RouterLabelStage(Stage):
    """The LLM's solutions of training problems, and the steps at which the SLM's token would cost the right answer."""

    name = "router-labels"
    command = "python -m benchmarks.paper"
    settings: PaperSettings
    slice = ("problems", "futures.max_new_tokens", "compare.router.problems", "verify")
    uses = ("slm", "llm", "tokenizer")

    def data(self) -> dict[str, Any]:
        return {"train": problems_hash(self._problems())}

    def _problems(self) -> list[Problem]:
        return splits_of(self.settings.problems)["train"][: self.settings.compare.router.problems]

    def _parts(self) -> dict[str, list[Problem]]:
        problems, size = self._problems(), self.settings.problems.per_shard
        return {f"part-{start // size:05d}": problems[start : start + size] for start in range(0, len(problems), size)}

    def shards(self) -> dict[str, int]:
        return {shard: len(problems) for shard, problems in self._parts().items()}

    def work(self, shard: str) -> Output:
        problems, models, room = self._parts()[shard], self.models, self.settings.futures.max_new_tokens
        prompts = models.prompts(problems, self.settings.problems)
        solutions = models.llm.complete_many([prompt.to(models.llm.device) for prompt in prompts], room)
        pairs = [(prompt, new.to(models.slm.device)) for prompt, new in zip(prompts, solutions, strict=True)]
        golds = [problem.answer for problem in problems]
        verifier = verifier_of(self.settings.verify)
        divergences = divergence_labels(models.slm, models.llm, pairs, golds, models.tokenizer, verifier, room)
        rows = [
            {
                "prompt": prompt.tolist(),
                "solution": new.tolist(),
                "differs": labels.differs.tolist(),
                "divergent": labels.divergent.tolist(),
            }
            for prompt, new, labels in zip(prompts, solutions, divergences, strict=True)
        ]
        counts = {
            "solutions": len(divergences),
            "tokens": sum(len(new) for new in solutions),
            "differing": sum(int(labels.differs.sum()) for labels in divergences),
            "divergent": sum(int(labels.divergent.sum()) for labels in divergences),
        }
        return Output({f"{shard}.parquet": table_bytes(rows, LABELS)}, counts)

    def most_tokens(self) -> int:
        prompt = self.models.longest_prompt(self._problems(), self.settings.problems)
        return prompt + self.settings.futures.max_new_tokens


class RouterStage(Stage):
    """The trained routers, one folder per seed, with what they say of the held-out solutions."""

    name = "router"
    command = "python -m benchmarks.paper"
    settings: PaperSettings
    slice = ("compare.router", "train.seeds")
    reads = (RouterLabelStage,)
    unit = "routers"
    parallel = False

    @property
    def _seeds(self) -> tuple[int, ...]:
        return self.settings.train.seeds

    def shards(self) -> dict[str, int]:
        return {f"seed-{seed}": 1 for seed in self._seeds}

    def work(self, shard: str) -> Output:
        slm, settings, seed = self.models.slm, self.settings.compare.router, int(shard.removeprefix("seed-"))
        labels = self.input(RouterLabelStage).folder
        rows = [row for part in labels.shards() for row in labels.table(part)]
        pairs = [
            (torch.tensor(row["prompt"], device=slm.device), torch.tensor(row["solution"], device=slm.device))
            for row in rows
        ]
        features = router_features(slm, pairs, vocabulary=self.models.vocabulary)
        divergent = [torch.tensor(row["divergent"], dtype=torch.bool) for row in rows]
        router = R2RRouter(slm, width=settings.width, blocks=settings.blocks, seed=seed).to(slm.device)
        held = set(range(HELD_OUT - 1, len(rows), HELD_OUT))
        trained = [index for index in range(len(rows)) if index not in held]
        train_router(
            router,
            [features[index] for index in trained],
            [divergent[index] for index in trained],
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            seed=seed,
        )
        judged: list[Tensor] = [router.probability(features[index]).cpu() for index in sorted(held)]
        actual = torch.cat([divergent[index] for index in sorted(held)])
        probability = torch.cat(judged)
        recall_threshold(probability, actual)  # raises here if no held-out token is divergent
        tensors = {"probability": probability, "divergent": actual, **router.state_dict(prefix=WEIGHTS)}
        return Output({f"{shard}.safetensors": tensor_bytes(tensors)}, {"routers": 1})


class Router(NamedTuple):
    """A trained router, and the probability from which it routes to the LLM."""

    network: R2RRouter
    threshold: float


def read_router(run: Path, models: Models, seed: int, recall: float) -> Router:
    """The router of a seed with the threshold of a recall; raises ValueError if it is not finished or is damaged."""
    folder, shard = Artefact(run, RouterStage.name), f"seed-{seed}"
    if folder.receipt(shard) is None:
        raise ValueError(f"{folder.path}: expected {shard}, got none; run `python -m benchmarks.paper tables methods`")
    tensors = folder.tensors(shard)
    weights = {name.removeprefix(WEIGHTS): value for name, value in tensors.items() if name.startswith(WEIGHTS)}
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    network = R2RRouter(models.slm, width=len(weights["projection.weight"]), blocks=len(blocks))
    network.load_state_dict(weights)
    threshold = recall_threshold(tensors["probability"], tensors["divergent"], recall)
    return Router(network.to(models.slm.device).eval(), threshold)

"""The calibrated target: six weights fitted to the rollouts of some training states, one fit per horizon."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fb_core.calibrated import Weights, calibrate, calibration_terms
from fb_core.stages.artefacts import Artefact
from fb_core.stages.examples import Examples, Group
from fb_core.stages.rollouts import RolloutStage
from fb_core.stages.scores import ScoreStage
from fb_core.stages.stage import Cost, Output, Stage


class CalibrationStage(Stage):
    """The weights theta for every horizon of the sweep, with the number of states that they were fitted to."""

    name = "calibration"
    command = "futurebridge train"
    slice = ("train.horizons", "rollouts.minimum_mixed")
    reads = (ScoreStage, RolloutStage)
    unit = "horizons"
    parallel = False

    @property
    def on_gpu(self) -> bool:
        return False

    @property
    def device(self) -> str:
        return "cpu"

    def shards(self) -> dict[str, int]:
        return {f"h{horizon}": 1 for horizon in self.settings.train.horizons}

    def work(self, shard: str) -> Output:
        horizon = int(shard.removeprefix("h"))
        terms, outcomes = rolled_out_terms(self.run, horizon)
        found = calibrate(terms, outcomes, minimum_mixed=self.settings.rollouts.minimum_mixed)
        line = json.dumps(found._asdict() | {"theta": found.theta._asdict()}) + "\n"
        return Output({f"{shard}.jsonl": line.encode()}, {"states": found.states, "mixed": found.mixed})

    def summary(self) -> dict[str, Any]:
        return {shard: json.loads(self.folder.read(shard, "jsonl")) for shard in self.shards()}

    def report(self, manifest: dict[str, Any]) -> str:
        least = self.settings.rollouts.minimum_mixed
        lines = [f"| horizon | mixed states (at least {least}) | all states | loss before and after, nats |"]
        lines[0] += "".join(f" {name} |" for name in Weights._fields)
        lines.append("|---" * (4 + len(Weights._fields)) + "|")
        for shard, found in manifest["summary"].items():
            numbers = " | ".join(f"{found['theta'][name]:+.2f}" for name in Weights._fields)
            loss = f"{found['loss_before']:.3f} to {found['loss_after']:.3f}"
            lines.append(f"| {shard[1:]} | {found['mixed']} | {found['states']} | {loss} | {numbers} |")
        return "\n".join(lines)

    def cost(self) -> Cost:
        return Cost("fitted on the CPU")


def rolled_out_terms(run: Path, horizon: int) -> tuple[list[Tensor], list[Tensor]]:
    """(terms [K, 6], outcomes bool [K]) per training state of which all scored candidates were rolled out."""
    terms: list[Tensor] = []
    outcomes: list[Tensor] = []
    for shard in Artefact(run, RolloutStage.name).shards("train"):
        examples = Examples(run, shard)
        for state, rolled in examples.rollouts.items():
            known = dict(zip(rolled.state.pool.ids.tolist(), rolled.correct.tolist(), strict=True))
            group = examples.groups.get(state)
            if group is not None and known.keys() >= set(scored := group.state.pool.ids.tolist()):
                terms.append(terms_of(group, horizon))
                outcomes.append(torch.tensor([known[token] for token in scored]))
    return terms, outcomes


def terms_of(group: Group, horizon: int) -> Tensor:
    """The six terms [K, 6] of a state's candidates."""
    pool = group.state.pool
    return calibration_terms(group.compatibility(horizon), pool.llm_logprob, pool.slm_logprob)


def read_weights(run: Path, horizons: Sequence[int]) -> list[Weights]:
    """The weights of every horizon; raises ValueError if the calibration is not finished."""
    summary = Artefact(run, CalibrationStage.name).finished()["summary"]
    return [Weights(**summary[f"h{horizon}"]["theta"]) for horizon in horizons]

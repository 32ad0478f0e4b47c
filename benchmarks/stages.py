"""The throughput of each stage of a run, and scoring against a loop: `python -m benchmarks.stages`."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from fb_core import BranchGroup
from fb_core.apps.pipeline.collect import TrajectoryStage
from fb_core.apps.pipeline.commands import COMMANDS, run_command, stages_of
from fb_core.apps.pipeline.page import markdown_table
from fb_core.apps.pipeline.records import Examples
from fb_core.apps.settings.run import RunSettings
from fb_core.models.facts import CausalLM

GROUPS = 100  # scored one candidate at a time
UNITS = {
    "trajectories": "trajectories",
    "states": "states",
    "futures": "futures",
    "scores": "valid_group",
    "training": "steps",
    "selection": "decoded",
    "evaluation": "decoded",
}


def rates(settings: RunSettings, run: Path) -> list[dict[str, Any]]:
    """Units, tokens and seconds of every finished stage, from its manifest."""
    rows = []
    for stage in (kind.name for command in COMMANDS for kind in stages_of(command, settings)):
        if stage in UNITS and (path := run / stage / "manifest.json").is_file():
            manifest = json.loads(path.read_text())
            counts, seconds = manifest["counts"], manifest["cost"]["seconds"]
            row = {"stage": stage, "unit": UNITS[stage].replace("valid_group", "groups"), "seconds": seconds}
            rows.append({**row, "units": counts[UNITS[stage]], "tokens": counts.get("tokens")})
    return rows


def logged_groups(settings: RunSettings, run: Path) -> list[tuple[Tensor, BranchGroup]]:
    """(trajectory, group) of the run's first scored states."""
    groups = []
    for shard in TrajectoryStage(settings, run).shards():
        examples = Examples(run, shard)
        futures = examples.futures()
        for name, scored in examples.groups.items():
            state, future = scored.state, futures[name].tokens[: settings.score.horizon]
            groups.append((state.trajectory.tokens, BranchGroup(state.position, state.pool.ids, future)))
    return groups[:GROUPS]


@torch.no_grad()
def one_candidate_at_a_time(model: CausalLM, tokens: Tensor, group: BranchGroup, valid_vocab: int) -> Tensor:
    """[K, H] by a full forward of the model for every candidate, with logits of the future only."""
    rows = []
    for candidate in group.candidates:
        ids = torch.cat([tokens[: group.position], candidate[None], group.future[:-1]])
        logits = model(input_ids=ids[None], use_cache=False, logits_to_keep=len(group.future)).logits[0]
        rows.append(logits[:, :valid_vocab].float().log_softmax(-1).gather(1, group.future[:, None])[:, 0])
    return torch.stack(rows)


def scoring(settings: RunSettings, run: Path) -> dict[str, Any]:
    """Groups per second with packed trajectories and with the loop, on the same groups; both must agree."""
    stage, groups = TrajectoryStage(settings, run), logged_groups(settings, run)
    model, scorer = stage.models.slm, stage.models.scorer
    packed: dict[int, tuple[Tensor, list[BranchGroup]]] = {}
    for tokens, group in groups:
        packed.setdefault(id(tokens), (tokens, []))[1].append(group)
    valid = scorer.valid_vocab

    def in_packs() -> list[Tensor]:
        return [matrix for scores in scorer.score_trajectories(list(packed.values())) for matrix in scores]

    def in_a_loop() -> list[Tensor]:
        return [one_candidate_at_a_time(model, tokens, group, valid) for tokens, group in groups]

    worst = max(float((a - b).abs().max()) for a, b in zip(in_packs(), in_a_loop(), strict=True))
    if worst > 1e-3:
        raise ValueError(f"scores: expected both ways to agree, got a difference of {worst}; do not time them")
    seconds = harness.in_turn({"packed": in_packs, "loop": in_a_loop}, 3)
    return {"groups": len(groups), "worst_difference": worst, **{name: min(times) for name, times in seconds.items()}}


def table(result: dict[str, Any]) -> list[str]:
    """The result in Markdown."""
    rows = []
    for row in result["stages"]:
        rates = [row[name] / row["seconds"] if row[name] else None for name in ("units", "tokens")]
        shown = (f"{rates[0]:.1f}", "" if rates[1] is None else f"{rates[1]:,.0f}")
        rows.append([row["stage"], f"{row['units']:,} {row['unit']}", f"{row['seconds']:.1f}", *shown])
    times = result["scoring"]
    return [
        f"*`{result['config']}`, {result['device']}, torch {result['torch']}, commit "
        f"{harness.shown_commit(result)}, {result['date']}*",
        "",
        *markdown_table(["stage", "units", "seconds", "units/s", "tokens/s"], rows),
        "",
        f"{times['groups']} of these groups: {times['groups'] / times['packed']:,.0f} per second packed by trajectory, "
        f"{times['groups'] / times['loop']:,.0f} per second with a full forward pass for every candidate, "
        f"**{times['loop'] / times['packed']:.1f}x** (both agree to {times['worst_difference']:.0e} nats).",
    ]


def main() -> None:
    """Run a configuration from scratch, or read a finished run, and print the throughput of each stage."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--run", type=Path, help="a finished run; a new one in a temporary folder if left out")
    parser.add_argument("--write", action="store_true", help="also write benchmarks/results/stages/<device>.json")
    given = parser.parse_args()
    settings = RunSettings.load(given.config)
    with tempfile.TemporaryDirectory() as folder:
        run = given.run or Path(folder)
        if given.run is None:
            for command in COMMANDS:
                run_command(command, settings, run)
        result = {
            **harness.machine(),
            "config": given.config,
            "stages": rates(settings, run),
            "scoring": scoring(settings, run),
        }
    print("\n".join(table(result)))
    if given.write:
        harness.write_result("stages", result)


if __name__ == "__main__":
    main()

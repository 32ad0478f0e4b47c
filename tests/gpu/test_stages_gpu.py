"""The commands of a run with both models on a GPU: they end, and what is made again has the same bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from gpu_checks import DEVICE

from benchmarks.paper.gather import gather
from benchmarks.paper.run import run_tables
from benchmarks.paper.settings import PaperSettings
from fb_core.apps.demo.pairs import load_pair
from fb_core.apps.pipeline.commands import COMMANDS, run_command
from fb_core.apps.pipeline.files import Artefact
from fb_core.apps.settings.base import change

pytestmark = pytest.mark.gpu
AGAIN = {  # a shard of each stage whose bytes depend on its inputs alone
    "trajectories": "train-00001",
    "states": "train-00001",
    "futures": "validation-00000",
    "scores": "train-00000",
    "selection": "epoch-1-h8-s1",
}


def pair_on_disk(folder: Path, device: str, dtype: str, count: int = 70) -> PaperSettings:
    """The demo's pair as ordinary checkpoints, and problems of its world."""
    pair, names = load_pair("plans"), {}
    for role, model in (("slm", pair.slm), ("llm", pair.llm)):
        names[role] = str(folder / role)
        model.to(getattr(torch, dtype)).save_pretrained(names[role])
        pair.world.tokenizer.save_pretrained(names[role])
    problems = folder / "problems.jsonl"
    rows = [{"problem": p.prompt, "answer": p.answer} for p in pair.world.problems(count, 0, "train")]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PaperSettings.model_validate(
        {
            "models": {**names, "device": device, "dtype": dtype},
            "problems": {
                "train": str(problems),
                "held_out": [],
                "validation": 10,
                "prompt": "{problem}",
                "per_shard": 10,
            },
            "collect": {"max_new_tokens": 45, "quantile": 0.9, "slm_k": 3},
            "futures": {"max_new_tokens": 45, "llm_k": 3},
            "score": {"horizon": 8},
            "train": {"horizons": [8], "seeds": [0, 1], "epochs": 1, "checkpoint_steps": 2, "microbatches": 2},
            "rollouts": {"train": 1.0},
            "evaluate": {"benchmarks": [str(problems)], "limit": 8, "max_new_tokens": 45},
            "compare": {
                "votes": 2,
                "delimiter": ". ",
                "judge": "=",
                "timed": 4,
                "router": {"problems": 60, "width": 16, "blocks": 1, "epochs": 2},
            },
            "experiment": {"alphas": [], "temperatures": [], "quantiles": []},
            "verify": {"workers": 1},
        }
    )


def run_and_repeat(folder: Path, device: str, dtype: str, count: int = 70) -> None:
    """All commands; then some shards are made again."""
    settings, run = pair_on_disk(folder, device, dtype, count), folder / "run"
    for command in COMMANDS:
        run_command(command, settings, run)
    before = {stage: shard_bytes(run, stage, shard) for stage, shard in AGAIN.items()}
    for stage, shard in AGAIN.items():
        (run / stage / f"{shard}.json").unlink()
    for command in COMMANDS:
        run_command(command, settings, run)
    assert {stage: shard_bytes(run, stage, shard) for stage, shard in AGAIN.items()} == before
    manifest = Artefact(run, "evaluation").finished()
    assert manifest["counts"]["decoded"] == 40
    assert (manifest["cost"]["gpu_hours"] > 0) == (device != "cpu")


def experiments(folder: Path, device: str, dtype: str, changes: dict[str, dict[str, object]]) -> None:
    """Peers and costs, and all that they are held against, in this process."""
    settings, run = change(pair_on_disk(folder, device, dtype), changes), folder / "run"
    run_tables(["methods", "costs"], settings, run, workers=1)
    made = gather(settings, run)
    rows = {(row.table, row.label) for row in made.results if row.accuracy}
    labels = {label for table, label in rows if table == "methods"}
    assert labels >= {"Greedy", "R2R", "SpecReason", "Published recipe"}
    timed = made.timed
    assert {row.loop for row in timed} == {"fast", "plain"}
    assert all((row.peak_bytes is None) == (device == "cpu") for row in timed)


def shard_bytes(run: Path, stage: str, shard: str) -> str:
    files = [path for path in (run / stage).glob(f"{shard}.*") if path.suffix != ".json"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_commands(tmp_path: Path, dtype: str) -> None:
    run_and_repeat(tmp_path, DEVICE, dtype)


def test_experiments(tmp_path: Path) -> None:
    experiments(tmp_path, DEVICE, "bfloat16", {})

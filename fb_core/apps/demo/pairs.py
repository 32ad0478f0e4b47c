"""The demo's model pairs: real Qwen3 models of a few hundred thousand parameters, shipped with the package.

`load_pair` reads the shipped weights; `retrain` makes them again from scratch. A model's accuracy depends on its corpus
and its training length, not on its size: the SLM's training stops when it can work a step out but not yet guess it.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

import torch
from numpy.random import SeedSequence, default_rng
from safetensors.torch import save
from transformers import Qwen3Config, Qwen3ForCausalLM, get_scheduler

from fb_core._util import write_file
from fb_core.apps.demo import DEMO, MODELS, Part, checkpoint
from fb_core.apps.demo.worlds import WORLDS, World, WorldProblem
from fb_core.apps.processes import processes
from fb_core.models.checkpoints import load_model

Progress = Callable[[tuple[str, int, int]], None]
"""Called with (model name, training steps done, training steps in all)."""

BATCH, WARMUP = 32, 100


@dataclass
class DemoPair:
    """A world with its two frozen models, float32 and in eval mode."""

    world: World
    slm: Qwen3ForCausalLM
    llm: Qwen3ForCausalLM


@dataclass(frozen=True)
class Pretraining:
    """How one model is trained."""

    hidden: int
    layers: int
    steps: int
    learning_rate: float


# Steps were chosen on role "validation": the SLMs' steps set the gap, the LLMs' steps suffice for about 100%.
RECIPES: dict[str, Pretraining] = {
    "plans-llm": Pretraining(96, 3, 1200, 3e-3),
    "plans-slm": Pretraining(64, 3, 2400, 2e-3),
    "control-llm": Pretraining(64, 3, 2000, 4e-3),
    "helpful-llm": Pretraining(96, 3, 1300, 3e-3),
    "style-slm": Pretraining(64, 3, 1450, 3e-3),
}


def load_pair(name: str, directory: Path | None = None) -> DemoPair:
    """The pair of a world ("plans", "helpful" or "control"), from the package or a directory written by `retrain`."""
    shipped = (checkpoint(f"{DEMO}{name}", part) for part in get_args(Part))
    slm, llm = (
        load_model(str(folder), "cpu", "float32")[0]
        for folder in (shipped if directory is None else folders(name, directory))
    )
    return DemoPair(WORLDS[name], slm, llm)


def folders(name: str, directory: Path) -> tuple[Path, Path]:
    """The folders of a world's SLM and LLM, as `retrain` writes them."""
    return directory / MODELS[name, "slm"], directory / MODELS[name, "llm"]


def retrain(
    directory: Path,
    seed: int = 0,
    worlds: Collection[str] = tuple(WORLDS),
    progress: Progress | None = None,
    workers: int = 2,
) -> None:
    """Train every model of `worlds` from scratch into `directory`, one checkpoint each; `load_pair` reads them.

    Each model is trained by one thread of a process, seeded by `seed` and its name, so the files do not depend on the
    number of processes.
    """
    if unknown := set(worlds) - set(WORLDS):
        raise ValueError(f"retrain: expected worlds among {', '.join(WORLDS)}, got {sorted(unknown)}; leave those out.")
    names = {MODELS[world, part]: None for part in get_args(Part) for world in worlds}  # SLMs first
    with get_context("spawn").Manager() as manager, processes(workers, __name__) as pool:
        steps: Any = manager.Queue()
        of = {
            model: (WORLDS[world], part) for (world, part), model in reversed(MODELS.items())
        }  # a model's first world
        jobs = [pool.submit(train_model, *of[name], name, RECIPES[name], directory, seed, steps.put) for name in names]
        while not (finished := all(job.done() for job in jobs)) or not steps.empty():
            with suppress(queue.Empty):
                step = steps.get(timeout=0 if finished else 0.2)
                if progress is not None:
                    progress(step)
        for job in jobs:
            job.result()


def train_model(
    world: World, part: Part, name: str, recipe: Pretraining, directory: Path, seed: int, progress: Progress
) -> None:
    """Train one model on its own stream of fresh examples and save it in float16, without a copy of the tied head."""
    model_seed = int(SeedSequence([seed, *name.encode()]).generate_state(1)[0])
    torch.manual_seed(model_seed)
    model = Qwen3ForCausalLM(_config(world, recipe))
    optimizer = torch.optim.AdamW(model.parameters(), recipe.learning_rate, fused=True)
    schedule = get_scheduler(
        "cosine_with_min_lr", optimizer, WARMUP, recipe.steps, scheduler_specific_kwargs={"min_lr_rate": 0.05}
    )
    rng = default_rng(model_seed)
    problems = world.problems(recipe.steps * BATCH, model_seed, "pair")
    for step in range(recipe.steps):
        batch = problems[step * BATCH : (step + 1) * BATCH]
        ids, labels = _collate(world, batch, [world.example(problem, part, rng) for problem in batch])
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress((name, step + 1, recipe.steps))
    weights = {key: value for key, value in model.half().state_dict().items() if key != "lm_head.weight"}
    (directory / name).mkdir(parents=True, exist_ok=True)
    model.config.to_json_file(directory / name / "config.json")
    write_file(directory / name / "model.safetensors", save(weights, metadata={"format": "pt"}))
    world.tokenizer.save_pretrained(directory / name)


def _config(world: World, recipe: Pretraining) -> Qwen3Config:
    tokenizer = world.tokenizer
    return Qwen3Config(
        architectures=[Qwen3ForCausalLM.__name__],
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=3 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.hidden // 16,
        num_key_value_heads=recipe.hidden // 32,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=recipe.hidden**-0.5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,  # the files have half of that
    )


def _collate(
    world: World, problems: Sequence[WorldProblem], solutions: Sequence[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts and solutions padded to one length; labels cover the solutions only."""
    start = len(problems[0].prompt_ids)
    shape = (len(problems), start + max(map(len, solutions)))
    ids, labels = torch.full(shape, world.tokenizer.pad_token_id), torch.full(shape, -100)
    for row, (problem, solution) in enumerate(zip(problems, solutions, strict=True)):
        end = start + len(solution)
        ids[row, :end] = torch.tensor([*problem.prompt_ids, *solution])
        labels[row, start:end] = ids[row, start:end]
    return ids, labels

"""Makes the pair: SmolLM2-135M-Instruct fine-tuned, and 22 of its 30 layers healed, each on one writer's solutions.

`python make_pair.py large BASE FOLDER` makes the large model from the folder that `pretrained_model.py` wrote. Then
`python make_pair.py small LARGE FOLDER` makes the small one from the large, and `control` one whose words say nothing
about the style. An interrupted run continues from its last checkpoint; a finished model is left as it is.

Each weight takes 2 operations per token forward and 4 backward. The large model has 106 million weights in its layers
and 28 million in its head. The head is frozen and acts only on the solution's tokens, about 60%: 0.70 GFLOP per token.
On one core of an AMD EPYC of 2024, float32 products run at 80 GFLOP/s and bfloat16 products at about 200; training runs
at 280 tokens per second for the large model and 380 for the small. So products are in bfloat16 and weights in float32.
Sequences have 80 to 110 tokens, and a batch has sequences of similar length. 260 steps of 8 problems are 200 thousand
tokens: 12 minutes; 160 steps of the small model are 105 thousand: 5 minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import problems
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fb_core import LocalLLM, Verifier

# The base model's chat template, without its default system message.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WARMUP, SORTED_TOGETHER, CHECKPOINT_STEPS = 20, 8, 50
PRODUCT = re.compile(r"(?P<careful>and \d+\+\d+=\d+, )?(?P<left>\d)\*(?P<right>\d[1-9])=(?P<value>\d+)")


@dataclass(frozen=True)
class Healing:
    """How one model is made.

    Attributes:
        writer: whose solutions it learns.
        layers: indices of the source model's layers that are kept.
        steps: of `batch` problems each, none seen twice.
    """

    writer: problems.Writer
    layers: tuple[int, ...]
    steps: int
    learning_rate: float
    batch: int = 8
    seed: int = 1


# The layers without which the large model's loss grew least, at step 100: found one by one on eight problems of role
# "pair".
DROPPED = (2, 5, 6, 7, 9, 10, 12, 25)
KEPT = tuple(layer for layer in range(30) if layer not in DROPPED)
RECIPES = {
    "large": Healing("llm", tuple(range(30)), 260, 3e-4),
    "small": Healing("slm", KEPT, 160, 4e-4),
    "control": Healing("control", KEPT, 160, 4e-4),
}


def make(name: str, base: Path, folder: Path, recipe: Healing) -> None:
    """Train a model into `folder`, unless it is there, and write its accuracy to `pair.json` in it."""
    folder.mkdir(parents=True, exist_ok=True)
    begun, wanted = folder / "recipe.json", json.dumps(asdict(recipe))
    if begun.is_file() and begun.read_text() != wanted:
        raise SystemExit(
            f"{folder}: expected a model of the recipe {wanted}, got {begun.read_text()}; remove the folder"
        )
    begun.write_text(wanted)
    if (folder / "pair.json").is_file():
        return
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE
    model = cut(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), recipe.layers)
    seconds = train(model, tokenizer, recipe, folder / "checkpoint.safetensors")
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    found = {"processor_seconds": round(seconds), **tried(model, tokenizer)}
    (folder / "pair.json").write_text(json.dumps(found, indent=1))
    (folder / "checkpoint.safetensors").unlink(missing_ok=True)
    print(name, json.dumps(found), flush=True)


def cut(model: PreTrainedModel, layers: tuple[int, ...]) -> PreTrainedModel:
    """The model with only these of its layers."""
    model.model.layers = torch.nn.ModuleList(model.model.layers[layer] for layer in layers)
    for place, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = place  # its slot in a KV cache
    model.config.num_hidden_layers = len(layers)
    return model


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Healing, checkpoint: Path) -> float:
    """AdamW on all weights but the embeddings, cosine decay to a tenth; returns seconds of CPU time."""
    model.model.embed_tokens.weight.requires_grad_(False)
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(weights.values(), recipe.learning_rate, weight_decay=0.01, fused=True)
    done, before = _resume(checkpoint, weights, optimizer)
    start = time.process_time()
    for step, (ids, first) in enumerate(_batches(tokenizer, recipe), 1):
        if step <= done:
            continue
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(step, recipe.steps)
        loss = _loss(model, ids, first)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds = before + time.process_time() - start
        if step % 20 == 0:
            print(f"step {step}/{recipe.steps}: loss {loss.item():.4f}, {seconds:.0f} processor seconds", flush=True)
        if step % CHECKPOINT_STEPS == 0 or step == recipe.steps:
            _keep(checkpoint, weights, optimizer, step, seconds)
    return before + time.process_time() - start


def _batches(tokenizer: PreTrainedTokenizerBase, recipe: Healing) -> Iterator[tuple[Tensor, Tensor]]:
    """For every step the ids [B, T], padded at the end, and the position where each row's solution begins [B]."""
    drawn = problems.problems(recipe.steps * recipe.batch, recipe.seed, "pair")
    rng = Random(recipe.seed)
    rows = []
    for problem in drawn:
        asked = [{"role": "user", "content": problems.PROMPT.format(problem=problem.text)}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
        answer = tokenizer(problems.solution(problem, recipe.writer, rng) + tokenizer.eos_token)["input_ids"]
        rows.append((prompt + answer, len(prompt)))
    together = recipe.batch * SORTED_TOGETHER
    for start in range(0, len(rows), together):
        near = sorted(rows[start : start + together], key=lambda row: len(row[0]))
        groups = [near[at : at + recipe.batch] for at in range(0, len(near), recipe.batch)]
        rng.shuffle(groups)
        for group in groups:
            ids = [torch.tensor(row) for row, _ in group]
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
            yield padded, torch.tensor([first for _, first in group])


def _loss(model: PreTrainedModel, ids: Tensor, first: Tensor) -> Tensor:
    """Mean cross-entropy of the solutions' tokens. Rows are padded at the end, where no earlier token sees it."""
    asked = (torch.arange(ids.shape[1] - 1) + 1 >= first[:, None]) & (ids[:, 1:] >= 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids.clamp(min=0), use_cache=False).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[asked])
    return F.cross_entropy(logits.float(), ids[:, 1:][asked])


def _schedule(step: int, steps: int) -> float:
    return min(step / WARMUP, 1.0) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def _keep(
    path: Path, weights: dict[str, torch.nn.Parameter], optimizer: torch.optim.AdamW, step: int, seconds: float
) -> None:
    state = {f"weight.{name}": weight.detach() for name, weight in weights.items()}
    for name, weight in weights.items():
        state |= {f"{key}.{name}": optimizer.state[weight][key] for key in ("exp_avg", "exp_avg_sq")}
    new = path.with_suffix(".new")
    save_file(state | {"step": torch.tensor(step), "seconds": torch.tensor(seconds)}, new)
    new.replace(path)


def _resume(path: Path, weights: dict[str, torch.nn.Parameter], optimizer: torch.optim.AdamW) -> tuple[int, float]:
    """Load a checkpoint into weights and optimizer; returns the steps done and the seconds of CPU time taken."""
    if not path.is_file():
        return 0, 0.0
    state = load_file(path)
    for name, weight in weights.items():
        weight.data.copy_(state[f"weight.{name}"])
        optimizer.state[weight] = {key: state[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight]["step"] = state["step"].float()
    return int(state["step"]), float(state["seconds"])


def tried(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int = 100, seed: int = 3
) -> dict[str, float]:
    """Greedy answers to problems of role "method": their accuracy, and how many products of each style are right."""
    asked = problems.problems(count, seed, "method")
    prompts = []
    for problem in asked:
        chat = [{"role": "user", "content": problems.PROMPT.format(problem=problem.text)}]
        made = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        prompts.append(made["input_ids"][0])
    answers = [tokenizer.decode(ids, skip_special_tokens=True) for ids in LocalLLM(model).complete_many(prompts, 128)]
    with Verifier() as verifier:
        verdicts = verifier.verify_many(answers, [str(problem.answer) for problem in asked])
    found: dict[str, float] = {"accuracy": verdicts.count("correct") / count}
    products = [match for answer in answers for match in PRODUCT.finditer(answer)]
    for style, careful in (("terse", False), ("careful", True)):
        these = [match for match in products if bool(match["careful"]) == careful]
        right = [int(match["left"]) * int(match["right"]) == int(match["value"]) for match in these]
        found |= {f"{style}_products": len(these), f"{style}_right": round(sum(right) / max(len(right), 1), 3)}
    return found


def main() -> None:
    """Make one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(RECIPES))
    parser.add_argument("base", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(RECIPES[options.name].seed)
    make(options.name, options.base, options.folder, RECIPES[options.name])


if __name__ == "__main__":
    main()

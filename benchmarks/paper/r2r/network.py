"""R2R's router: the network, and what it sees of the small model."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fb_core.llm.local import Ids
from fb_core.models import facts as models
from fb_core.models.facts import CausalLM, fingerprint, lm_head
from fb_core.models.tokens import checked_prompts, token_ids
from fb_core.runtime.plain import MAX_ROWS, batches, check_decodable

WEIGHTS, DESCRIPTION, FORMAT = "router.safetensors", "router.json", 2
LARGEST = {"logits_size": 1 << 20, "width": 1 << 16, "blocks": 256}
EXPANSION = 4  # inner width of a block, as a multiple of its width


class RouterFeatures(NamedTuple):
    """What the router sees at n positions."""

    hidden: Tensor  # [n, D] float32, after the final norm
    logits: Tensor  # [n, L] float32, the largest, in descending order
    embedding: Tensor  # [n, E] float32, of `token`
    token: Tensor  # [n] int64, the SLM's likeliest


class R2RRouter(nn.Module):
    """The probability that the SLM's next token is divergent: float32, made on the CPU.

    Args:
        slm: the small model whose features it reads; only sizes and a fingerprint are kept.
        logits_size: number of largest logits, clamped to the vocabulary.
        width: of the residual blocks.
        blocks: their number.
        dropout: while training.
        seed: of the initial weights; the global generator is left as it was.

    Raises:
        TypeError: `slm` is not a transformers model.
        ValueError: a model in training mode, or a size out of range.
    """

    def __init__(
        self,
        slm: CausalLM,
        *,
        logits_size: int = 100,
        width: int = 1024,
        blocks: int = 6,
        dropout: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_decodable("slm", slm)
        sizes = {"logits_size": logits_size, "width": width, "blocks": blocks}
        for name, size in sizes.items():
            if not isinstance(size, Integral) or not 1 <= size <= LARGEST[name]:
                raise ValueError(f"{name}: expected 1 to {LARGEST[name]}, got {size}; leave it out for the default")
        if not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout: expected 0 or more and below 1, got {dropout}; the published value is 0.1")
        self.logits_size = min(logits_size, models.vocabulary(slm))
        self.settings = {**sizes, "logits_size": self.logits_size, "dropout": dropout}
        self.base = fingerprint(slm)
        hidden, embedding = lm_head(slm).weight.shape[1], slm.get_input_embeddings().weight.shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.logits_projection = nn.Linear(self.logits_size, hidden)
            self.projection = nn.Linear(2 * hidden + embedding, width)
            self.blocks = nn.ModuleList(
                nn.Sequential(
                    nn.LayerNorm(width),
                    nn.Linear(width, EXPANSION * width),
                    nn.GELU(),
                    nn.Dropout(dropout),
                    nn.Linear(EXPANSION * width, width),
                    nn.Dropout(dropout),
                )
                for _ in range(blocks)
            )
            self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, features: RouterFeatures) -> Tensor:
        """The logit [n] of the probability."""
        x = torch.cat([features.hidden, features.embedding, self.logits_projection(features.logits)], -1)
        x = self.projection(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)[:, 0]

    @torch.no_grad()
    def probability(self, features: RouterFeatures) -> Tensor:
        """float32 [n]: that the SLM's token is divergent."""
        return self(features).sigmoid()

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write router.safetensors and router.json, to temporary names first."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        description = {"format": FORMAT, "base": self.base, "settings": self.settings}
        weights, about = folder / f".{WEIGHTS}.{os.getpid()}", folder / f".{DESCRIPTION}.{os.getpid()}"
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, weights)
        about.write_text(json.dumps(description, indent=2))
        os.replace(weights, folder / WEIGHTS)
        os.replace(about, folder / DESCRIPTION)

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str], slm: CausalLM) -> R2RRouter:
        """Load what `save_pretrained` wrote, in eval mode on the device of the SLM that it was trained with.

        Raises:
            TypeError: `slm` is not a transformers model.
            ValueError: missing or damaged files, or another SLM.
        """
        folder = Path(directory)
        try:
            if (size := (folder / DESCRIPTION).stat().st_size) > 1 << 20:
                raise ValueError(f"a description of {size} bytes")
            description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
            tensors = load_file(folder / WEIGHTS)
        except (OSError, ValueError, RecursionError, SafetensorError) as problem:
            raise ValueError(f"{folder}: expected a router's two files, got {problem}; save it again") from problem
        settings = description.get("settings") if isinstance(description, dict) else None
        if (
            not isinstance(settings, dict)
            or description.get("format") != FORMAT
            or set(settings) != {*LARGEST, "dropout"}
        ):
            raise ValueError(
                f"{folder / DESCRIPTION}: expected format {FORMAT} with its settings, got something else; load it with "
                "the version that wrote it"
            )
        with torch.device("meta"):  # no memory is allocated before the weights match the stated sizes
            router = cls(slm, **settings)
        if description.get("base") != router.base:
            raise ValueError(
                f"slm: expected the model that the router in {folder} was trained with, got a {type(slm).__name__} "
                "with other weights or architecture; load that model"
            )
        try:
            router.load_state_dict(tensors, assign=True)
        except RuntimeError as problem:
            raise ValueError(
                f"{folder / WEIGHTS}: expected the weights of its settings, got {' '.join(str(problem).split())}; save "
                "the router again"
            ) from problem
        if any(value.dtype != torch.float32 or not bool(value.isfinite().all()) for value in tensors.values()):
            raise ValueError(f"{folder / WEIGHTS}: expected finite float32 weights, got others; save the router again")
        return router.to(slm.device).eval()


@torch.no_grad()
def router_features(
    slm: CausalLM,
    trajectories: Sequence[tuple[Ids, Ids]],
    *,
    logits_size: int = 100,
    vocabulary: int | None = None,
    batch_tokens: int = 65536,
) -> list[RouterFeatures]:
    """What the router would see before every token of many responses, teacher-forced in right-padded batches.

    Args:
        slm: the small model, in eval mode.
        trajectories: (prompt [P], response [n]) token ids of each.
        logits_size: number of largest logits, clamped to the vocabulary.
        vocabulary: ids from this one on never count; None if all of the model's do.
        batch_tokens: maximum tokens of one batch, padding included.

    Returns:
        The n rows of every trajectory, row i before response[i].

    Raises:
        TypeError: ids that are not integers, or `slm` is not a transformers model.
        ValueError: no prompt, an id outside the vocabulary, another device or shape, too many tokens for the model, or
            a model in training mode.
    """
    check_decodable("slm", slm)
    prompts = checked_prompts("prompt", [prompt for prompt, _ in trajectories], slm, room=0)
    responses = [token_ids("response", response, slm) for _, response in trajectories]
    joined = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    checked_prompts("trajectory", joined, slm, room=0)
    features: dict[int, RouterFeatures] = {}
    for rows in batches([len(ids) for ids in joined], 0, batch_tokens):
        ids = pad_sequence([joined[row] for row in rows], batch_first=True)  # causal: padding after a row is not seen
        for row, hidden in zip(rows, slm.base_model(input_ids=ids, use_cache=False).last_hidden_state, strict=True):
            read = hidden[len(prompts[row]) - 1 : len(joined[row]) - 1]
            parts = [
                features_of(slm, part, models.logits(slm, part)[:, :vocabulary], logits_size)
                for part in read.split(MAX_ROWS)
            ]
            features[row] = concatenated(parts)
    return [features[row] for row in range(len(joined))]


def features_of(slm: CausalLM, hidden: Tensor, logits: Tensor, logits_size: int) -> RouterFeatures:
    """What the router sees, from hidden [n, D] after the final norm and logits [n, V]."""
    token = logits.argmax(-1)  # the first of equal ones
    largest = logits.topk(min(logits_size, logits.shape[-1])).values
    embedding = slm.get_input_embeddings().weight[token]
    return RouterFeatures(hidden.float(), largest.float(), embedding.float(), token)


def concatenated(parts: Sequence[RouterFeatures]) -> RouterFeatures:
    """The rows of all parts."""
    return RouterFeatures(*(torch.cat(column) for column in zip(*parts, strict=True)))

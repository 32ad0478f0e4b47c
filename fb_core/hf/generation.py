"""Decoding by a model's own forward: padded batches and their caches."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    PreTrainedModel,
)

from fb_core.hf.models import CausalLM

Cache: TypeAlias = DynamicCache


def new_cache() -> DynamicCache:
    """An empty cache whose layers keep every token: made with a config, sliding layers would keep only their window."""
    return DynamicCache()


def check_decodable(name: str, model: CausalLM) -> None:
    """Refuse what cannot decode deterministically.

    Raises:
        TypeError: not a transformers model.
        ValueError: a model in training mode.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"{name}: expected a transformers causal LM, got {type(model).__name__}; load one with AutoModelForCausalLM"
        )
    if model.training:
        raise ValueError(f"{name}: expected a model in eval mode, got one in training mode; call .eval() first")


def left_padded(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Token ids [B, S] with each sequence at the right end, and their mask [B, S] (None where all have one length)."""
    longest = max(len(tokens) for tokens in sequences)
    ids = torch.stack([nn.functional.pad(tokens, (longest - len(tokens), 0)) for tokens in sequences])
    if all(len(tokens) == longest for tokens in sequences):
        return ids, None
    lengths = torch.tensor([len(tokens) for tokens in sequences], device=ids.device)
    return ids, (torch.arange(longest, device=ids.device) >= longest - lengths[:, None]).long()


@torch.no_grad()
def last_logits(model: CausalLM, ids: Tensor, mask: Tensor | None = None, cache: Cache | None = None) -> Tensor:
    """float32 [B, V] behind the last token of each row; a cache is extended by the new tokens.

    Args:
        model: a causal LM.
        ids: [B, n] the new tokens.
        mask: [B, cached + n], 0 at left padding; None for none.
        cache: what was computed before, None to keep nothing.
    """
    options: dict[str, Any] = {"past_key_values": cache, "use_cache": cache is not None}
    if mask is not None:
        options["attention_mask"] = mask
        options["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    return model(input_ids=ids, **options).logits[:, -1].float()


def keep_rows(cache: Cache, rows: Sequence[int], device: torch.device) -> None:
    """Make a batched cache one of these rows, in place; a row may come again."""
    cache.batch_select_indices(torch.tensor(rows, device=device))


def streamer_of_caller(depth: int = 2) -> Any:
    """The `streamer=` that a user gave to `model.generate`: transformers 5 passes none to a `custom_generate` callable.

    It is read from the frame of `generate`, which is the caller of the callable, which is the caller of this.
    """
    frame = sys._getframe(depth)
    return frame.f_locals.get("streamer") if frame.f_code.co_name == "generate" else None

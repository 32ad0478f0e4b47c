"""What a user would write with transformers, peft and torch alone."""

from __future__ import annotations

import copy

import torch
from peft import PeftModel
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@torch.no_grad()
def full_forwards(
    model: PreTrainedModel, prefix: Tensor, candidates: Tensor, future: Tensor, *, keep_all: bool = False
) -> Tensor:
    """[K, H]: one forward of prefix + branch a candidate, with the logits of the H needed positions or of all."""
    h, rows = len(future), []
    for candidate in candidates:
        ids = torch.cat([prefix, candidate[None], future[:-1]])[None]
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=0 if keep_all else h).logits
        rows.append(_gather(logits[:, -h:], future)[0])
    return torch.stack(rows)


@torch.no_grad()
def padded_batch(model: PreTrainedModel, prefix: Tensor, candidates: Tensor, future: Tensor) -> Tensor:
    """[K, H]: all K sequences as one batch (they have one length, so there is nothing to mask)."""
    ids = torch.cat([prefix.expand(len(candidates), -1), _branches(candidates, future)], 1)
    return _gather(model(input_ids=ids, use_cache=False, logits_to_keep=len(future)).logits, future)


@torch.no_grad()
def repeated_cache(
    model: PreTrainedModel, prefix: Tensor, candidates: Tensor, future: Tensor, cache: DynamicCache | None = None
) -> Tensor:
    """[K, H]: the prefix once, its cache repeated K times, then all branches as one batch."""
    if cache is None:
        cache = prefill(model, prefix)
    else:
        cache = DynamicCache([(layer.keys, layer.values) for layer in cache.layers])  # repeating works in place
    cache.batch_repeat_interleave(len(candidates))
    return _gather(model(input_ids=_branches(candidates, future), past_key_values=cache).logits, future)


@torch.no_grad()
def expanded_cache(
    model: PreTrainedModel, prefix: Tensor, candidates: Tensor, future: Tensor, cache: DynamicCache
) -> Tensor:
    """[K, H]: as `repeated_cache`, but the repeats are views: the forward's own concatenation is the only copy."""
    return _gather(
        model(input_ids=_branches(candidates, future), past_key_values=_expanded(cache, len(candidates))).logits, future
    )


@torch.no_grad()
def prefill(model: PreTrainedModel, prefix: Tensor) -> DynamicCache:
    """The prefix's cache."""
    cache = DynamicCache()
    model.base_model(input_ids=prefix[None], past_key_values=cache)
    return cache


@torch.no_grad()
def rerank_full_forwards(adapted: PeftModel, head: Tensor, prefix: Tensor, candidates: Tensor) -> Tensor:
    """[K]: one forward of prefix + candidate a candidate, adapters on all of it."""
    decoder = adapted.get_base_model().base_model
    rows = [torch.cat([prefix, candidate[None]])[None] for candidate in candidates]
    return torch.cat([decoder(input_ids=ids, use_cache=False).last_hidden_state[:, -1] @ head for ids in rows])


@torch.no_grad()
def rerank_cached_forwards(
    adapted: PeftModel, head: Tensor, prefix: Tensor, candidates: Tensor, cache: DynamicCache
) -> Tensor:
    """[K]: one forward of a single token a candidate over the frozen model's cache, cropped after each."""
    decoder = adapted.get_base_model().base_model
    cache = DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
    scores = []
    for candidate in candidates:
        scores.append(decoder(input_ids=candidate[None, None], past_key_values=cache).last_hidden_state[:, -1] @ head)
        cache.crop(-1)
    return torch.cat(scores)


@torch.no_grad()
def rerank_repeated_cache(
    adapted: PeftModel, head: Tensor, prefix: Tensor, candidates: Tensor, cache: DynamicCache
) -> Tensor:
    """[K]: the frozen model's cache repeated K times, then all candidates as one batch."""
    cache = DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
    cache.batch_repeat_interleave(len(candidates))
    decoder = adapted.get_base_model().base_model
    return decoder(input_ids=candidates[:, None], past_key_values=cache).last_hidden_state[:, -1] @ head


@torch.no_grad()
def rerank_expanded_cache(
    adapted: PeftModel, head: Tensor, prefix: Tensor, candidates: Tensor, cache: DynamicCache
) -> Tensor:
    """[K]: as `rerank_repeated_cache` with the repeats as views."""
    decoder = adapted.get_base_model().base_model
    cache = _expanded(cache, len(candidates))
    return decoder(input_ids=candidates[:, None], past_key_values=cache).last_hidden_state[:, -1] @ head


@torch.no_grad()
def log_softmax_logprob(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """[N]: logits, log-softmax, gather."""
    return (hidden @ weight.T).log_softmax(-1).gather(-1, target[:, None])[:, 0]


@torch.no_grad()
def logsumexp_logprob(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """[N]: logits, the target's less their log-sum-exp."""
    logits = hidden @ weight.T
    return logits.gather(-1, target[:, None])[:, 0] - logits.logsumexp(-1)


def _branches(candidates: Tensor, future: Tensor) -> Tensor:
    return torch.cat([candidates[:, None], future[:-1].expand(len(candidates), -1)], 1)  # [K, H]


def _gather(logits: Tensor, future: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, future.expand(len(logits), -1)[..., None])[..., 0]


def _expanded(cache: DynamicCache, k: int) -> DynamicCache:
    layers = [copy.copy(layer) for layer in cache.layers]
    for layer in layers:
        layer.keys, layer.values = layer.keys.expand(k, -1, -1, -1), layer.values.expand(k, -1, -1, -1)
    views = copy.copy(cache)
    views.layers = layers
    return views

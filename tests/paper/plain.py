"""Tiny models, and what they say by plain forwards."""

from __future__ import annotations

import functools

import torch
from tiny import tiny


@functools.cache
def models(*seeds, family="qwen3"):
    return tuple(tiny(family, seed) for seed in seeds)


@torch.no_grad()
def logits(model, ids):
    """[V] of the token after ids."""
    return model(torch.tensor([ids])).logits[0, -1]

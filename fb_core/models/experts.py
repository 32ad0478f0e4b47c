"""A mixture of experts in the native decoder: rows sorted by expert, so that each runs once, without padding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fb_kernels import skinny_linear, swiglu


class Experts(NamedTuple):
    """Gated MLPs, of which a row takes the `top_k` likeliest of its router, weighted by their probabilities."""

    router: Tensor  # [X, D]
    gate_up: Tensor  # [X, 2F, D]
    down: Tensor  # [X, D, F]
    top_k: int
    normed: bool  # whether a row's weights are divided by their sum

    def __call__(self, x: Tensor) -> Tensor:
        """[N, D] of x[N, D]; weighted and summed in float32 at least, rounded once."""
        probs, chosen = skinny_linear(x, self.router).softmax(-1, torch.float32).topk(self.top_k)  # [N, top_k]
        if self.normed:
            probs /= probs.sum(-1, keepdim=True)
        experts, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(len(self.router), device=x.device), right=True)
        rows = x[order // self.top_k]
        found = self._grouped(rows, ends) if x.is_cuda else self._each(rows, ends)
        weighted = torch.empty_like(found).index_copy_(0, order, found).view(*chosen.shape, -1) * probs[..., None]
        return weighted.sum(1).to(x.dtype)

    def _each(self, rows: Tensor, ends: Tensor) -> Tensor:
        """[N top_k, D] of rows that are sorted by expert, of which expert i has those up to ends[i]."""
        found, start = torch.empty_like(rows), 0
        for index, end in enumerate(ends.tolist()):
            if end > start:
                gated = skinny_linear(rows[start:end], self.gate_up[index], swiglu=True)
                found[start:end] = skinny_linear(gated, self.down[index])
                start = end
        return found

    def _grouped(self, rows: Tensor, ends: Tensor) -> Tensor:
        """As `_each`, without waiting for the device."""
        ends = ends.int()
        gated = swiglu(F.grouped_mm(rows, self.gate_up.mT, offs=ends))
        return F.grouped_mm(gated, self.down.mT, offs=ends)

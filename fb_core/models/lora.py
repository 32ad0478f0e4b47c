"""LoRA in the native decoder, as peft's linear layer computes it (Hu et al. 2021, equation 3, after dropout).

Adapters, scales and dropout are read at every call, so that what is done to the layer counts at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout


class Term(NamedTuple):
    """What an adapter adds to some columns: scale * dropout(x) down^T up^T."""

    columns: slice
    scale: float
    rate: float  # of the dropout; 0 where it is not active
    down: nn.Parameter  # [r, K]
    up: nn.Parameter  # [m, r]

    @classmethod
    def of(cls, layer: LoraLinear, start: int) -> Iterator[Term]:
        """Those of a peft layer as it is now, whose columns begin at `start`."""
        for name in () if layer.disable_adapters or layer.merged else layer.active_adapters:
            if name in layer.lora_A:
                down, up, drop = layer.lora_A[name].weight, layer.lora_B[name].weight, layer.lora_dropout[name]
                rate = drop.p if drop.training and isinstance(drop, nn.Dropout) else 0.0
                yield cls(slice(start, start + len(up)), layer.scaling[name], rate, down, up)


class WithLora(NamedTuple):
    """A projection of the native decoder, and the peft layers in it with the first column of each."""

    product: Callable[[Tensor], Tensor]
    layers: Sequence[tuple[LoraLinear, int]]

    def __call__(self, x: Tensor) -> Tensor:
        """[N, M] of x[N, K]; differentiable to x and the adapters."""
        out = self.product(x)
        terms = [term for layer, start in self.layers for term in Term.of(layer, start)]
        together = len({term.down.dtype for term in terms}) == 1 and not any(term.rate for term in terms)
        for some in [terms] if together else ([term] for term in terms):  # each draws for itself
            wide = dropout(x.to(some[0].down.dtype), some[0].rate)
            out = _Adapters.apply(out, wide, some, *chain.from_iterable(term[-2:] for term in some))
        return out


class _Adapters(torch.autograd.Function):
    """The terms of one input, added to a product in place; all their products with it are one."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, terms: Sequence[Term], *factors: Tensor) -> Tensor:
        downs, ups = factors[::2], factors[1::2]
        down = downs[0] if len(downs) == 1 else torch.cat(downs)
        low = x @ down.T  # [N, sum r]
        for term, part, up in zip(terms, low.split([len(each) for each in downs], 1), ups, strict=True):
            columns = out[:, term.columns]
            if columns.dtype == part.dtype:
                columns.addmm_(part, up.T, alpha=term.scale)
            else:
                columns.add_(part @ up.T, alpha=term.scale)  # rounded once
        ctx.terms = terms
        ctx.mark_dirty(out)
        ctx.save_for_backward(x, low, down, *ups)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low, down, *ups = ctx.saved_tensors
        slope, to_low, to_ups = grad.to(low.dtype), torch.empty_like(low), []
        sizes = [up.shape[1] for up in ups]
        for term, part, to_part, up in zip(ctx.terms, low.split(sizes, 1), to_low.split(sizes, 1), ups, strict=True):
            columns = slope[:, term.columns]
            to_part.addmm_(columns, up, beta=0, alpha=term.scale)
            to_ups.append(torch.empty_like(up).addmm_(columns.T, part, beta=0, alpha=term.scale))
        to_x = to_low @ down if ctx.needs_input_grad[1] else None
        to_downs = (to_low.T @ x).split(sizes)
        return grad, to_x, None, *chain.from_iterable(zip(to_downs, to_ups, strict=True))

"""The k largest logits of a row, exactly ordered, and the entropy of the softmax over them."""

from __future__ import annotations

import torch
from torch import Tensor

from fb_kernels._runtime import checks
from fb_kernels._runtime.op import Op, signature
from fb_kernels._runtime.precision import accumulation_dtype


def topk_entropy(logits: Tensor, k: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest logits of every row, and the entropy of their softmax, -sum p log p in nats.

    Args:
        logits: [..., V] float, any number of rows; they may not require grad.
        k: 1 to V.

    Returns:
        (entropy[...], values[..., k], indices[..., k]). Entropy and values are float32 (float64 for float64 input),
        indices int64. Values are in descending order, ties go to the lowest index, -0.0 ties with 0.0, and NaN counts
        as the largest. A logit of -inf adds nothing to the entropy. Rows with NaN or +inf, or with -inf only, have
        entropy NaN.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape or k, or logits that require grad.
    """
    key = signature((logits,), (), (k,))
    run = _topk_entropy.checked.get(key) if key else None
    if run is None:
        op = "topk_entropy"
        checks.floating(op, "logits", logits)
        if logits.ndim == 0:
            raise checks.error(op, "logits", "shape [..., V]", logits, "add a dimension")
        checks.integer(op, "k", k, "clamp it to the vocabulary", least=1, most=logits.shape[-1])
        run = _topk_entropy.passed(key, logits)
    return run(logits, k)


def _fake(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, dtype = logits.shape[:-1], accumulation_dtype(logits.dtype)
    return (
        logits.new_empty(rows, dtype=dtype),
        logits.new_empty((*rows, k), dtype=dtype),
        logits.new_empty((*rows, k), dtype=torch.int64),
    )


_topk_entropy = Op(
    "topk_entropy",
    "(Tensor logits, SymInt k) -> (Tensor, Tensor, Tensor)",
    fake=_fake,
    triton=True,
    cuda=True,
    cpu=True,
)
_topk_entropy.has_no_gradient()

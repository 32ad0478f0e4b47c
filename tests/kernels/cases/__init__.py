"""Every public op with arguments that it takes, for the tests of what all ops promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cases import (
    branch_attention,
    branch_attention_qkv,
    candidate_head,
    commit,
    merge_attention_states,
    rms_norm,
    skinny_linear,
    swiglu,
    topk_entropy,
)
from cases.base import Case, Op, heads, ids, randn


def _head(rows: int = 6, vocabulary: int = 11) -> dict[str, Any]:
    target = ids(*(3, 0, 10, -100, 7, 5)[:rows], dtype=torch.int64)
    return {"hidden": randn(rows, 8), "target": target, "bias": randn(vocabulary, seed=1)}


def _partials() -> dict[str, Tensor]:
    return {"max": randn(3, 5), "sumexp": randn(3, 5, seed=1).square() + 1, "target_logit": randn(3, 5, seed=2)}


_CASES: dict[str, Callable[[], Case]] = {
    "combine_logprob_partials": lambda: Case(
        "combine_logprob_partials", dict(_partials()), gradients=("sumexp", "target_logit"), outputs=(0, 1)
    ),
    "compatibility_targets": lambda: Case(
        "compatibility_targets",
        {
            "logprob": -randn(7, 5).square(),
            "cu_group": ids(0, 3, 3, 6),
            "horizons": [2, 5],
            "local": -randn(7).square(),
            "alpha": 0.5,
        },
    ),
    "group_cross_entropy": lambda: Case(
        "group_cross_entropy",
        {"score": randn(7), "target": randn(7, seed=1).square(), "cu_group": ids(0, 3, 3, 6)},
        gradients=("score",),
    ),
    "joint_pool": lambda: Case(
        "joint_pool", {"slm_ids": ids(4, 2, 9, 1, 1, -1).view(2, 3), "llm_ids": ids(9, 3, 4, 5, 5, 2, 1, 0).view(2, 4)}
    ),
    "linear_logprob": lambda: Case(
        "linear_logprob",
        _head() | {"weight": randn(11, 8), "return_lse": True, "return_entropy": True},
        gradients=("hidden", "weight", "bias"),
        outputs=(0, 1),
    ),
    "linear_logprob, three dimensions": lambda: Case(
        "linear_logprob",
        {"hidden": randn(2, 3, 8), "weight": randn(11, 8), "target": ids(1, 2, 3, 4, 5, 6).view(2, 3)},
        gradients=("hidden", "weight"),
    ),
    "linear_logprob_partials": lambda: Case(
        "linear_logprob_partials",
        _head() | {"weight_shard": randn(11, 8), "vocab_start": 2},
        gradients=("hidden", "weight_shard", "bias"),
        outputs=(1, 2),
    ),
    "qk_norm_rope": lambda: Case(
        "qk_norm_rope", heads(6), gradients=("qkv", "q_weight", "k_weight"), outputs=(0, 1, 2)
    ),
    "qk_norm_rope, one row": lambda: Case(
        "qk_norm_rope", heads(1), gradients=("qkv", "q_weight", "k_weight"), outputs=(0, 1, 2)
    ),
    "qk_norm_rope, written": lambda: Case(
        "qk_norm_rope",
        heads(4) | {"kv_out": (randn(9, 2, 8, seed=5), randn(9, 2, 8, seed=6), ids(6, -1, 8, 7))},
        written=("kv_out.0", "kv_out.1"),
    ),
}

_DECLARED = (
    branch_attention,
    branch_attention_qkv,
    candidate_head,
    commit,
    merge_attention_states,
    rms_norm,
    skinny_linear,
    swiglu,
    topk_entropy,
)
OPS: dict[str, Op] = {module.OP.name: module.OP for module in _DECLARED}
for _module in _DECLARED:
    _CASES |= _module.EXAMPLES
NAMES = tuple(_CASES)


def case(name: str) -> Case:
    """The case of a name, with tensors of its own."""
    return _CASES[name]()

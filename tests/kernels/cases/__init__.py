"""Every public op with arguments that it takes, for the tests of what all ops promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cases import (
    compatibility_targets,
    group_cross_entropy,
    joint_pool,
    linear_logprob,
    merge_attention_states,
    qk_norm_rope,
    rms_norm,
    swiglu,
)
from cases.base import Case, Op, ids, randn
from cases.qk_norm_rope import heads
from fb_kernels import BranchLayout, DecodeState


def _branches(rows: int, lengths: tuple[int, ...], paged: bool = False, own: bool = True) -> dict[str, Any]:
    """Two groups over one buffer; branches of the given lengths, the first half of them the first group's."""
    prefix = (3, 4, 2, 8) if paged else (9, 2, 8)
    half = len(lengths) // 2
    return {
        "q": randn(rows, 4, 8),
        "k": randn(rows, 2, 8, seed=1) if own else None,
        "v": randn(rows, 2, 8, seed=2) if own else None,
        "prefix_k": randn(*prefix, seed=3),
        "prefix_v": randn(*prefix, seed=4),
        "layout": BranchLayout(
            ids(*torch.tensor((0, *lengths)).cumsum(0).tolist()),
            ids(0, half, len(lengths)),
            ids(1, 0) if paged else ids(1, 3),
            ids(6, 4) if paged else ids(5, 6),
            ids(2, 0, 1, -1).view(2, 2) if paged else None,
        ),
    }


def _linear(rows: int, *options: str, outputs: int = 12, width: int = 16) -> dict[str, Any]:
    given = {
        "bias": randn(outputs, seed=1),
        "norm_weight": randn(width, seed=2),
        "residual": randn(rows, outputs, seed=3),
        "swiglu": True,
    }
    built = {"x": randn(rows, width), "weight": randn(outputs, width)}
    return built | {name: given[name] for name in options}


def _state() -> DecodeState:
    return DecodeState(torch.arange(28).view(4, 7), ids(3, 4, 2, 7), ids(0, 0, 3, 0), ids(1, 0, 2, 1))


def _attention(rows: int, slots: bool) -> dict[str, Any]:
    built = heads(rows) | {"k_cache": randn(9, 2, 8, seed=5), "v_cache": randn(9, 2, 8, seed=6), "held": ids(5)}
    return built | ({"slots": ids(*(6, 5, 8, 7)[:rows])} if slots else {})


_OWN = ("q", "k", "v")
_CASES: dict[str, Callable[[], Case]] = {
    "branch_attention": lambda: Case(
        "branch_attention", _branches(9, (2, 3, 1, 3)) | {"return_lse": True}, gradients=_OWN
    ),
    "branch_attention, one row each": lambda: Case(
        "branch_attention", _branches(6, (1,) * 6) | {"return_lse": True}, gradients=_OWN
    ),
    "branch_attention, one page each": lambda: Case(
        "branch_attention",
        Case("branch_attention", _branches(6, (1,) * 6, paged=True) | {"return_lse": True}).changed(
            **{"layout.block_table": ids(2, 0).view(2, 1), "layout.prefix_len": ids(3, 4)}
        ),
        gradients=_OWN,
    ),
    "branch_attention, paged": lambda: Case(
        "branch_attention", _branches(9, (2, 3, 1, 3), paged=True) | {"window": 3, "softcap": 2.0}, gradients=_OWN
    ),
    "branch_attention, prefix only": lambda: Case(
        "branch_attention", _branches(9, (2, 3, 1, 3), own=False), gradients=("q",)
    ),
    "branch_attention_qkv": lambda: Case("branch_attention_qkv", _attention(1, slots=False)),
    "branch_attention_qkv, written": lambda: Case(
        "branch_attention_qkv", _attention(4, slots=True) | {"window": 4}, written=("k_cache", "v_cache")
    ),
    "candidate_head": lambda: Case(
        "candidate_head",
        {
            "hidden": randn(7, 16),
            "norm_weight": randn(16),
            "head_weight": randn(16, seed=1),
            "cu_group": ids(0, 3, 3, 6),
            "eps": 1e-6,
            "head_bias": randn(1),
        },
        gradients=("hidden", "norm_weight", "head_weight", "head_bias"),
    ),
    "commit_": lambda: Case(
        "commit_",
        {
            "state": _state(),
            "token": ids(9, 5, 6, 8),
            "entropy": torch.tensor([0.5, 2.0, 0.1, 0.2]),
            "threshold": torch.tensor([1.0, 1.0, 1.0, 1.0]),
            "eos_ids": ids(7, 8, 2),
            "max_length": ids(6, 6, 6, 6),
        },
        written=("state.tokens", "state.length", "state.halt"),
    ),
    "skinny_linear": lambda: Case("skinny_linear", _linear(3, "bias", "norm_weight")),
    "skinny_linear, one row": lambda: Case("skinny_linear", _linear(1, "residual")),
    "skinny_linear, residual": lambda: Case("skinny_linear", _linear(3, "bias", "residual")),
    "skinny_linear, gated": lambda: Case("skinny_linear", _linear(3, "bias", "swiglu")),
    "skinny_linear, many rows": lambda: Case("skinny_linear", _linear(20, "bias", "norm_weight", "residual")),
    "topk_entropy": lambda: Case("topk_entropy", {"logits": randn(2, 3, 40), "k": 5}),
    "topk_entropy, many rows": lambda: Case("topk_entropy", {"logits": randn(12, 40), "k": 5}),
}

_DECLARED = (
    compatibility_targets,
    group_cross_entropy,
    joint_pool,
    linear_logprob,
    merge_attention_states,
    qk_norm_rope,
    rms_norm,
    swiglu,
)
_DECLARED_OPS = [value for module in _DECLARED for value in vars(module).values() if isinstance(value, Op)]
OPS: dict[str, Op] = {op.name: op for op in _DECLARED_OPS}
for _module in _DECLARED:
    _CASES |= _module.EXAMPLES
NAMES = tuple(_CASES)


def case(name: str) -> Case:
    """The case of a name, with tensors of its own."""
    return _CASES[name]()

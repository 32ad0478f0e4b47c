"""Every public op, declared once, with some calls of it that are always the same."""

from __future__ import annotations

from collections.abc import Callable

from cases import (
    branch_attention,
    branch_attention_qkv,
    candidate_head,
    commit,
    compatibility_targets,
    group_cross_entropy,
    joint_pool,
    linear_logprob,
    merge_attention_states,
    qk_norm_rope,
    rms_norm,
    skinny_linear,
    swiglu,
    topk_entropy,
)
from cases.base import Case, Op

_MODULES = (
    branch_attention,
    branch_attention_qkv,
    candidate_head,
    commit,
    compatibility_targets,
    group_cross_entropy,
    joint_pool,
    linear_logprob,
    merge_attention_states,
    qk_norm_rope,
    rms_norm,
    skinny_linear,
    swiglu,
    topk_entropy,
)
OPS: dict[str, Op] = {op.name: op for module in _MODULES for op in vars(module).values() if isinstance(op, Op)}
_EXAMPLES: dict[str, Callable[[], Case]] = {name: make for each in _MODULES for name, make in each.EXAMPLES.items()}
NAMES = tuple(_EXAMPLES)


def case(name: str) -> Case:
    """The call of a name, with tensors of its own."""
    return _EXAMPLES[name]()

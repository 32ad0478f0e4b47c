"""Attention of many branches over one shared prefix, which is read in place and never repeated."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from fb_kernels._runtime import checks, precision
from fb_kernels._runtime.op import Op, fake_gradients, signature
from fb_kernels._runtime.precision import accumulation_dtype
from fb_kernels.branch_attention.arguments import BranchAttention, BranchAttentionBackward
from fb_kernels.layout import BranchLayout, memory_of

OP = "branch_attention"


@overload
def branch_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    prefix_k: Tensor,
    prefix_v: Tensor,
    layout: BranchLayout,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def branch_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    prefix_k: Tensor,
    prefix_v: Tensor,
    layout: BranchLayout,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def branch_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    prefix_k: Tensor,
    prefix_v: Tensor,
    layout: BranchLayout,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the tokens of B branches in G groups to the group's prefix slice and to their own branch.

    Row i of a branch sees the group's whole slice of P keys and the branch's rows 0 to i. Slice key j is at position j,
    row i at P + i; with a window, only keys with 0 <= pos_q - pos_k < window count. out = softmax(s) v with
    s = scale q . k, or softcap tanh(scale q . k / softcap), accumulated in float32 (float64 for float64 input). Under
    torch.autocast q, k, v and the prefix are cast to its dtype first, as scaled_dot_product_attention casts them
    (float64 stays).

    Args:
        q: [T, Hq, E] float; any strides.
        k: [T, Hkv, E] of q's dtype, where Hkv divides Hq: the branches' own keys; None for prefix only.
        v: like k; None if k is None.
        prefix_k: [Tp, Hkv, E], or pages [pages, page, Hkv, E] if the layout has a block table. It may be k itself or a
            view of it (states of one packed forward), detached if the prefix is frozen. For a cache [B, Hkv, S, E] pass
            `cache.transpose(1, 2)`, with one page per sequence.
        prefix_v: like prefix_k.
        layout: the rows of each branch and the prefix of each group; one for all layers of a forward.
        window: sliding window, at least 1; None for all keys.
        scale: multiplies q . k, above 0; E**-0.5 by default.
        softcap: bound of the scores (Gemma 2); None for no bound.
        return_lse: also return the log-sum-exp of the scores; of 16-bit inputs on a CPU it is right to 1e-4.

    Returns:
        out [T, Hq, E] in q's dtype; with return_lse also lse [Hq, T], natural log, float32 (float64 for float64 input).
        A row that sees no key has out 0 and lse -inf; a row with a NaN or +inf score is NaN. Gradients flow through out
        and lse to q, k and v, and to the prefix if it requires grad (rows of the same packed forward; flat
        [Tp, Hkv, E] prefixes): zeros outside all slices, sums in the order of groups where slices overlap. A frozen
        prefix costs nothing extra, nor does an lse that no loss uses. On the CPU a layout that does not fit is a
        ValueError of `BranchLayout`; on a device the affected rows are NaN. For an attention sink use
        out * sigmoid(lse.T - sink)[..., None], whose gradients are right.

    Raises:
        TypeError: an argument of the wrong type or dtype; float8 prefixes are not supported.
        ValueError: a wrong shape, device or value, or pages that require grad (pass flat slices, or detach them).
    """
    key = None
    if type(layout) is BranchLayout:
        place = layout.cu_branch.device, layout.block_table is None
        key = signature((q, k, v, prefix_k, prefix_v), (scale, softcap), (window,), place)
    run = _branch_attention.checked.get(key) if key else None
    if run is None:
        q, k, v, prefix_k, prefix_v = precision.lowered(q, k, v, prefix_k, prefix_v)
        _check(q, k, v, prefix_k, prefix_v, layout)
        if window is not None:
            checks.integer(OP, "window", window, "pass None for no bound", 1)
        if scale is not None:
            checks.positive(OP, "scale", scale, "pass None for E**-0.5")
        if softcap is not None:
            checks.positive(OP, "softcap", softcap, "pass None for no soft-cap")
        run = _branch_attention.passed(key, q)
    hints = layout.max_branch_len, layout.max_prefix_len
    factor = q.shape[2] ** -0.5 if scale is None else scale
    out, lse = run(BranchAttention(q, k, v, prefix_k, prefix_v, *layout.indices, *hints, window, factor, softcap))
    return (out, lse) if return_lse else out


def _check(
    q: Tensor, k: Tensor | None, v: Tensor | None, prefix_k: Tensor, prefix_v: Tensor, layout: BranchLayout
) -> None:
    """Check the tensors' types, shapes and devices; those of the layout are checked when it is made."""
    checks.floating(OP, "q", q)
    checks.shape(OP, "q", q, (None, None, None), "[T, Hq, E]", "reshape it")
    rows, heads, width = q.shape
    if width == 0:
        raise checks.error(OP, "q", "a head dimension E of 1 or more", q, "reshape it")
    if not isinstance(layout, BranchLayout):
        got = type(layout).__name__
        raise checks.error(OP, "layout", "a BranchLayout", got, "make one with BranchLayout.of", TypeError)
    paged = layout.block_table is not None
    checks.floating(OP, "prefix_k", prefix_k, like=q)
    letters = "[pages, page, Hkv, E]" if paged else "[Tp, Hkv, E]"
    paging = "give the layout no block_table without pages" if paged else "give the layout a block_table with pages"
    checks.shape(OP, "prefix_k", prefix_k, (*(None,) * (3 if paged else 2), width), letters, paging)
    kv_heads = prefix_k.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise checks.error(OP, "prefix_k", f"a number of heads that divides Hq = {heads}", prefix_k, "check the heads")
    checks.floating(OP, "prefix_v", prefix_v, like=q)
    checks.shape(OP, "prefix_v", prefix_v, tuple(prefix_k.shape), letters, "give it prefix_k's shape")
    if paged and torch.is_grad_enabled():
        for name, prefix in (("prefix_k", prefix_k), ("prefix_v", prefix_v)):
            if prefix.requires_grad:
                raise _trained_pages(name, prefix)
    for name, own, other in (("k", k, v), ("v", v, k)):
        if own is not None:
            checks.floating(OP, name, own, like=q)
            checks.shape(OP, name, own, (rows, kv_heads, width), "[T, Hkv, E]", "give each row of q its own")
        elif other is not None:
            raise checks.error(OP, name, "both k and v, or neither", None, "pass None for both to see the prefix only")
    checks.same_device(OP, "layout", layout.cu_branch, q)


def _trained_pages(name: str, prefix: Tensor) -> Exception:
    remedy = "give the layout flat slices, or pass it with .detach()"
    return checks.error(OP, name, "frozen pages, which require no grad", prefix, remedy)


def _fake(call: BranchAttention) -> tuple[Tensor, Tensor]:
    q = call.q
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=accumulation_dtype(q.dtype))


def _backward_fake(call: BranchAttentionBackward) -> tuple[Tensor, ...]:
    needs = (True, True, True, call.prefix_grads, call.prefix_grads)
    return fake_gradients(call.forward.q, call.forward[:5], needs)


_branch_attention = Op(
    "branch_attention",
    BranchAttention,
    "(Tensor, Tensor)",
    fake=_fake,
    triton=True,
    cuda=True,
    cpu=True,
)
_branch_attention_backward = Op(
    "branch_attention_backward",
    BranchAttentionBackward,
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    folder="branch_attention",
    fake=_backward_fake,
    triton=True,
    cpu=True,
)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    ctx.set_materialize_grads(False)  # the lse that no loss uses has a gradient of None
    ctx.save_for_backward(out, lse, *inputs[:10])
    ctx.options = inputs[10:]
    ctx.memory = memory_of(inputs[5:10])  # keeps the plan for the backward


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor, ...]:
    saved = ctx.saved_tensors  # read only once: checkpointing allows no second time
    for name, need, prefix in zip(("prefix_k", "prefix_v"), ctx.needs[3:], saved[5:7], strict=True):
        if need and saved[-1] is not None:  # pages; under vmap the check is possible only here
            raise _trained_pages(name, prefix)
    grad_out = torch.zeros_like(saved[0]) if grad_out is None else grad_out
    return _branch_attention_backward(grad_out, grad_lse, *saved, *ctx.options, any(ctx.needs[3:]))


_branch_attention.differentiate(
    to=("q", "k", "v", "prefix_k", "prefix_v"), setup_context=_save, backward=_backward, by=_branch_attention_backward
)

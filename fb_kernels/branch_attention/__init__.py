"""Attention of many branches over one shared prefix, which is read in place and never repeated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fb_kernels import checks, precision
from fb_kernels._op import Op
from fb_kernels.branch_attention import reference
from fb_kernels.precision import accumulation_dtype


def branch_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    prefix_k: Tensor,
    prefix_v: Tensor,
    *,
    cu_branch: Tensor,
    cu_group: Tensor,
    prefix_start: Tensor,
    prefix_len: Tensor,
    max_branch_len: int | None = None,
    max_prefix_len: int | None = None,
    block_table: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the tokens of B branches in G groups to the group's prefix slice and to their own branch.

    Rows lie sorted by group, a group's branches one after the other: group g has the branches cu_group[g] to
    cu_group[g + 1], branch b the rows cu_branch[b] to cu_branch[b + 1]. Row i of a branch sees the group's whole slice
    of P keys and the branch's rows 0 to i. Slice key j is at position j, row i at P + i; with a window only keys with
    0 <= pos_q - pos_k < window count. out = softmax(s) v with s = scale q . k, or softcap tanh(scale q . k / softcap),
    accumulated in float32 (float64 for float64 input). A whole trajectory is a group of one branch with prefix_len 0.
    Under torch.autocast q, k, v and the prefix are cast to its dtype first, as scaled_dot_product_attention casts them
    (float64 stays).

    Args:
        q: [T, Hq, E] float; any strides.
        k: [T, Hkv, E] of q's dtype, Hkv dividing Hq: the branches' own keys; None for prefix only.
        v: like k, None with it.
        prefix_k: [Tp, Hkv, E], or pages [pages, page, Hkv, E] with a block table. Frozen; it may be a view of a
            detached k, and a cache [B, Hkv, S, E] is `cache.transpose(1, 2)` with one page a row.
        prefix_v: like prefix_k.
        cu_branch: [B + 1] int32 or int64, from 0 to T.
        cu_group: [G + 1] int32 or int64, from 0 to B.
        prefix_start: [G] int32 or int64: first key of the slice, in the buffer or in the group's pages one after the
            other.
        prefix_len: [G] int32 or int64: number of keys; an empty slice may start anywhere.
        max_branch_len: hint; a wrong one costs time only.
        max_prefix_len: hint; a wrong one costs time only.
        block_table: [G, n] int32 or int64, the pages of each group in order; what lies outside the slice is not read
            (pad with -1).
        window: sliding window, at least 1; None for all keys.
        scale: multiplies q . k, above 0; E**-0.5 by default.
        softcap: bound of the scores (Gemma 2), None for none.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        out [T, Hq, E] in q's dtype; with return_lse also lse [Hq, T], natural log, float32 (float64 for float64 input).
        A row that sees no key has out 0, lse -inf; one with a score that is NaN or +inf is NaN. Gradients reach q, k
        and v through out; lse carries none. On the CPU a layout that does not fit is a ValueError, on a device the
        rows it affects are NaN. An attention sink is out * sigmoid(lse - sink).

    Raises:
        TypeError: an argument of the wrong kind or dtype; float8 prefixes are not supported.
        ValueError: a wrong shape, device or value, or a prefix that requires grad (detach it).
    """
    q, k, v, prefix_k, prefix_v = precision.lowered(q, k, v, prefix_k, prefix_v)
    layout = (cu_branch, cu_group, prefix_start, prefix_len, block_table)
    options = (max_branch_len, max_prefix_len, window, scale, softcap)
    out, lse = _branch_attention(*_arguments("branch_attention", q, k, v, prefix_k, prefix_v, layout, options))
    return (out, lse) if return_lse else out


def branch_attention_out(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    prefix_k: Tensor,
    prefix_v: Tensor,
    *,
    cu_branch: Tensor,
    cu_group: Tensor,
    prefix_start: Tensor,
    prefix_len: Tensor,
    max_branch_len: int | None = None,
    max_prefix_len: int | None = None,
    block_table: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> None:
    """`branch_attention` into given tensors; every element of both is written, and there is no gradient.

    out and lse share no memory with each other or with an input; where they do, that is a ValueError. torch.autocast
    casts nothing here, as with `out=` of torch's own functions.

    Args:
        out: [T, Hq, E] of q's dtype, any strides but those of an expanded tensor.
        lse: [Hq, T] float32 (float64 for float64 input), likewise.
        q: as in `branch_attention`, like everything that follows.
        k: see there.
        v: see there.
        prefix_k: see there.
        prefix_v: see there.
        cu_branch: see there.
        cu_group: see there.
        prefix_start: see there.
        prefix_len: see there.
        max_branch_len: see there.
        max_prefix_len: see there.
        block_table: see there.
        window: see there.
        scale: see there.
        softcap: see there.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: a wrong shape, device or value, or a tensor that requires grad.
    """
    op = "branch_attention_out"
    layout = (cu_branch, cu_group, prefix_start, prefix_len, block_table)
    options = (max_branch_len, max_prefix_len, window, scale, softcap)
    arguments = _arguments(op, q, k, v, prefix_k, prefix_v, layout, options)
    rows, heads, _ = q.shape
    checks.floating(op, "out", out, like=q)
    checks.shape(op, "out", out, tuple(q.shape), "[T, Hq, E]", "allocate it like q")
    checks.floating(op, "lse", lse)
    checks.same_device(op, "lse", lse, q)
    dtype = accumulation_dtype(q.dtype)
    if lse.dtype != dtype:
        raise checks.error(op, "lse", f"dtype {dtype} for this q", lse, "allocate it in that dtype", TypeError)
    checks.shape(op, "lse", lse, (heads, rows), "[Hq, T]", "allocate one value for each head and row")
    written = (("out", out), ("lse", lse))
    for name, value in written:
        checks.writable(op, name, value)
    names = (
        "q",
        "k",
        "v",
        "prefix_k",
        "prefix_v",
        "cu_branch",
        "cu_group",
        "prefix_start",
        "prefix_len",
        "block_table",
    )
    checks.apart(op, written, zip(names, arguments[: len(names)], strict=True))
    if torch.is_grad_enabled():
        for name, given in (("out", out), ("lse", lse), ("q", q), ("k", k), ("v", v)):
            if given is not None and given.requires_grad:
                raise checks.error(
                    op, name, "a tensor that requires no grad", given, "use branch_attention or torch.no_grad()"
                )
    _branch_attention_out(out, lse, *arguments)


def _arguments(
    op: str,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    prefix_k: Tensor,
    prefix_v: Tensor,
    layout: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    options: tuple[int | None, int | None, int | None, float | None, float | None],
) -> tuple:
    """The operator's arguments, after checks."""
    cu_branch, cu_group, prefix_start, prefix_len, block_table = layout
    max_branch_len, max_prefix_len, window, scale, softcap = options
    checks.floating(op, "q", q)
    checks.shape(op, "q", q, (None, None, None), "[T, Hq, E]", "reshape it")
    rows, heads, width = q.shape
    if width == 0:
        raise checks.error(op, "q", "a head dimension E of 1 or more", q, "reshape it")
    checks.floating(op, "prefix_k", prefix_k, like=q)
    pages: tuple[None, ...] = (None,) if block_table is None else (None, None)
    letters = "[Tp, Hkv, E]" if block_table is None else "[pages, page, Hkv, E]"
    paging = "give a block_table with pages" if block_table is None else "give no block_table without pages"
    checks.shape(op, "prefix_k", prefix_k, (*pages, None, width), letters, paging)
    kv_heads = prefix_k.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise checks.error(op, "prefix_k", f"a number of heads that divides Hq = {heads}", prefix_k, "check the heads")
    checks.floating(op, "prefix_v", prefix_v, like=q)
    checks.shape(op, "prefix_v", prefix_v, tuple(prefix_k.shape), letters, "give it prefix_k's shape")
    if torch.is_grad_enabled():
        for name, prefix in (("prefix_k", prefix_k), ("prefix_v", prefix_v)):
            if prefix.requires_grad:
                raise checks.error(
                    op, name, "a frozen prefix, which requires no grad", prefix, "pass it with .detach()"
                )
    for name, own, other in (("k", k, v), ("v", v, k)):
        if own is not None:
            checks.floating(op, name, own, like=q)
            checks.shape(op, name, own, (rows, kv_heads, width), "[T, Hkv, E]", "give each row of q its own")
        elif other is not None:
            raise checks.error(op, name, "both k and v, or neither", None, "pass None for both to see the prefix only")
    checks.offsets(op, "cu_branch", cu_branch, like=q)
    checks.offsets(op, "cu_group", cu_group, like=q)
    groups = cu_group.shape[0] - 1
    for name, value in (("prefix_start", prefix_start), ("prefix_len", prefix_len)):
        checks.index(op, name, value, like=q)
        checks.shape(op, name, value, (groups,), "[G] of cu_group[G + 1]", "give one value to each group")
    if block_table is not None:
        checks.index(op, "block_table", block_table, like=q)
        checks.shape(op, "block_table", block_table, (groups, None), "[G, n]", "give one row to each group")
    for name, bound, least in (
        ("max_branch_len", max_branch_len, 0),
        ("max_prefix_len", max_prefix_len, 0),
        ("window", window, 1),
    ):
        if bound is not None:
            checks.integer(op, name, bound, "pass None for no bound", least)
    if scale is None:
        scale = width**-0.5
    checks.positive(op, "scale", scale, "pass None for E**-0.5")
    if softcap is not None:
        checks.positive(op, "softcap", softcap, "pass None for no soft-cap")
    return (q, k, v, prefix_k, prefix_v, *layout, max_branch_len, max_prefix_len, window, scale, softcap)


_OPTIONS = (
    "Tensor cu_branch, Tensor cu_group, Tensor prefix_start, Tensor prefix_len, Tensor? block_table, "
    "SymInt? max_branch_len, SymInt? max_prefix_len, SymInt? window, float scale, float? softcap"
)
_INPUTS = "Tensor q, Tensor? k, Tensor? v, Tensor prefix_k, Tensor prefix_v"


def _fake(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=accumulation_dtype(q.dtype))


def _backward_fake(_: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
    q = tensors[0]
    return tuple(q.new_empty(0 if x is None else x.shape) for x in tensors[:3])


_branch_attention = Op(
    "branch_attention",
    f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)",
    reference=reference.branch_attention,
    fake=_fake,
    triton=True,
    cpu=True,
)
_branch_attention_out = Op(
    "branch_attention_out",
    f"(Tensor(a!) out, Tensor(b!) lse, {_INPUTS}, {_OPTIONS}) -> ()",
    reference=reference.branch_attention_out,
    fake=lambda *_: None,
    triton=True,
)
_branch_attention_backward = Op(
    "branch_attention_backward",
    f"(Tensor grad_out, {_INPUTS}, Tensor out, Tensor lse, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    reference=reference.branch_attention_backward,
    fake=_backward_fake,
    triton=True,
    cpu=True,
)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(*inputs[:5], out, lse, *inputs[5:10])
    ctx.options = inputs[10:]


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv = _branch_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    own = ctx.saved_tensors[1] is not None
    return dq, dk if own else None, dv if own else None, *(None,) * 12


_branch_attention.differentiate(setup_context=_save, backward=_backward, by=_branch_attention_backward)

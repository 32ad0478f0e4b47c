"""From the fused q, k, v projection to attention's inputs: split, per-head norm, rotary embedding, cache write."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fb_kernels._runtime import checks, precision
from fb_kernels._runtime.op import Op, fake_gradients, signature
from fb_kernels.qk_norm_rope.arguments import QkNormRope, QkNormRopeBackward, QkNormRopeOut


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    kv_out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv into heads, RMS-norm those of q and k if a weight is given (Qwen3), and rotate them.

    x -> x cos + rotate_half(x) sin with rotate_half(x1, x2) = (-x2, x1) over the two halves of a head, as in Hugging
    Face's models; in float32 (float64 for float64 input), rounded once. Under torch.autocast qkv and weights of several
    dtypes are cast to the widest of them (float64 stays); with kv_out nothing is cast, as in torch's in-place
    operations.

    Args:
        qkv: [T, (Hq + 2 Hkv) E] float: the heads of q, then of k, then of v; or [T, (Hq + Hkv) E] without v.
        q_weight: [E] like qkv, or None for no norm.
        k_weight: [E] like qkv, or None for no norm.
        cos: [S, E] float of any dtype: the rotary table, one row per position.
        sin: [S, E], cos's dtype.
        positions: [T] int32 or int64, rows of cos and sin.
        num_heads: Hq.
        num_kv_heads: Hkv.
        eps: of the norm, above 0.
        kv_out: (k_cache[slots, Hkv, E], v_cache[slots, Hkv, E], slot[T]): k and v are also written to their slots, the
            only writes to an argument; rows with a negative slot are not written. No two rows may share a slot, and the
            caches may not share memory with each other or with another argument.

    Returns:
        (q[T, Hq, E], k[T, Hkv, E], v[T, Hkv, E]) in qkv's dtype, new and contiguous; v[T, 0, E] if qkv has none.
        Without kv_out gradients flow to qkv, q_weight and k_weight; cos and sin may not require grad. On the CPU a
        position outside the table or a slot outside the cache is a ValueError; on a device the row's q and k are NaN
        for a bad position, and the row is not written for a bad slot.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value, cos or sin that require grad, or kv_out with any argument that does.
    """
    op, caches = "qk_norm_rope", kv_out if type(kv_out) is tuple else ()
    key = signature((qkv, q_weight, k_weight, cos, sin, positions, *caches), (eps,), (num_heads, num_kv_heads))
    operator = _qk_norm_rope if kv_out is None else _qk_norm_rope_out
    run = operator.checked.get(key) if key else None
    if run is None:
        if kv_out is None:
            qkv, q_weight, k_weight = precision.promoted(qkv, q_weight, k_weight)
            cos, sin = precision.promoted(cos, sin)
        checks.floating(op, "qkv", qkv)
        checks.floating(op, "cos", cos)
        checks.same_device(op, "cos", cos, qkv)
        checks.floating(op, "sin", sin, like=cos)
        for name, heads in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
            checks.integer(op, name, heads, "pass the model's number of heads", least=1)
        checks.shape(op, "cos", cos, (None, None), "[S, E]", "drop the batch dimension")
        length, head_dim = cos.shape
        if head_dim % 2:
            raise checks.error(op, "cos", "an even head dimension E", cos, "give both halves of the rotary table")
        checks.shape(op, "sin", sin, (length, head_dim), "[S, E]", "give it cos's shape")
        if kv_out is not None or qkv.shape[1:] != ((num_heads + num_kv_heads) * head_dim,):  # with v
            columns = (num_heads + 2 * num_kv_heads) * head_dim
            remedy = "concatenate the heads of q, k and v in a row"
            checks.shape(op, "qkv", qkv, (None, columns), "[T, (Hq + 2 Hkv) E]", remedy)
        rows = qkv.shape[0]
        if rows and not length:
            raise checks.error(op, "cos", "a row for each position", cos, "build the rotary tables first")
        for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
            if weight is not None:
                checks.floating(op, name, weight, like=qkv)
                checks.shape(op, name, weight, (head_dim,), "[E]", "pass the norm's weight, or None for no norm")
        checks.index(op, "positions", positions, like=qkv)
        checks.shape(op, "positions", positions, (rows,), "[T]", "give one position to each row of qkv")
        checks.positive(op, "eps", eps, "pass the model's rms_norm_eps")
        if kv_out is not None:
            if not isinstance(kv_out, tuple | list) or len(kv_out) != 3:
                got = type(kv_out).__name__
                raise checks.error(op, "kv_out", "(k_cache, v_cache, slot)", got, "give all three", TypeError)
            for value in kv_out[:2]:
                checks.floating(op, "kv_out", value, like=qkv)
                checks.shape(
                    op, "kv_out", value, (None, num_kv_heads, head_dim), "[slots, Hkv, E]", "view the cache so"
                )
            checks.shape(
                op, "kv_out", kv_out[1], tuple(kv_out[0].shape), "[slots, Hkv, E]", "give both caches one size"
            )
            checks.index(op, "kv_out", kv_out[2], like=qkv)
            checks.shape(op, "kv_out", kv_out[2], (rows,), "[T]", "give one slot to each row of qkv")
        run = operator.passed(key, qkv)
    call = QkNormRope(qkv, q_weight, k_weight, cos, sin, positions, num_heads, num_kv_heads, eps)
    if kv_out is None:
        return run(call)
    k_cache, v_cache, slot = kv_out
    if not (key and checks.disjoint((k_cache, v_cache), *call[:6], slot)):
        checks.writable(op, "kv_out", k_cache)
        checks.writable(op, "kv_out", v_cache)
        written = (("kv_out[0]", k_cache), ("kv_out[1]", v_cache))
        checks.apart(op, written, (*zip(call._fields, call[:6], strict=False), ("kv_out[2]", slot)))
    return run(QkNormRopeOut(call, k_cache, v_cache, slot))


def _fake(call: QkNormRope) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (call.qkv.new_empty((call.qkv.shape[0], heads, call.cos.shape[1])) for heads in call.heads)
    return q, k, v


_THREE = "(Tensor, Tensor, Tensor)"
_qk_norm_rope = Op("qk_norm_rope", QkNormRope, _THREE, fake=_fake, triton=True, cpu=True)
_qk_norm_rope_out = Op(
    "qk_norm_rope_out",
    QkNormRopeOut,
    _THREE,
    folder="qk_norm_rope",
    fake=lambda call: _fake(call.projection),
    writes=("k_cache", "v_cache"),
    triton=True,
    cpu=True,
)
_qk_norm_rope_backward = Op(
    "qk_norm_rope_backward",
    QkNormRopeBackward,
    _THREE,
    folder="qk_norm_rope",
    fake=lambda call: fake_gradients(call.forward.qkv, call.forward[:3], call.needs),
    triton=True,
)


def _backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, ...]:
    return _qk_norm_rope_backward(grad_q, grad_k, grad_v, *ctx.saved_tensors, *ctx.options, ctx.needs)


_qk_norm_rope.differentiate(to=("qkv", "q_weight", "k_weight"), backward=_backward, by=_qk_norm_rope_backward)
_qk_norm_rope_out.has_no_gradient()

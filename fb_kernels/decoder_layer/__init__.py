"""A whole layer of a Llama-like decoder for a few rows after each sequence: a decode step's, or candidates'."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fb_kernels._runtime import checks
from fb_kernels._runtime.op import Op, signature
from fb_kernels.branch_attention_qkv import are_apart, check_sequences, check_written


class LayerWeights(NamedTuple):
    """The weights of a layer, all of one dtype and on one device; F is the width of the MLP."""

    input_norm: Tensor
    """[D]."""
    qkv: Tensor
    """[(Hq + 2 Hkv) E, D]: the heads of q, then of k, then of v."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    """[E], or None for no norm."""
    k_norm: Tensor | None
    o: Tensor
    """[D, Hq E]."""
    o_bias: Tensor | None
    post_norm: Tensor
    """[D], of the norm before the MLP."""
    gate_up: Tensor
    """[2F, D]: the gate's rows, then up's."""
    gate_up_bias: Tensor | None
    down: Tensor
    """[D, F]."""
    down_bias: Tensor | None


NEEDED = tuple("None" not in str(kind) for kind in LayerWeights.__annotations__.values())


def decoder_layer(
    hidden: Tensor,
    weights: LayerWeights,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    held: Tensor,
    slots: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    eps: float = 1e-6,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """One layer for rows that are each one more token after a sequence: the next token, or candidates for it.

    `skinny_linear` with its norm, `branch_attention_qkv`, and three times `skinny_linear` for o and the MLP, in one
    call; intermediate results may have higher precision. The weights are treated as frozen, as in `skinny_linear`.
    torch.autocast casts nothing here, as in torch's in-place operations.

    Args:
        hidden: [N, D] float, the residual stream; N / G rows for each of G sequences in order.
        weights: like hidden. Hkv and E are taken from the cache, Hq from o.
        cos: [S, E] float of any dtype: the rotary table.
        sin: [S, E], cos's dtype.
        positions: [N] int32 or int64, rows of cos and sin.
        k_cache: [slots, Hkv, E] like hidden for one sequence, or pages [pages, page, Hkv, E] with a block table.
        v_cache: likewise.
        held: [G] int32 or int64: the number of tokens that each sequence holds.
        slots: [N] like positions: where each row's k and v are written, negative for nowhere; None writes nothing. The
            rules for slots and pages are those of `branch_attention_qkv`.
        block_table: [G, n] like positions, the pages of each sequence; None for a flat cache.
        eps: of all norms, above 0.
        window: number of keys that a row sees, itself included; None for all.
        scale: of the scores; None for E ** -0.5.

    Returns:
        [N, D] in hidden's dtype, contiguous. For inference: no argument may require grad. Values out of range are
        treated as in `branch_attention_qkv`: a ValueError on the CPU, NaN in the affected rows on a device.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value, or an argument that requires grad.
    """
    op = "decoder_layer"
    rest = (cos, sin, positions, k_cache, v_cache, held, slots, block_table)
    whole = type(weights) is LayerWeights
    key = signature((hidden, *rest, *weights), (eps, scale), (window,)) if whole else None
    run = _decoder_layer.checked.get(key) if key else None
    if run is None:
        checks.floating(op, "hidden", hidden)
        checks.shape(op, "hidden", hidden, (None, None), "[N, D]", "flatten the leading dimensions")
        check_sequences(op, hidden, *rest, eps, window, scale)
        if not isinstance(weights, LayerWeights):
            kind = type(weights).__name__
            raise checks.error(op, "weights", "LayerWeights", kind, "build them from the layer's tensors", TypeError)
        (kv_heads, width), model = k_cache.shape[-2:], hidden.shape[1]
        if not kv_heads:
            raise checks.error(op, "k_cache", "one head or more", k_cache, "reshape the cache")
        for (name, weight), needed in zip(weights._asdict().items(), NEEDED, strict=True):
            if weight is not None or needed:
                checks.floating(op, f"weights.{name}", weight, like=hidden)
        if weights.o.ndim != 2 or weights.o.shape[0] != model or weights.o.shape[1] % (kv_heads * width):
            expected = f"shape [D, Hq E] = [{model}, a multiple of {kv_heads * width}]"
            raise checks.error(op, "weights.o", expected, weights.o, "pass the projection after the attention")
        checks.shape(op, "weights.down", weights.down, (model, None), "[D, F]", "pass the MLP's last projection")
        for (name, weight), sizes in zip(
            weights._asdict().items(), _sizes(model, weights, kv_heads, width), strict=True
        ):
            if weight is not None:
                checks.shape(op, f"weights.{name}", weight, sizes, name, "pass the weights of one layer of the model")
        run = _decoder_layer.passed(key, hidden)
    if slots is not None and not (key and are_apart(hidden, *rest, *weights)):
        named = {f"weights.{name}": weight for name, weight in weights._asdict().items()}
        check_written(op, *rest, {"hidden": hidden} | named)
    return run(hidden, *weights, *rest, eps, window, cos.shape[1] ** -0.5 if scale is None else scale)


def _sizes(model: int, weights: LayerWeights, kv_heads: int, width: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of the weights, derived from those of o and down."""
    attention, inner = weights.o.shape[1], weights.down.shape[1]
    outputs = attention + 2 * kv_heads * width
    return (
        (model,), (outputs, model), (outputs,), (width,), (width,), (model, attention), (model,), (model,),
        (2 * inner, model), (2 * inner,), (model, inner), (model,),
    )  # fmt: skip


def _fake(hidden: Tensor, *_: object) -> Tensor:
    return hidden.new_empty(hidden.shape)


_decoder_layer = Op(
    "decoder_layer",
    "(Tensor hidden, Tensor input_norm, Tensor qkv, Tensor? qkv_bias, Tensor? q_norm, Tensor? k_norm, Tensor o, "
    "Tensor? o_bias, Tensor post_norm, Tensor gate_up, Tensor? gate_up_bias, Tensor down, Tensor? down_bias, "
    "Tensor cos, Tensor sin, Tensor positions, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor held, Tensor? slots, "
    "Tensor? block_table, float eps, SymInt? window, float scale) -> Tensor",
    fake=_fake,
    cpu=True,
)
_decoder_layer.has_no_gradient()

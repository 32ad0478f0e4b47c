"""A whole layer of a Llama-like decoder for a few rows after each sequence: a decode step's, or candidates'."""

from __future__ import annotations

from torch import Tensor

from fb_kernels._runtime import checks
from fb_kernels._runtime.op import Op, signature
from fb_kernels.branch_attention_qkv import check_sequences, check_written
from fb_kernels.branch_attention_qkv.arguments import CachedSequences
from fb_kernels.decoder_layer.arguments import DecoderLayer
from fb_kernels.decoder_layer.arguments import LayerWeights as LayerWeights

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
    sequences = CachedSequences(cos, sin, positions, k_cache, v_cache, held, slots, block_table)
    whole = type(weights) is LayerWeights
    key = signature((hidden, *sequences, *weights), (eps, scale), (window,)) if whole else None
    run = _decoder_layer.checked.get(key) if key else None
    if run is None:
        checks.floating(op, "hidden", hidden)
        checks.shape(op, "hidden", hidden, (None, None), "[N, D]", "flatten the leading dimensions")
        check_sequences(op, hidden, sequences, eps, window, scale)
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
    others = (hidden, *weights, cos, sin, positions, held, slots, block_table)
    if slots is not None and not (key and checks.disjoint((k_cache, v_cache), *others)):
        by_name = {f"weights.{name}": weight for name, weight in weights._asdict().items()}
        check_written(op, sequences, {"hidden": hidden} | by_name)
    scale = cos.shape[1] ** -0.5 if scale is None else scale
    return run(DecoderLayer(hidden, weights, sequences, eps, window, scale))


def _sizes(model: int, weights: LayerWeights, kv_heads: int, width: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of the weights, derived from those of o and down."""
    attention, inner = weights.o.shape[1], weights.down.shape[1]
    outputs = attention + 2 * kv_heads * width
    return (
        (model,), (outputs, model), (outputs,), (width,), (width,), (model, attention), (model,), (model,),
        (2 * inner, model), (2 * inner,), (model, inner), (model,),
    )  # fmt: skip


_decoder_layer = Op(
    "decoder_layer",
    DecoderLayer,
    "Tensor",
    fake=lambda call: call.hidden.new_empty(call.hidden.shape),
    writes=("k_cache", "v_cache"),
    cpu=True,
)
_decoder_layer.has_no_gradient()

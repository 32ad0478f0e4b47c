"""A decode step's attention, from the fused projection to the heads' output: norm, rotation, cache write, softmax."""

from __future__ import annotations

from torch import Tensor

from fb_kernels._runtime import checks
from fb_kernels._runtime.op import Op, signature
from fb_kernels.branch_attention_qkv.arguments import BranchAttentionQkv, CachedSequences


def branch_attention_qkv(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    held: Tensor,
    slots: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of rows that are each one more token after a sequence: the next token, or candidates for it.

    `qk_norm_rope` and `branch_attention` in one op, with one group of one-token branches for each of G sequences. Every
    row sees itself and what its sequence holds (with a window, the last window - 1 keys), but not the other rows. A
    row's result depends neither on the other sequences of a call nor on which pages a sequence has. torch.autocast
    casts nothing here, as in torch's in-place operations.

    Args:
        qkv: [N, (Hq + 2 Hkv) E] float: the heads of q, then of k, then of v; N / G rows for each sequence in order.
        q_weight: [E] like qkv, or None for no norm.
        k_weight: [E] like qkv, or None for no norm.
        cos: [S, E] float of any dtype: the rotary table.
        sin: [S, E], cos's dtype.
        positions: [N] int32 or int64, rows of cos and sin.
        k_cache: [slots, Hkv, E] like qkv for one sequence, or pages [pages, page, Hkv, E] with a block table; nothing
            after the held tokens is ever seen.
        v_cache: likewise.
        held: [G] int32 or int64: the number of tokens that each sequence holds, at the beginning of a flat cache.
        slots: [N] like positions: where each row's k and v are written (with pages: page number * page + offset);
            negative for nowhere. In a flat cache a slot must come after the held tokens; with pages it must not hold
            one of the sequence's held tokens, and the caller must ensure that it holds none of another sequence's. No
            two rows may share a slot, and the caches may not share memory with each other or anything else. None writes
            nothing.
        block_table: [G, n] like positions: token i of sequence g is in page block_table[g, i // page] at i % page.
            Pages without a token that is seen are never read, so those entries may be anything. None for a flat cache.
        num_heads: Hq, a multiple of Hkv.
        num_kv_heads: Hkv.
        eps: of the norm, above 0.
        window: number of keys that a row sees, itself included; None for all.
        scale: of the scores; None for E ** -0.5.

    Returns:
        [N, Hq, E] in qkv's dtype. For inference: no argument may require grad. On the CPU a position outside the table,
        or a held, page or slot out of range, is a ValueError; on a device the affected rows are NaN and write nothing.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value, or an argument that requires grad.
    """
    op = "branch_attention_qkv"
    sequences = CachedSequences(cos, sin, positions, k_cache, v_cache, held, slots, block_table)
    key = signature((qkv, q_weight, k_weight, *sequences), (eps, scale), (num_heads, num_kv_heads, window))
    run = _branch_attention_qkv.checked.get(key) if key else None
    if run is None:
        checks.floating(op, "qkv", qkv)
        checks.integer(op, "num_kv_heads", num_kv_heads, "pass the model's number of heads", least=1)
        checks.integer(op, "num_heads", num_heads, "pass the model's number of heads", least=1)
        if num_heads % num_kv_heads:
            raise checks.error(op, "num_heads", f"a multiple of {num_kv_heads}", num_heads, "pass the model's heads")
        checks.shape(op, "qkv", qkv, (None, None), "[N, (Hq + 2 Hkv) E]", "flatten the leading dimensions")
        check_sequences(op, qkv, sequences, eps, window, scale)
        head_dim = cos.shape[1]
        width, remedy = (num_heads + 2 * num_kv_heads) * head_dim, "concatenate the heads of q, k and v in a row"
        checks.shape(op, "qkv", qkv, (None, width), "[N, (Hq + 2 Hkv) E]", remedy)
        if k_cache.shape[-2] != num_kv_heads:
            expected = f"{num_kv_heads} heads, as num_kv_heads says"
            raise checks.error(op, "k_cache", expected, k_cache, "reshape the cache")
        for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
            if weight is not None:
                checks.floating(op, name, weight, like=qkv)
                checks.shape(op, name, weight, (head_dim,), "[E]", "pass the norm's weight, or None for no norm")
        run = _branch_attention_qkv.passed(key, qkv)
    others = (qkv, q_weight, k_weight, cos, sin, positions, held, slots, block_table)
    if slots is not None and not (key and checks.disjoint((k_cache, v_cache), *others)):
        check_written(op, sequences, {"qkv": qkv, "q_weight": q_weight, "k_weight": k_weight})
    scale = cos.shape[1] ** -0.5 if scale is None else scale
    return run(BranchAttentionQkv(qkv, q_weight, k_weight, sequences, num_heads, num_kv_heads, eps, window, scale))


def check_written(op: str, sequences: CachedSequences, others: dict[str, Tensor | None]) -> None:
    """Raise unless every element of the caches has memory of its own."""
    others = others | sequences._asdict()
    caches = [(name, cache) for name in ("k_cache", "v_cache") if (cache := others.pop(name)) is not None]
    for name, cache in caches:
        checks.writable(op, name, cache)
    checks.apart(op, caches, others.items())


def check_sequences(
    op: str, rows: Tensor, sequences: CachedSequences, eps: float, window: int | None, scale: float | None
) -> None:
    """Raise if the tables and caches do not fit the op's rows; whether memory is shared is for `check_written`."""
    cos, sin, positions, k_cache, v_cache, held, slots, block_table = sequences
    checks.floating(op, "cos", cos)
    checks.same_device(op, "cos", cos, rows)
    checks.floating(op, "sin", sin, like=cos)
    checks.shape(op, "cos", cos, (None, None), "[S, E]", "drop the batch dimension")
    length, head_dim = cos.shape
    if head_dim % 2 or not head_dim:
        raise checks.error(op, "cos", "an even head dimension E above 0", cos, "give both halves of the rotary table")
    checks.shape(op, "sin", sin, (length, head_dim), "[S, E]", "give it cos's shape")
    count = rows.shape[0]
    checks.index(op, "positions", positions, like=rows)
    checks.shape(op, "positions", positions, (count,), "[N]", "give one position to each row")
    letters = "[slots, Hkv, E]" if block_table is None else "[pages, page, Hkv, E]"
    sizes = (*(None,) * (2 if block_table is None else 3), head_dim)
    remedy = "give pages a block_table, and a flat cache none"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        checks.floating(op, name, cache, like=rows)
        checks.shape(op, name, cache, sizes, letters, remedy)
    checks.shape(op, "v_cache", v_cache, tuple(k_cache.shape), letters, "give both caches one size")
    checks.index(op, "held", held, like=rows)
    if block_table is None:
        checks.shape(op, "held", held, (1,), "[1]", "give several sequences pages, and a block_table")
    else:
        checks.shape(op, "held", held, (None,), "[G]", "give each sequence's length")
        groups = held.shape[0]
        if not groups or count % groups:
            expected = f"[G] with G of 1 or more that divides N = {count}"
            raise checks.error(op, "held", expected, held, "give every sequence as many rows")
        if not k_cache.shape[1]:
            raise checks.error(op, "k_cache", "pages of one slot or more", k_cache, "reshape the cache")
        checks.index(op, "block_table", block_table, like=rows)
        checks.shape(op, "block_table", block_table, (groups, None), "[G, n]", "give one row to each sequence")
    if slots is not None:
        checks.index(op, "slots", slots, like=rows)
        checks.shape(op, "slots", slots, (count,), "[N]", "give one slot to each row")
    checks.positive(op, "eps", eps, "pass the model's rms_norm_eps")
    if window is not None:
        checks.integer(op, "window", window, "leave it out for full attention", least=1)
    if scale is not None:
        checks.number(op, "scale", scale, "leave it out for E ** -0.5")


_branch_attention_qkv = Op(
    "branch_attention_qkv",
    BranchAttentionQkv,
    "Tensor",
    fake=lambda call: call.qkv.new_empty((call.qkv.shape[0], call.num_heads, call.sequences.cos.shape[1])),
    writes=("k_cache", "v_cache"),
    triton=True,
    cuda=True,
    cpu=True,
)
_branch_attention_qkv.has_no_gradient()

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fb_kernels import backend
from fb_kernels.qk_norm_rope import qk_norm_rope, reference
from fb_kernels.qk_norm_rope.naive import qk_norm_rope as naive
from fb_kernels.testing import assert_close_to_reference, count_launches, count_syncs, poison_

HQ, HKV, E, S = 4, 2, 8, 12
HEADS = {"num_heads": HQ, "num_kv_heads": HKV}


def tables(length: int, dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    frequency = 100.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / max(dim, 1))
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def inputs(rows: int = 5, dtype: torch.dtype = torch.float32, seed: int = 0, dim: int = E) -> list[Tensor]:
    """qkv, q_weight, k_weight, cos, sin, positions."""
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(rows, (HQ + 2 * HKV) * dim, generator=generator, dtype=torch.float64) * 2
    weights = torch.randn(2, dim, generator=generator, dtype=torch.float64)
    positions = torch.randint(0, S, (rows,), generator=generator)
    return [*(value.to(dtype) for value in (qkv, weights[0], weights[1], *tables(S, dim))), positions]


def caches(size: int = 7, dtype: torch.dtype = torch.float32, dim: int = E) -> tuple[Tensor, Tensor]:
    return poison_(torch.empty(size, HKV, dim, dtype=dtype)), poison_(torch.empty(size, HKV, dim, dtype=dtype))


def relaid(x: Tensor, layout: str) -> Tensor:
    if layout == "strided":
        return torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]
    if layout == "offset":
        return torch.cat((torch.full_like(x[..., :1], torch.nan), x), -1)[..., 1:]
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x


@given(
    rows=st.integers(0, 5),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    half=st.integers(0, 4),
    normed=st.tuples(st.booleans(), st.booleans()),
    layout=st.sampled_from(["plain", "strided", "offset", "transposed"]),
    index=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 99),
)
def test_matches_naive_float64(
    rows: int, heads: tuple, half: int, normed: tuple, layout: str, index: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(rows, (heads[0] + 2 * heads[1]) * 2 * half, generator=generator, dtype=torch.float64)
    weights = [torch.randn(2 * half, generator=generator, dtype=torch.float64) if use else None for use in normed]
    # unequal halves: nothing may assume that the table repeats itself
    cos, sin = torch.randn(2, 6, 2 * half, generator=generator, dtype=torch.float64)
    positions = torch.randint(0, 6, (rows,), generator=generator).to(index)
    arguments = [relaid(qkv, layout), *weights, relaid(cos, layout), relaid(sin, layout), positions]
    before = [None if value is None else value.clone() for value in arguments]
    options = {"num_heads": heads[0], "num_kv_heads": heads[1], "eps": 1e-3}
    outputs = qk_norm_rope(*arguments, **options)
    torch.testing.assert_close(outputs, naive(*arguments, **options), rtol=1e-12, atol=1e-12)
    assert all(output.is_contiguous() for output in outputs)
    for value, copy in zip(arguments, before, strict=True):
        assert value is copy or torch.equal(value, copy)


def test_matches_hugging_face() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    qkv, q_weight, k_weight, cos, sin, positions = inputs()
    norms = Qwen3RMSNorm(E), Qwen3RMSNorm(E)
    for norm, weight in zip(norms, (q_weight, k_weight), strict=True):
        norm.weight.data.copy_(weight)
    heads = qkv.view(1, 5, HQ + 2 * HKV, E)
    q, k = norms[0](heads[:, :, :HQ]), norms[1](heads[:, :, HQ : HQ + HKV])
    q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos[positions][None], sin[positions][None])
    ours = qk_norm_rope(qkv, q_weight, k_weight, cos, sin, positions, **HEADS)
    torch.testing.assert_close(ours[0], q[0].transpose(0, 1).detach())
    torch.testing.assert_close(ours[1], k[0].transpose(0, 1).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    ours = inputs(40, dtype, dim=64)
    wide = [value.double() if value.is_floating_point() else value for value in ours]
    plain = [value.clone() for value in ours]
    results = []
    for values, function in ((ours, qk_norm_rope), (wide, naive), (plain, naive)):
        for value in values[:3]:
            value.requires_grad_()
        outputs = function(*values, **HEADS)
        generator = torch.Generator().manual_seed(3)
        grads = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype) for out in outputs]
        torch.autograd.backward(outputs, [grad.to(outputs[0].dtype) for grad in grads])
        results.append([*outputs, *(value.grad for value in values[:3])])
    for mine, truth, native in zip(*results, strict=True):
        assert mine.dtype == dtype
        assert_close_to_reference(mine, truth, native)


def test_float32_tables_serve_low_precision() -> None:
    values = inputs(dtype=torch.bfloat16)
    values[3:5] = tables(S, E)
    mine = qk_norm_rope(*values, **HEADS)
    truth = naive(*(value.double() if value.is_floating_point() else value for value in values), **HEADS)
    for ours, expected in zip(mine, truth, strict=True):
        assert torch.equal(ours, expected.bfloat16())


def test_hostile_rows_and_unused_positions_stay_alone() -> None:
    values = inputs()
    clean = qk_norm_rope(*values, **HEADS)
    hostile = [value.clone() for value in values]
    hostile[0][1], hostile[0][2, 0] = torch.nan, torch.inf
    used = set(values[5].tolist())
    for row in set(range(S)) - used:
        poison_(hostile[3][row])
        poison_(hostile[4][row])
    for mine, expected in zip(qk_norm_rope(*hostile, **HEADS), clean, strict=True):
        assert torch.equal(mine[[0, 3, 4]], expected[[0, 3, 4]])
        assert mine[1].isnan().all()


@pytest.mark.parametrize("normed", [(True, True), (False, False), (True, False), (False, True)])
def test_gradcheck(normed: tuple[bool, bool]) -> None:
    qkv, q_weight, k_weight, cos, sin, positions = inputs(2, torch.float64, dim=2)
    weights = [w.requires_grad_() if use else None for w, use in zip((q_weight, k_weight), normed, strict=True)]
    leaves = [qkv.requires_grad_(), *(w for w in weights if w is not None)]

    def function(qkv: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        return qk_norm_rope(qkv, *weights, cos, sin, positions, **HEADS)

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_gradients_of_one_argument_and_one_output_alone(index: int) -> None:
    values, wide = inputs(dtype=torch.float64), inputs(dtype=torch.float64)
    grads = []
    for inner, function in ((values, qk_norm_rope), (wide, naive)):
        inner[index].requires_grad_()
        function(*inner, **HEADS)[index // 2].pow(3).sum().backward()
        grads.append(inner[index].grad)
    torch.testing.assert_close(*grads)


def test_opcheck() -> None:
    op = torch.ops.fb.qk_norm_rope.default
    for values in (inputs(), inputs(3, torch.bfloat16), inputs(0)):
        for value in values[:3]:
            value.requires_grad_()
        torch.library.opcheck(op, (*values, HQ, HKV, 1e-6))
    values = inputs()
    torch.library.opcheck(op, (values[0].T.contiguous().T.requires_grad_(), None, None, *values[3:], HQ, HKV, 1e-6))
    grads = [torch.ones(5, heads, E) for heads in (HQ, HKV, HKV)]
    for some, needs in ((values, [True, True, True]), ([values[0], None, *values[2:]], [False, False, True])):
        arguments = (*grads, *some, HQ, HKV, 1e-6, needs)
        torch.library.opcheck(torch.ops.fb.qk_norm_rope_backward.default, arguments)
    slots = torch.tensor([0, -1, 3, 1, 6])
    out_op = torch.ops.fb.qk_norm_rope_out.default
    torch.library.opcheck(out_op, (*values, torch.zeros(7, HKV, E), torch.zeros(7, HKV, E), slots, HQ, HKV, 1e-6))
    torch.library.opcheck(out_op, (*inputs(0), *caches(0), slots[:0], HQ, HKV, 1e-6))


def test_compile() -> None:
    def loss(*values: Tensor) -> Tensor:
        q, k, v = qk_norm_rope(*values, **HEADS)
        return (q.sum() + k.square().sum()) * v.sum()

    def write(*values: Tensor) -> Tensor:
        return qk_norm_rope(*values[:6], **HEADS, kv_out=(values[6], values[7], values[8]))[0] + values[6].sum()

    values = inputs()
    for value in values[:3]:
        value.requires_grad_()
    eager, compiled = loss(*values), torch.compile(loss, fullgraph=True, backend="aot_eager")(*values)
    assert torch.equal(eager, compiled)
    for one, other in zip(*(torch.autograd.grad(out, values[:3]) for out in (eager, compiled)), strict=True):
        assert torch.equal(one, other)

    values = inputs()
    slots = torch.tensor([0, -1, 3, 1, 6])
    results = []
    for function in (write, torch.compile(write, fullgraph=True, backend="aot_eager")):
        k_cache, v_cache = torch.zeros(7, HKV, E), torch.zeros(7, HKV, E)
        results.append((function(*values, k_cache, v_cache, slots), k_cache, v_cache))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@given(
    rows=st.integers(0, 6),
    size=st.integers(0, 9),
    index=st.sampled_from([torch.int32, torch.int64]),
    paged=st.booleans(),
    data=st.data(),
)
def test_cache_write(rows: int, size: int, index: torch.dtype, paged: bool, data: st.DataObject) -> None:
    slots = data.draw(st.permutations(range(size)))[:rows]
    slots = [slot if data.draw(st.booleans()) else -data.draw(st.integers(1, 3)) for slot in slots]
    slots += [-1] * (rows - len(slots))
    values = inputs(rows)
    k_cache, v_cache = caches(size)
    if paged:  # k and v side by side in one buffer
        k_cache, v_cache = poison_(torch.empty(size, 2, HKV, E)).unbind(1)
    plain = qk_norm_rope(*values, **HEADS)
    kv_out = (k_cache, v_cache, torch.tensor(slots, dtype=index))
    outputs = qk_norm_rope(*values, **HEADS, kv_out=kv_out)
    for one, other in zip(outputs, plain, strict=True):
        assert torch.equal(one, other)
    for cache, written in ((k_cache, plain[1]), (v_cache, plain[2])):
        for slot in range(size):
            if slot in slots:
                assert torch.equal(cache[slot], written[slots.index(slot)])
            else:
                assert cache[slot].isnan().all()


def test_a_cache_needs_no_grad() -> None:
    values = inputs()
    kv_out = (*caches(), torch.arange(5))
    for index in range(3):
        values[index].requires_grad_()
        with pytest.raises(ValueError, match="qk_norm_rope: kv_out: expected no argument that requires grad"):
            qk_norm_rope(*values, **HEADS, kv_out=kv_out)
        with torch.no_grad():
            qk_norm_rope(*values, **HEADS, kv_out=kv_out)
        values[index].requires_grad_(False)


def test_repeats_are_bit_equal_with_one_launch_and_no_sync() -> None:
    values, kv_out = inputs(dtype=torch.bfloat16), (*caches(dtype=torch.bfloat16), torch.arange(5))
    first = qk_norm_rope(*values, **HEADS)
    with count_launches() as launches, count_syncs() as syncs:
        again = qk_norm_rope(*values, **HEADS, kv_out=kv_out)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert (launches.total, syncs.total) == (1, 0)


FIVE = torch.arange(5)


@pytest.mark.parametrize(
    ("argument", "change", "error"),
    [
        ("qkv", {"qkv": 1.0}, TypeError),
        ("qkv", {"qkv": torch.ones(5, 63)}, ValueError),
        ("qkv", {"qkv": torch.ones(1, 5, 64)}, ValueError),
        ("q_weight", {"q_weight": torch.ones(7)}, ValueError),
        ("q_weight", {"q_weight": torch.ones(8).half()}, TypeError),
        ("k_weight", {"k_weight": torch.ones(1, 8)}, ValueError),
        ("cos", {"cos": torch.ones(12, 8, dtype=torch.int64)}, TypeError),
        ("cos", {"cos": torch.ones(1, 12, 8)}, ValueError),
        ("cos", {"cos": torch.ones(12, 7), "sin": torch.ones(12, 7)}, ValueError),
        ("cos", {"cos": torch.ones(0, 8), "sin": torch.ones(0, 8)}, ValueError),
        ("cos", {"cos": torch.ones(12, 8, device="meta")}, ValueError),
        ("sin", {"sin": torch.ones(11, 8)}, ValueError),
        ("sin", {"sin": torch.ones(12, 8).half()}, TypeError),
        ("positions", {"positions": torch.ones(5)}, TypeError),
        ("positions", {"positions": torch.arange(4)}, ValueError),
        ("positions", {"positions": FIVE + 8}, ValueError),
        ("positions", {"positions": FIVE - 1}, ValueError),
        ("num_heads", {"num_heads": 0}, ValueError),
        ("num_kv_heads", {"num_kv_heads": -1}, ValueError),
        ("num_kv_heads", {"num_kv_heads": 1.0}, TypeError),
        ("eps", {"eps": -1.0}, ValueError),
        ("kv_out", {"kv_out": caches()}, TypeError),
        ("kv_out", {"kv_out": (caches()[0], caches(6)[0], FIVE)}, ValueError),
        ("kv_out", {"kv_out": (*caches(dim=4), FIVE)}, ValueError),
        ("kv_out", {"kv_out": (*caches(dtype=torch.float16), FIVE)}, TypeError),
        ("kv_out", {"kv_out": (*caches(), FIVE[:4])}, ValueError),
        ("kv_out", {"kv_out": (*caches(), FIVE.float())}, TypeError),
        ("kv_out", {"kv_out": (*caches(), FIVE + 3)}, ValueError),
        ("kv_out", {"kv_out": (*caches(), FIVE // 2)}, ValueError),
        ("kv_out", {"kv_out": (caches()[0][:1].expand(8, -1, -1), caches(8)[1], FIVE)}, ValueError),
    ],
)
def test_bad_arguments(argument: str, change: dict, error: type[Exception]) -> None:
    names = ("qkv", "q_weight", "k_weight", "cos", "sin", "positions")
    good = dict(zip(names, inputs(), strict=True)) | HEADS
    with pytest.raises(error, match=f"qk_norm_rope: {argument}: expected .*, got .*; ") as raised:
        qk_norm_rope(**(good | change))
    assert raised.type is error
    qk_norm_rope(**good)


def test_a_refused_call_leaves_the_cache_alone() -> None:
    values, (k_cache, v_cache) = inputs(), caches()
    with pytest.raises(ValueError, match="kv_out: expected slots below 7"):
        qk_norm_rope(*values, **HEADS, kv_out=(k_cache, v_cache, FIVE + 5))
    assert k_cache.isnan().all()
    assert v_cache.isnan().all()


def test_out_of_range_where_the_host_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device values are not read: such rows are NaN, or not written."""
    monkeypatch.setattr(reference, "_host_reads", lambda _: False)
    monkeypatch.setattr(backend, "_overrides", backend._parse("reference"))
    values = inputs()
    clean = qk_norm_rope(*values, **HEADS)
    values[5] = values[5].clone()
    values[5][1], values[5][3] = -1, S
    for slots in ([6, 2, 7, -1, 100], [-1] * 5, [7] * 5):
        cache = caches()
        q, k, v = qk_norm_rope(*values, **HEADS, kv_out=(*cache, torch.tensor(slots)))
        assert torch.equal(v, clean[2])
        for mine, expected in ((q, clean[0]), (k, clean[1])):
            assert torch.equal(mine[[0, 2, 4]], expected[[0, 2, 4]])
            assert mine[[1, 3]].isnan().all()
        for slot in range(7):
            expected = v[slots.index(slot)] if slot in slots else torch.full((HKV, E), torch.nan)
            torch.testing.assert_close(cache[1][slot], expected, rtol=0, atol=0, equal_nan=True)

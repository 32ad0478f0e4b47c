from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fb_kernels import backend
from fb_kernels.branch_attention import reference as branch_attention
from fb_kernels.branch_attention_qkv import branch_attention_qkv, reference
from fb_kernels.branch_attention_qkv.naive import branch_attention_qkv as definition
from fb_kernels.qk_norm_rope import reference as qk_norm_rope
from fb_kernels.qk_norm_rope.naive import qk_norm_rope as naive_qk_norm_rope
from fb_kernels.testing import assert_close_to_reference, count_syncs, magnitude


def case(
    rows: int = 3,
    kv_heads: int = 2,
    repeat: int = 2,
    head_dim: int = 8,
    held: int = 5,
    size: int = 9,
    *,
    normed: bool = True,
    slots: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Arguments whose cache holds NaN wherever it is not to be seen."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    angles = torch.randn(size + 1, head_dim // 2, generator=generator, dtype=torch.float64).repeat(1, 2)
    caches = [randn(size, kv_heads, head_dim) for _ in range(2)]
    for cache in caches:
        cache[held:] = torch.nan
    return {
        "qkv": randn(rows, (repeat + 2) * kv_heads * head_dim),
        "q_weight": randn(head_dim) if normed else None,
        "k_weight": randn(head_dim) if normed else None,
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
        "positions": torch.randint(0, size + 1, (rows,), generator=generator, dtype=torch.int32),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "held": torch.tensor([held], dtype=torch.int32),
        "slots": None if slots is None else torch.tensor(slots, dtype=torch.int32),
        "num_heads": repeat * kv_heads,
        "num_kv_heads": kv_heads,
        **options,
    }


def changed(arguments: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The arguments, with another in place of each tensor of floating point."""
    return {
        name: change(value) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def turned(arguments: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """(q[N, Hq, E], k[N, Hkv, E], v) after norm and rotation."""
    names = ("qkv", "q_weight", "k_weight", "cos", "sin", "positions", "num_heads", "num_kv_heads")
    return naive_qk_norm_rope(**{name: arguments[name] for name in names}, eps=arguments.get("eps", 1e-6))


def naive(arguments: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """(out[N, Hq, E], k[N, Hkv, E], v) of the definition, which leaves the caches alone."""
    return definition(**(arguments | {"slots": None})), *turned(arguments)[1:]


def scale_of(arguments: dict[str, Any]) -> float:
    return arguments.get("scale") or arguments["cos"].shape[1] ** -0.5


def seen(arguments: dict[str, Any], k: Tensor, v: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """(row, query head, keys[n, E], values) of what each row's heads see, its own last."""
    heads, kv_heads = arguments["num_heads"], arguments["num_kv_heads"]
    held, window = int(arguments["held"]), arguments.get("window")
    first = 0 if window is None else max(0, held - window + 1)
    for row in range(len(k)):
        for head in range(heads):
            group = head * kv_heads // heads
            keys = torch.cat((arguments["k_cache"][first:held, group], k[row, group][None]))
            values = torch.cat((arguments["v_cache"][first:held, group], v[row, group][None]))
            yield row, head, keys, values


def magnitudes(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Of out[N, Hq, 1] and k[N, Hkv, 1], the scale of rounding: sums of |terms|.

    Scores are rounded in float32 at |q| |k| |scale|, and all that they weigh moves by as much.
    """
    truth = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in arguments.items()
    }
    sizes = changed(arguments, magnitude)
    sizes["sin"][:, : sizes["sin"].shape[1] // 2] *= -1  # so that no rotation subtracts
    q, k, v = turned(sizes)
    score = q.new_zeros(q.shape[:2])
    for row, head, keys, _ in seen(sizes, k, v):
        score[row, head] = abs(scale_of(arguments)) * (keys @ q[row, head]).amax()
    width = truth["cos"].shape[1]
    first = truth["qkv"].shape[1] - arguments["num_kv_heads"] * width
    truth["qkv"] = torch.cat((truth["qkv"][:, :first], truth["qkv"][:, first:].abs()), 1)
    out = naive(truth | {"v_cache": sizes["v_cache"]})[0].amax(-1)
    eps = torch.finfo(torch.float32).eps / torch.finfo(arguments["qkv"].dtype).eps
    return (out * (1 + eps * score))[..., None], k.amax(-1, keepdim=True)


@given(
    rows=st.integers(0, 5),
    kv_heads=st.integers(1, 3),
    repeat=st.integers(1, 3),
    half=st.integers(1, 4),
    held=st.integers(0, 7),
    normed=st.booleans(),
    window=st.none() | st.integers(1, 9),
    keep=st.sampled_from(["none", "all", "some"]),
    seed=st.integers(0, 99),
)
def test_matches_naive_float64(
    rows: int, kv_heads: int, repeat: int, half: int, held: int, normed: bool, window: int | None, keep: str, seed: int
) -> None:
    slots = None
    if keep != "none":
        slots = [held + row if keep == "all" or row % 2 else -1 - row for row in range(rows)]
    built = case(
        rows, kv_heads, repeat, 2 * half, held, 13, normed=normed, slots=slots, seed=seed, window=window, scale=0.3
    )
    caches = {name: built[name].clone() for name in ("k_cache", "v_cache")}
    expected = definition(**(built | caches))
    qkv = built["qkv"].clone()
    out = branch_attention_qkv(**built)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert out.is_contiguous()
    assert torch.equal(built["qkv"], qkv)
    for name, cache in caches.items():
        torch.testing.assert_close(built[name], cache, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("slots", [None, [40]], ids=["candidate", "step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype, slots: list[int] | None) -> None:
    built = case(1 if slots else 4, 2, 2, 32, 40, 48, slots=slots, dtype=dtype)
    wide = changed(built, Tensor.double)
    expected, plain = naive(wide)[0], naive(built)[0]
    out = branch_attention_qkv(**built)
    assert out.dtype == dtype
    assert_close_to_reference(out, expected, plain)


def test_hostile_values_stay_in_their_row_and_seen_ones_show() -> None:
    built = case(4)
    clean = branch_attention_qkv(**built)
    built["qkv"][1] = torch.nan
    out = branch_attention_qkv(**built)
    assert torch.equal(out[[0, 2, 3]], clean[[0, 2, 3]])
    assert out[1].isnan().all()
    built["v_cache"][2, 1, 3] = torch.inf
    assert branch_attention_qkv(**built)[0, 2:, 3].isinf().all()


def test_a_step_at_a_time_is_causal_attention() -> None:
    """Rows that are kept one after another see what `branch_attention` shows a whole sequence."""
    built = case(6, held=0, size=6)
    built["positions"] = torch.arange(6, dtype=torch.int32)
    qkv, positions = built["qkv"], built["positions"]
    steps = []
    for place in range(6):
        one = positions[place : place + 1]
        built |= {"qkv": qkv[place : place + 1], "positions": one, "held": one, "slots": one}
        steps.append(branch_attention_qkv(**built))
    query = naive(built | {"qkv": qkv, "positions": positions, "held": torch.tensor([0])})
    k, v = built["k_cache"], built["v_cache"]
    torch.testing.assert_close(k, query[1])
    torch.testing.assert_close(v, query[2])
    later = case(1, held=5, size=6) | {"k_cache": k, "v_cache": v, "qkv": qkv[5:], "positions": positions[5:]}
    later |= {name: built[name] for name in ("cos", "sin", "q_weight", "k_weight")}
    torch.testing.assert_close(naive(later)[0], steps[5])


@pytest.mark.parametrize("slots", [None, [5, -1, 7]], ids=["candidates", "kept"])
def test_opcheck(slots: list[int] | None) -> None:
    built = case(3, slots=slots)
    for name in ("k_cache", "v_cache"):
        built[name] = built[name].nan_to_num()
    order = ("qkv", "q_weight", "k_weight", "cos", "sin", "positions", "k_cache", "v_cache", "held", "slots")
    torch.library.opcheck(
        torch.ops.fb.branch_attention_qkv.default, (*(built[name] for name in order), 4, 2, 1e-6, None, 0.3)
    )


def test_compile() -> None:
    compiled = torch.compile(lambda **kw: branch_attention_qkv(**kw), fullgraph=True, backend="aot_eager")
    one, other = case(1, slots=[5]), case(1, slots=[5])
    torch.testing.assert_close(compiled(**one), branch_attention_qkv(**other))
    torch.testing.assert_close(one["k_cache"], other["k_cache"], equal_nan=True)


def test_no_sync() -> None:
    built = case(1, slots=[5])
    with count_syncs() as syncs:
        branch_attention_qkv(**built)
    assert syncs.total == 0


@pytest.mark.usefixtures("triton_kernels")
@pytest.mark.parametrize("slots", [None, [20, -1, 22]], ids=["candidates", "kept"])
@pytest.mark.parametrize("window", [None, 7])
def test_from_triton_kernels(slots: list[int] | None, window: int | None) -> None:
    built = case(3, 2, 2, 64, 20, 24, slots=slots, dtype=torch.float32, window=window)
    wide = changed(built, Tensor.double)
    expected, k, _ = naive(wide)
    plain, plain_k, _ = naive(built)
    out_scale, k_scale = magnitudes(built)
    with backend.override("branch_attention_qkv=triton"):
        out = branch_attention_qkv(**built)
    assert_close_to_reference(out, expected, plain, scale=out_scale)
    if slots:
        kept = [0, 2]
        assert_close_to_reference(built["k_cache"][[20, 22]], k[kept], plain_k[kept], scale=k_scale[kept])
        assert built["k_cache"][[21, 23]].isnan().all()


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize(
    ("change", "bad"),
    [
        ({"held": [-1]}, [0, 1, 2]),
        ({"held": [10]}, [0, 1, 2]),
        ({"slots": [5, 4, 6]}, [1]),
        ({"slots": [5, 9, -1]}, [1]),
        ({"positions": [0, 1, 99]}, [2]),
    ],
)
def test_out_of_range_where_the_host_does_not_look(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, kind: str, change: dict, bad: list[int]
) -> None:
    changed = {name: torch.tensor(values, dtype=torch.int32) for name, values in change.items()}
    built = case(3, 1, 2, 64, slots=[5, 6, 7], dtype=torch.float32) | changed
    before = built["k_cache"].clone()
    if kind == "triton":
        request.getfixturevalue("triton_kernels")
        out = branch_attention_qkv(**built)
    else:
        for module in (reference, branch_attention, qk_norm_rope):
            monkeypatch.setattr(module, "_host_reads", lambda _: False)
        with backend.override("reference"):
            out = branch_attention_qkv(**built)
    assert [row for row in range(3) if out[row].isnan().all()] == bad
    assert out[[row for row in range(3) if row not in bad]].isfinite().all()
    slots = built["slots"].tolist()
    written = [] if "held" in change else [slots[row] for row in range(3) if row not in bad and slots[row] >= 0]
    untouched = [slot for slot in range(9) if slot not in written]
    assert torch.equal(built["k_cache"][untouched].nan_to_num(7.0), before[untouched].nan_to_num(7.0))
    assert built["k_cache"][written].isfinite().all()


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"qkv": torch.zeros(3, 5, dtype=torch.float64)}, ValueError, r"qkv: expected shape \[N, \(Hq"),
        ({"qkv": 1}, TypeError, "qkv: expected a torch.Tensor, got int"),
        (
            {"cos": torch.zeros(3, 7, dtype=torch.float64), "sin": torch.zeros(3, 7, dtype=torch.float64)},
            ValueError,
            "an even head dimension",
        ),
        ({"num_heads": 3}, ValueError, "num_heads: expected a multiple of 2, got 3"),
        ({"q_weight": torch.zeros(7, dtype=torch.float64)}, ValueError, r"q_weight: expected shape \[E\]"),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, ValueError, r"positions: expected shape \[N\]"),
        ({"positions": torch.tensor([0, 1, 10])}, ValueError, "positions: expected 0 to 9"),
        ({"k_cache": torch.zeros(9, 8, dtype=torch.float64)}, ValueError, r"k_cache: expected shape \[slots"),
        ({"v_cache": torch.zeros(8, 2, 8, dtype=torch.float64)}, ValueError, "give both caches one size"),
        ({"v_cache": torch.zeros(9, 2, 8)}, TypeError, "v_cache: expected dtype torch.float64"),
        ({"held": torch.tensor(5)}, ValueError, r"held: expected shape \[1\]"),
        ({"held": torch.tensor([10])}, ValueError, "held: expected 0 to 9, the caches' rows, got 10"),
        ({"slots": torch.tensor([5, 6])}, ValueError, r"slots: expected shape \[N\]"),
        ({"slots": torch.tensor([5, 4, 7])}, ValueError, "slots: expected slots from 5 on, got 4"),
        ({"slots": torch.tensor([5, 6, 9])}, ValueError, "slots below 9"),
        ({"slots": torch.tensor([5, 6, 5])}, ValueError, "slot 5 twice"),
        ({"window": 0}, ValueError, "window: expected an int of 1 or more, got 0"),
        ({"scale": float("nan")}, ValueError, "scale: expected a finite number"),
        ({"eps": 0.0}, ValueError, "eps: expected a finite number above 0"),
    ],
)
def test_bad_arguments(change: dict, kind: type[Exception], message: str) -> None:
    built = case() | change
    before = {name: value.clone() for name, value in built.items() if name in ("k_cache", "v_cache")}
    with pytest.raises(kind, match=message):
        branch_attention_qkv(**built)
    assert all(torch.equal(built[name].nan_to_num(7), value.nan_to_num(7)) for name, value in before.items())


def test_a_gradient_is_refused() -> None:
    built = case()
    built["qkv"].requires_grad_()
    with pytest.raises(ValueError, match="qkv: expected a tensor that requires no grad"):
        branch_attention_qkv(**built)

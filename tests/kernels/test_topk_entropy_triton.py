"""The Triton kernel of `topk_entropy` against a sort in Python, interpreted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import count_kernels
from test_topk_entropy import HOSTILE, assert_matches
from torch import Tensor

from fb_kernels import backend, tuning
from fb_kernels.testing import assert_close_to_reference, count_launches, count_syncs, poison_
from fb_kernels.topk_entropy import topk_entropy
from fb_kernels.topk_entropy import triton as kernels
from fb_kernels.topk_entropy.naive import topk_entropy as naive

pytestmark = pytest.mark.usefixtures("triton_kernels")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of many blocks, and as few groups as can be, so that groups hold several of the largest."""

    def launch(dtype: torch.dtype, width: int, k: int) -> dict[str, int]:
        return {"BLOCK": 2 * k, "GROUP": 2, "STEPS": 2, "num_warps": 1}

    monkeypatch.setattr(tuning, "topk_entropy", launch)


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=25)
@given(data=st.data())
def test_matches_naive_on_hostile_rows(data: st.DataObject) -> None:
    batch = data.draw(st.sampled_from([(), (0,), (1,), (3,), (2, 0), (2, 3)]))
    width = data.draw(st.integers(1, 60))
    k = data.draw(st.integers(1, min(width, 17)))
    dtype = data.draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randn(*batch, width, generator=generator)
    hostile = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    pool = torch.tensor(data.draw(st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=4)))
    picks = torch.randint(0, len(pool), logits.shape, generator=generator)
    chosen = torch.rand(logits.shape, generator=generator) < hostile
    assert_matches(torch.where(chosen, pool[picks], logits.round(decimals=1)).to(dtype), k)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("arrangement", ["rising", "falling", "one group", "equal", "one column a block"])
@pytest.mark.parametrize("k", [1, 5, 8])
def test_wherever_the_largest_lie(arrangement: str, k: int) -> None:
    """Also where every later element beats all before, and where all lie in one group."""
    width = 16 * 21 + 3
    logits = torch.arange(width, dtype=torch.float32) / 7
    if arrangement == "falling":
        logits = logits.flip(0)
    elif arrangement == "equal":
        logits = torch.full((width,), -3.0)
    elif arrangement != "rising":
        block = 2 * max(tuning.next_power_of_2(k), 2)
        columns = torch.arange(width) % block
        logits = torch.where((columns < 2) if arrangement == "one group" else (columns == 3), logits, logits - 1e4)
    assert_matches(torch.stack((logits, -logits)), k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_naive_on_a_vocabulary(dtype: torch.dtype) -> None:
    logits = (torch.randn(1, 5003, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    assert_matches(logits, 64)


@pytest.mark.parametrize("k", [1, 2, 64, 100, 128])
def test_every_k_with_the_default_configuration(k: int) -> None:
    logits = torch.randn(1, 1300, generator=torch.Generator().manual_seed(k))
    assert_matches(logits, k)
    assert_matches(logits[:, :k], k)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_within_twice_plain_pytorch(dtype: torch.dtype) -> None:
    logits = (torch.randn(16, 90, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    want = naive(logits.double(), 32)[0]
    plain = torch.distributions.Categorical(logits=logits.topk(32).values).entropy()
    ours = topk_entropy(logits, 32)[0]
    assert_close_to_reference(ours, want, plain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_index(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 5000, dtype=dtype)
    logits[:, ::2] = -0.0
    logits[1, 4500] = 1.0
    entropy, values, indices = topk_entropy(logits, 64)
    assert indices[0].tolist() == list(range(64))
    assert indices[1].tolist() == [4500, *range(63)]
    assert values[0].signbit().tolist() == [True, False] * 32
    torch.testing.assert_close(entropy[0].item(), math.log(64))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_rows(dtype: torch.dtype) -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor(
        [[0.0, nan, 1.0, nan], [-inf] * 4, [1.0, inf, 2.0, inf], [-inf, 1.0, -inf, 1.0], [inf, -inf, nan, 0.0]],
        dtype=dtype,
    )
    entropy, values, indices = topk_entropy(logits, 3)
    assert indices.tolist() == [[1, 3, 2], [0, 1, 2], [1, 3, 2], [1, 3, 0], [2, 0, 3]]
    assert entropy.isnan().tolist() == [True, True, True, False, True]
    torch.testing.assert_close(entropy[3].item(), math.log(2))
    assert values[3].tolist() == [1.0, 1.0, -inf]


@pytest.mark.parametrize("bits", [-1, -4194304, 0x7F800001, 0x7FFFFFFF])
def test_any_nan_payload_counts_as_the_largest(bits: int) -> None:
    logits = torch.tensor([0.0, 0.0, math.inf, 0.0, 0.0])
    logits.view(torch.int32)[1] = bits
    logits[4] = math.nan
    assert topk_entropy(logits, 3)[2].tolist() == [1, 4, 2]


def test_negative_and_subnormal_order() -> None:
    logits = torch.tensor([-1e-45, 1e-45, -3.0, -1e30, 0.0, -2.9999998])
    assert topk_entropy(logits, 6)[2].tolist() == [1, 4, 0, 5, 2, 3]


@pytest.mark.usefixtures("small_blocks")
def test_rows_are_independent() -> None:
    logits = torch.randn(4, 100)
    alone = topk_entropy(logits[2:3], 8)
    logits[[0, 1, 3]] = math.nan
    for ours, want in zip(topk_entropy(logits, 8), alone, strict=True):
        assert torch.equal(ours[2:3], want)


@pytest.mark.usefixtures("small_blocks")
def test_strided_offset_and_transposed_input() -> None:
    base = torch.randn(6, 3, 17)
    for view in (base.transpose(0, 2)[:4], base[::2, 1:, ::2], base[..., 9::2].mT, base[:1].expand(2, -1, -1)):
        assert_matches(view, 3)


def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3, 70)
    clean = topk_entropy(logits, 5)
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **options: poison_(new_empty(*args, **options)))
    assert all(map(torch.equal, topk_entropy(logits, 5), clean))


def test_repeats_are_bit_equal_with_one_kernel_and_no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3, 70).bfloat16()
    names = count_kernels(monkeypatch, kernels)
    with count_launches() as launches, count_syncs() as syncs:
        first = topk_entropy(logits, 8)
    launched = launches.by_op["fb::topk_entropy"]
    assert (launched, syncs.total, names) == (1, 0, ["_topk_entropy_kernel"])
    assert all(map(torch.equal, topk_entropy(logits, 8), first))


@pytest.mark.parametrize("shape", [(0, 9), (3, 0, 9), (5,)])
def test_opcheck(shape: tuple[int, ...]) -> None:
    torch.library.opcheck(torch.ops.fb.topk_entropy.default, (torch.randn(shape), 3))


def test_float64_and_a_large_k_are_the_references() -> None:
    for logits, k in ((torch.randn(2, 9, dtype=torch.float64), 3), (torch.randn(2, 200), 129)):
        with pytest.raises(ValueError, match="topk_entropy: expected arguments that the triton kernel takes"):
            topk_entropy(logits, k)
        with backend.override("triton,topk_entropy=auto"):
            assert_matches(logits, k)

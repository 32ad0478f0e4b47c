"""The compiled `topk_entropy`, emulated, against a sort in Python; what it takes to overflow its buffers too."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_topk_entropy import HOSTILE, assert_matches
from torch import Tensor

from fb_kernels import backend, cuda
from fb_kernels.testing import assert_close_to_reference, count_launches, count_syncs, poison_, poisoned_memory
from fb_kernels.topk_entropy import cuda as kernels
from fb_kernels.topk_entropy import topk_entropy
from fb_kernels.topk_entropy.naive import topk_entropy as naive

pytestmark = pytest.mark.usefixtures("cuda_kernels")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FIXTURE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
MANY = 5003  # columns of some hundred groups; more survive in one group than the buffer holds only by ties or order


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, suppress_health_check=FIXTURE)
@given(data=st.data())
def test_matches_naive_on_hostile_rows(data: st.DataObject) -> None:
    batch = data.draw(st.sampled_from([(), (0,), (1,), (3,), (2, 0), (2, 2)]))
    width = data.draw(st.sampled_from([1, 2, 7, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1100, 2600]))
    k = data.draw(st.one_of(st.just(min(width, 64)), st.integers(1, min(width, 64))))
    dtype = data.draw(st.sampled_from(DTYPES))
    offset, gap = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randn(*batch, width, generator=generator)
    hostile = data.draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    pool = torch.tensor(data.draw(st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=4)))
    picks = torch.randint(0, len(pool), logits.shape, generator=generator)
    chosen = torch.rand(logits.shape, generator=generator) < hostile
    logits = torch.where(chosen, pool[picks], logits.round(decimals=1)).to(dtype)
    whole = torch.full((*batch, offset + width + gap), math.nan, dtype=dtype)  # what lies around is the largest
    whole[..., offset : offset + width] = logits
    with poisoned_memory():
        assert_matches(whole[..., offset : offset + width], k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 64])
def test_all_equal_rows_overflow_and_are_exact(dtype: torch.dtype, k: int) -> None:
    """No buffer holds all that tie; the order of columns decides."""
    for value in (1.5, -math.inf, math.inf, math.nan):
        assert_matches(torch.full((1, MANY), value, dtype=dtype), k)
    assert_matches(torch.full((1, 40_000), -2.0, dtype=dtype), k)  # 64 groups hold more than the buffer


@pytest.mark.parametrize("k", [1, 5, 64])
@pytest.mark.parametrize("arrangement", ["rising", "falling", "one group", "one place of each group", "late ties"])
def test_wherever_the_largest_lie(arrangement: str, k: int) -> None:
    column = torch.arange(40_001)
    logits = column / 7
    if arrangement == "falling":
        logits = logits.flip(0)
    elif arrangement == "one group":
        logits = torch.where(column // 128 == 77, logits, logits - 1e4)
    elif arrangement == "one place of each group":
        logits = torch.where(column % 128 == 3, logits, logits - 1e4)
    elif arrangement == "late ties":
        logits = torch.where(column > 30_000, 2.0, torch.where(column % 999 == 5, 3.0, 1.0))
    assert_matches(logits[None], k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_across_every_border(dtype: torch.dtype) -> None:
    """Where the bound is itself one of the keys."""
    both = torch.eye(33)[:31] + torch.eye(33).roll(1, 1)[:31]
    assert topk_entropy(both.to(dtype), 1)[2][:, 0].tolist() == list(range(31))
    assert topk_entropy(both.to(dtype), 2)[2].tolist() == [[i, i + 1] for i in range(31)]


def test_masked_rows_fall_back_to_the_lowest_columns() -> None:
    """A constrained decoder leaves few logits above -inf."""
    logits = torch.full((2, 30_000), -math.inf)
    logits[0, 29_000:29_010] = randn(10)
    logits[1, [7, 20_000]] = 1.0
    _, _, indices = topk_entropy(logits, 64)
    assert indices[0, 10:].tolist() == list(range(54))
    assert indices[1].tolist() == [7, 20_000, *range(7), *range(8, 63)]
    assert_matches(logits, 64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_index(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, MANY, dtype=dtype)
    logits[:, ::2] = -0.0
    logits[1, 4500] = 1.0
    entropy, values, indices = topk_entropy(logits, 64)
    assert indices[0].tolist() == list(range(64))
    assert indices[1].tolist() == [4500, *range(63)]
    assert values[0].signbit().tolist() == [True, False] * 32
    torch.testing.assert_close(entropy[0].item(), math.log(64))


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_within_twice_plain_pytorch(dtype: torch.dtype) -> None:
    logits = (randn(16, 300, seed=1) * 3).to(dtype)
    want = naive(logits.double(), 64)[0]
    plain = torch.distributions.Categorical(logits=logits.topk(64).values).entropy()
    ours = topk_entropy(logits, 64)[0]
    assert_close_to_reference(ours, want, plain)


def test_rows_are_independent_and_repeats_bit_equal() -> None:
    """Blocks and threads run in another order each time."""
    logits = randn(4, MANY)
    alone = topk_entropy(logits[2:3], 8)
    logits[[0, 1, 3]] = math.nan
    for _ in range(3):
        for ours, want in zip(topk_entropy(logits, 8), alone, strict=True):
            assert torch.equal(ours[2:3], want)


def test_strided_offset_and_transposed_input() -> None:
    base = randn(6, 3, 17)
    for view in (base.transpose(0, 2)[:4], base[::2, 1:, ::2], base[..., 9::2].mT, base[:1].expand(2, -1, -1)):
        assert_matches(view, 3)


def test_vocabulary_of_the_gate() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        with poisoned_memory():
            assert_matches((3 * randn(1, 151_936)).to(dtype), 64)


def test_a_row_of_more_groups_than_chunks_of_128() -> None:
    logits = randn(2048 * 128 + 5).half()
    logits[-1] = 9.0
    assert_matches(logits, 64)


def test_one_launch_and_no_sync() -> None:
    logits = randn(3, 70).bfloat16()
    with count_launches() as launches, count_syncs() as syncs:
        topk_entropy(logits, 8)
    assert (launches.by_op["fb::topk_entropy"], syncs.total) == (1, 0)


def call(logits: Tensor, k: int, stream: int) -> tuple[Tensor, ...]:
    """The C function; a host's stream that is not null stands for one that captures. Returns the workspace too."""
    rows, width = logits.shape
    entropy, values = torch.empty(rows), torch.empty(rows, k)
    indices, workspace = (poison_(torch.empty(size, dtype=torch.int64)) for size in (rows * k, rows * (width + 1)))
    found = cuda.library()
    assert not isinstance(found, str)
    places = [tensor.data_ptr() for tensor in (workspace, entropy, values, indices)]
    assert found.fb_topk_entropy(logits.data_ptr(), logits.stride(0), rows, width, k, 0, *places, stream) == 0
    return entropy, values, indices.view(rows, k), workspace


@pytest.mark.skipif(torch.cuda.is_available(), reason="its library takes host pointers")
def test_a_captured_launch_has_counters_of_its_own() -> None:
    logits = randn(3, 1100)
    want = topk_entropy(logits, 9)
    for _ in range(2):
        *got, workspace = call(logits, 9, stream=1)
        assert all(map(torch.equal, got, want))
        groups = workspace.ne(torch.iinfo(torch.int64).max).sum()
        assert groups % 3 == 0
        assert workspace[groups:].eq(torch.iinfo(torch.int64).max).all()  # no counters there
    *got, eager = call(logits, 9, stream=0)
    assert all(map(torch.equal, got, want))
    assert eager[:groups].equal(workspace[:groups])
    assert eager[groups:].view(torch.int32)[:3].tolist() == [0] * 3  # as a replay of a graph needs to find them


@pytest.mark.parametrize("shape", [(0, 9), (3, 0, 9), (5,)])
def test_opcheck(shape: tuple[int, ...]) -> None:
    torch.library.opcheck(torch.ops.fb.topk_entropy.default, (torch.randn(shape), 3))


def test_what_others_do_is_not_taken() -> None:
    for logits, k in ((randn(2, 9).double(), 3), (randn(2, 200), 65), (randn(33, 9), 3)):
        assert kernels.topk_entropy(logits, k) is NotImplemented
        with backend.override("cuda,topk_entropy=auto"):
            assert_matches(logits, k)

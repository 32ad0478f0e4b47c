from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fb_kernels.joint_pool import joint_pool
from fb_kernels.joint_pool.naive import joint_pool as naive


def assert_matches(slm_ids: Tensor, llm_ids: Tensor) -> None:
    for ours, want in zip(joint_pool(slm_ids, llm_ids), naive(slm_ids, llm_ids), strict=True):
        assert ours.dtype == want.dtype
        assert torch.equal(ours, want)


@settings(deadline=None, max_examples=40)
@given(
    batch=st.sampled_from([(), (0,), (1,), (4,), (2, 3), (2, 0)]),
    slm_k=st.integers(0, 9),
    llm_k=st.integers(0, 9),
    top=st.sampled_from([1, 5, 30, 2**31]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    strided=st.booleans(),
    seed=st.integers(0, 99),
)
def test_matches_naive(
    batch: tuple[int, ...], slm_k: int, llm_k: int, top: int, dtype: torch.dtype, strided: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    lists = []
    for k in (slm_k, llm_k):
        if strided:
            lists.append(
                torch.randint(-2, top, (k + 1, 2, *batch), generator=generator)[1:, 1].movedim(0, -1).to(dtype)
            )
        else:
            lists.append(torch.randint(-2, top, (*batch, k), generator=generator).to(dtype))
    assert_matches(*lists)


def test_order_sources_and_padding() -> None:
    ids, count, source = joint_pool(torch.tensor([7, 3, -1, 7]), torch.tensor([9, 3, -100, 2]))
    assert ids.tolist() == [7, 3, 9, 2, -1, -1, -1, -1]
    assert source.tolist() == [1, 3, 2, 2, 0, 0, 0, 0]
    assert count.item() == 4


def test_one_list_or_neither() -> None:
    none, some = torch.empty(0, dtype=torch.int64), torch.tensor([4, 4, 1])
    assert joint_pool(some, none)[2].tolist() == [1, 1, 0]
    assert joint_pool(none, some)[2].tolist() == [2, 2, 0]
    assert joint_pool(none, none)[1].item() == 0
    padding = torch.full((2, 3), -1)
    ids, count, source = joint_pool(padding, padding)
    assert (ids == -1).all()
    assert not count.any()
    assert not source.any()


def test_ids_at_the_ends_of_the_range() -> None:
    for dtype in (torch.int32, torch.int64):
        info = torch.iinfo(dtype)
        assert_matches(torch.tensor([info.max, info.min, 0], dtype=dtype), torch.tensor([0, info.max], dtype=dtype))


def test_inputs_unchanged_repeats_equal_rows_independent() -> None:
    slm_ids, llm_ids = torch.randint(-1, 12, (5, 8)), torch.randint(-1, 12, (5, 8))
    before = slm_ids.clone(), llm_ids.clone()
    first, second = joint_pool(slm_ids, llm_ids), joint_pool(slm_ids, llm_ids)
    assert torch.equal(slm_ids, before[0])
    assert torch.equal(llm_ids, before[1])
    for a, b, row in zip(first, second, joint_pool(slm_ids[3], llm_ids[3]), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[3], row)


@pytest.mark.parametrize(
    ("slm_ids", "llm_ids"),
    [
        (torch.randint(0, 9, (3, 8)), torch.randint(0, 9, (3, 8))),
        (torch.randint(0, 9, (4, 2, 3)).int().mT, torch.randint(0, 9, (4, 3, 5)).int()),
        (torch.tensor([1, 2]), torch.empty(0, dtype=torch.int64)),
        (torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 3, dtype=torch.int64)),
    ],
)
def test_opcheck(slm_ids: Tensor, llm_ids: Tensor) -> None:
    torch.library.opcheck(torch.ops.fb.joint_pool.default, (slm_ids, llm_ids))


def test_compiles_without_breaks() -> None:
    compiled = torch.compile(joint_pool, fullgraph=True, backend="aot_eager")
    for shape in ((8,), (3, 8)):
        lists = torch.randint(-1, 12, shape), torch.randint(-1, 12, shape)
        for ours, want in zip(compiled(*lists), joint_pool(*lists), strict=True):
            assert torch.equal(ours, want)


IDS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: joint_pool([1, 2], IDS), TypeError, "slm_ids"),
        (lambda: joint_pool(IDS, [1, 2]), TypeError, "llm_ids"),
        (lambda: joint_pool(IDS.float(), IDS), TypeError, "slm_ids"),
        (lambda: joint_pool(IDS, IDS.float()), TypeError, "llm_ids"),
        (lambda: joint_pool(IDS, IDS.int()), TypeError, "llm_ids"),
        (lambda: joint_pool(IDS, IDS.to("meta")), ValueError, "llm_ids"),
        (lambda: joint_pool(torch.tensor(1), IDS), ValueError, "slm_ids"),
        (lambda: joint_pool(IDS[0], torch.tensor(1)), ValueError, "llm_ids"),
        (lambda: joint_pool(IDS, IDS[:1]), ValueError, "llm_ids"),
        (lambda: joint_pool(IDS, IDS[0]), ValueError, "llm_ids"),
    ],
)
def test_bad_arguments(call: Callable[[], object], kind: type[Exception], argument: str) -> None:
    with pytest.raises(kind, match=rf"^joint_pool: {argument}: expected .*, got .*; .+") as caught:
        call()
    assert type(caught.value) is kind
    assert_matches(torch.tensor([3, 1]), torch.tensor([1, 2]))

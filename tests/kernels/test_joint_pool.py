"""What is peculiar to `joint_pool`: the order of ids, and ids of either list alone."""

from __future__ import annotations

import torch

from fb_kernels import joint_pool


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


def test_ids_at_the_ends_of_the_range() -> None:
    for dtype in (torch.int32, torch.int64):
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        ids, count, source = joint_pool(
            torch.tensor([most, least, 0], dtype=dtype), torch.tensor([0, most], dtype=dtype)
        )
        assert ids.tolist() == [most, 0, -1, -1, -1]
        assert (count.item(), source.tolist()) == (2, [3, 3, 0, 0, 0])

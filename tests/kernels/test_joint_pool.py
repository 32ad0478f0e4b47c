"""What is peculiar to `joint_pool`: ids at the ends of their range."""

from __future__ import annotations

import torch

from fb_kernels import joint_pool


def test_ids_at_the_ends_of_the_range() -> None:
    for dtype in (torch.int32, torch.int64):
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        ids, count, source = joint_pool(
            torch.tensor([most, least, 0], dtype=dtype), torch.tensor([0, most], dtype=dtype)
        )
        assert ids.tolist() == [most, 0, -1, -1, -1]
        assert (count.item(), source.tolist()) == (2, [3, 3, 0, 0, 0])

"""What every op gets from its registration."""

from __future__ import annotations

import pytest
import torch

from fb_kernels import branch_attention, linear_logprob


def test_autocast_does_not_lower_the_products_inside():
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(9, 64), torch.randn(40, 64), torch.randint(40, (9,))
    q, k = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    layout = {
        "cu_branch": torch.tensor([0, 5]),
        "cu_group": torch.tensor([0, 1]),
        "prefix_start": torch.tensor([0]),
        "prefix_len": torch.tensor([0]),
    }
    calls = (
        lambda: linear_logprob(hidden, weight, target),
        lambda: branch_attention(q, k, k, k, k, softcap=5.0, **layout),
    )
    for call in calls:
        plain = call()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(call(), plain)


@pytest.mark.parametrize("op", ["linear_logprob", "branch_attention", "topk_entropy"])
def test_ops_live_in_the_namespace(op):
    assert hasattr(torch.ops.fb, op)

"""What is peculiar to `merge_attention_states`: states of parts of the keys, and states of none."""

from __future__ import annotations

import math

import pytest
import torch
from cases.merge_attention_states import NAMES, OP, make
from torch import Tensor
from ways import names, running

from fb_kernels import BranchLayout, branch_attention, merge_attention_states


def test_branch_attention_in_two_parts() -> None:
    """Gradients too, which reach the parts through both results."""
    shapes = (6, 4, 8), (2, 9, 2, 8), (2, 6, 2, 8)
    leaves = q, prefix, own = [torch.randn(*shape, requires_grad=True) for shape in shapes]

    def run(own: Tensor | tuple[None, None], length: int) -> tuple[Tensor, Tensor]:
        return branch_attention(q, *own, *prefix, BranchLayout.of([[4, 2]], [(1, length)]), return_lse=True)

    merged = merge_attention_states(*run((None, None), 7), *run(own, 0))
    whole = run(own, 7)
    pulled = [torch.randn_like(x) for x in whole]
    grads, wanted = (torch.autograd.grad(results, leaves, pulled) for results in (merged, whole))
    for actual, expected in zip((*merged, *grads), (*whole, *wanted), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mark", [-math.inf, math.inf])  # the second is that of other libraries
@pytest.mark.parametrize("way", names(OP))
def test_an_empty_state_is_not_read(way: str, mark: float) -> None:
    values = OP.cast(make(4, 2, 3), torch.float32).tensors
    out_a, lse_a, out_b, lse_b = (values[name] for name in NAMES)
    lse_a[:, :2] = mark
    lse_b[:, 1:3] = -math.inf
    out_a[:2], out_b[1:3] = math.nan, math.inf
    leaves = [x.requires_grad_() for x in (out_a, lse_a, out_b, lse_b)]
    with running(way):
        out, lse = merge_attention_states(*leaves)
        grads = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
    assert torch.equal(out[0], out_b[0])
    assert torch.equal(lse[:, 0], lse_b[:, 0])
    assert torch.equal(out[2], out_a[2])
    assert torch.equal(lse[:, 2], lse_a[:, 2])
    assert not out[1].any()
    assert (lse[:, 1] == -math.inf).all()
    assert all(grad.isfinite().all() for grad in grads)
    assert not any(grad[1].any() for grad in grads[::2])
    assert not any(grad[:, 1].any() for grad in grads[1::2])
    torch.testing.assert_close(grads[2][0], torch.ones(2, 3))
    torch.testing.assert_close(grads[3][:, 0], torch.ones(2))

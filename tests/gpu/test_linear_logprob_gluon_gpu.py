"""`linear_logprob` by Hopper's own kernel, in a process of its own: a mistake of its barriers would wait for ever."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import test_linear_logprob_gpu as head
import torch
from gpu_checks import DEVICE, PROMISES, Case, matches_the_reference, randn

from fb_kernels import linear_logprob
from fb_kernels._runtime import tuning
from fb_kernels.linear_logprob import triton as kernels

pytestmark = pytest.mark.gpu
HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0) or not kernels.HAS_GLUON:
        pytest.skip("for a Hopper and a Triton whose Gluon is known")
    monkeypatch.setattr(tuning, "linear_logprob_form", lambda *_: "gluon")


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("size", head.SIZES)
def test_matches_the_reference(size: str, dtype: torch.dtype) -> None:
    matches_the_reference(head.make(head.SIZES[size], dtype))


@pytest.mark.parametrize("options", head.OPTIONS)
@pytest.mark.parametrize("dtype", HALF)
def test_options(dtype: torch.dtype, options: str) -> None:
    matches_the_reference(head.make(head.SIZES["small"], dtype, bias=True, **head.OPTIONS[options]))


test_real_rows = head.test_real_rows
test_weight_of_more_than_2_31_elements = head.test_weight_of_more_than_2_31_elements


@pytest.mark.parametrize("promise", PROMISES)
def test_promises(promise: Callable[[Case], None]) -> None:
    promise(head.make((300, 32_000, 1024), torch.bfloat16))


def test_a_row_knows_neither_the_others_nor_the_multiprocessors() -> None:
    hidden, weight = (randn(*shape, dtype=torch.bfloat16) for shape in ((1000, 1024), (32_000, 1024)))
    target = torch.arange(1000, device=DEVICE) * 31
    whole = linear_logprob(hidden, weight, target, return_lse=True, return_entropy=True, return_max=True)
    for rows, processors in ((slice(0, 1), 1), (slice(70, 900), 7)):
        with mock.patch.object(tuning, "processors", return_value=processors):
            part = linear_logprob(
                hidden[rows], weight, target[rows], return_lse=True, return_entropy=True, return_max=True
            )
        assert all(torch.equal(x[rows], y) for x, y in zip(whole, part, strict=True))


@pytest.mark.parametrize("rows", [70, 700])
def test_largest_log_prob(rows: int) -> None:
    hidden, weight = randn(1, 64, dtype=torch.bfloat16), randn(70, 64, dtype=torch.bfloat16, seed=1)
    every = torch.arange(rows, device=DEVICE) % 70
    logprob, largest = linear_logprob(hidden.repeat(rows, 1), weight, every, return_max=True)
    assert torch.equal(largest, logprob.amax().expand(rows))

"""`linear_logprob`, its partials and their combination on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import (
    DEVICE,
    DTYPES,
    PROMISES,
    Case,
    filled,
    large,
    matches_the_reference,
    randn,
    second_device,
    shifted,
)
from torch import Tensor

from fb_kernels import combine_logprob_partials, linear_logprob, linear_logprob_partials
from fb_kernels._runtime import backend

pytestmark = pytest.mark.gpu
SIZES = {"small": (5, 300, 40), "event": (13, 151_936, 2048), "step": (128, 151_936, 2048), "odd": (777, 50_257, 768)}
REAL = (1664, 151_936, 2048)
TRAINED = 1 << 26  # elements of the largest weight whose gradient is compared too
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"logit_scale": 0.7, "softcap": 20.0, "temperature": 1.3},
    "cut": {"valid_vocab": 257},
}


def make(
    size: tuple[int, int, int], dtype: torch.dtype, device: str = DEVICE, *, bias: bool = False, **options: Any
) -> Case:
    """Logits of standard deviation 2; a head that is not trained is frozen, and then no loss has an entropy."""
    rows, vocabulary, width = size
    frozen = vocabulary * width > TRAINED
    valid = options.get("valid_vocab", vocabulary)
    draw = torch.Generator().manual_seed(5)
    target, other = (torch.randint(valid, (rows,), generator=draw).to(device) for _ in range(2))
    target[1] = other[0] = -100

    def op(hidden: Tensor, weight: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
        asked = {"return_lse": True, "return_entropy": not frozen, "return_max": True}
        return linear_logprob(hidden, weight, target, *bias, **asked, **options)

    def plain(hidden: Tensor, weight: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
        logits = (hidden @ weight[:valid].T) * options.get("logit_scale", 1.0)
        logits = logits + bias[0][:valid] if bias else logits
        softcap = options.get("softcap")
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        logits = logits.float() / options.get("temperature", 1.0)
        counted = target != -100
        logprob = -F.cross_entropy(logits, target, reduction="none", ignore_index=-100)
        lse, largest = logits.logsumexp(-1), logits.log_softmax(-1).amax(-1).detach()
        entropy = [] if frozen else [torch.special.entr(logits.softmax(-1)).sum(-1)]
        return logprob, *(torch.where(counted, x, 0.0) for x in (lse, *entropy, largest))

    hidden = randn(rows, width, dtype=dtype, device=device)
    weight = (2 * width**-0.5 * randn(vocabulary, width, device=device, seed=1)).to(dtype)
    floats = (hidden, weight, *([randn(vocabulary, dtype=dtype, device=device, seed=2)] if bias else []))
    trained, carriers = (1, 2) if frozen else (len(floats), 3)
    return Case(op, plain, floats, trained, carriers, changes=[(target, other)], scale=8.0)


def partials_combine(size: tuple[int, int, int], dtype: torch.dtype, device: str = DEVICE) -> None:
    """Uneven shards and an empty one give what the whole gives."""
    rows, vocabulary, width = size
    hidden = randn(rows, width, dtype=dtype, device=device)
    weight = (2 * width**-0.5 * randn(vocabulary, width, device=device, seed=1)).to(dtype)
    target = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(5)).to(device)
    cuts = [0, vocabulary // 3, vocabulary // 3, vocabulary - 1, vocabulary]
    shards = [
        linear_logprob_partials(hidden, weight[start:stop], target, vocab_start=start) for start, stop in pairwise(cuts)
    ]
    got = combine_logprob_partials(*(torch.stack(part) for part in zip(*shards, strict=True)))
    want = linear_logprob(hidden, weight, target, return_lse=True)
    for actual, expected in zip(got, want, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


def largest_is_one_of_them(rows: int, dtype: torch.dtype, device: str = DEVICE) -> None:
    """Bit for bit, whatever the target: the largest log-prob that any id has."""
    hidden, weight = randn(1, 64, dtype=dtype, device=device), randn(70, 64, dtype=dtype, device=device, seed=1)
    every = torch.arange(rows, device=device) % 70
    logprob, largest = linear_logprob(hidden.expand(rows, 64), weight, every, return_max=True)
    assert torch.equal(largest, logprob.amax().expand(rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [70, 700])
def test_small_largest_log_prob(rows: int, dtype: torch.dtype) -> None:
    largest_is_one_of_them(rows, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_matches_the_reference(size: str, dtype: torch.dtype) -> None:
    matches_the_reference(make(SIZES[size], dtype))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_options(dtype: torch.dtype, options: str) -> None:
    matches_the_reference(make(SIZES["small"], dtype, bias=True, **OPTIONS[options]))


def test_real_rows() -> None:
    with large(40):
        matches_the_reference(make(REAL, torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", ["small", "odd"])
def test_partials_combine(size: str, dtype: torch.dtype) -> None:
    partials_combine(SIZES[size], dtype)


def test_small_unaligned_tensors() -> None:
    case = make(SIZES["small"], torch.bfloat16)
    case.floats = tuple(shifted(x) for x in case.floats)
    matches_the_reference(case)


def test_small_bad_ids_give_nan() -> None:
    hidden, weight = randn(4, 32), randn(50, 32, seed=1)
    target = torch.tensor([3, -1, 50, 1 << 40], device=DEVICE)
    got = linear_logprob(hidden, weight, target)
    assert got[1:].isnan().all()
    assert got[0].isfinite()


def test_frozen_weight_gets_no_gradient() -> None:
    hidden, weight = make(SIZES["event"], torch.bfloat16).floats
    hidden.requires_grad_()
    target = torch.arange(len(hidden), device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_logprob(hidden, weight, target).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < weight.nbytes
    with backend.override("reference"):
        wide = hidden.detach().double().requires_grad_()
        linear_logprob(wide, weight.double(), target).sum().backward()
    torch.testing.assert_close(hidden.grad, wide.grad.bfloat16(), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("promise", PROMISES)
def test_promises(promise: Callable[[Case], None]) -> None:
    promise(make((13, 32_000, 1024), torch.bfloat16))


def test_promises_of_many_rows() -> None:
    for promise in PROMISES[1:]:
        promise(make((300, 32_000, 1024), torch.bfloat16))


def test_another_device() -> None:
    matches_the_reference(make(SIZES["small"], torch.bfloat16, second_device()))


def test_weight_of_more_than_2_31_elements() -> None:
    vocabulary, width = 1_100_000, 2048
    with large(40):
        hidden, weight = filled(16, width), filled(vocabulary, width, seed=1)
        target = vocabulary - 1 - torch.arange(16, device=DEVICE)
        tail = linear_logprob_partials(hidden, weight[-1024:], target, vocab_start=vocabulary - 1024)
        whole = linear_logprob_partials(hidden, weight, target, vocab_start=0)
        torch.testing.assert_close(whole[2], tail[2], rtol=1e-4, atol=1e-2)


def test_hidden_of_more_than_2_31_elements() -> None:
    rows, width = 1_100_000, 2048
    with large(40):
        hidden, weight = filled(rows, width), filled(256, width, seed=1)
        target = torch.arange(rows, device=DEVICE) % 256
        end = linear_logprob(hidden[-16:].clone(), weight, target[-16:])
        torch.testing.assert_close(linear_logprob(hidden, weight, target)[-16:], end, rtol=1e-5, atol=1e-3)

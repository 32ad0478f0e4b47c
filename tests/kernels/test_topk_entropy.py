from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fb_kernels.testing import assert_close_to_reference
from fb_kernels.topk_entropy import reference, topk_entropy
from fb_kernels.topk_entropy.naive import topk_entropy as naive

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HOSTILE = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, -1.0, -2.5, 60000.0, -60000.0, 1e-7)


def assert_matches(logits: Tensor, k: int) -> None:
    entropy, values, indices = topk_entropy(logits, k)
    want_entropy, want_values, want_indices = naive(logits.double(), k)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    assert entropy.dtype == values.dtype == dtype
    assert indices.dtype == torch.int64
    assert torch.equal(indices, want_indices)
    torch.testing.assert_close(values, want_values.to(dtype), rtol=0, atol=0, equal_nan=True)
    plain = torch.distributions.Categorical(logits=want_values.to(dtype), validate_args=False).entropy()
    assert_close_to_reference(entropy, want_entropy, plain, scale=entropy_magnitude(want_values))


def entropy_magnitude(values: Tensor) -> Tensor:
    """Of -sum p log p over the last dimension: p is off by ulps of log p, and log of a sum from 1 on by ulps of 1."""
    logp = values.double().log_softmax(-1)
    size = torch.where(logp.exp() > 0, -logp, 0.0)
    return 1 + (logp.exp() * size * (1 + size)).sum(-1)


@settings(max_examples=40)
@given(data=st.data())
def test_matches_naive_on_hostile_rows(data: st.DataObject) -> None:
    batch = data.draw(st.sampled_from([(), (0,), (1,), (3,), (2, 0), (2, 3)]))
    width = data.draw(st.integers(1, 40))
    k = data.draw(st.integers(1, width))
    dtype = data.draw(st.sampled_from(DTYPES))
    logits = torch.randn(*batch, width, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    pool = torch.tensor(HOSTILE)
    if data.draw(st.booleans()):
        picks = torch.tensor(
            data.draw(st.lists(st.integers(0, 3 * len(HOSTILE)), min_size=logits.numel(), max_size=logits.numel())),
            dtype=torch.int64,
        ).view(logits.shape)
        logits = torch.where(picks < len(HOSTILE), pool[picks.clamp(max=len(HOSTILE) - 1)], logits.round())
    assert_matches(logits.to(dtype), k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_naive_on_a_vocabulary(dtype: torch.dtype) -> None:
    logits = (torch.randn(2, 5003, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    assert_matches(logits, 64)
    assert torch.equal(topk_entropy(logits)[2], topk_entropy(logits, 64)[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_within_twice_plain_pytorch(dtype: torch.dtype) -> None:
    logits = (torch.randn(64, 500, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    want = naive(logits.double(), 64)[0]
    plain = torch.distributions.Categorical(logits=logits.topk(64).values).entropy()
    ours = topk_entropy(logits)[0]
    assert_close_to_reference(ours, want, plain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_index(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 3000, dtype=dtype)
    logits[:, ::2] = -0.0
    logits[1, 1500] = 1.0
    entropy, _, indices = topk_entropy(logits, 64)
    assert indices[0].tolist() == list(range(64))
    assert indices[1].tolist() == [1500, *range(63)]
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
    logits = torch.tensor([0.0, 0.0, math.inf])
    logits.view(torch.int32)[1] = bits
    assert topk_entropy(logits, 2)[2].tolist() == [1, 2]


def test_negative_and_subnormal_order() -> None:
    logits = torch.tensor([-1e-45, 1e-45, -3.0, -1e30, 0.0, -2.9999998])
    assert topk_entropy(logits, 6)[2].tolist() == [1, 4, 0, 5, 2, 3]


def test_unused_nan_rows_do_not_leak_and_rows_are_independent() -> None:
    logits = torch.randn(4, 100)
    alone = topk_entropy(logits[2:3], 8)
    logits[[0, 1, 3]] = math.nan
    for ours, want in zip(topk_entropy(logits, 8), alone, strict=True):
        assert torch.equal(ours[2:3], want)


@pytest.mark.parametrize("k", [1, 16])
def test_strided_offset_and_transposed_input(k: int) -> None:
    base = torch.randn(16, 5, 33)
    for view in (base.transpose(0, 2), base[::2, 1:, ::2], base[..., 1::2].mT, base[:1].expand(4, -1, -1)):
        assert_matches(view, min(k, view.shape[-1]))
        assert all(ours.is_contiguous() for ours in topk_entropy(view, min(k, view.shape[-1])))


def test_blocks_of_rows_equal_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 50)
    whole = topk_entropy(logits, 5)
    monkeypatch.setattr(reference, "ELEMENT_BLOCK", 100)
    for ours, want in zip(topk_entropy(logits, 5), whole, strict=True):
        assert torch.equal(ours, want)


def test_empty_batches() -> None:
    for shape in ((0, 9), (3, 0, 9), (0, 3, 9)):
        entropy, values, indices = topk_entropy(torch.empty(shape), 3)
        assert entropy.shape == shape[:-1]
        assert values.shape == indices.shape == (*shape[:-1], 3)


def test_carries_no_gradient_and_leaves_the_input_alone() -> None:
    logits = torch.randn(3, 20, requires_grad=True)
    before = logits.detach().clone()
    first, second = topk_entropy(logits, 4), topk_entropy(logits, 4)
    assert not any(out.requires_grad for out in first)
    assert torch.equal(logits, before)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    first[1].zero_()
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("logits", "k"),
    [
        (torch.randn(3, 70), 64),
        (torch.randn(70, dtype=torch.float64), 1),
        (torch.randn(2, 9, 3).mT.bfloat16(), 9),
        (torch.empty(0, 5), 2),
    ],
)
def test_opcheck(logits: Tensor, k: int) -> None:
    torch.library.opcheck(torch.ops.fb.topk_entropy.default, (logits, k))


def test_compiles_without_breaks() -> None:
    compiled = torch.compile(topk_entropy, fullgraph=True, backend="aot_eager")
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(2, 3, 90, dtype=dtype, requires_grad=True)
        for ours, want in zip(compiled(logits, 7), topk_entropy(logits, 7), strict=True):
            assert torch.equal(ours, want)
            assert not ours.requires_grad


def test_a_k_that_follows_the_vocabulary_compiles_once() -> None:
    def run(logits: Tensor) -> tuple[Tensor, ...]:
        return topk_entropy(logits, min(64, logits.shape[-1]))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for width in range(3, 15):  # more than torch compiles one function
        logits = torch.randn(2, width)
        assert all(torch.equal(a, b) for a, b in zip(compiled(logits), run(logits), strict=True))


@pytest.mark.parametrize(
    ("call", "kind", "argument"),
    [
        (lambda: topk_entropy([1.0, 2.0]), TypeError, "logits"),
        (lambda: topk_entropy(torch.zeros(80, dtype=torch.int64)), TypeError, "logits"),
        (lambda: topk_entropy(torch.tensor(1.0), 1), ValueError, "logits"),
        (lambda: topk_entropy(torch.zeros(4), 5), ValueError, "k"),
        (lambda: topk_entropy(torch.zeros(4), 0), ValueError, "k"),
        (lambda: topk_entropy(torch.zeros(4, 0), 1), ValueError, "k"),
        (lambda: topk_entropy(torch.zeros(4), 2.0), TypeError, "k"),
        (lambda: topk_entropy(torch.zeros(4), True), TypeError, "k"),
    ],
)
def test_bad_arguments(call: Callable[[], object], kind: type[Exception], argument: str) -> None:
    with pytest.raises(kind, match=rf"^topk_entropy: {argument}: expected .*, got .*; .+") as caught:
        call()
    assert type(caught.value) is kind
    assert_matches(torch.randn(2, 9), 3)

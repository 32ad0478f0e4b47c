import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fb_core.decode.policy import RequestPolicy
from fb_kernels.topk_entropy.naive import topk_entropy

NATS = st.floats(-1e3, 1e3, allow_nan=False, width=32)


@settings(deadline=None, max_examples=50)
@given(st.lists(NATS, min_size=1, max_size=40), st.floats(0, 1))
def test_calibration_is_the_linear_quantile(entropies, quantile):
    policy = RequestPolicy.calibrate(entropies, quantile)
    assert policy.threshold == pytest.approx(float(np.quantile(entropies, quantile)), rel=1e-6, abs=1e-9)
    assert policy.top_k == 64


def test_calibration_takes_tensors_of_any_shape_and_keeps_top_k():
    entropies = torch.arange(12.0).view(3, 4)
    assert RequestPolicy.calibrate(entropies, 0.5, top_k=7) == RequestPolicy(5.5, 7)
    assert RequestPolicy.calibrate([3.0], 0.99) == RequestPolicy(3.0)
    assert RequestPolicy.calibrate(entropies, 0.0).threshold == 0.0
    assert RequestPolicy.calibrate(entropies, 1.0).threshold == 11.0


@pytest.mark.parametrize(
    ("call", "named"),
    [
        *((lambda it=it: RequestPolicy(it), "threshold:") for it in (math.nan, 10**400)),
        (lambda: RequestPolicy(1.0, 0), "top_k:"),
        *((lambda it=it: RequestPolicy.calibrate(it), "entropies:") for it in ([], [1.0, math.nan], [1.0, math.inf])),
        *((lambda it=it: RequestPolicy.calibrate([1.0], it), "quantile:") for it in (1.1, -0.1, math.nan)),
    ],
)
def test_bad_arguments(call, named):
    with pytest.raises(ValueError, match=named):
        call()


@pytest.mark.parametrize("nats", [np.float32(1.7), Fraction(17, 10), Decimal("1.7"), pytest.param(10**300, id="huge")])
def test_a_threshold_of_any_kind_is_kept_as_a_float(nats):
    threshold = RequestPolicy(nats).threshold
    assert (type(threshold), threshold) == (float, float(nats))


@pytest.mark.parametrize("value", ["1.2", b"1", None, [1.0], 1j, torch.ones(2), Decimal("sNaN")])
def test_a_threshold_or_quantile_that_is_no_number_is_named(value):
    with pytest.raises(TypeError, match="threshold:"):
        RequestPolicy(value)
    with pytest.raises(TypeError, match="quantile:"):
        RequestPolicy.calibrate([1.0], value)


def test_policy_is_frozen():
    with pytest.raises(AttributeError):
        RequestPolicy(1.0).threshold = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("k", [1, 3, 20, 64])
def test_entropy_is_that_of_the_largest_logits_in_nats(k):
    logits = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(k)) * 3
    entropy = RequestPolicy(1.0, k).entropy(logits)
    assert entropy.shape == (2, 3)
    assert entropy.dtype == torch.float32
    torch.testing.assert_close(entropy.double(), topk_entropy(logits.double(), min(k, 20))[0], rtol=1e-5, atol=1e-6)


def test_asks_strictly_above_the_threshold():
    entropy = torch.tensor([0.5, 1.0, 1.5, math.nan])
    assert RequestPolicy(1.0).asks(entropy).tolist() == [False, False, True, False]
    assert RequestPolicy(-math.inf).asks(entropy).tolist() == [True, True, True, False]
    assert not RequestPolicy(math.inf).asks(entropy).any()

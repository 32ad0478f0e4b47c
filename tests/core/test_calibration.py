"""The calibrated target: its six terms, the fit against planted weights, and the soft target it gives."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fb_core.calibrated import Calibration, Weights, calibrate, calibrated_target, calibration_terms
from fb_core.reranker import candidate_features

Groups = tuple[list[Tensor], list[Tensor]]


def random_terms(candidates: int, generator: torch.Generator, *, future: bool = True) -> Tensor:
    logprobs = [torch.randn(candidates, generator=generator).log_softmax(0) for _ in range(3)]
    return calibration_terms(logprobs[0] if future else None, *logprobs[1:])


def planted(theta: list[float], states: int, seed: int = 0) -> Groups:
    """Groups in which one candidate succeeds, drawn from softmax(terms @ theta)."""
    generator = torch.Generator().manual_seed(seed)
    terms, outcomes = [], []
    for state in range(states):
        rows = random_terms(2 + state % 6, generator, future=state % 5 > 0)
        drawn = torch.multinomial((rows @ torch.tensor(theta)).softmax(0), 1, generator=generator)
        terms.append(rows)
        outcomes.append(torch.arange(len(rows)) == drawn)
    return terms, outcomes


def objective(theta: Tensor, groups: Groups, penalty: float) -> Tensor:
    """What `calibrate` minimises, state by state."""
    losses = [
        -(rows.double() @ theta).softmax(0)[outcome].sum().log()
        for rows, outcome in zip(*groups, strict=True)
        if outcome.any() and not outcome.all()
    ]
    return torch.stack(losses).mean() + penalty * theta.square().sum()


def test_terms_by_hand() -> None:
    """Deviations are 1, 1 and 0; the LLM's largest probability is 1/2."""
    llm = torch.tensor([0.5, 0.5 / math.e**2]).log()
    terms = calibration_terms(torch.tensor([-5.0, -3.0]), llm, torch.tensor([-0.7, -0.7]))
    expected = torch.tensor([[-1.0, 1.0, 0.0, -0.5, 0.5, 0.0], [1.0, -1.0, 0.0, 0.5, -0.5, 0.0]])
    assert terms.dtype == torch.float32
    torch.testing.assert_close(terms, expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(calibration_terms(None, llm, torch.tensor([-0.7, -0.7]))[:, [0, 3]], torch.zeros(2, 2))


def test_terms_are_those_of_the_candidate_features() -> None:
    generator = torch.Generator().manual_seed(3)
    slm, llm = (torch.randn(7, generator=generator).log_softmax(0) for _ in range(2))
    features = candidate_features(
        slm, llm, torch.ones(7, dtype=torch.int64), ["llm", "slm", "llm_certain", "slm_certain"]
    )
    torch.testing.assert_close(calibration_terms(None, llm, slm)[:, [1, 2, 4, 5]], features)


@pytest.mark.parametrize("value", [-0.1, -31.7, -1e-30])
def test_rounding_is_no_spread(value: float) -> None:
    same = torch.full((3,), value)
    apart = same.clone()
    apart[0] = torch.nextafter(same[0], torch.tensor(0.0))
    for values in (same, apart, same[:1]):
        assert not calibration_terms(values, values, values).any()


@pytest.mark.parametrize(
    "values",
    [
        (torch.zeros(2), torch.zeros(3), torch.zeros(3)),
        (None, torch.zeros(3), torch.zeros(2)),
        (None, torch.zeros(0), torch.zeros(0)),
        (None, torch.zeros(1, 2), torch.zeros(1, 2)),
        (None, torch.tensor(0.0), torch.tensor(0.0)),
    ],
)
def test_terms_of_other_shapes_are_refused(values: tuple[Tensor | None, Tensor, Tensor]) -> None:
    with pytest.raises(ValueError, match="the same one or more candidates"):
        calibration_terms(*values)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", range(3))
def test_terms_that_are_not_finite_are_refused(bad: float, place: int) -> None:
    values = [torch.tensor([-1.0, -2.0]) for _ in range(3)]
    values[place][1] = bad
    with pytest.raises(ValueError, match="got 1 that are not"):
        calibration_terms(*values)


def test_planted_weights_are_found() -> None:
    theta = [1.2, 0.3, -0.6, -0.8, 1.5, 0.4]
    found = calibrate(*planted(theta, 4000), penalty=1e-4)
    assert torch.cosine_similarity(torch.tensor(found.theta), torch.tensor(theta), dim=0) > 0.98
    assert found.loss_after < found.loss_before


def test_an_inverted_future_gets_a_negative_weight() -> None:
    for sign in (1.0, -1.0):
        found = calibrate(*planted([2.0 * sign, 0, 0, 0, 0, 0], 200)).theta
        assert found.b * sign > 0.5
        assert abs(found.b) > 3 * max(abs(found.llm), abs(found.slm))


def test_the_minimum_is_one() -> None:
    groups = planted([1.0, -1.0, 0.5, 0.5, 2.0, 0.0], 60)
    groups[1][:20] = [outcome | (torch.arange(len(outcome)) == 0) for outcome in groups[1][:20]]  # several successes
    found = calibrate(*groups)
    theta = torch.tensor(found.theta, dtype=torch.float64, requires_grad=True)
    value = objective(theta, groups, 1e-2)
    (slope,) = torch.autograd.grad(value, theta)
    assert float(slope.abs().max()) < 1e-7
    with torch.no_grad():
        assert found.loss_after == pytest.approx(float(objective(theta, groups, 0.0)))
        assert found.loss_before == pytest.approx(float(objective(torch.zeros_like(theta), groups, 0.0)))
        for step in torch.randn(20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64):
            assert objective(theta + 0.1 * step, groups, 1e-2) > value


def test_two_candidates_by_hand() -> None:
    """25 times the better B wins: log(1 + exp(-2 b)) + penalty b^2 has slope 0 where penalty b = sigmoid(-2 b)."""
    row = torch.zeros(2, 6)
    row[:, 0] = torch.tensor([1.0, -1.0])
    found = calibrate([row] * 25, [torch.tensor([True, False])] * 25, penalty=0.1)
    b = found.theta.b
    assert 0.1 * b == pytest.approx(1 / (1 + math.exp(2 * b)))
    assert found.theta[1:] == (0.0,) * 5
    assert found[1:] == (25, 25, pytest.approx(math.log(2)), pytest.approx(math.log1p(math.exp(-2 * b))))


def test_states_of_one_outcome_say_nothing() -> None:
    terms, outcomes = planted([1.0, 0, 0, 0, 1.0, 0], 40)
    extra = [torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), torch.ones(1, 6), torch.zeros(0, 6)]
    same = [torch.ones(4, dtype=torch.bool), torch.zeros(1, dtype=torch.bool), torch.zeros(0, dtype=torch.bool)]
    alone, more = calibrate(terms, outcomes), calibrate(extra + terms, same + outcomes)
    assert more == alone._replace(states=43)
    assert alone.mixed == 40
    assert isinstance(alone, Calibration)
    assert isinstance(alone.theta, Weights)


def test_too_few_mixed_states() -> None:
    terms, outcomes = planted([1.0, 0, 0, 0, 0, 0], 24)
    terms, outcomes = terms + terms[:9], outcomes + [torch.ones_like(outcome) for outcome in outcomes[:9]]
    with pytest.raises(ValueError, match=r"at least 25 .* got 24 of 33 rolled out; roll out a larger share"):
        calibrate(terms, outcomes)
    assert calibrate(terms, outcomes, minimum_mixed=24).mixed == 24
    assert calibrate(terms[:1], outcomes[:1], minimum_mixed=1).mixed == 1
    with pytest.raises(ValueError, match="got 0 of 0"):
        calibrate([], [])


@given(st.integers(0, 2**31))
def test_the_order_of_candidates_and_states_does_not_matter(seed: int) -> None:
    terms, outcomes = planted([1.0, 0.5, 0, 0, 1.0, -0.5], 30, seed)
    found = calibrate(terms, outcomes)
    assert calibrate(terms, outcomes) == found
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(rows), generator=generator) for rows in terms]
    states = torch.randperm(30, generator=generator).tolist()
    moved = calibrate([terms[s][orders[s]] for s in states], [outcomes[s][orders[s]] for s in states])
    assert moved.theta == pytest.approx(found.theta, abs=1e-6)
    for rows, order in zip(terms, orders, strict=True):
        expected = calibrated_target(rows, found.theta)[order]
        torch.testing.assert_close(calibrated_target(rows[order], found.theta), expected)


def test_what_surrounds_the_fit_does_not_matter() -> None:
    terms, outcomes = planted([1.0, 0, 0, 0, 0, 0], 30)
    expected = calibrate(terms, outcomes)
    with torch.no_grad():
        assert calibrate(terms, outcomes) == expected
    assert calibrate([rows.requires_grad_() for rows in terms], outcomes) == expected
    assert all(rows.grad is None for rows in terms)


def test_separable_outcomes_keep_theta_finite() -> None:
    terms, _ = planted([0.0] * 6, 30)
    found = calibrate(terms, [rows[:, 1] == rows[:, 1].max() for rows in terms], penalty=1e-6)
    assert all(math.isfinite(weight) for weight in found.theta)
    assert found.loss_after < 1e-3


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"terms": [torch.zeros(2, 6)] * 24}, ValueError, "got 24 and 25"),
        ({"terms": [torch.zeros(2, 5)] * 25}, ValueError, r"state 0: expected finite terms \[K, 6\], got \[2, 5\]"),
        ({"terms": [torch.zeros(6)] * 25}, ValueError, r"got \[6\]"),
        ({"terms": [torch.full((2, 6), math.nan)] * 25}, ValueError, "with 12 that are not"),
        ({"terms": [torch.full((2, 6), math.inf)] * 25}, ValueError, "with 12 that are not"),
        ({"terms": [torch.zeros(3, 6)] * 25}, ValueError, r"one outcome per candidate, \[3\], got \[2\]"),
        ({"outcomes": [torch.tensor([1.0, 0.0])] * 25}, TypeError, "bool outcomes, got torch.float32 in state 0"),
        ({"minimum_mixed": 0}, ValueError, "minimum_mixed"),
        ({"penalty": 0.0}, ValueError, "penalty"),
        ({"penalty": math.nan}, ValueError, "penalty"),
        ({"penalty": math.inf}, ValueError, "penalty"),
    ],
)
def test_bad_arguments_are_refused(change: dict, kind: type[Exception], message: str) -> None:
    good = {"terms": [torch.zeros(2, 6)] * 25, "outcomes": [torch.tensor([True, False])] * 25}
    assert calibrate(**good).theta == (0.0,) * 6
    with pytest.raises(kind, match=message):
        calibrate(**(good | change))


def test_target_by_hand() -> None:
    """Scores 2 - 1 = 1 and 0; no temperature: twice theta is twice as sharp."""
    terms = torch.tensor([[1.0, 0, 0, 1.0, 0, 0], [0.0] * 6])
    for scale in (1.0, 2.0):
        target = calibrated_target(terms, [2.0 * scale, 0, 0, -1.0 * scale, 0, 0])
        share = 1 / (1 + math.exp(-scale))
        torch.testing.assert_close(target, torch.tensor([share, 1 - share]))
        assert target.dtype == torch.float32


@pytest.mark.parametrize("candidates", [0, 1, 3])
def test_no_spread_gives_a_uniform_target(candidates: int) -> None:
    target = calibrated_target(torch.ones(candidates, 6), [3.0, -1.0, 2.0, 0.1, 0.2, 0.3])
    assert torch.equal(target, torch.full((candidates,), 1 / max(candidates, 1)))


def test_target_refuses_bad_values() -> None:
    for terms in (torch.zeros(2, 5), torch.full((2, 6), math.nan), torch.zeros(6)):
        with pytest.raises(ValueError, match="expected finite terms"):
            calibrated_target(terms, [0.0] * 6)
    for theta in ([0.0] * 5, [0.0] * 5 + [math.nan], [math.inf] + [0.0] * 5):
        with pytest.raises(ValueError, match="six finite weights"):
            calibrated_target(torch.zeros(2, 6), theta)

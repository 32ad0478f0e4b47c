from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fb_kernels.commit import DecodeState, Halt, commit_, reference
from fb_kernels.commit.naive import commit_ as naive
from fb_kernels.testing import count_syncs

NAN = math.nan


def state(
    length: list[int], halt: list[int] | None = None, budget: list[int] | None = None, width: int = 6
) -> DecodeState:
    rows = len(length)
    tokens = torch.arange(rows * width, dtype=torch.int64).view(rows, width) + 1000
    others = (length, halt or [0] * rows, budget or [1] * rows)
    return DecodeState(tokens, *(torch.tensor(values, dtype=torch.int32) for values in others))


def limits(threshold: object = 1.0, eos_ids: tuple = (7,), max_length: object = 6) -> dict:
    return {
        "threshold": torch.tensor(threshold, dtype=torch.float32),
        "eos_ids": torch.tensor(eos_ids, dtype=torch.int64),
        "max_length": torch.tensor(max_length, dtype=torch.int32),
    }


def clone(state: DecodeState) -> DecodeState:
    return DecodeState(*(value.clone() for value in state))


def assert_same(one: DecodeState, other: DecodeState) -> None:
    for name, mine, expected in zip(one._fields, one, other, strict=True):
        assert torch.equal(mine, expected), name


@given(data=st.data(), rows=st.integers(0, 5), width=st.integers(0, 5), whole=st.booleans(), strided=st.booleans())
def test_matches_naive(data: st.DataObject, rows: int, width: int, whole: bool, strided: bool) -> None:
    def draw(values: st.SearchStrategy) -> list:
        return data.draw(st.lists(values, min_size=rows, max_size=rows))

    levels = st.sampled_from([0.0, 0.5, 1.0, 1.5, math.inf])
    mine = state(draw(st.integers(0, width + 1)), draw(st.integers(0, 4)), draw(st.integers(0, 2)), width)
    if strided:
        mine = DecodeState(*(torch.stack((value, value), -1)[..., 0] for value in mine))
    token, entropy = draw(st.integers(0, 5)), draw(levels | st.just(NAN))
    eos = data.draw(st.lists(st.integers(0, 5), max_size=3))
    threshold = [data.draw(levels)] * rows if whole else draw(levels)
    limit = [data.draw(st.integers(0, width + 2))] * rows if whole else draw(st.integers(0, width + 2))
    if whole:
        threshold, limit = (threshold or [1.0])[0], (limit or [1])[0]
    token_dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    expected, given = clone(mine), limits(threshold, tuple(eos), limit)
    for function, state_ in ((commit_, mine), (naive, expected)):
        function(state_, torch.tensor(token, dtype=token_dtype), torch.tensor(entropy), **given)
    assert_same(mine, expected)


@pytest.mark.parametrize(
    ("token", "entropy", "length", "budget", "reason"),
    [
        (7, NAN, 6, 1, Halt.NAN),
        (7, 2.0, 6, 1, Halt.EVENT),
        (7, 2.0, 6, 0, Halt.EOS),
        (7, 1.0, 6, 1, Halt.EOS),
        (5, 1.0, 6, 1, Halt.LENGTH),
        (5, 2.0, 3, 0, Halt.NONE),
        (5, 1.0, 3, 1, Halt.NONE),
    ],
)
def test_order_of_reasons(token: int, entropy: float, length: int, budget: int, reason: Halt) -> None:
    mine = state([length], budget=[budget])
    commit_(mine, torch.tensor([token]), torch.tensor([entropy]), **limits())
    assert mine.halt.item() == reason
    assert mine.length.item() == length + (reason == Halt.NONE)


def test_a_halted_row_changes_no_more() -> None:
    mine = state([2, 3], halt=[0, Halt.EVENT])
    for _ in range(2):
        commit_(mine, torch.tensor([7, 5]), torch.tensor([0.0, 0.0]), **limits())
    expected = state([2, 3], halt=[Halt.EOS, Halt.EVENT])
    assert_same(mine, expected)
    commit_(mine, torch.tensor([5, 5]), torch.tensor([NAN, NAN]), **limits(0.0, (), 0))
    assert_same(mine, expected)


def test_never_outside_the_buffer() -> None:
    buffer = torch.full((1, 12), -5)
    mine = state([6], width=6)._replace(tokens=buffer[:, 3:9])
    commit_(mine, torch.tensor([5]), torch.tensor([0.0]), **limits(max_length=100))
    assert mine.halt.item() == Halt.LENGTH
    assert (buffer == -5).all()


def test_a_loop_fills_the_buffer_and_stops() -> None:
    mine = state([1], width=4)
    for step in range(6):
        commit_(mine, torch.tensor([10 + step]), torch.tensor([0.0]), **limits(max_length=100))
    assert mine.tokens.tolist() == [[1000, 10, 11, 12]]
    assert (mine.length.item(), mine.halt.item()) == (4, Halt.LENGTH)


def test_only_the_state_is_written() -> None:
    mine, token, entropy, given = state([2]), torch.tensor([5]), torch.tensor([0.5]), limits([1.0], (7, 8), [6])
    values = (token, entropy, *given.values())
    before = [value.clone() for value in values]
    assert commit_(mine, token, entropy, **given) is None
    assert all(torch.equal(value, copy) for value, copy in zip(values, before, strict=True))


def test_opcheck() -> None:
    op = torch.ops.fb.commit_.default
    for mine in (state([2, 6, 3]), state([]), state([0, 0, 0], width=0)):
        rows = mine.length.shape[0]
        for threshold, eos, limit in ((1.0, (), 6), ([1.0] * rows, (7, 8), [6] * rows)):
            token, entropy = torch.tensor([5, 7, 5][:rows], dtype=torch.int64), torch.tensor([0.5, 2.0, NAN][:rows])
            torch.library.opcheck(op, (*mine, token, entropy, *limits(threshold, eos, limit).values()))


def test_compile() -> None:
    results = []
    for function in (commit_, torch.compile(commit_, fullgraph=True, backend="aot_eager")):
        mine = state([2, 6, 3])
        function(mine, torch.tensor([5, 5, 5]), torch.tensor([0.5, 0.5, 2.0]), **limits())
        results.append(mine)
    assert_same(*results)
    assert results[0].halt.tolist() == [Halt.NONE, Halt.LENGTH, Halt.EVENT]


def test_the_device_form_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, (400,), generator=generator).to(dtype)

    start = DecodeState(torch.arange(2400).view(400, 6), draw(0, 8), draw(0, 2) * draw(0, 5), draw(-1, 2))
    token, entropy = draw(5, 9, torch.int64), draw(0, 4).float() / 2
    entropy[::7] = NAN
    arguments = limits([1.0] * 400, (7,), draw(1, 8).tolist())
    states = [clone(start) for _ in range(2)]
    commit_(states[0], token, entropy, **arguments)
    monkeypatch.setattr(reference, "_host_reads", lambda _: False)
    commit_(states[1], token, entropy, **arguments)
    assert_same(*states)
    assert set(states[0].halt.tolist()) == {0, 1, 2, 3, 4}


def test_no_sync() -> None:
    with count_syncs() as syncs:
        commit_(state([2]), torch.tensor([5]), torch.tensor([0.5]), **limits())
    assert not syncs.total


def test_negative_length_where_the_host_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device values are not read: a negative length and a NaN threshold halt."""
    monkeypatch.setattr(reference, "_host_reads", lambda _: False)
    mine = state([-1, 2])
    tokens = mine.tokens.clone()
    commit_(mine, torch.tensor([5, 5]), torch.tensor([0.5, 0.5]), **limits([1.0, NAN], (), 6))
    assert mine.halt.tolist() == [Halt.LENGTH, Halt.NAN]
    assert torch.equal(mine.tokens, tokens)


ONE = torch.tensor([1])


@pytest.mark.parametrize(
    ("argument", "change", "error"),
    [
        ("state", {"state": tuple(state([2]))}, TypeError),
        ("state.tokens", {"state": state([2])._replace(tokens=torch.ones(1, 6))}, TypeError),
        ("state.tokens", {"state": state([2])._replace(tokens=torch.ones(6, dtype=torch.int64))}, ValueError),
        ("state.length", {"state": state([2])._replace(length=ONE)}, TypeError),
        ("state.halt", {"state": state([2])._replace(halt=torch.zeros(2, dtype=torch.int32))}, ValueError),
        ("state.budget", {"state": state([2])._replace(budget=3)}, TypeError),
        ("state.budget", {"state": state([2])._replace(budget=ONE.int().to("meta"))}, ValueError),
        ("state.length", {"state": state([-1])}, ValueError),
        ("state.tokens", {"state": state([2])._replace(tokens=torch.ones(1, 1).long().expand(1, 6))}, ValueError),
        ("token", {"token": torch.ones(1)}, TypeError),
        ("token", {"token": torch.tensor(1)}, ValueError),
        ("entropy", {"entropy": ONE}, TypeError),
        ("entropy", {"entropy": torch.ones(2)}, ValueError),
        ("threshold", {"threshold": 1.0}, TypeError),
        ("threshold", {"threshold": torch.ones(2)}, ValueError),
        ("threshold", {"threshold": torch.tensor(NAN)}, ValueError),
        ("eos_ids", {"eos_ids": torch.tensor(7)}, ValueError),
        ("eos_ids", {"eos_ids": torch.ones(1)}, TypeError),
        ("max_length", {"max_length": 6}, TypeError),
        ("max_length", {"max_length": torch.ones(1, 1, dtype=torch.int32)}, ValueError),
    ],
)
def test_bad_arguments(argument: str, change: dict, error: type[Exception]) -> None:
    def good() -> dict:
        return {"state": state([2]), "token": torch.tensor([5]), "entropy": torch.tensor([0.5]), **limits()}

    with pytest.raises(error, match=f"commit_: {argument}: expected .*, got .*; ") as raised:
        commit_(**(good() | change))
    assert raised.type is error
    commit_(**good())


def test_a_refused_call_changes_nothing() -> None:
    mine = state([2, -1])
    with pytest.raises(ValueError, match=r"commit_: state\.length: expected lengths of 0 or more, got -1"):
        commit_(mine, torch.tensor([5, 5]), torch.tensor([0.5, 0.5]), **limits())
    assert_same(mine, state([2, -1]))

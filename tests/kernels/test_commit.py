"""What is peculiar to `commit_`: in which order its reasons come, and what it leaves as it is."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from cases.commit import OP, make
from ways import names, running

from fb_kernels import DecodeState, Halt, commit, commit_
from fb_kernels.commit import reference

NAN = math.nan
of_every_way = pytest.mark.parametrize("way", names(OP))


def state(length: list[int], halt: list[int] | None = None, budget: int = 1, width: int = 6) -> DecodeState:
    rows = len(length)
    tokens = torch.arange(rows * width, dtype=torch.int64).view(rows, width) + 1000
    others = (length, halt or [0] * rows, [budget] * rows)
    return DecodeState(tokens, *(torch.tensor(values, dtype=torch.int32) for values in others))


def step(
    state: DecodeState,
    token: int,
    entropy: float,
    eos_ids: tuple[int, ...] = (7,),
    max_length: int = 6,
    threshold: float | list[float] = 1.0,
) -> None:
    """The same for every row, but for the threshold."""
    rows = len(state.length)
    commit_(
        state,
        torch.full((rows,), token),
        torch.full((rows,), entropy),
        threshold=torch.tensor(threshold, dtype=torch.float64),
        eos_ids=torch.tensor(eos_ids, dtype=torch.int64),
        max_length=torch.tensor(max_length, dtype=torch.int32),
    )


@of_every_way
@pytest.mark.parametrize("inference", [False, True])
def test_what_is_written_has_a_new_version(way: str, inference: bool) -> None:
    with running(way), torch.inference_mode(inference):
        mine = state([3])
        step(mine, 5, 0.5)
    assert mine.length.tolist() == [4]
    assert inference or min(mine.tokens._version, mine.length._version) > 0  # inference tensors have none


def assert_same(one: DecodeState, other: DecodeState) -> None:
    for name, mine, expected in zip(one._fields, one, other, strict=True):
        assert torch.equal(mine, expected), name


@of_every_way
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
def test_order_of_reasons(way: str, token: int, entropy: float, length: int, budget: int, reason: Halt) -> None:
    mine = state([length], budget=budget)
    with running(way):
        step(mine, token, entropy)
    assert mine.halt.item() == reason
    assert mine.length.item() == length + (reason == Halt.NONE)


@of_every_way
def test_a_halted_row_changes_no_more(way: str) -> None:
    mine, expected = state([2, 3], halt=[0, Halt.EVENT]), state([2, 3], halt=[Halt.EOS, Halt.EVENT])
    with running(way):
        for _ in range(2):
            step(mine, 7, 0.0)
            assert_same(mine, expected)
        step(mine, 5, NAN, (), 0)
    assert_same(mine, expected)


@of_every_way
def test_a_loop_fills_the_buffer_and_stops(way: str) -> None:
    mine = state([1], width=4)
    with running(way):
        for token in range(10, 16):
            step(mine, token, 0.0, max_length=100)
    assert mine.tokens.tolist() == [[1000, 10, 11, 12]]
    assert (mine.length.item(), mine.halt.item()) == (4, Halt.LENGTH)


def test_the_device_form_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    case = OP.cast(make(400, 6, 2), torch.float32)
    case.arguments["entropy"][::7] = NAN
    host, device = (case.fresh() for _ in range(2))
    with running("reference"):
        commit_(**host.arguments)
        monkeypatch.setattr(reference, "_host_reads", lambda _: False)
        commit_(**device.arguments)
    assert_same(host.arguments["state"], device.arguments["state"])
    assert set(host.arguments["state"].halt.tolist()) == set(Halt)


@of_every_way
def test_negative_length_where_the_host_does_not_look(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device values are not read: a negative length and a NaN threshold halt."""
    monkeypatch.setattr(reference, "_host_reads", lambda _: False)
    mine = state([-1, 2])
    tokens = mine.tokens.clone()
    with running(way):
        step(mine, 5, 0.5, threshold=[1.0, NAN])
    assert mine.halt.tolist() == [Halt.LENGTH, Halt.NAN]
    assert torch.equal(mine.tokens, tokens)


def test_a_refused_call_changes_nothing() -> None:
    mine = state([2, -1])
    with pytest.raises(ValueError, match=r"commit_: state\.length: expected lengths of 0 or more, got -1"):
        step(mine, 5, 0.5)
    assert_same(mine, state([2, -1]))


def test_in_a_capture_the_driver_is_not_asked_whether_memory_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    outcome = SimpleNamespace(is_pinned=lambda: asked.append(True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert commit._may_be_pinned(outcome)  # type: ignore[arg-type]
    assert not asked

"""The compiled `commit_`, emulated: exactly the definition, row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fb_kernels.commit import DecodeState, Halt, commit_
from fb_kernels.commit.naive import commit_ as naive

pytestmark = pytest.mark.usefixtures("cuda_kernels")

NAN, INF = float("nan"), float("inf")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data(), rows=st.integers(0, 70), slots=st.integers(1, 9), ends=st.integers(0, 3), each=st.booleans())
def test_as_the_definition(data: st.DataObject, rows: int, slots: int, ends: int, each: bool) -> None:
    def draw(low: int, high: int, dtype: torch.dtype, count: int = rows) -> torch.Tensor:
        return torch.tensor(data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count)), dtype=dtype)

    whole = torch.arange(rows * (slots + 3)).view(rows, slots + 3)
    state = DecodeState(
        whole[:, :slots],
        draw(0, slots + 1, torch.int32),
        draw(0, 4, torch.int32) * draw(0, 1, torch.int32),
        draw(-1, 2, torch.int32),
    )
    entropy = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0, NAN, INF]), min_size=rows, max_size=rows)),
        dtype=torch.float32,
    )
    arguments = {
        "token": draw(0, 5, torch.int64),
        "entropy": entropy,
        "threshold": torch.full((rows,) if each else (), 1.0, dtype=torch.float64),
        "eos_ids": draw(0, 5, torch.int64, ends),
        "max_length": draw(1, slots + 1, torch.int32) if each else torch.tensor(slots, dtype=torch.int32),
    }
    expected = DecodeState(*(value.clone() for value in state))
    naive(expected, **arguments)
    beyond = whole[:, slots:].clone()
    commit_(state, **arguments)
    for name, mine, right in zip(state._fields, state, expected, strict=True):
        assert torch.equal(mine, right), name
    assert torch.equal(whole[:, slots:], beyond)


def test_a_negative_length_halts() -> None:
    length, halt = torch.tensor([-1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    tokens = torch.full((1, 4), 9)
    operator = torch.ops.fb.commit_.default
    operator(
        tokens, length, halt, halt.clone(), torch.zeros(1, dtype=torch.int64), torch.zeros(1),
        torch.tensor(1.0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64), torch.tensor(4, dtype=torch.int32),
    )  # fmt: skip
    assert halt.tolist() == [Halt.LENGTH]
    assert tokens.tolist() == [[9] * 4]


def test_other_dtypes_are_for_the_reference() -> None:
    state = DecodeState(torch.zeros(1, 4, dtype=torch.int64), *(torch.zeros(1, dtype=torch.int32) for _ in range(3)))
    with pytest.raises(ValueError, match="commit_: expected arguments that the cuda kernel takes"):
        commit_(
            state,
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(1),
            threshold=torch.tensor(1.0),
            eos_ids=torch.zeros(0, dtype=torch.int64),
            max_length=torch.tensor(4),
        )

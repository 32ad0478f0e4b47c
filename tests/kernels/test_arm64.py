"""On arm64 every op's kernel for CPUs is its definition; where a cross compiler and an emulator are installed."""

from __future__ import annotations

import pytest
from cases import OPS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contract import drawing, is_the_definition


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if "cpu" in op.ways])
@settings(drawing, max_examples=10)
@given(data=st.data())
def test_on_arm64_it_is_the_definition(name: str, data: st.DataObject) -> None:
    is_the_definition(name, "cpu arm64", data)

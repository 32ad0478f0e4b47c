"""Where the arguments of a public op may lie: expanded, one beside the other, and gradients of results anywhere."""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from cases import NAMES, OPS, Case, case
from cases.base import gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, ROUGH, WHOLE, outside
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fb_kernels
from fb_kernels._runtime import backend, checks

EXPANDED = [layout for layout in LAYOUTS if layout not in WHOLE]


def outcome(call: Callable[[], list[Tensor]]) -> list[Tensor] | str:
    try:
        return [x.clone() for x in call()]
    except ValueError as problem:
        return str(problem)


def assert_same(one: list[Tensor] | str, other: list[Tensor] | str, what: str) -> None:
    if isinstance(one, str) or isinstance(other, str):
        assert one == other, what
        return
    for mine, expected in zip(one, other, strict=True):
        torch.testing.assert_close(mine, expected, rtol=2e-5, atol=2e-5, equal_nan=True, msg=lambda m: f"{what}: {m}")


def test_every_op_has_a_case() -> None:
    functions = {
        name for name in fb_kernels.__all__ if name not in ("BranchLayout", "DecodeState", "Halt", "LayerWeights")
    }
    assert {case(name).op for name in NAMES} == functions


@pytest.fixture(params=["reference", "auto"])  # auto: what is compiled for the CPU
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    with backend.override(request.param):
        yield


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("kernels")
def test_expanded_arguments(name: str) -> None:
    """Other layouts are test_contract.py's."""
    for argument, x in case(name).tensors.items():
        for layout in EXPANDED:
            view, example, what = LAYOUTS[layout](x), case(name), f"{argument}, {layout}"
            before = outside(view)
            if argument in example.written and 0 in view.stride():
                shown = argument.partition(".")[0]
                with pytest.raises(ValueError, match=rf"^{example.op}: {shown}.*; clone it$"):
                    example.run(**{argument: view})
                continue
            expected = outcome(lambda view=view, argument=argument: case(name).run(**{argument: view.clone()}))
            mine = outcome(lambda example=example, view=view, argument=argument: example.run(**{argument: view}))
            assert_same(mine, expected, what)
            torch.testing.assert_close(outside(view), before, rtol=0, atol=0, equal_nan=True, msg=what)


def takes_any_gradients(example: Case, layouts: Iterable[str]) -> None:
    for layout in layouts:
        lay = LAYOUTS[layout]
        expected = gradients(example, lambda x, lay=lay: lay(x).contiguous().clone())
        assert_same(gradients(example, lay), expected, layout)


@pytest.mark.parametrize("name", [name for name in NAMES if case(name).gradients])
@pytest.mark.usefixtures("kernels")
def test_any_strides_of_the_results_gradients(name: str) -> None:
    takes_any_gradients(case(name), LAYOUTS)


@pytest.mark.slow
@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="kernels run on a GPU here: see tests/gpu")
@pytest.mark.parametrize("name", OPS)
@pytest.mark.sweep(6)
def test_any_strides_of_gradients_for_triton(name: str) -> None:
    op, ways = OPS[name], [way for way in OPS[name].ways if way.startswith("triton")]
    example = op.cast(op.make(**op.typical), torch.float32)
    if ways and example.gradients:
        with backend.override("triton"), op.way(ways[0]).small():
            takes_any_gradients(example, (ROUGH, "expanded"))


def written_with_another(name: str) -> Iterator[tuple[str, str]]:
    """Each argument that is written, with each other one."""
    example = case(name)
    for place, argument in enumerate(example.written):
        yield from ((argument, other) for other in example.tensors if other not in example.written[: place + 1])


WRITING = pytest.mark.parametrize("name", [name for name in NAMES if case(name).written])


def beside(x: Tensor, y: Tensor, start: int, pitch: int | None = None) -> tuple[Tensor, Tensor]:
    """Both in one buffer, y from byte `start` on; with a pitch, so many bytes from element to element."""
    buffer = torch.zeros(2 * (x.numel() + y.numel() + 1) * 16, dtype=torch.uint8)
    views = []
    for value, first in ((x, 0), (y, start)):
        size = value.element_size()
        flat = buffer[first:][: (len(buffer) - first) // 8 * 8].view(value.dtype)[:: (pitch or size) // size]
        views.append(flat[: value.numel()].unflatten(0, value.shape) if value.ndim else flat[0])
    return views[0].copy_(x), views[1].copy_(y)


@WRITING
def test_what_is_written_overlaps_nothing(name: str) -> None:
    for argument, other in written_with_another(name):
        example = case(name)
        x, y = example.tensors[argument], example.tensors[other]
        for start in (0, (x.nbytes - 1) // 8 * 8):  # the last element is enough
            one, two = beside(x, y, start)
            before = one.clone()
            sentence = rf"^{example.op}: .*memory of its own, apart from .*; clone one$"
            with pytest.raises(ValueError, match=sentence) as raised:
                example.run(**{argument: one, other: two})
            inner, outer = (
                n if n.startswith(("state", "weights")) else n.replace(".", "[") + "]" * ("." in n)
                for n in (argument, other)
            )
            assert f"{example.op}: {inner}: " in str(raised.value)
            assert f"apart from {outer}," in str(raised.value)
            torch.testing.assert_close(one, before, rtol=0, atol=0, equal_nan=True)


@WRITING
def test_what_is_written_may_lie_between_other_elements(name: str) -> None:
    for argument, other in written_with_another(name):
        example = case(name)
        one, two = beside(example.tensors[argument], example.tensors[other], 8, pitch=16)
        mine = example.run(**{argument: one, other: two})
        torch.testing.assert_close(mine, case(name).run(), rtol=1e-5, atol=1e-5, equal_nan=True)


LAID = st.tuples(
    st.sampled_from([torch.float16, torch.int32, torch.float64]),
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24])), max_size=3),
    st.integers(0, 40),
)


def addresses(x: Tensor) -> list[int]:
    """Of each byte of each element."""
    places = itertools.product(*map(range, x.shape))
    first = [x.data_ptr() + sum(map(operator.mul, place, x.stride())) * x.element_size() for place in places]
    return [address + byte for address in first for byte in range(x.element_size())]


@settings(max_examples=300)
@given(one=LAID, other=LAID)
def test_overlaps_are_found_as_by_counting(one: tuple, other: tuple) -> None:
    buffer = torch.zeros(1000, dtype=torch.float64)
    x, y = (
        buffer.view(dtype).as_strided([n for n, _ in dims], [step for _, step in dims], start)
        for dtype, dims, start in (one, other)
    )
    mine, theirs = addresses(x), addresses(y)

    def refused(check: Callable[..., None], *arguments: Any) -> bool:
        try:
            check("op", *arguments)
        except ValueError:
            return True
        return False

    assert refused(checks.apart, [("x", x)], [("y", y)]) == bool(set(mine) & set(theirs))
    assert refused(checks.writable, "x", x) == (len(set(mine)) < len(mine))


def test_caches_of_one_buffer_are_apart() -> None:
    """As engines lay them out: side by side in a slot, in a head, or one after the other."""
    buffer = torch.zeros(64, 2, 4, 16)
    for k, v in (
        buffer.unbind(1),
        buffer.split(8, -1),
        buffer.split(2, 2),
        buffer.split(32),
        (buffer[::2], buffer[1::2]),
    ):
        checks.apart("op", [("k", k), ("v", v)], [])
    with pytest.raises(ValueError, match=r"op: k: .* apart from v"):
        checks.apart("op", [("k", buffer[:33]), ("v", buffer[32:])], [])


def test_tensors_without_memory_pass() -> None:
    meta = torch.zeros(3, device="meta")
    with FakeTensorMode():
        fake = torch.zeros(3)
    for x in (meta, fake, torch.zeros(0)):
        checks.apart("op", [("x", x), ("y", x)], [("z", x)])
        checks.writable("op", "x", x)

"""What every public op promises, whatever it computes; first, any strides and nothing touched between elements."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from cases import NAMES, Case, case
from torch import Tensor

import fb_kernels
from fb_kernels import backend
from fb_kernels.testing import poison_

BACKENDS = ("reference", "auto", "triton")  # auto: what is compiled for CPU tensors
PAD = 5


def laid(x: Tensor, *, step: int = 1, pad: int = 0, reverse: bool = False) -> Tensor:
    """The values of x at a step in each dimension, `pad` places behind each row, in memory that is poison elsewhere."""
    order = list(range(x.ndim))[:: -1 if reverse else 1]
    sizes = [step * x.shape[dimension] + pad for dimension in order]
    flat = poison_(x.new_empty(torch.Size(sizes).numel() + 2 * PAD))
    view = flat[PAD : len(flat) - PAD].view(sizes)
    for place, dimension in enumerate(order):
        view = view.narrow(place, 0, step * x.shape[dimension])
    view = view[tuple(slice(None, None, step) for _ in order)].permute([order.index(d) for d in range(x.ndim)])
    with torch.no_grad():
        return view.copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "offset": laid,
    "steps of 2": lambda x: laid(x, step=2),
    "rows apart": lambda x: laid(x, pad=3),
    "transposed": lambda x: laid(x, reverse=True),
    "transposed, steps of 3": lambda x: laid(x, step=3, reverse=True),
    "expanded": lambda x: laid(x[:1]).expand_as(x) if x.ndim else x,
    "expanded columns": lambda x: laid(x[..., :1]).expand_as(x) if x.ndim else x,
}
ROUGH = "transposed, steps of 3"


@pytest.fixture
def kernels(which: str) -> Iterator[None]:
    if which == "triton" and os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("kernels run on a GPU here: see tests/gpu")
    with backend.override(which):
        yield


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


def outside(view: Tensor) -> Tensor:
    """The elements of the view's memory that are not its own."""
    flat = view.new_empty(0).set_(view.untyped_storage())
    own = torch.zeros(flat.shape, dtype=torch.bool)
    own.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    return flat[~own].clone()


def test_every_op_has_a_case() -> None:
    functions = {name for name in fb_kernels.__all__ if name not in ("DecodeState", "Halt")}
    assert {case(name).op for name in NAMES} == functions


def relaid(given: Case, which: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each tensor in each layout; where calls take long, as in the interpreter, all tensors in one."""
    if which == "triton":
        yield ROUGH, {name: LAYOUTS[ROUGH](x) for name, x in given.tensors.items()}
        return
    for name, x in given.tensors.items():
        for layout, lay in LAYOUTS.items():
            yield f"{name}, {layout}", {name: lay(x)}


def compact(views: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: view.contiguous().clone() for name, view in views.items()}


@pytest.mark.parametrize("which", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("kernels")
def test_any_strides(name: str, which: str) -> None:
    for what, views in relaid(case(name), which):
        given = case(name)
        before = [outside(view) for view in views.values()]
        if any(argument in given.written and 0 in view.stride() for argument, view in views.items()):
            with pytest.raises(ValueError, match=rf"^{given.op}: {what[:5]}.*; clone it$"):
                given.run(**views)
            continue
        expected = outcome(lambda views=views: case(name).run(**compact(views)))
        assert_same(outcome(lambda given=given, views=views: given.run(**views)), expected, what)
        after = [outside(view) for view in views.values()]
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True, msg=what)


def gradients(given: Case, changes: dict[str, Tensor], upstream: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The gradients to all arguments that have one, from values laid out by `upstream`."""
    leaves = {name: changes.get(name, given.tensors[name]).detach().requires_grad_() for name in given.gradients}
    results = given.run(**changes | leaves)
    outputs = [results[place] for place in given.outputs]
    grads = [upstream(torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)) for x in outputs]
    return list(torch.autograd.grad(outputs, list(leaves.values()), grads))


@pytest.mark.parametrize("which", BACKENDS)
@pytest.mark.parametrize("name", [name for name in NAMES if case(name).gradients])
@pytest.mark.usefixtures("kernels")
def test_any_strides_in_gradients(name: str, which: str) -> None:
    given = case(name)
    for what, views in relaid(given, which):
        if all(view.is_floating_point() for view in views.values()) or which == "triton":
            expected = gradients(given, compact(views), torch.clone)
            assert_same(gradients(given, views, torch.clone), expected, what)
    for layout in (ROUGH, "expanded") if which == "triton" else LAYOUTS:
        lay = LAYOUTS[layout]
        expected = gradients(given, {}, lambda x, lay=lay: lay(x).contiguous().clone())
        assert_same(gradients(given, {}, lay), expected, f"gradient of the result, {layout}")

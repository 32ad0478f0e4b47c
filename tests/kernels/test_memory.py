"""What every public op promises, whatever it computes; first, any strides and nothing touched between elements."""

from __future__ import annotations

import itertools
import operator
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import NAMES, Case, case
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, ROUGH, outside
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import fb_kernels
from fb_kernels import backend, checks

BACKENDS = ("reference", "auto", pytest.param("triton", marks=pytest.mark.slow))  # auto: what is compiled for the CPU


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


def test_every_op_has_a_case() -> None:
    functions = {name for name in fb_kernels.__all__ if name not in ("BranchLayout", "DecodeState", "Halt")}
    assert {case(name).op for name in NAMES} == functions


def relaid(example: Case, which: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each tensor in each layout; where calls take long, as in the interpreter, all tensors in one."""
    if which == "triton":
        yield ROUGH, {name: LAYOUTS[ROUGH](x) for name, x in example.tensors.items()}
        return
    for name, x in example.tensors.items():
        for layout, lay in LAYOUTS.items():
            yield f"{name}, {layout}", {name: lay(x)}


def compact(views: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: view.contiguous().clone() for name, view in views.items()}


@pytest.mark.parametrize("which", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("kernels")
def test_any_strides(name: str, which: str) -> None:
    for what, views in relaid(case(name), which):
        example = case(name)
        before = [outside(view) for view in views.values()]
        if any(argument in example.written and 0 in view.stride() for argument, view in views.items()):
            shown = re.split("[.,]", what)[0]
            with pytest.raises(ValueError, match=rf"^{example.op}: {shown}.*; clone it$"):
                example.run(**views)
            continue
        expected = outcome(lambda views=views: case(name).run(**compact(views)))
        assert_same(outcome(lambda example=example, views=views: example.run(**views)), expected, what)
        after = [outside(view) for view in views.values()]
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True, msg=what)


def gradients(example: Case, changes: dict[str, Tensor], upstream: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The gradients to all arguments that have one, from values laid out by `upstream`."""
    leaves = {name: changes.get(name, example.tensors[name]).detach().requires_grad_() for name in example.gradients}
    results = example.run(**changes | leaves)
    outputs = [results[place] for place in example.outputs]
    ramps = [torch.linspace(-1, 2 + place, x.numel(), dtype=x.dtype) for place, x in enumerate(outputs)]
    grads = [upstream(ramp.view(x.shape)) for ramp, x in zip(ramps, outputs, strict=True)]
    return list(torch.autograd.grad(outputs, list(leaves.values()), grads))


@pytest.mark.parametrize("which", BACKENDS)
@pytest.mark.parametrize("name", [name for name in NAMES if case(name).gradients])
@pytest.mark.usefixtures("kernels")
def test_any_strides_in_gradients(name: str, which: str) -> None:
    example = case(name)
    for what, views in relaid(example, which):
        if all(view.is_floating_point() for view in views.values()) or which == "triton":
            expected = gradients(example, compact(views), torch.clone)
            assert_same(gradients(example, views, torch.clone), expected, what)
    for layout in (ROUGH, "expanded") if which == "triton" else LAYOUTS:
        lay = LAYOUTS[layout]
        expected = gradients(example, {}, lambda x, lay=lay: lay(x).contiguous().clone())
        assert_same(gradients(example, {}, lay), expected, f"gradient of the result, {layout}")


WRITING = [
    (name, argument, other)
    for name in NAMES
    for place, argument in enumerate(case(name).written)
    for other in case(name).tensors
    if other not in case(name).written[: place + 1]
]


def beside(x: Tensor, y: Tensor, start: int, pitch: int | None = None) -> tuple[Tensor, Tensor]:
    """Both in one buffer, y from byte `start` on; with a pitch, so many bytes from element to element."""
    buffer = torch.zeros(2 * (x.numel() + y.numel() + 1) * 16, dtype=torch.uint8)
    views = []
    for value, first in ((x, 0), (y, start)):
        size = value.element_size()
        flat = buffer[first:][: (len(buffer) - first) // 8 * 8].view(value.dtype)[:: (pitch or size) // size]
        views.append(flat[: value.numel()].unflatten(0, value.shape) if value.ndim else flat[0])
    return views[0].copy_(x), views[1].copy_(y)


@pytest.mark.parametrize(("name", "argument", "other"), WRITING)
def test_what_is_written_overlaps_nothing(name: str, argument: str, other: str) -> None:
    example = case(name)
    x, y = example.tensors[argument], example.tensors[other]
    for start in (0, (x.nbytes - 1) // 8 * 8):  # the last element is enough
        one, two = beside(x, y, start)
        before = one.clone()
        with pytest.raises(
            ValueError, match=rf"^{example.op}: .*memory of its own, apart from .*; clone one$"
        ) as raised:
            example.run(**{argument: one, other: two})
        inner, outer = (
            n if n.startswith("state") else n.replace(".", "[") + "]" * ("." in n) for n in (argument, other)
        )
        assert f"{example.op}: {inner}: " in str(raised.value)
        assert f"apart from {outer}," in str(raised.value)
        torch.testing.assert_close(one, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "argument", "other"), WRITING)
def test_what_is_written_may_lie_between_other_elements(name: str, argument: str, other: str) -> None:
    example = case(name)
    one, two = beside(example.tensors[argument], example.tensors[other], 8, pitch=16)
    expected = case(name).run()
    mine = example.run(**{argument: one, other: two})
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


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
    """As engines lay them out: side by side in a slot, in a head, or one behind the other."""
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


PRODUCTS = {"branch_attention", "linear_logprob", "linear_logprob_partials", "skinny_linear"}
OWN_DTYPE = {"lse_a", "lse_b", "cos", "sin", "threshold", "entropy"}  # whatever the others have


@pytest.mark.parametrize("name", NAMES)
def test_autocast_casts_as_torch_does(name: str) -> None:
    """Products in the region's dtype, others in the widest, nothing where an argument is written."""
    op, arguments = case(name).op, case(name).tensors
    floats = [name for name, x in arguments.items() if x.is_floating_point() and name not in OWN_DTYPE]
    given = {name: arguments[name].to([torch.bfloat16, torch.float32][place % 2]) for place, name in enumerate(floats)}
    wide = max((x.dtype for x in given.values()), key=lambda dtype: dtype.itemsize, default=torch.float32)
    cast = {name: x.to(torch.bfloat16 if op in PRODUCTS else wide) for name, x in given.items()}
    if len(floats) > 1 and op != "candidate_head":  # whose weights may be float32
        refusal = pytest.raises(TypeError, match=rf"^{op}: .*expected dtype .*, got b?float.*; ")
        with refusal:
            case(name).run(**given)
        if op.endswith("_qkv") or case(name).written:
            with torch.autocast("cpu", dtype=torch.bfloat16), refusal:
                case(name).run(**given)
            return
    expected = case(name).run(**cast)
    double = {name: x.double() for name, x in arguments.items() if x.is_floating_point()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = case(name).run(**given)
        assert torch.float32 not in {x.dtype for x in case(name).run(**double)}
    torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in NAMES if case(name).gradients])
def test_gradients_of_autocast_reach_the_tensors_given(name: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(case(name), {}, torch.clone)
    for grad, expected in zip(found, gradients(case(name), {}, torch.clone), strict=True):
        assert grad.dtype == torch.float32
        assert (grad - expected).norm() <= 0.05 * expected.norm()


def test_autocast_compiles() -> None:
    given = case("linear_logprob").arguments

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fb_kernels.linear_logprob(hidden, weight, given["target"])

    tensors = given["hidden"].bfloat16(), given["weight"]
    assert torch.equal(torch.compile(loss, fullgraph=True, backend="aot_eager")(*tensors), loss(*tensors))


DIFFERENTIABLE = [name for name in NAMES if case(name).gradients]


def loss_of(example: Case) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A scalar of the results that carry gradients, and the tensors that it is a function of."""
    weights = [torch.linspace(1, 2 + place, x.numel()).view(x.shape) for place, x in enumerate(example.run())]

    def loss(*values: Tensor) -> Tensor:
        results = example.run(**dict(zip(example.gradients, values, strict=True)))
        return torch.stack([(results[place] * weights[place]).sum() for place in example.outputs]).sum()

    return loss, [example.tensors[name] for name in example.gradients]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_by_transforms(name: str) -> None:
    """torch.func.grad, and vmap of it for the gradients of each sample, are what autograd says."""
    loss, values = loss_of(case(name))
    leaves = [x.clone().requires_grad_() for x in values]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    grad = torch.func.grad(loss, argnums=tuple(range(len(values))))
    torch.testing.assert_close(grad(*values), expected)
    samples = torch.func.vmap(grad)(*(torch.stack((2 * x, x)) for x in values))
    torch.testing.assert_close(tuple(x[1] for x in samples), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", NAMES)
def test_vmap_is_a_loop(name: str) -> None:
    example, expected = case(name), case(name).run()
    changing = next(n for n in example.tensors if n not in example.written)
    x = example.tensors[changing]

    def run(value: Tensor) -> tuple[Tensor, ...]:
        return tuple(example.run(**{changing: value}))

    if example.written or example.op == "branch_attention_qkv":
        with pytest.raises(NotImplementedError, match=rf"^{example.op}.*: expected .*, got .*; loop over the calls$"):
            torch.func.vmap(run)(torch.stack((x, x)))
    else:
        torch.testing.assert_close([y[1] for y in torch.func.vmap(run)(torch.stack((x, x)))], expected)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_no_tangent_is_lost(name: str) -> None:
    loss, values = loss_of(case(name))
    refusal = pytest.raises(NotImplementedError, match=rf"^{case(name).op}: expected .* reverse, got forward mode; use")
    with refusal:
        torch.func.jvp(loss, tuple(values), tuple(values))
    with refusal, forward_ad.dual_level():
        loss(*(forward_ad.make_dual(x, x) for x in values))
    if not hasattr(torch.ops.fb, f"{case(name).op}_backward"):
        return  # its gradient is made of torch's operations, which have their own
    with pytest.raises(NotImplementedError, match=rf"^{case(name).op}: only first derivatives exist; "):
        torch.func.jacrev(torch.func.grad(loss))(*values)


def test_no_tangent_is_lost_where_there_is_no_gradient() -> None:
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"^skinny_linear: x: expected a tensor without a tangent, got a dual one; "):
        torch.func.jvp(lambda x: fb_kernels.skinny_linear(x, weight), (x,), (x,))

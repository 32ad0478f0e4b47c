"""Every public op under autocast and under the transforms of torch.func: what they say, or one sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import NAMES, Case, case
from cases.base import gradients
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fb_kernels

PRODUCTS = {"branch_attention", "linear_logprob", "linear_logprob_partials", "skinny_linear"}
MAY_WRITE = ("branch_attention_qkv", "decoder_layer")  # whether or not a call of theirs does
OWN_DTYPE = {"lse_a", "lse_b", "cos", "sin", "threshold", "entropy"}  # whatever the others have


@pytest.mark.parametrize("name", NAMES)
def test_autocast_casts_as_torch_does(name: str) -> None:
    """Products in the region's dtype, others in the widest, nothing where an argument is written."""
    op, arguments = case(name).op, case(name).tensors
    floats = [name for name, x in arguments.items() if x.is_floating_point() and name not in OWN_DTYPE]
    given = {name: arguments[name].to([torch.bfloat16, torch.float32][place % 2]) for place, name in enumerate(floats)}
    wide = max((x.dtype for x in given.values()), key=lambda dtype: dtype.itemsize, default=torch.float32)
    cast = {name: x.to(torch.bfloat16 if op in PRODUCTS else wide) for name, x in given.items()}
    if len(floats) > 1 and op not in ("candidate_head", "rms_norm"):  # whose weights may be float32
        refusal = pytest.raises(TypeError, match=rf"^{op}: .*expected dtype .*, got b?float.*; ")
        with refusal:
            case(name).run(**given)
        if op in MAY_WRITE or case(name).written:
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
        found = gradients(case(name))
    for grad, expected in zip(found, gradients(case(name)), strict=True):
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


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_checkpointing_changes_no_bit(name: str) -> None:
    """torch.utils.checkpoint hands out what a backward pass saved once only."""
    loss, values = loss_of(case(name))
    leaves = [x.clone().requires_grad_() for x in values]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    again = torch.autograd.grad(checkpoint(loss, *leaves, use_reentrant=False), leaves)
    assert all(torch.equal(*pair) for pair in zip(again, expected, strict=True))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.sweep(5)
def test_gradients_by_transforms(name: str) -> None:
    """torch.func.grad, and vmap of it for the gradients of each sample, are what autograd says, compiled too."""
    loss, values = loss_of(case(name))
    leaves = [x.clone().requires_grad_() for x in values]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    grad = torch.func.grad(loss, argnums=tuple(range(len(values))))
    torch.testing.assert_close(grad(*values), expected)
    stacked = [torch.stack((2 * x, x)) for x in values]
    samples = torch.func.vmap(grad)(*stacked)
    torch.testing.assert_close(tuple(x[1] for x in samples), expected)
    torch._dynamo.reset()  # or the same function of many ops reaches a limit
    compiled = torch.compile(torch.func.vmap(grad), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*stacked), samples)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", NAMES)
def test_vmap_is_a_loop(name: str) -> None:
    example, expected = case(name), case(name).run()
    changing = next(n for n in example.tensors if n not in example.written)
    x = example.tensors[changing]

    def run(value: Tensor) -> tuple[Tensor, ...]:
        return tuple(example.run(**{changing: value}))

    if example.written or example.op in MAY_WRITE:
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
    with pytest.raises(ValueError, match=r"^skinny_linear: x: expected a tensor that needs no gradient, got one"):
        torch.func.jvp(lambda x: fb_kernels.skinny_linear(x, weight), (x,), (x,))

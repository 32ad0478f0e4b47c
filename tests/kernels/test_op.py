"""The two ways of a call, past torch's dispatcher and through it: which is taken when, and that they are one."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import NAMES, Case, case
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import fb_kernels
from fb_kernels import rms_norm, topk_entropy
from fb_kernels._runtime import checks
from fb_kernels._runtime import op as _op
from fb_kernels._runtime.op import Op, signature

SHORT = {  # ops that have the short way
    *("branch_attention", "branch_attention_qkv", "candidate_head", "linear_logprob", "merge_attention_states"),
    *("qk_norm_rope", "rms_norm", "skinny_linear", "swiglu", "topk_entropy"),
}


def has_short_way(example: Case) -> bool:
    return example.op in SHORT and not any(name.startswith("kv_out") for name in example.written)


PLAIN = [name for name in NAMES if has_short_way(case(name))]


@contextmanager
def dispatcher_closed() -> Iterator[None]:
    """Calls through the dispatcher fail."""

    def refuse(self: Op, *_: Any) -> None:
        raise AssertionError(f"{self.name} went through the dispatcher")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "__call__", refuse)
        yield


def test_every_op_with_a_short_way_is_here() -> None:
    assert {case(name).op for name in PLAIN} == SHORT


MODULES = {sys.modules[getattr(fb_kernels, name).__module__] for name in fb_kernels.__all__}
OPERATORS = sorted({x for each in MODULES for x in vars(each).values() if isinstance(x, Op)}, key=lambda x: x.name)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda x: x.name)
def test_every_kernel_is_attached(operator: Op) -> None:
    """What a folder has for an operator in triton.py, cuda.py or cpu.py runs; the reference would do so in silence."""
    folder = Path(fb_kernels.__file__).parent / operator.stem
    for kind in ("triton", "cuda", "cpu"):
        source = folder / f"{kind}.py"
        found = source.is_file() and re.search(rf"(^def | as ){operator.name}\b", source.read_text(), re.MULTILINE)
        assert bool(found) == (kind in operator.kinds), kind


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_call_goes_past_the_dispatcher_and_is_the_same(name: str) -> None:
    with dispatcher_closed():
        short = case(name).run()
        with torch.inference_mode():
            case(name).run()
    module = sys.modules[case(name).function.__module__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "signature", lambda *_: None)
        long = case(name).run()
    torch.testing.assert_close(short, long, rtol=0, atol=0, equal_nan=True)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


X = torch.linspace(-1, 2, 24).view(3, 8)
CONJUGATED = torch.complex(X, 2 * X).conj().imag
assert CONJUGATED.is_neg()


@pytest.mark.parametrize(
    ("x", "inside"),
    [
        (X.clone().requires_grad_(), nullcontext),
        (torch.nn.Parameter(X), nullcontext),
        (X.as_subclass(Subclass), nullcontext),
        (X.to_sparse(), nullcontext),
        (torch.nested.nested_tensor([X, X[:2]]), nullcontext),
        (CONJUGATED, nullcontext),
        ([1.0], nullcontext),
        (X, Mode),
        (X, lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
        (X, forward_ad.dual_level),
        (X, torch.profiler.profile),
    ],
    ids=[
        *("gradient", "parameter", "subclass", "sparse", "nested", "negated", "list"),
        *("mode", "autocast", "dual", "profile"),
    ],
)
def test_what_goes_through_it(x: Any, inside: Callable[[], AbstractContextManager]) -> None:
    with inside():
        assert signature((X, x)) is None


def test_transforms_tracing_and_compilation_go_through_it() -> None:
    seen = []

    def watch(x: Tensor) -> Tensor:
        seen.append(signature((x,)))
        return x.sum()

    torch.func.grad(watch)(X)
    torch.func.vmap(watch)(X)
    torch.jit.trace(watch, X, check_trace=False)
    assert not any(seen)
    compiled = torch.compile(lambda x: x + (signature((x,)) is not None), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(2)).tolist() == [0, 0]


def test_what_has_passed_the_checks_passes_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are checked: another shape or type, a bool in the place of a number, what no set can hold."""
    weight, checked = torch.ones(8), []
    monkeypatch.setattr(_op, "MOST", 3)
    monkeypatch.setattr(checks, "floating", lambda *given, **_: checked.append(given[1]))
    for rows in (2, 2, 3, 3):
        rms_norm(torch.ones(rows, 8), weight, 1e-6)
    assert checked == ["x", "weight"] * 2
    for rows in range(20):
        rms_norm(torch.ones(rows, 8), weight, 1e-6)
    (known,) = (x for x in OPERATORS if x.name == "rms_norm")
    assert len(known.checked) <= 3
    topk_entropy(X, 1)
    for k in (True, [1], 1.0):
        with pytest.raises(TypeError, match="topk_entropy: k: expected an int"):
            topk_entropy(X, k)
    torch.testing.assert_close(rms_norm(X, weight, 1)[0], rms_norm(X, weight, 1.0)[0], rtol=0, atol=0)


def test_what_needs_no_gradient_goes_past_it() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    assert signature((X, X[:, ::2], X.T, X.bfloat16(), torch.empty(0, 8), None, weight.detach()))
    with dispatcher_closed(), torch.no_grad():
        rms_norm(X, weight, 1e-6)
    assert rms_norm(X, weight, 1e-6)[0].requires_grad


def test_a_negated_view_is_taken_as_it_reads() -> None:
    weight = torch.ones(8)
    assert torch.equal(rms_norm(CONJUGATED, weight, 1e-6)[0], rms_norm(CONJUGATED.clone(), weight, 1e-6)[0])


def test_a_profile_names_ops() -> None:
    with torch.profiler.profile() as profile:
        rms_norm(X, torch.ones(8), 1e-6)
    assert "fb::rms_norm" in {event.key for event in profile.key_averages()}

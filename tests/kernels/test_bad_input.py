"""Every argument of every public op with what it is not: one sentence naming op and argument, and nothing else."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import NAMES, case
from torch import Tensor

from fb_kernels import BranchLayout
from fb_kernels._runtime import backend, checks

ONE_EACH = {case(name).op: name for name in reversed(NAMES)}  # op: its first case
ANY_SHAPE = {("swiglu", "gate_up"), ("topk_entropy", "logits"), ("candidate_head", "head_bias")}
MORE_ROWS = {("skinny_linear", "x"), ("candidate_head", "hidden")}
ANY_SIGN = {"logit_scale", "scale", "ignore_index", "threshold"}


def bad_tensors(op: str, name: str, x: Tensor) -> Iterator[tuple[str, Any]]:
    """(what is wrong, value) in the place of a tensor."""
    yield from (("kind", value) for value in ("text", 1.5, [1.0], x.tolist(), object()))
    yield "kind", x.to_sparse()
    if x.ndim:
        yield "kind", torch.nested.nested_tensor([x, x])
        yield "kind", torch.nested.nested_tensor([x, x], layout=torch.jagged)
    yield from (("kind", each) for each in without_memory(x))
    wrong = [torch.int64, torch.float8_e4m3fn] if x.is_floating_point() else [torch.float32, torch.int16]
    yield from (("dtype", x.to(dtype)) for dtype in (*wrong, torch.bool, torch.uint8, torch.complex64))
    if len(case(ONE_EACH[op]).tensors) > 1:
        yield "device", x.to("meta")
    if (op, name) not in ANY_SHAPE:
        yield "shape", x[None, None, None]
        if x.ndim and name not in ("threshold", "max_length"):  # which may be one for all rows
            yield "shape", x.flatten()[0]
        if x.ndim and (op, name) not in MORE_ROWS and name != "eos_ids":
            yield "shape", torch.cat((x, x, x[:1]))


def without_memory(x: Tensor) -> Iterator[Tensor]:
    """Tensors like it whose elements lie nowhere."""
    freed, escaped = x.clone(), []
    freed.untyped_storage().resize_(0)
    torch.func.vmap(lambda one: (escaped.append(one), one)[1])(x[None])
    torch.func.vjp(lambda one: (escaped.append(one), one)[1], x.float())
    yield from (torch._efficientzerotensor(x.shape, dtype=x.dtype), freed, *(one.to(x.dtype) for one in escaped[:1]))
    if x.is_floating_point():
        yield escaped[1]


def bad_options(name: str, kinds: str) -> Iterator[tuple[str, Any]]:
    """Likewise in the place of a number; what is left out of a signature's kinds is wrong."""
    yield from (("kind", wrong) for wrong in ("text", [1], {}, 1j, object(), True))
    if "None" not in kinds:
        yield "kind", None
    if "int" in kinds:
        yield from (("kind", 1.5), *(("value", wrong) for wrong in (2**63, -(2**70), 10**5000)))
    else:
        yield from (("value", wrong) for wrong in (math.nan, math.inf, -math.inf, 10**400))
    if name not in ANY_SIGN:
        yield "value", -1


def bad_values(op: str) -> Iterator[tuple[str, str, Any]]:
    """(argument, what is wrong, value)."""
    example = case(ONE_EACH[op])
    for name, x in example.tensors.items():
        yield from ((name, what, value) for what, value in bad_tensors(op, name, x))
    for name, parameter in inspect.signature(example.function).parameters.items():
        if "Tensor" in parameter.annotation:
            if "None" not in parameter.annotation:
                yield name, "kind", None
        elif parameter.annotation.startswith(("int", "float")):
            yield from ((name, what, value) for what, value in bad_options(name, parameter.annotation))


OTHERS = [
    ("branch_attention", {"layout": None}, "layout"),
    ("branch_attention", {"layout": {}}, "layout"),
    ("commit_", {"state": tuple(case("commit_").arguments["state"])}, "state"),
    ("commit_", {"state": None}, "state"),
    ("commit_", {"threshold": torch.full((4,), math.nan)}, "threshold"),
    ("commit_", {"state.length": torch.tensor([0, 1, -1, 2], dtype=torch.int32)}, "state.length"),
    ("compatibility_targets", {"horizons": 5}, "horizons"),
    ("compatibility_targets", {"horizons": [2.0]}, "horizons"),
    ("compatibility_targets", {"horizons": [True]}, "horizons"),
    ("compatibility_targets", {"horizons": []}, "horizons"),
    ("compatibility_targets", {"horizons": [0]}, "horizons"),
    ("compatibility_targets", {"horizons": [6]}, "horizons"),
    ("compatibility_targets", {"horizons": [10**5000]}, "horizons"),
    ("compatibility_targets", {"local": None}, "local"),
    ("compatibility_targets", {"alpha": 1.5}, "alpha"),
    ("group_cross_entropy", {"reduction": "max"}, "reduction"),
    ("group_cross_entropy", {"reduction": None}, "reduction"),
    ("qk_norm_rope", {"kv_out": 3}, "kv_out"),
    ("qk_norm_rope", {"kv_out": (torch.zeros(9, 2, 8),) * 2}, "kv_out"),
    ("topk_entropy", {"k": 0}, "k"),
    ("topk_entropy", {"k": 41}, "k"),
    *(
        (op, {name: case(ONE_EACH[op]).tensors[name] + shift}, name)
        for op, name, shift in (
            ("branch_attention", "layout.cu_branch", 1),
            ("branch_attention", "layout.cu_group", -1),
            ("branch_attention", "layout.prefix_start", -99),
            ("branch_attention", "layout.prefix_len", -9),
            ("branch_attention", "layout.prefix_len", 2**30),
            ("branch_attention_qkv", "held", 99),
            ("branch_attention_qkv", "held", -9),
            ("branch_attention_qkv", "positions", 99),
            ("branch_attention_qkv", "positions", -99),
            ("candidate_head", "cu_group", 9),
            ("compatibility_targets", "cu_group", -9),
            ("group_cross_entropy", "cu_group", 1),
            ("linear_logprob", "target", 99),
            ("linear_logprob_partials", "target", -9),
            ("qk_norm_rope", "positions", 99),
        )
    ),
    ("branch_attention_qkv", {"slots": torch.tensor([99])}, "slots"),
    ("branch_attention_qkv", {"slots": torch.tensor([2])}, "slots"),
]


def refused(op: str, argument: str | None, changes: dict[str, Any]) -> None:
    example = case(ONE_EACH[op])
    function: Callable[..., object] = example.function
    if any(name.startswith("layout.") for name in changes):  # is made before the call, and says what is wrong with it
        op, function = "BranchLayout", BranchLayout
        argument = argument and argument.removeprefix("layout.")
    names = "|".join(map(re.escape, inspect.signature(function).parameters))
    named = names if argument is None else re.escape(argument)
    with pytest.raises((TypeError, ValueError)) as raised:
        example.run(**changes)
    sentence = rf"^{op}: ({named})[^:]*: expected [^\n]+, got [^\n]+; [^\n]+$"
    assert re.match(sentence, str(raised.value)), (changes, str(raised.value))
    assert len(str(raised.value)) < 400
    assert type(raised.value) in (TypeError, ValueError)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("op", ONE_EACH)
def test_what_an_argument_is_not(op: str) -> None:
    """A wrong shape or device may be said of the argument beside."""
    for argument, what, value in bad_values(op):
        refused(op, None if what in ("shape", "device") else argument, {argument: value})


@pytest.mark.parametrize("which", ["auto", "reference"])
@pytest.mark.parametrize(("op", "changes", "argument"), OTHERS)
def test_values_that_no_kind_rules_out(op: str, changes: dict[str, Any], argument: str, which: str) -> None:
    with backend.override(which):
        refused(op, argument, changes)


@pytest.mark.parametrize(
    ("entries", "shown"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], r"\[1, 2, 3, 4, 5, 6, 7, 8\]"),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], r"\[1, 2, 3, 4\] \.\.\. \[8, 9\]"),
    ],
)
def test_long_offsets_are_cut_short(entries: list[int], shown: str) -> None:
    with pytest.raises(ValueError, match=f"got {shown}; rebuild them"):
        checks.offset_values("op", "offsets", entries, entries[-1])


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [({}, "an int"), ({"least": 1}, "an int of 1 or more"), ({"least": 1, "most": 9}, "an int from 1 to 9")],
)
def test_an_int_that_is_none_says_what_is_one(bounds: dict[str, int], expected: str) -> None:
    with pytest.raises(TypeError, match=f"expected {expected}, got float; convert it"):
        checks.integer("op", "count", 1.5, "remedy", **bounds)

"""Every argument of every public op with what it is not: one sentence naming op and argument, and nothing else.

Values that are wrong for one op alone are in cases/.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import NAMES, case
from torch import Tensor

from fb_kernels import BranchLayout
from fb_kernels._runtime import checks

ERRORS = {"kind": (TypeError,), "dtype": (TypeError,), "mixed": (TypeError,)}
ERRORS |= {"device": (ValueError,), "shape": (ValueError,), "value": (ValueError,), "memory": (TypeError, ValueError)}
ONE_EACH = {case(name).op: name for name in reversed(NAMES)}  # op: its first case
ANY_SHAPE = {("swiglu", "gate_up"), ("topk_entropy", "logits"), ("candidate_head", "head_bias")}
MORE_ROWS = {("skinny_linear", "x"), ("candidate_head", "hidden")}
ANY_FLOAT = {("", "threshold"), ("", "entropy"), ("rms_norm", "weight")}  # beside any other; of every op, or of one
ANY_SIGN = {"logit_scale", "offset", "scale", "ignore_index", "threshold"}


def bad_tensors(op: str, name: str, x: Tensor) -> Iterator[tuple[str, Any]]:
    """(what is wrong, value) in the place of a tensor."""
    yield from (("kind", value) for value in ("text", 1.5, [1.0], x.tolist(), object()))
    yield "memory", x.to_sparse()
    if x.ndim:
        yield "memory", torch.nested.nested_tensor([x, x])
        yield "memory", torch.nested.nested_tensor([x, x], layout=torch.jagged)
    yield from (("memory", each) for each in without_memory(x))
    wrong = [torch.int64, torch.float8_e4m3fn] if x.is_floating_point() else [torch.float32, torch.int16]
    yield from (("dtype", x.to(dtype)) for dtype in (*wrong, torch.bool, torch.uint8, torch.complex64))
    others = [other for name, other in case(ONE_EACH[op]).tensors.items() if ("", name) not in ANY_FLOAT]
    if len(others) > 1:
        yield "device", x.to("meta")
    if (
        sum(other.is_floating_point() for other in others) > 1
        and x.is_floating_point()
        and not {(op, name), ("", name)} & ANY_FLOAT
    ):
        yield "mixed", x.half()
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("op", ONE_EACH)
def test_what_an_argument_is_not(op: str) -> None:
    """A wrong shape or device, or another float, may be said of the argument beside."""
    example = case(ONE_EACH[op])
    for argument, what, value in bad_values(op):
        name, function, named = op, example.function, argument
        if argument.startswith("layout."):  # is made before the call, and says what is wrong with it
            name, function, named = "BranchLayout", BranchLayout, argument.removeprefix("layout.")
        anyone = "|".join(map(re.escape, inspect.signature(function).parameters))
        named = anyone if what in ("shape", "device", "mixed") else re.escape(named)
        with pytest.raises((TypeError, ValueError)) as raised:
            example.run(**{argument: value})
        sentence = rf"^{name}: ({named})[^:]*: expected [^\n]+, got [^\n]+; [^\n]+$"
        assert re.match(sentence, str(raised.value)), (argument, what, str(raised.value))
        assert len(str(raised.value)) < 400
        assert raised.type in ERRORS[what], (argument, what, str(raised.value))


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

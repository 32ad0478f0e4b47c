"""`branch_attention` by Hopper's own kernel, in a process of its own: a mistake of its barriers would wait for ever."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import pytest
import test_branch_attention_gpu as attention
import torch
from gpu_checks import DEVICE, PROMISES, Case, matches_the_reference, randn
from test_branch_attention_gpu import LAYOUTS, Layout, make

from fb_kernels._runtime import tuning
from fb_kernels.triton import HAS_GLUON

pytestmark = pytest.mark.gpu
HALF = (torch.bfloat16, torch.float16)
FLAT = ("small", "small-packed", "small-trained", "scoring", "trajectory", "trajectory-trained", "head-64")
TAILS = Layout([[127, 1, 0, 65], [300], [2] * 9, [129]], [(5, 127), (3, 0), (0, 1), (77, 1000)])


@pytest.fixture(autouse=True)
def gluon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call of such branches takes it; one that does not fails the test."""
    if torch.cuda.get_device_capability() != (9, 0) or not HAS_GLUON:
        pytest.skip("for a Hopper and a Triton whose Gluon is known")
    from fb_kernels.branch_attention import gluon

    monkeypatch.setattr(tuning, "branch_attention_form", lambda *_: "gluon")
    with mock.patch.object(gluon, "attend", wraps=gluon.attend) as attend:
        yield
    assert attend.called


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", FLAT)
def test_matches_the_reference(layout: str, dtype: torch.dtype) -> None:
    matches_the_reference(make(LAYOUTS[layout], dtype))


@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (8, 2), (16, 2)])
@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_tails_and_heads(width: int, heads: tuple[int, int]) -> None:
    matches_the_reference(make(replace(TAILS, heads=heads, width=width), torch.bfloat16))


@pytest.mark.parametrize("layout", ["small", "scoring", "trajectory"])
def test_writes_every_element(layout: str) -> None:
    attention.writes_every_element(LAYOUTS[layout], torch.bfloat16)


@pytest.mark.parametrize("promise", PROMISES)
def test_promises(promise: Callable[[Case], None]) -> None:
    promise(make(LAYOUTS["scoring"], torch.bfloat16))


def test_a_group_alone_has_the_same_bits() -> None:
    attention.test_a_group_alone_has_the_same_bits("scoring")


def test_a_row_knows_neither_the_others_nor_the_multiprocessors() -> None:
    case = make(TAILS, torch.bfloat16)
    whole = case.call()
    for processors in (1, 7, 1000):
        with mock.patch.object(tuning, "processors", return_value=processors):
            assert all(torch.equal(x, y) for x, y in zip(whole, case.call(), strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_strange_value_reaches_those_who_see_it_alone(value: float) -> None:
    case = make(Layout([[200, 40]], [(0, 300)]), torch.bfloat16)
    clean, (q, k, v, *prefix) = case.call(), case.floats
    for place in (0, 70, 130, 199, 200, 239):
        strange = v.clone()
        strange[place, :, 5] = value
        out, lse = case.op(q, k, strange, *prefix)
        seeing = torch.arange(240, device=DEVICE)
        seeing = (seeing >= place) & (seeing < (200 if place < 200 else 240))
        assert not out[seeing][..., 5].isfinite().any()
        out[seeing, :, 5] = clean[0][seeing, :, 5]
        assert torch.equal(out, clean[0])
        assert torch.equal(lse, clean[1])


def test_bad_layouts_give_nan_and_no_stray_access() -> None:
    good = {"cu_branch": [0, 70, 150, 200], "cu_group": [0, 2, 3], "prefix_start": [0, 7], "prefix_len": [290, 100]}
    bad = {"prefix_len": [290, 1 << 30], "prefix_start": [-7, 0]}
    bad |= {"cu_branch": [0, 70, 1 << 20, 200], "cu_group": [0, 9, 3]}
    attention.bad_layouts_give_nan(200, randn(300, 2, 64, dtype=torch.bfloat16, seed=9), good, bad)


def test_prefix_of_more_than_2_31_elements() -> None:
    attention.reads_a_far_prefix(2)

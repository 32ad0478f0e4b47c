"""`fb_kernels.bench`: every op at any shape, checked before it is timed."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

import fb_kernels
from fb_kernels import bench, calls
from fb_kernels._runtime import timing

SMALL = {"n": 4, "d": 64, "v": 300, "f": 96, "g": 2, "k": 6, "l": 3, "p": 20, "hq": 4, "hkv": 2, "e": 64}
SMALL |= {"h": 16, "s": 2, "m": 80}
OPS = bench.dimensions()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ceilings", lambda *_: (1e9, 1e9))
    monkeypatch.setattr(timing, "LEAST", 1e-4)
    monkeypatch.setattr(timing, "MOST", 1e-3)


def test_every_public_op_can_be_timed() -> None:
    public = {name for name in fb_kernels.__all__ if inspect.isfunction(getattr(fb_kernels, name))}
    assert OPS.keys() == public


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
def test_all_ways_are_right_at_a_shape_of_ones_own(op: str, dtype: str) -> None:
    found = bench.bench(op, {name: SMALL[name] for name in OPS[op]}, dtype, "cpu")
    assert all(f"{name.capitalize()}={SMALL[name]}" in found.shape for name in OPS[op])
    assert [row.name for row in found.rows if row.used and row.seconds]
    assert not [row for row in found.rows if row.fault and not row.fault.startswith("it takes ")]
    assert found.rows[-1].seconds is not None
    if OPS[op] and found.bytes:
        assert found.floor > 0
        assert found.rate(found.rows[-1])


def with_plain(monkeypatch: pytest.MonkeyPatch, op: str, ways: dict[str, object]) -> None:
    """Give calls of an op other ways in plain torch."""
    folder, function = calls.by_name()[op]
    changed = replace(function, shaped=lambda **sizes: replace(function.shaped(**sizes), plain=ways))
    monkeypatch.setattr(calls, "by_name", lambda: {op: (folder, changed)})
    monkeypatch.setattr(bench, "dimensions", lambda: OPS)


@pytest.mark.parametrize("wrong", [lambda x: x[..., :96] * 1.01, lambda x: x[..., :96].fill_(torch.nan)])
def test_what_is_wrong_is_not_timed(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with_plain(monkeypatch, "swiglu", {"wrong": lambda gate_up: wrong(gate_up)})
    found = bench.bench("swiglu", {"n": 4, "f": 96}, device="cpu")
    *ours, row = found.rows
    assert row.fault.startswith("wrong: ")
    assert row.seconds is None
    assert found.ratio(row) is None
    assert all(row.seconds for row in ours)


def test_a_wrong_row_that_is_looked_at_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many rows some are checked, the first and the last among them."""
    right = calls.by_name()["linear_logprob"][1].shaped(4, 4, 4).plain["logits, log_softmax"]

    def last_is_wrong(**given: object) -> torch.Tensor:
        out = right(**given)
        assert isinstance(out, torch.Tensor)
        out[-1] += 1
        return out

    with_plain(monkeypatch, "linear_logprob", {"right": right, "wrong": last_is_wrong})
    found = bench.bench("linear_logprob", {"n": 100, "d": 32, "v": 200}, device="cpu")
    assert {row.name: bool(row.fault) for row in found.rows if not row.ours} == {"right": False, "wrong": True}


def test_a_ratio_is_to_the_quickest_other() -> None:
    rows = tuple(bench.Timed(name, seconds=seconds) for name, seconds in (("a", 2.0), ("b", 1.0), ("c", 4.0)))
    found = bench.Results("swiglu", "", "cpu", "float32", 0.0, 8e9, 0.5, 0.0, rows)
    assert [found.ratio(row) for row in rows] == [0.5, 2.0, 0.25]
    assert (found.rate(rows[1]), found.unit) == (8.0, "GB/s")
    assert found.floor == 0.5


@pytest.mark.parametrize(
    ("op", "sizes", "dtype", "device", "words"),
    [
        ("softmax", {}, None, None, "bench: expected an op of branch_attention, .*, got 'softmax'; name one"),
        ("swiglu", {"v": 3}, None, None, "bench: expected --n, --f for swiglu, got --v; leave it out"),
        ("swiglu", {"n": 0}, None, None, "bench: expected --n of at least 1, got 0; give another size"),
        ("swiglu", {}, "float8", None, "bench: expected float32, bfloat16, float16, got 'float8'"),
        ("swiglu", {}, None, "tpu", "bench: expected cpu, or cuda where there is a GPU, got 'tpu'"),
    ],
)
def test_bad_input_is_one_sentence(op: str, sizes: dict, dtype: str | None, device: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bench.bench(op, sizes, dtype, device)

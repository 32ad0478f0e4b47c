"""The compiled kernels for CPU tensors, for every width of vectors, against float64 and against plain PyTorch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_linear_logprob as logprobs
import test_qk_norm_rope as rotation
import torch
from cases.base import single
from cases.branch_attention import one_row
from cases.branch_attention_qkv import make as make_attention
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_contract import evaluate
from torch import Tensor
from ways import BITS, running

from fb_kernels import backend, cpu, segments
from fb_kernels import layout as layouts
from fb_kernels.branch_attention_qkv import reference as attention_reference
from fb_kernels.candidate_head import candidate_head
from fb_kernels.linear_logprob import cpu as logprob_kernels
from fb_kernels.linear_logprob import linear_logprob
from fb_kernels.linear_logprob import reference as logprob_reference
from fb_kernels.merge_attention_states import merge_attention_states
from fb_kernels.merge_attention_states import reference as state_reference
from fb_kernels.qk_norm_rope import cpu as rotation_kernels
from fb_kernels.qk_norm_rope import qk_norm_rope
from fb_kernels.qk_norm_rope import reference as rotation_reference
from fb_kernels.rms_norm import rms_norm
from fb_kernels.skinny_linear import reference as linear_reference
from fb_kernels.skinny_linear import skinny_linear
from fb_kernels.swiglu import swiglu
from fb_kernels.testing import assert_close_to_reference, magnitude, poisoned_memory

NAN, INF = float("nan"), float("inf")


WIDTHS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 100, 129)


given_here = settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(autouse=True, params=[f"cpu {bits}" for bits in BITS])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every op runs its compiled CPU kernel, and refuses arguments that it was not made for."""
    with running(request.param):
        yield


def changed(arguments: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The arguments, with another in place of each tensor of floating point."""
    return {
        name: change(value) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def wide(arguments: dict[str, Any]) -> dict[str, Any]:
    return changed(arguments, Tensor.double)


def apart(x: Tensor, offset: int) -> Tensor:
    """The same values in rows that lie apart, from an odd address on, with NaN around."""
    whole = torch.full((*x.shape[:-1], x.shape[-1] + offset + 3), NAN)
    whole[..., offset : offset + x.shape[-1]] = x
    return whole[..., offset : offset + x.shape[-1]]


def beside_poison(x: Tensor, offset: int = 3) -> Tensor:
    """The same values, contiguous from an odd address on, with NaN around."""
    whole = torch.full((x.numel() + 2 * offset + 1,), NAN)
    return whole[offset : offset + x.numel()].view(x.shape).copy_(x)


def results(call: Callable[..., Any], *arguments: Any) -> tuple[Tensor, ...]:
    """What is returned, where all is written, contiguous, the same when repeated, and no argument is changed."""
    before = [x.clone() for x in arguments if isinstance(x, Tensor)]
    with poisoned_memory():
        out, again = call(*arguments), call(*arguments)
    out, again = ((x,) if isinstance(x, Tensor) else x for x in (out, again))
    torch.testing.assert_close(out, again, rtol=0, atol=0, equal_nan=True)
    after = [x for x in arguments if isinstance(x, Tensor)]
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    assert all(x.is_contiguous() for x in out)
    return out


def hostile(x: Tensor, share: float, seed: int, values: tuple[float, ...] = (NAN, INF, -INF, 0.0)) -> Tensor:
    """x with other values in some places."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, len(values), x.shape, generator=generator)
    return torch.where(torch.rand(x.shape, generator=generator) < share, torch.tensor(values)[picks], x)


given_share = st.sampled_from([0.0, 0.0, 0.02, 0.2])


def check_logprobs(out: tuple[Tensor, ...], values: logprobs.Inputs, valid: int | None, **options: Any) -> None:
    """At the size of the logits' terms, of which nothing cancels."""
    options |= {"ignore_index": logprobs.IGNORE, "valid_vocab": valid}
    given = (values.hidden, values.weight, values.target, values.bias)
    wide = [x if x is None or not x.is_floating_point() else x.double() for x in given]
    expected, plain = (call_reference(arguments, **options) for arguments in (wide, given))
    terms = magnitude(values.hidden) @ magnitude(values.weight).T * abs(options["logit_scale"])
    terms = terms if values.bias is None else terms + magnitude(values.bias)
    size = (terms / options["temperature"])[..., :valid].amax(-1)
    for place in range(3):
        scale = (1 + size) * (5 if place == 2 else 1)  # of the entropy: a probability is off by ulps of its logit
        assert_close_to_reference(out[place], expected[place], plain[place], scale=scale)


def call_reference(given: Any, **options: Any) -> tuple[Tensor, ...]:
    names = ("logit_scale", "softcap", "temperature", "ignore_index", "valid_vocab")
    return logprob_reference.linear_logprob(*given, *(options[name] for name in names))


@given_here
@given(
    rows=st.lists(st.integers(1, 5), max_size=2),
    width=st.sampled_from(WIDTHS),
    vocabulary=st.sampled_from([1, 2, 3, 4, 5, 15, 16, 17, 64, 67, 130]),
    bias=st.booleans(),
    padding=st.integers(0, 2),
    index=st.sampled_from([torch.int32, torch.int64]),
    options=logprobs.options,
    share=given_share,
    offset=st.none() | st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_logprob_matches_float64(
    rows: list[int],
    width: int,
    vocabulary: int,
    bias: bool,
    padding: int,
    index: torch.dtype,
    options: dict[str, Any],
    share: float,
    offset: int | None,
    seed: int,
) -> None:
    values = logprobs.inputs(tuple(rows), width, vocabulary + padding, seed=seed, bias=bias)
    target = values.target % vocabulary
    ignored = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < 0.2
    hidden = beside_poison(hostile(values.hidden, share / width, seed, (NAN, INF, -INF)))
    weight = values.weight if offset is None else apart(values.weight, offset)
    weight[vocabulary:] = NAN
    offsets = None if not bias else beside_poison(hostile(values.bias, share, seed, (-INF,)))
    values = logprobs.Inputs(hidden, weight, target.masked_fill(ignored, logprobs.IGNORE).to(index), offsets)
    valid = vocabulary if padding else None
    out = results(partial(linear_logprob, **options, **logprobs.ALL, valid_vocab=valid), *values)
    check_logprobs(out, values, valid, **options)


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_logprob_over_more_than_a_stretch(softcap: float | None) -> None:
    """Of a vocabulary that is summed in parts, and as many rows as are taken."""
    values = logprobs.inputs((9,), 7, 3001)
    options = {"logit_scale": 3.0, "softcap": softcap, "temperature": 0.5}
    check_logprobs(linear_logprob(*values, **options, **logprobs.ALL), values, None, **options)


def test_soft_caps_of_every_size() -> None:
    """Logits from where tanh is its argument to where it is 1."""
    bias = torch.cat((torch.linspace(-20, 20, 4001), torch.tensor([1e-30, -1e-9, 0.0, INF, -INF, 200.0, -1e30])))
    for x in bias.split(1):  # its own log-prob is 0, its lse the logit
        lse = linear_logprob(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), x,
                             softcap=2.0, return_lse=True)[1]  # fmt: skip
        torch.testing.assert_close(lse, (2 * torch.tanh(x.double() / 2)).float(), rtol=4e-7, atol=0)


@given_here
@given(
    rows=st.integers(1, 4),
    count=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    half=st.sampled_from([1, 2, 3, 4, 8, 9, 16, 33]),
    normed=st.tuples(st.booleans(), st.booleans()),
    index=st.sampled_from([torch.int32, torch.int64]),
    kept=st.none() | st.sampled_from(["all", "some"]),
    share=given_share,
    offset=st.none() | st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_rotation_matches_float64(
    rows: int,
    count: tuple[int, int],
    half: int,
    normed: tuple[bool, bool],
    index: torch.dtype,
    kept: str | None,
    share: float,
    offset: int | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(rows, (count[0] + 2 * count[1]) * 2 * half, generator=generator)
    qkv = hostile(qkv, share / half, seed, (NAN, 0.0))
    qkv = qkv if offset is None else apart(qkv, offset)
    weights = [beside_poison(torch.randn(2 * half, generator=generator)) if use else None for use in normed]
    cos, sin = map(beside_poison, torch.randn(2, 6, 2 * half, generator=generator))
    positions = torch.randint(0, 6, (rows,), generator=generator).to(index)
    given = (qkv, *weights, cos, sin, positions)
    options = {"num_heads": count[0], "num_kv_heads": count[1], "eps": 1e-3}
    out = results(partial(qk_norm_rope, **options), *given)
    wide = [x if x is None or not x.is_floating_point() else x.double() for x in given]
    straight = [*wide[:3], torch.ones_like(wide[3]), torch.zeros_like(wide[4]), positions]
    reach = (wide[3].abs() + wide[4].abs()).max()
    everything = zip(out, *(rotation.naive(*x, **options) for x in (wide, given, straight)), strict=True)
    for actual, expected, plain, size in everything:
        assert_close_to_reference(actual, expected, plain, scale=magnitude(size).amax(-1, keepdim=True) * reach)
    assert torch.equal(out[2].nan_to_num(), qkv[:, -2 * half * count[1] :].reshape(out[2].shape).nan_to_num())
    alone = qk_norm_rope(qkv[-1:], *given[1:5], positions[-1:], **options)
    torch.testing.assert_close(alone, tuple(x[-1:] for x in out), rtol=0, atol=0, equal_nan=True)
    if kept:
        slots = [7 - row if kept == "all" or row % 2 else -1 for row in range(rows)]
        pages = [apart(torch.full((9, count[1], 2 * half), -7.0), 2) for _ in range(2)]
        written = qk_norm_rope(*given, **options, kv_out=(*pages, torch.tensor(slots, dtype=index)))
        torch.testing.assert_close(written, out, rtol=0, atol=0, equal_nan=True)
        for page, rows_of in zip(pages, out[1:], strict=True):
            expected = torch.full(page.shape, -7.0)
            for row, slot in enumerate(slots):
                if slot >= 0:
                    expected[slot] = rows_of[row]
            torch.testing.assert_close(page, expected, rtol=0, atol=0, equal_nan=True)


WRONG: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "candidate_head": (
        lambda cu: candidate_head(torch.ones(4, 3), None, torch.ones(3), torch.tensor(cu), eps=0.1),
        [[1, 4], [0, 5], [0, 3, 2], [0, -1, 4], [0, 2, 2**40, 4], [0, 1, 2, 3, 4, 3, 4, 4, 4, 4]],
    ),
    "linear_logprob": (
        lambda ids, **rest: linear_logprob(torch.ones(2, 3), torch.ones(5, 3), torch.tensor(ids), **rest),
        [[0, 5], [-1, 9], [-100, 5], [2**40, 0]],
    ),
    "qk_norm_rope": (
        lambda positions: qk_norm_rope(
            torch.ones(2, 6), None, None, torch.ones(4, 2), torch.ones(4, 2), torch.tensor(positions),
            num_heads=1, num_kv_heads=1,
        ),
        [[0, 4], [-1, 0], [2**40, 1]],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("op", "value"), [(op, value) for op, (_, values) in WRONG.items() for value in values])
def test_errors_are_those_of_the_reference(op: str, value: list[int]) -> None:
    said = []
    for which in ("cpu", "reference"):
        with backend.override(which), pytest.raises(ValueError, match=f"^{op}: .*expected") as raised:
            WRONG[op][0](value)
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert "kernel" not in said[0]


@pytest.mark.parametrize("slots", [[0, 3], [1, 1]])
@pytest.mark.parametrize("positions", [[0, 1], [0, 9]])
def test_a_refused_rotation_writes_nothing(slots: list[int], positions: list[int]) -> None:
    if positions == [0, 9]:
        slots = [0, 1]
    qkv, tables, caches = torch.ones(2, 6), torch.ones(2, 4, 2), torch.zeros(2, 3, 1, 2)
    with pytest.raises(ValueError, match=r"^qk_norm_rope: (kv_out|positions): expected"):
        qk_norm_rope(
            qkv, None, None, *tables, torch.tensor(positions),
            num_heads=1, num_kv_heads=1, kv_out=(*caches, torch.tensor(slots)),
        )  # fmt: skip
    assert not caches.any()


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, **options)


def rotated(rows: int = 2, **changes: Any) -> Any:
    given = {"qkv": ones(rows, 6), "cos": ones(4, 2), "sin": ones(4, 2)} | changes
    return qk_norm_rope(
        **given, q_weight=None, k_weight=None, positions=torch.zeros(rows, dtype=torch.int32), num_heads=1,
        num_kv_heads=1,
    )  # fmt: skip


def logged(hidden: Tensor, weight: Tensor, **options: Any) -> Any:
    return linear_logprob(hidden, weight, torch.zeros(hidden.shape[:-1], dtype=torch.int64), **options)


NOT_TAKEN: list[tuple[str, Callable[[], object]]] = [
    ("linear_logprob", lambda: logged(ones(2, 3).double(), ones(5, 3).double())),
    ("linear_logprob", lambda: logged(ones(2, 3), ones(5, 3), bias=ones(10)[::2])),
    ("linear_logprob", lambda: logged(ones(2, 3), ones(5, 3), softcap=1e-60)),
    ("linear_logprob", lambda: logged(ones(0, 3), ones(5, 3))),
    ("linear_logprob", lambda: logged(ones(logprob_reference.FEW_ROWS + 1, 3), ones(5, 3))),
    ("linear_logprob", lambda: logged(ones(2, 1), ones(logprob_reference.VOCAB_BLOCK + 1, 1))),
    ("linear_logprob", lambda: logged(ones(40, 1), ones(logprob_kernels.LOGITS // 40 + 1, 1))),
    ("qk_norm_rope", lambda: rotated(qkv=ones(2, 6).bfloat16())),
    ("qk_norm_rope", lambda: rotated(cos=ones(4, 2).half(), sin=ones(4, 2).half())),
    ("qk_norm_rope", lambda: rotated(qkv=ones(6, 2).t())),
    ("qk_norm_rope", lambda: rotated(sin=ones(2, 4).t())),
    ("qk_norm_rope", lambda: rotated(0)),
    ("qk_norm_rope", lambda: rotated(rotation_kernels.SIZE // 6 + 1)),
    ("qk_norm_rope_out", lambda: rotated(kv_out=(*ones(2, 3, 1, 4)[..., ::2], torch.tensor([0, 1])))),
    ("qk_norm_rope_out", lambda: rotated(kv_out=(*ones(2, 3, 1, 2), torch.tensor([0, 7, 1])[::2]))),
]


@pytest.mark.parametrize("index", range(len(NOT_TAKEN)))
def test_what_the_small_kernels_leave_to_others(index: int) -> None:
    not_taken(*NOT_TAKEN[index])


def not_taken(op: str, call: Callable[[], object]) -> None:
    """Refused where it is asked for, and elsewhere what the reference says."""
    with pytest.raises(ValueError, match=f"{op}: expected arguments that the cpu kernel takes"):
        call()
    with backend.override("reference"):
        expected = call()
    with backend.override("auto"):
        got = call()
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
def test_threads_are_those_of_torch() -> None:
    """A second thread begins with the first call, which plain operations use too, in the one runtime of the process."""
    code = """
import os, torch
from pathlib import Path
from fb_kernels import cpu, skinny_linear
x, weight = torch.ones(1, 512), torch.ones(1024, 512)
if cpu.why_not():
    raise SystemExit(77)
torch.set_num_threads(2)
counts = [len(os.listdir("/proc/self/task"))]
for run in (lambda: skinny_linear(x, weight), lambda: torch.ones(1 << 20).exp_()):
    run()
    counts.append(len(os.listdir("/proc/self/task")))
paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "gomp" in line}
print(counts[1] - counts[0], counts[2] - counts[1], len(paths))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("the library is not built")
    assert done.stdout.split() == ["1", "0", "1"], done.stderr


def test_it_runs_without_being_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(linear_reference, "linear", refuse)
    monkeypatch.setattr(attention_reference, "_on_host", refuse)
    monkeypatch.setattr(layouts, "plan", refuse)
    for module, name in (
        (torch.nn.functional, "rms_norm"),
        (torch.nn.functional, "silu"),
        (state_reference, "merge_weights"),
        (segments, "segments"),
        (logprob_reference, "_statistics"),
        (rotation_reference, "qk_norm_rope"),
    ):
        monkeypatch.setattr(module, name, refuse)
    with backend.override("auto"):
        evaluate(one_row((2, 0, 3)))
        skinny_linear(torch.ones(1, 4), torch.ones(2, 4))
        single(make_attention(1)).run()
        rms_norm(ones(2, 3), ones(3), 0.1)
        swiglu(ones(2, 4))
        merge_attention_states(ones(2, 3, 4), ones(3, 2), ones(2, 3, 4), ones(3, 2))
        candidate_head(ones(2, 3), None, ones(3), torch.tensor([0, 2]), eps=0.1)
        logged(ones(2, 3), ones(5, 3))
        rotated()
        rotated(kv_out=(*torch.zeros(2, 3, 1, 2), torch.tensor([0, 2])))


def test_a_library_of_other_sources_is_not_used(tmp_path: Path) -> None:
    assert str(cpu.opened(tmp_path / "absent.so")).startswith("cannot be loaded")
    source = tmp_path / "other.cpp"
    source.write_text('extern "C" int fbcpu_abi_version() { return 0; }\n')
    compiler = shutil.which("g++") or shutil.which("clang++")
    subprocess.run([str(compiler), "-shared", "-fPIC", str(source), "-o", str(tmp_path / "other.so")], check=True)
    assert cpu.opened(tmp_path / "other.so") == "built from other sources: install it anew"

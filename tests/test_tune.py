"""The search for launch configurations: what it writes is what `fb_kernels.tuning` reads."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import harness, shapes, tune
from fb_kernels import backend, devices, swiglu, timing, tuning

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def toy_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of tuned launches, and a device of our own."""
    monkeypatch.setattr(tuning, "_device", lambda: "t9")
    monkeypatch.setattr(harness, "device_name", lambda: "t9")
    monkeypatch.setenv(devices.VARIABLE, str(tmp_path))
    devices.forget()
    yield tmp_path
    devices.forget()


@pytest.fixture
def toy_swiglu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreted kernel at one toy size."""
    if os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("for machines without a GPU")
    monkeypatch.setattr(shapes, "ROWS", (3,))
    monkeypatch.setattr(tune.bench_neighbours, "WIDTH", 64)
    monkeypatch.setattr(timing, "CALLS", 1)
    with backend.override("triton"):
        yield


def cheap(favourite: tuple[str, int]) -> type[tune.Call]:
    """Calls whose time is made up: one launch parameter at one value is twice as fast as any other."""

    class Cheap(tune.Call):
        def seconds(self) -> float:
            name, value = favourite
            self.run()
            return 0.5 if tuning.swiglu(torch.float32, 64)[name] == value else 1.0

    return Cheap


@pytest.mark.usefixtures("toy_swiglu")
def test_a_better_launch_is_written_and_read(toy_device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = tuning.swiglu(torch.float32, 64)
    assert default["BLOCK"] == 64
    monkeypatch.setattr(tune, "Call", cheap(("BLOCK", 32)))
    found, looked_up, lines = tune.search("swiglu", 60.0)
    assert list(found.values()) == [default | {"BLOCK": 32}]
    assert looked_up == found.keys()
    assert "0.50 of the default" in lines[0]
    path = tune.write(toy_device, found, looked_up)
    assert path.name == "t9.json"
    assert set(json.loads(path.read_text())) == {"device", "torch", "triton", "commit", "launches", "off"}
    assert tuning.swiglu(torch.float32, 64)["BLOCK"] == 32
    assert tuning.swiglu(torch.float32, 1000)["BLOCK"] == 1024  # another bucket
    x = torch.randn(3, 128)
    with backend.override("reference"):
        want = swiglu(x)
    torch.testing.assert_close(swiglu(x), want)


@pytest.mark.usefixtures("toy_swiglu")
def test_the_default_stays_where_nothing_helps(toy_device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "Call", cheap(("BLOCK", 64)))
    found, looked_up, _ = tune.search("swiglu", 60.0)
    assert not found
    key = next(iter(looked_up))
    tune.write(toy_device, {key: {"BLOCK": 1, "num_warps": 1}, "other/float32/8": {"BLOCK": 8}}, set())
    launches = json.loads(tune.write(toy_device, found, looked_up).read_text())["launches"]
    assert launches == {"other/float32/8": {"BLOCK": 8}}


@pytest.mark.usefixtures("toy_swiglu", "toy_device")
def test_wrong_and_failing_launches_never_win(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(tune.neighbour("swiglu"))

    def spoiled(*floats: torch.Tensor) -> torch.Tensor:
        out = case[0](*floats)
        block = tuning.swiglu(torch.float32, 64)["BLOCK"]
        if block == 128:
            raise RuntimeError("out of resource")
        return out + 1 if block == 32 else out

    monkeypatch.setitem(tune.OPS, "swiglu", lambda _: iter([(spoiled, case[1], 0)]))
    monkeypatch.setattr(tune, "Call", cheap(("BLOCK", 32)))
    assert tune.search("swiglu", 60.0)[0] == {}
    monkeypatch.setattr(tune, "Call", cheap(("BLOCK", 128)))
    assert tune.search("swiglu", 60.0)[0] == {}


@pytest.mark.usefixtures("toy_swiglu", "toy_device")
def test_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "Call", cheap(("BLOCK", 32)))
    found, _, lines = tune.search("swiglu", 0.0)
    assert not found
    assert ", 1 tried" in lines[0]


def test_an_op_without_a_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "ROWS", (3,))
    with backend.override("reference"):
        found, looked_up, lines = tune.search("swiglu", 1.0)
    assert not found
    assert not looked_up
    assert "looks up no launch" in lines[0]


@pytest.mark.parametrize("op", tune.OPS)
def test_every_op_has_calls_that_agree_with_themselves(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "ROWS", (3,))
    monkeypatch.setattr(shapes, "BRANCHES", [(2, 4, 8)])
    monkeypatch.setattr(shapes, "ONE_TOKEN_BRANCHES", [(1, 1, 8)])
    monkeypatch.setattr(shapes, "TRAINED_BRANCHES", [(2, 1, 8)])
    monkeypatch.setattr(shapes, "LONG_TRAINED_BRANCHES", [(2, 4, 8)])
    monkeypatch.setattr(tune.bench_linear_logprob, "VOCABULARY", 300)
    monkeypatch.setattr(tune.bench_neighbours, "VOCABULARY", 300)
    with backend.override("reference"):
        made = list(tune.calls(op))
        assert made
        assert all(call.right() for call in made)
        assert not any(
            tune.Call(lambda call=call: tuple(x + 1 for x in call.run()), call.expected, call.tolerance).right()
            for call in made
        )


FORMS = ("plain", "window", "capped", "cappedwindow", "unaligned")
LOOKED_UP = {
    "linear_logprob": {
        *("linear_logprob", "linear_logprob_form", "linear_logprob_chunk_size"),
        *("linear_logprob_chunk", "linear_logprob_merge"),
    },
    "branch_attention": {
        *(f"{name} {form}" for name in ("branch_attention", "branch_attention_split") for form in FORMS),
        "branch_attention_form",
        *("branch_attention_backward aligned", "branch_attention_backward unaligned"),
        *("branch_attention_backward_prefix aligned", "branch_attention_backward_prefix unaligned"),
    },
}


@pytest.mark.usefixtures("toy_device")
@pytest.mark.parametrize("op", LOOKED_UP)
def test_every_launch_of_an_op_is_searched(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("for machines without a GPU")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "kernels"))
    importlib.import_module("interpreter").refuse_bfloat16()
    monkeypatch.setattr(shapes, "BRANCHES", [(1, 2, 8)])
    monkeypatch.setattr(shapes, "ONE_TOKEN_BRANCHES", [(1, 1, 8)])
    monkeypatch.setattr(shapes, "TRAINED_BRANCHES", [(1, 1, 8)])
    monkeypatch.setattr(shapes, "LONG_TRAINED_BRANCHES", [(1, 2, 8)])
    monkeypatch.setattr(tune.bench_linear_logprob, "VOCABULARY", 300)
    monkeypatch.setattr(tune.bench_linear_logprob, "HIDDEN", 16)
    small = partial(shapes.Branches.random, candidates=2, heads=(2, 1), head_dim=16)
    monkeypatch.setattr(shapes.Branches, "random", small)
    monkeypatch.setattr(tune.Call, "right", lambda self: self.run() is not None)
    monkeypatch.setattr(tune.Call, "seconds", lambda self: 1.0)
    with backend.override("triton"):
        _, looked_up, lines = tune.search(op, 0.0)
    names = [key.split("/")[0] for key in looked_up]
    forms = [key.rpartition("x")[2] for key in looked_up]
    found = {f"{name} {form}" if form.isalpha() else name for name, form in zip(names, forms, strict=True)}
    assert found == LOOKED_UP[op]
    assert len(lines) == len(looked_up)
    order = [line.split("/")[0] for line in lines]
    if op == "linear_logprob":  # the choice comes after the launches that it chooses from
        assert order.index("linear_logprob_form") > max(
            map(order.index, ("linear_logprob", "linear_logprob_chunk_size"))
        )


@pytest.mark.usefixtures("toy_device")
@pytest.mark.parametrize("mistake", [None, "shift = shift_of(higher)", "warpgroup_mma_wait(0"])
def test_hoppers_head_is_chosen_where_it_is_right_and_faster(
    mistake: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with a wrong number and not if it reads what has not landed, however fast it is."""
    if os.environ["TRITON_INTERPRET"] != "1" or not tune.kernels.HAS_GLUON:
        pytest.skip("for machines without a GPU and a Triton whose Gluon is known")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "kernels"))
    emulation = importlib.import_module("gluon_emulation")
    changed = {"shift = shift_of(higher)": "shift = shift_of(top)", "warpgroup_mma_wait(0": "warpgroup_mma_wait(1"}
    changes = {"_consume": (mistake, changed[mistake])} if mistake else None
    monkeypatch.setattr(tune.bench_linear_logprob, "VOCABULARY", 600)
    monkeypatch.setattr(tune.bench_linear_logprob, "HIDDEN", 16)
    monkeypatch.setattr(shapes, "DTYPE", torch.bfloat16)
    form = partial(tuning.linear_logprob_form, torch.bfloat16, 4, 600, 16)
    monkeypatch.setattr(tune.Call, "seconds", lambda self: 0.5 if form() == "gluon" else 1.0)
    with backend.override("triton"), emulation.emulated("fb_kernels.linear_logprob.gluon", changes=changes):
        found, looked_up, _ = tune.search("linear_logprob", 20.0)
    chosen = [launch for key, launch in found.items() if key.startswith("linear_logprob_form/")]
    assert [launch["gluon"] for launch in chosen] == ([] if mistake else [1])
    assert any(key.startswith("linear_logprob_gluon/") for key in looked_up)


@pytest.mark.usefixtures("toy_device")
@pytest.mark.parametrize(
    "mistake",
    [None, ("_softmax", "total * decay", "total"), ("_sweep", "warpgroup_mma_wait(0", "warpgroup_mma_wait(1")],
)
def test_hoppers_attention_is_chosen_where_it_is_right_and_faster(
    mistake: tuple[str, str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likewise."""
    if os.environ["TRITON_INTERPRET"] != "1" or not tune.attention_kernels.HAS_GLUON:
        pytest.skip("for machines without a GPU and a Triton whose Gluon is known")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "kernels"))
    emulation = importlib.import_module("gluon_emulation")
    changes = {mistake[0]: mistake[1:]} if mistake else None
    monkeypatch.setattr(shapes, "BRANCHES", [(2, 3, 300)])
    for others in ("ONE_TOKEN_BRANCHES", "TRAINED_BRANCHES", "LONG_TRAINED_BRANCHES"):
        monkeypatch.setattr(shapes, others, [(1, 1, 8)])
    small = partial(shapes.Branches.random, candidates=2, heads=(2, 1), head_dim=16, dtype=torch.bfloat16)
    monkeypatch.setattr(shapes.Branches, "random", small)
    form = partial(tuning.branch_attention_form, torch.bfloat16, 16, 2)
    monkeypatch.setattr(tune.Call, "seconds", lambda self: 0.5 if form() == "gluon" else 1.0)
    monkeypatch.setattr(tune, "candidates", lambda name, value: [1 - value] if name == "gluon" else [])
    with backend.override("triton"), emulation.emulated("fb_kernels.branch_attention.gluon", changes=changes):
        found, looked_up, lines = tune.search("branch_attention", 60.0)
    chosen = [launch for key, launch in found.items() if key.startswith("branch_attention_form/")]
    assert [launch["gluon"] for launch in chosen] == ([] if mistake else [1])
    names = [key.partition("/")[0] for key in looked_up]
    order = [line.partition("/")[0] for line in lines]
    if not mistake:  # else its call is left out
        assert "branch_attention_gluon" in names
        assert order.index("branch_attention_form") > max(
            map(order.index, ("branch_attention", "branch_attention_gluon"))
        )


def test_a_call_without_an_end_is_given_up() -> None:
    assert tune.finishes(int)
    assert not tune.finishes(partial(sys.exit, 1))
    assert not tune.finishes(partial(time.sleep, 3600), 0.0)


def test_candidates_are_beside_the_value() -> None:
    assert tune.candidates("num_warps", 16) == [8]
    assert tune.candidates("num_stages", 3) == [2, 4]
    assert tune.candidates("BLOCK_M", 64) == [32, 128]
    assert tune.candidates("ROWS", 1) == [2]
    assert tune.candidates("fused", 1) == [0]
    assert tune.candidates("gluon", 0) == [1]
    assert tune.candidates("STAGES", 4) == [3, 5]
    assert tune.candidates("TILES", 32) == [16]
    assert tune.candidates("columns", 33_792) == [16_896, 67_584]


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.tune", "swiglu", "--seconds", "1"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "FB_KERNELS_BACKEND": "triton"}
    options = {"env": environment, "cwd": ROOT, "capture_output": True, "text": True}
    done = subprocess.run([*command, "--output", str(tmp_path)], **options)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "cpu.json").read_text())["torch"] == torch.__version__


@pytest.mark.skipif(harness.DEVICE == "cuda", reason="for machines without a GPU")
@pytest.mark.parametrize("arguments", [["swiglu"], ["softmax"]])
def test_the_command_refuses(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tune", *arguments])
    with pytest.raises(SystemExit, match="2"):
        tune.main()

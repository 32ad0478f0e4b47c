"""The search for launch configurations: what it writes is what `fb_kernels._runtime.tuning` reads."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import harness, shapes
from benchmarks.gpu import tune
from fb_kernels import swiglu
from fb_kernels._runtime import backend, devices, timing, tuning

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


@pytest.fixture
def toy_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op at sizes that take no time."""
    sizes = {"ROWS": (3,), "BRANCHES": [(1, 2, 8)], "ONE_TOKEN_BRANCHES": [(1, 1, 8)]}
    sizes |= {"TRAINED_BRANCHES": [(1, 1, 8)], "LONG_TRAINED_BRANCHES": [(1, 2, 8)]}
    for name, value in sizes.items():
        monkeypatch.setattr(shapes, name, value)
    for module in (tune.bench_linear_logprob, tune.bench_neighbours):
        monkeypatch.setattr(module, "VOCABULARY", 300)


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


@pytest.mark.usefixtures("toy_shapes")
def test_an_op_without_a_kernel_says_so() -> None:
    with backend.override("reference"):
        found, looked_up, lines = tune.search("swiglu", 1.0)
    assert not found
    assert not looked_up
    assert "looks up no launch" in lines[0]


@pytest.mark.usefixtures("toy_shapes")
@pytest.mark.parametrize("op", tune.OPS)
def test_every_op_has_calls_that_agree_with_themselves(op: str) -> None:
    with backend.override("reference"):
        made = list(tune.calls(op))
        assert made
        assert all(call.right() for call in made)
        assert not any(
            tune.Call(lambda call=call: tuple(x + 1 for x in call.run()), call.expected, call.tolerance).right()
            for call in made
        )


LOOKED_UP = {
    "linear_logprob": {
        *("linear_logprob", "linear_logprob_form", "linear_logprob_merge"),
        *("linear_logprob_chunk", "linear_logprob_chunk_size"),  # of the backward
    },
    "branch_attention": {
        *("branch_attention plain", "branch_attention_split plain", "branch_attention_form"),
        *("branch_attention_backward aligned", "branch_attention_backward_prefix aligned"),
    },
}


@pytest.mark.usefixtures("toy_device", "toy_shapes")
@pytest.mark.parametrize("op", LOOKED_UP)
def test_every_launch_of_an_op_is_searched(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("for machines without a GPU")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "kernels"))
    importlib.import_module("interpreter").refuse_bfloat16()
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


def measured(path: Path, medians: dict[str, float | None], commit: str = "c" * 40) -> None:
    """A result file with our medians by shape."""
    about = {"device": "NVIDIA T9 80GB", "torch": "2", "triton": "3", "commit": commit}
    cases = [
        {"op": path.stem, "shape": f"{shape} (cold L2)", "impl": "fb", "dtype": "bfloat16", "median_us": us}
        for shape, us in medians.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about | {"cases": cases}))


@pytest.mark.usefixtures("toy_device")
def test_the_form_that_was_faster_in_a_visit_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one number of rows Gluon's head was slower, and at one it was wrong; its attention was faster on the whole."""
    visit, package = tmp_path / "visit", tmp_path / "package"
    sizes = [f"N={rows} D=2048 V=151936" for rows in (1664, 8192, 4096)]
    for form, attention, head in (("results", (100, 100), (10, 20, 30)), ("gluon", (101, 70), (9, 21, None))):
        branches = dict(zip(("G=1 P=1024", "G=4 P=1024"), attention, strict=True))
        measured(visit / form / "t9" / "branch_attention.json", branches)
        measured(visit / form / "t9" / "linear_logprob.json", dict(zip(sizes, head, strict=True)))
    found = {"branch_attention_gluon/bfloat16/128x2": {"BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 4}}
    devices.write(visit / "tuned", "t9", {"device": "NVIDIA T9 80GB", "commit": "c" * 40}, launches=found)
    monkeypatch.setattr(sys, "argv", ["tune", "--visit", str(visit), "--output", str(package)])
    tune.main()
    written = json.loads((package / "t9.json").read_text())
    assert written["commit"] == "c" * 40
    assert written["launches"] == found | {
        "branch_attention_form/bfloat16/128x2": {"gluon": 1},
        "linear_logprob_form/bfloat16/2048x262144x2048": {"fused": 1, "gluon": 1},
    }
    monkeypatch.setenv(devices.VARIABLE, str(package))
    devices.forget()
    assert tuning.branch_attention_form(torch.bfloat16, 128, 2) == "gluon"
    assert tuning.branch_attention_gluon(torch.bfloat16, 128, 2)["STAGES"] == 4
    assert tuning.linear_logprob_form(torch.bfloat16, 8192, 151_936, 2048) == "fused"
    measured(visit / "gluon" / "t9" / "branch_attention.json", {"G=1 P=1024": 50.0}, "d" * 40)
    with pytest.raises(SystemExit, match="2"):
        tune.main()


@pytest.mark.parametrize("op", tune.TIMED)
def test_gluons_form_is_asked_for_after_one_call(
    op: str, toy_device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune.bench_linear_logprob, "VOCABULARY", 151_936)
    monkeypatch.setattr(tune.bench_linear_logprob, "HIDDEN", 4)
    small = partial(shapes.Branches.random, candidates=2, heads=(2, 1), head_dim=16)
    monkeypatch.setattr(shapes.Branches, "random", lambda groups, length, prefix: small(groups, 2, prefix))
    with backend.override("reference"):
        tune.ask_for_gluon(op, tmp_path / "asked")
    asked = json.loads((tmp_path / "asked" / "t9.json").read_text())["launches"]
    assert len(asked) == {"branch_attention": 1, "linear_logprob": 2}[op]
    assert {key.split("/")[0] for key in asked} == {f"{op}_form"}
    assert all(launch["gluon"] for launch in asked.values())


@pytest.mark.usefixtures("toy_swiglu")
def test_a_search_goes_on_from_the_launch_in_use(toy_device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = tuning.swiglu(torch.float32, 64)
    tune.write(toy_device, {"swiglu/float32/64": default | {"BLOCK": 16}}, set())
    monkeypatch.setattr(tune, "Call", cheap(("BLOCK", 8)))
    assert tune.search("swiglu", 60.0)[0] == {"swiglu/float32/64": default | {"BLOCK": 8}}
    monkeypatch.setattr(tune, "Call", cheap(("BLOCK", 16)))
    assert tune.search("swiglu", 60.0)[0] == {"swiglu/float32/64": default | {"BLOCK": 16}}


@pytest.mark.parametrize(
    ("name", "value", "beside"),
    [
        *(("num_warps", 16, [8]), ("num_stages", 3, [2, 4]), ("BLOCK_M", 64, [32, 128]), ("fused", 1, [0])),
        *(("gluon", 0, []), ("TILES", 32, [16]), ("columns", 33_792, [16_896, 67_584])),
    ],
)
def test_candidates_are_beside_the_value(name: str, value: int, beside: list[int]) -> None:
    assert tune.candidates(name, value) == beside


@pytest.mark.slow
@pytest.mark.sweep
def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.tune", "swiglu", "--seconds", "1"]
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

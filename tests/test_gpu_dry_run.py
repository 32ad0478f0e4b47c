"""The GPU tests' own code, run on CPU tensors at toy sizes, so that their mistakes are found where there is no GPU."""

# ruff: noqa: E402 (the GPU tests lie in folders of their own)

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import harness
from benchmarks.gpu import counters
from benchmarks.shapes import Branches
from fb_kernels._runtime import backend, tuning
from fb_kernels._runtime import timing as fb_timing
from fb_kernels._runtime.timing import Timing

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER / "gpu"), str(FOLDER / "kernels")]

import gpu_checks
import test_branch_attention_gpu as branch_attention
import test_candidate_head_gpu as candidate_head
import test_commit_gpu as commit
import test_linear_logprob_gpu as linear_logprob
import test_merge_attention_states_gpu as merge_attention_states
import test_qk_norm_rope_gpu as qk_norm_rope
import test_rms_norm_gpu as rms_norm
import test_runtime_gpu as runtime
import test_scorer_gpu as scorer
import test_stages_gpu as stages
import test_swiglu_gpu as swiglu
import test_topk_entropy_gpu as topk_entropy

if os.environ["TRITON_INTERPRET"] == "1":
    import interpreter

    interpreter.refuse_bfloat16()

MODULES = (swiglu, rms_norm, qk_norm_rope, merge_attention_states, candidate_head, topk_entropy, linear_logprob)
REPEATS = 1  # of a thousand
ONCE = pytest.mark.parametrize("implementation", ["reference"], indirect=True)
SMALL = [name for name in branch_attention.LAYOUTS if name.startswith("small")]


@pytest.fixture(autouse=True, params=["reference", "triton"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """On CPU tensors: plain PyTorch, then the kernels, interpreted."""
    if request.param == "triton" and os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("kernels run on a GPU here: see tests/gpu")
    sorts_little = {"BLOCK": 32, "GROUP": 2, "STEPS": 1, "num_warps": 4}
    monkeypatch.setattr(tuning, "topk_entropy", lambda *_: sorts_little)
    with backend.override(request.param):
        yield request.param


def small(module: Any, dtype: torch.dtype, **options: Any) -> gpu_checks.Case:
    return module.make(module.SIZES["small"], dtype, "cpu", **options)


@pytest.mark.parametrize("module", MODULES)
def test_small_sizes_match(module: Any) -> None:
    gpu_checks.matches_the_reference(small(module, torch.bfloat16))


@pytest.mark.parametrize("layout", SMALL)
def test_small_layouts_match(layout: str) -> None:
    gpu_checks.matches_the_reference(branch_attention.make(branch_attention.LAYOUTS[layout], torch.bfloat16, "cpu"))


@pytest.mark.parametrize("options", linear_logprob.OPTIONS)
def test_options_of_the_head(options: str) -> None:
    case = small(linear_logprob, torch.float32, bias=True, **linear_logprob.OPTIONS[options])
    gpu_checks.matches_the_reference(case)


def test_other_arguments() -> None:
    gpu_checks.matches_the_reference(small(rms_norm, torch.float32, residual=False))
    gpu_checks.matches_the_reference(small(qk_norm_rope, torch.float32, norm=False))
    gpu_checks.matches_the_reference(small(candidate_head, torch.float32, norm=False))
    case = small(linear_logprob, torch.bfloat16)
    case.floats = tuple(gpu_checks.shifted(x) for x in case.floats)
    gpu_checks.matches_the_reference(case)


def test_what_has_no_case() -> None:
    qk_norm_rope.writes_its_slots(qk_norm_rope.SIZES["small"], torch.bfloat16, "cpu")
    topk_entropy.orders_exactly(topk_entropy.hostile(20, "cpu"), 4)
    linear_logprob.partials_combine(linear_logprob.SIZES["small"], torch.float32, "cpu")
    linear_logprob.largest_is_one_of_them(70, torch.float32, "cpu")
    commit.host_sees_every_step("cpu", 5)
    for layout in ("small-paged", "small-window"):
        branch_attention.writes_every_element(branch_attention.LAYOUTS[layout], torch.float32, "cpu")


@pytest.mark.parametrize("promise", gpu_checks.PROMISES)
@pytest.mark.parametrize("module", [*MODULES, branch_attention])
def test_promises(module: Any, promise: Callable[..., None]) -> None:
    case = (
        module.make(module.LAYOUTS["small-paged"], torch.float32, "cpu")
        if module is branch_attention
        else small(module, torch.float32)
    )
    promise(case, *([REPEATS] if promise is gpu_checks.repeats_are_bit_equal else []))


@ONCE
def test_runtime() -> None:
    runtime.tokens_are_the_plain_decoders("cpu")
    runtime.valued_tokens_are_the_plain_decoders("cpu")


@pytest.mark.sweep(2)
def test_scorer(implementation: str) -> None:
    layers = 2 if implementation == "reference" else 1  # interpreted layers take their time
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    config = scorer.qwen3(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    model = scorer.random_model(config, torch.float32, "cpu")
    wide = scorer.copy.deepcopy(model).double()
    scorer.matches_full_forwards(model, wide, (20, 3, 5), "cpu")
    scorer.trajectory_matches_groups(model, 30, "cpu")


@ONCE
@pytest.mark.parametrize("wrong", [lambda x: x * 1.2, lambda x: x.roll(1, 0), lambda x: x * torch.nan])
def test_a_wrong_result_is_seen(wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    case = small(swiglu, torch.bfloat16)
    op = case.op

    def broken(x: torch.Tensor) -> torch.Tensor:
        return op(x) if x.dtype == torch.float64 else wrong(op(x))

    case.op = broken
    with pytest.raises(AssertionError):
        gpu_checks.matches_the_reference(case)


@ONCE
def test_a_result_that_varies_is_seen() -> None:
    case = small(swiglu, torch.float32)
    op, calls = case.op, []

    def varying(x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return op(x) + len(calls)

    case.op = varying
    with pytest.raises(AssertionError):
        gpu_checks.repeats_are_bit_equal(case, 2)


@ONCE
def test_a_sync_is_seen() -> None:
    case = small(swiglu, torch.float32)
    op = case.op
    case.op = lambda x: op(x) * float(x[0, 0].item())
    with pytest.raises(AssertionError):
        gpu_checks.never_syncs_when_warm(case)


@ONCE
def test_a_stale_result_is_seen() -> None:
    case = small(swiglu, torch.float32)
    kept = case.call()
    case.op = lambda _: kept
    with pytest.raises(AssertionError):
        gpu_checks.runs_on_a_side_stream(case)


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, _: Event) -> float:
        return 2.0  # ms


class Graph:
    def replay(self) -> None: ...


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the benchmark harness asks of CUDA, without any."""
    for name, stand_in in {
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": lambda _: nullcontext(),
        "stream": nullcontext,
        "current_stream": lambda: None,
        "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: 100,
        "max_memory_allocated": lambda: 300,
        "get_device_name": lambda: "NVIDIA Pretended 1",
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(harness, "_commit", lambda: "0" * 40)
    monkeypatch.setattr(harness, "DEVICE", "cuda")
    monkeypatch.setattr(harness, "_device_of", lambda _: "cuda")
    monkeypatch.setattr(fb_timing, "_flusher", lambda: torch.empty(4))
    monkeypatch.setattr(harness, "ceilings", lambda: harness.Ceilings(copy_tbps=4.0, bf16_tflops=800.0))
    monkeypatch.setattr(harness, "longest_kernel", lambda run: f"kernel_of_{run()[0]:.0f}")


class Pedantic:
    """pytest-benchmark's fixture in its smallest form."""

    def __init__(self) -> None:
        self.extra_info: dict[str, Any] = {}

    def pedantic(self, run: Callable[..., None], args: tuple, setup: Callable[[], None], rounds: int) -> None:
        for _ in range(rounds):
            setup()
            run(*args)


@ONCE
@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("timing", Timing)
def test_harness_on_a_pretended_gpu(timing: Timing, tmp_path: Path) -> None:
    truth = torch.arange(6.0)

    def absent() -> torch.Tensor:
        raise ImportError("no such package\nand more")

    runs = {"fb": lambda: truth + 0, "peer": lambda: (truth + 1e-6, truth), "wrong": lambda: truth + 1}
    runs["absent"] = absent
    skipped: dict[str, str] = {}
    rows = harness.compare(
        Pedantic(),
        "op",
        "N=6",
        {name: harness.Implementation(run, truth) for name, run in runs.items()},
        rounds=3,
        tolerance=1e-3,
        timing=timing,
        cost=harness.Cost(flops=8e8, bytes=2e9),
        dtype=torch.bfloat16,
        skipped=skipped,
        ran={"op": "triton", "op_backward": "triton"},
    )
    found = {row.impl: row for row in rows}
    assert (found["fb"].backend, found["peer"].backend) == ("triton", "")
    assert skipped == {"absent": "ImportError: no such package"}
    calls = fb_timing.GRAPH_CALLS if timing is Timing.GRAPH_WARM else 1
    assert found["fb"].median_us == pytest.approx(2000 / calls)
    assert found["fb"].shape == f"N=6 ({timing.value})"
    assert (found["fb"].dtype, found["fb"].peak_bytes) == ("bfloat16", 200)
    assert found["fb"].tbps == pytest.approx(1.0 * calls)
    assert found["peer"].ok
    assert not found["wrong"].ok
    assert found["wrong"].median_us is None
    cold = timing in (Timing.COLD, Timing.GRAPH_COLD)
    assert ("floor" in found) == cold
    if cold:
        assert found["floor"].median_us == pytest.approx(500.0)  # 2 GB at 4 TB/s, above 1 us of product
        assert found["fb"].fraction_of_ceiling == pytest.approx(0.25)
    assert "FAILED" in harness.table(rows)
    (path,) = harness.write_results(tmp_path, {"op": rows})
    assert path == tmp_path / "1" / "op.json"  # the device's name
    written = json.loads(path.read_text())
    assert written["ceilings"] == {"copy_tbps": 4.0, "bf16_tflops": 800.0}
    assert {"device", "driver", "torch", "triton", "cuda", "commit", "date", "cases"} < written.keys()


@ONCE
@pytest.mark.usefixtures("pretended_gpu")
def test_a_case_is_told_the_kernel_that_ran(tmp_path: Path) -> None:
    def absent() -> torch.Tensor:
        raise ImportError("no such package")

    made = {name: harness.Implementation(run, torch.ones(1)) for name, run in (("fb", lambda: [7.0]), ("x", absent))}
    rows = harness.kernels_of("op", "N=6", made, Timing.COLD)
    assert rows == [{"op": "op", "shape": "N=6 (cold L2)", "impl": "fb", "kernel": "kernel_of_7"}]
    timed = [harness.Result("op", "N=6 (cold L2)", name, "x", 1.0, 1.0, 1.0, 0.0, True) for name in ("fb", "peer")]
    harness.write_results(tmp_path, {"op": timed, "op_kernels": rows})
    (result,) = harness.read_results(tmp_path / "1").values()
    assert [case["kernel"] for case in result["cases"]] == ["kernel_of_7", ""]


@ONCE
@pytest.mark.usefixtures("pretended_gpu")
def test_kernels_are_compiled_before_their_counters_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, partial(said.append, name))
    counters.main("cpu", "small")
    assert said == ["start", "stop"] * (len(said) // 2)
    assert len(said) // 2 >= len(counters.SIX)


@ONCE
def test_what_ran_is_one_word_or_one_for_each_op() -> None:
    assert harness._backend({}) == ""
    assert harness._backend({"swiglu": "triton", "rms_norm": "triton"}) == "triton"
    assert harness._backend({"swiglu": "triton", "commit_": "cuda"}) == "commit_=cuda, swiglu=triton"


@ONCE
def test_an_absent_kernel_fails_the_gpu_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture of tests/gpu, where there is no library and then nothing at all."""
    absent = {"cuda"}
    monkeypatch.setattr(backend, "_absent", lambda kind, _: "not here" if kind in absent else "")
    with backend.override("auto"):
        gpu_checks.run_their_kernels(["swiglu", "joint_pool"], (9, 0))
        gpu_checks.run_their_kernels(["topk_entropy"], (10, 0))  # compiled kernels are not for it
        with pytest.raises(AssertionError, match="topk_entropy: it has a kernel; cuda: not here"):
            gpu_checks.run_their_kernels(["topk_entropy"], (9, 0))
        absent.add("triton")
        with pytest.raises(AssertionError, match="swiglu: not here"):
            gpu_checks.run_their_kernels(["swiglu"], (9, 0))


@ONCE
@pytest.mark.usefixtures("pretended_gpu")
def test_times_and_floors_are_of_a_unit_and_rates_of_the_call() -> None:
    truth = torch.arange(6.0)
    rows = harness.compare(
        Pedantic(),
        "op",
        "N=6",
        {"fb": harness.Implementation(lambda: truth + 0, truth)},
        rounds=1,
        tolerance=0.0,
        cost=harness.Cost(flops=8e8, bytes=2e9),
        per=4,
        details=lambda name: {"calls": float(len(name))},
    )
    found = {row.impl: row for row in rows}
    assert found["fb"].median_us == pytest.approx(500)
    assert found["floor"].median_us == pytest.approx(125)
    assert found["fb"].tbps == pytest.approx(1.0)
    assert found["fb"].fraction_of_ceiling == pytest.approx(0.25)
    assert (found["fb"].details, found["floor"].details) == ({"calls": 2.0}, {})


@ONCE
def test_each_tensor_is_held_to_its_own_tolerance() -> None:
    truth = (torch.full((3,), 100.0), torch.full((3,), 0.1))
    close = (truth[0] + 0.5, truth[1])
    assert harness.within(close, truth, None, (1.0, 0.01))
    assert not harness.within((truth[0], 0 * truth[1]), truth, None, (1.0, 0.01))
    assert not harness.within(close, truth, None, (0.1, 0.01))
    assert harness.within(close, truth, None, 1.0)
    assert not harness.within((truth[0], truth[1] * torch.nan), truth, None, (1.0, 0.01))


@ONCE
def test_floor_of_the_anchors() -> None:
    ceilings = harness.Ceilings(copy_tbps=4.3, bf16_tflops=790.0)
    assert ceilings.floor_us(harness.Cost(2.0 * 1664 * 2048 * 151_936, 0.0)) == pytest.approx(1310, rel=0.01)
    assert ceilings.floor_us(harness.Cost(0.0, 2.0 * 2048 * 151_936)) == pytest.approx(145, rel=0.01)
    sizes = [(1664, 16), (1664, 8), (1664, 8), (1024, 8), (1024, 8)]
    branches = Branches(1, 13, 128, 1024, *(torch.empty(*size, 128, device="meta") for size in sizes))
    assert ceilings.floor_us(branches.cost) == pytest.approx(18.8, rel=0.01)


@ONCE
def test_the_stages(tmp_path: Path) -> None:
    stages.run_and_repeat(tmp_path, "cpu", "float32", count=30)


@ONCE
@pytest.mark.slow
@pytest.mark.sweep
def test_experiments(tmp_path: Path) -> None:
    fewer = {"problems": {"validation": 5}, "train": {"seeds": [0]}, "evaluate": {"limit": 2}, "compare": {"timed": 1}}
    stages.experiments(tmp_path, "cpu", "bfloat16", fewer)

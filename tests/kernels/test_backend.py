"""What every op gets from its registration, and which implementation runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fb_kernels import BranchLayout, branch_attention, linear_logprob, skinny_linear, swiglu
from fb_kernels._runtime import backend, cpu, cuda, precision

X = torch.linspace(-3, 3, 24).reshape(2, 12)


def test_autocast_does_not_lower_the_products_inside() -> None:
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(9, 64), torch.randn(40, 64), torch.randint(40, (9,))
    q, k = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    layout = BranchLayout.of([[5]], [(0, 0)])
    calls = (
        lambda *given: linear_logprob(*given, target),
        lambda q, k: branch_attention(q, k, k, k, k, layout, softcap=5.0),
    )
    for call, given in zip(calls, ((hidden, weight), (q, k)), strict=True):
        plain = call(*(x.bfloat16() for x in given))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(call(*given), plain)


@pytest.mark.parametrize("op", ["linear_logprob", "branch_attention", "topk_entropy"])
def test_ops_live_in_the_namespace(op: str) -> None:
    assert hasattr(torch.ops.fb, op)


@pytest.mark.parametrize(
    ("spec", "cpu", "cuda"),
    [
        ("", "cpu", "triton"),
        ("auto", "cpu", "triton"),
        ("cuda", "reference", "triton"),
        ("reference", "reference", "reference"),
        ("triton", "triton", "triton"),
        ("triton, swiglu=reference", "reference", "reference"),
        ("reference,swiglu=triton", "triton", "triton"),
        ("reference,rms_norm=triton", "reference", "reference"),
        ("cpu", "cpu", "reference"),
        ("cpu,swiglu=triton", "triton", "triton"),
    ],
)
@pytest.mark.usefixtures("triton_kernels")
def test_what_is_chosen(monkeypatch: pytest.MonkeyPatch, spec: str, cpu: str, cuda: str) -> None:
    monkeypatch.setattr("fb_kernels._runtime.cpu.why_not", lambda: "")
    with backend.override(spec):
        assert [backend.chosen("swiglu", device)[0] for device in ("cpu", "cuda")] == [cpu, cuda]
        assert backend.chosen("joint_pool", "cuda")[0] == "reference"


@pytest.mark.parametrize(
    ("spec", "device", "expected"),
    [
        ("", "cpu", ("cpu", "it has a kernel")),
        ("cpu", "cpu", ("cpu", "FB_KERNELS_BACKEND asks for it")),
        ("reference", "cpu", ("reference", "FB_KERNELS_BACKEND asks for it")),
        ("triton", "cpu", ("triton", "FB_KERNELS_BACKEND asks for it")),
        ("cuda", "cpu", ("reference", "there is no library")),
        ("", "cuda", ("triton", "it has a kernel; cuda: there is no library")),
        ("cpu", "cuda", ("reference", "kernels are for CPU tensors")),
        ("cuda", "cuda", ("reference", "there is no library")),
    ],
)
@pytest.mark.usefixtures("triton_kernels")
def test_what_is_chosen_where_there_are_all_kinds(
    monkeypatch: pytest.MonkeyPatch, spec: str, device: str, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(cuda, "why_not", lambda _: "there is no library")
    monkeypatch.setattr(cpu, "why_not", lambda: "")
    with backend.override(spec):
        assert backend.chosen("skinny_linear", device) == expected


def test_without_a_library_for_the_cpu_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "library", lambda: "there is no library")
    with backend.override("reference"):
        expected = skinny_linear(X, X)
    with backend.override("auto"):
        assert backend.chosen("skinny_linear", "cpu") == ("reference", "there is no library")
        assert torch.equal(skinny_linear(X, X), expected)


def test_kernels_that_are_asked_for_and_absent_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "library", lambda: "there is no library")
    sentence = (
        r"^skinny_linear: expected cpu kernels, as FB_KERNELS_BACKEND asks, got none \(there is no library\); install "
        r"what is missing or set FB_KERNELS_BACKEND=auto$"
    )
    with backend.override("cpu"), pytest.raises(ValueError, match=sentence):
        skinny_linear(X, X)
    with backend.override("reference,skinny_linear=cpu"), pytest.raises(ValueError, match=sentence):
        skinny_linear(X, X)


def test_the_override_ends_with_its_context() -> None:
    before = backend.chosen("swiglu", "cuda")
    with pytest.raises(RuntimeError), backend.override("reference"):
        raise RuntimeError
    assert backend.chosen("swiglu", "cuda") == before


@pytest.mark.parametrize("spec", ["gpu", "swiglu", "auto,swiglu=fast", "auto,swigloo=triton", "=", "../env=triton"])
def test_a_wrong_override_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"FB_KERNELS_BACKEND: expected auto, .*, got .*; write"):
        backend._parse(spec)


def test_the_variable_is_read() -> None:
    code = "from fb_kernels._runtime import backend; print(backend.chosen('swiglu', 'cuda'))"
    environment = os.environ | {backend.VARIABLE: "reference"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "('reference', 'FB_KERNELS_BACKEND asks for it')\n"


def test_a_kernel_runs_and_what_it_refuses_goes_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def kernel(gate_up: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        seen.append(gate_up.dtype)
        return NotImplemented if gate_up.dtype == torch.float64 else torch.zeros(2, 6)

    monkeypatch.setattr(backend, "_module", lambda _, __: SimpleNamespace(swiglu=kernel))
    monkeypatch.setattr(backend, "_TRIED", {(wanted, "cpu"): ("triton",) for wanted in ("auto", "triton")})
    monkeypatch.setattr(backend, "_why_not", lambda *_: "")
    monkeypatch.setattr(backend, "AUTOMATIC", None)
    assert torch.equal(swiglu(X), torch.zeros(2, 6))
    assert swiglu(X.double()).abs().sum() > 0
    with torch.autocast("cpu"):
        assert torch.equal(swiglu(X), torch.zeros(2, 6))
    with (
        backend.override("triton"),
        pytest.raises(ValueError, match=r"swiglu: expected .* set FB_KERNELS_BACKEND=auto"),
    ):
        swiglu(X.double())
    assert seen == [torch.float32, torch.float64, torch.float32, torch.float64]


def test_without_triton_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fb_kernels.triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    backend._why_no_triton.cache_clear()
    try:
        with backend.override("triton"):
            assert backend.chosen("swiglu", "cuda") == ("reference", "triton cannot be imported: ModuleNotFoundError")
            assert swiglu(X).shape == (2, 6)
    finally:
        backend._why_no_triton.cache_clear()


def on_cuda(name: str, own: list[str]) -> Callable:
    """What the op's CUDA tensors would come to, given CPU ones."""
    return backend.implementation(name, name, torch.neg, own, "cuda")


def test_on_cuda_without_kernels_there_is_a_warning_for_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_warned", set())
    monkeypatch.setattr(backend, "_absent", lambda kind, _: f"no {kind} here")
    kinds = {"swiglu": ["triton"], "rms_norm": ["triton"], "commit": ["cuda"], "joint_pool": []}
    ran = {name: on_cuda(name, own) for name, own in kinds.items()}
    with warnings.catch_warnings(record=True) as quiet:
        warnings.simplefilter("always")
        ran["joint_pool"](X)  # has no kernel to miss
        for spec in ("reference", "cpu"):
            with backend.override(spec):
                ran["swiglu"](X)
        swiglu(X)  # on the CPU
    assert [str(one.message) for one in quiet] == []
    with pytest.warns(RuntimeWarning) as caught:
        assert all(torch.equal(run(X), -X) for run in ran.values() for _ in range(2))
    assert [str(one.message) for one in caught] == [
        "swiglu: expected its triton kernel for CUDA tensors, got reference (no triton here); it is slower: see "
        "`python -m fb_kernels.env`, and pip install '.[gpu]' in the clone for triton",
        "commit: expected its cuda kernel for CUDA tensors, got reference (no cuda here); it is slower: see "
        "`python -m fb_kernels.env`, and pip install '.[gpu]' in the clone for triton",
    ]


@pytest.fixture
def without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA tensors with Triton's kernels, which add 1, and no compiled ones."""
    monkeypatch.setattr(backend, "_warned", set())
    monkeypatch.setattr(backend, "_absent", lambda kind, _: "not built" if kind == "cuda" else "")
    monkeypatch.setattr(backend, "_module", lambda _, stem: SimpleNamespace(**{stem: lambda x: x + 1}))
    monkeypatch.setattr(backend, "_on_device_of", lambda *_: nullcontext())


@pytest.mark.usefixtures("without_a_library")
def test_triton_in_place_of_a_compiled_kernel_is_a_warning() -> None:
    run = on_cuda("topk_entropy", ["cuda", "triton"])
    with pytest.warns(RuntimeWarning, match=r"^topk_entropy: expected its cuda kernel .*, got triton .*not built"):
        assert torch.equal(run(X), X + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run(X), X + 1)


@pytest.mark.usefixtures("without_a_library")
def test_a_call_that_batch_invariant_mode_has_no_kernel_for_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "INVARIANT", True)
    monkeypatch.setattr(backend, "_module", lambda _, stem: SimpleNamespace(**{stem: lambda _: NotImplemented}))
    with pytest.warns(RuntimeWarning, match=r"^skinny_linear: expected its batch-invariant .* \(the arguments\)"):
        assert torch.equal(on_cuda("skinny_linear", ["triton"])(X), -X)


@pytest.mark.usefixtures("without_a_library")
def test_a_compiled_kernel_that_is_asked_for_and_absent_is_an_error() -> None:
    run, other = on_cuda("topk_entropy", ["cuda", "triton"]), on_cuda("swiglu", ["triton"])
    with backend.override("cuda"):
        assert torch.equal(other(X), X + 1)  # has no compiled one
        with pytest.raises(ValueError, match=r"^topk_entropy: expected cuda kernels, .* got none \(not built\)"):
            run(X)


def test_what_ran_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "library", lambda: "there is no library")
    with backend.seen() as ran:
        skinny_linear(X, X)
        with backend.override("reference"):
            swiglu(X)
    linear_logprob(X, X, torch.tensor([0, 1]))
    assert ran == {"skinny_linear": "reference", "swiglu": "reference"}


@pytest.mark.usefixtures("triton_kernels")
def test_a_kernel_that_ran_is_seen() -> None:
    with backend.seen() as ran:
        swiglu(X)
    assert ran == {"swiglu": "triton"}


@pytest.fixture
def triton_is_asked_again() -> Iterator[None]:
    backend._why_no_triton.cache_clear()
    yield
    backend._why_no_triton.cache_clear()


@pytest.mark.usefixtures("triton_is_asked_again")
@pytest.mark.parametrize(
    ("given", "found", "why"),
    [
        (None, ("gcc",), ""),
        (None, ("clang",), ""),
        (None, (), "triton needs a C compiler, got none: install gcc or set CC"),
        ("icx", ("gcc",), "triton needs a C compiler, got CC=icx, which is not found: install gcc or set CC"),
        ("icx", ("icx",), ""),
    ],
)
def test_triton_needs_a_c_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None, found: tuple[str, ...], why: str
) -> None:
    if given is None:
        monkeypatch.delenv("CC", raising=False)
    else:
        monkeypatch.setenv("CC", given)
    monkeypatch.setattr(backend.shutil, "which", lambda name: name if name in found else None)
    monkeypatch.setenv("CPATH", str(tmp_path))
    (tmp_path / "Python.h").touch()
    assert backend._why_no_triton("cuda") == why
    assert "compiler" not in backend._why_no_triton("cpu")


@pytest.mark.usefixtures("triton_is_asked_again")
@pytest.mark.parametrize("scheme", ["posix_prefix", "posix_local"])
def test_triton_needs_the_header_of_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: str) -> None:
    """In the folder where Triton itself looks for it, or where the compiler does."""
    folders = {"posix_prefix": str(tmp_path), "posix_local": str(tmp_path / "local")}
    monkeypatch.setattr(backend.shutil, "which", str)
    monkeypatch.setattr(backend.sysconfig, "get_default_scheme", lambda: scheme)
    monkeypatch.setattr(backend.sysconfig, "get_paths", lambda scheme: {"include": folders[scheme]})
    for name in ("CC", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    version = ".".join(map(str, sys.version_info[:2]))
    why = f"triton needs Python.h, got none in {tmp_path}: install python{version}-dev"
    assert backend._why_no_triton("cuda") == why
    assert backend.chosen("rms_norm", "cuda") == ("reference", why)
    (tmp_path / "Python.h").touch()
    backend._why_no_triton.cache_clear()
    assert backend._why_no_triton("cuda") == ""


@pytest.mark.parametrize(
    ("driver", "runtime", "why"),
    [
        (13000, 13000, ""),
        (13000, 12080, ""),
        (12020, 12080, ""),  # of one major version
        (
            12040,
            13000,
            "built with CUDA 13.0, and the driver supports 12.4 at most: update the driver, or reinstall "
            "futurebridge with an nvcc of CUDA 12",
        ),
    ],
)
def test_a_driver_older_than_the_library_is_named(
    monkeypatch: pytest.MonkeyPatch, driver: int, runtime: int, why: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    library = SimpleNamespace(
        fb_is_emulation=lambda: 0, fb_driver_version=lambda: driver, fb_runtime_version=lambda: runtime
    )
    assert cuda._why_not(library, "cuda") == why  # type: ignore[arg-type]

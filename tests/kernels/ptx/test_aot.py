"""Every kernel compiles for sm_90 without a GPU: few spills, shared memory in bounds, HGMMA, no TF32.

Of each kernel one launch is compiled; with --all, of launches alike but for sizes one. `make aot` compiles all, for
sm_80 and sm_100 too.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
import triton
from packaging.version import Version

from benchmarks.gpu import sass
from benchmarks.gpu.aot import __main__ as command
from benchmarks.gpu.aot import branch_attention, calls, compiler, linear_logprob, measured
from benchmarks.gpu.aot.compiler import Compiled, Launch, representative
from fb_kernels.linear_logprob.triton import HAS_GLUON

ROOT = Path(__file__).resolve().parents[3]
OPS = calls.ops()
HOPPER = next(arch for arch in compiler.ARCHITECTURES if arch.name == "sm_90")
of_gluon = pytest.mark.skipif(not HAS_GLUON, reason="another Triton's Gluon")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.sweep(4)
def test_compiles_without_a_fault(op: str, request: pytest.FixtureRequest) -> None:
    chosen = list(representative(command.launched([op], ["sm_90"])))
    kernels = {kernel for source in sources_of(op) for kernel in kernels_in(source)}
    assert {(launch.name, variant) for launch, variant in chosen} >= {
        (kernel, variant) for kernel in kernels for variant in ("aligned", "unaligned", "ones")
    }
    if not request.config.getoption("all"):
        chosen = list({each[0].name: each for each in reversed(chosen)}.values())  # the first of each kernel
    rows = [compiler.compiled(*each) for each in chosen]
    faults = [(row.kernel, row.shape, row.variant, fault) for row in rows for fault in row.faults]
    assert [fault for fault in faults if not tolerated(fault[-1])] == []
    assert {row.kernel for row in rows if row.op == op} == kernels


def tolerated(fault: str) -> bool:
    """A few bytes spilled by a Triton newer than that of constraints.txt, which launch configurations were made for."""
    spilled = re.fullmatch(r"spills: (\d+) bytes of stack, \d+ local accesses", fault)
    newer = Version(metadata.version("triton")) >= Version("3.9")
    return newer and spilled is not None and int(spilled[1]) <= 64


def sources_of(op: str) -> set[Path]:
    """The files whose kernels the cases of an op launch."""
    folder, backward = ROOT / "fb_kernels" / op.removesuffix("_backward"), op.endswith("_backward")
    written = {folder / ("triton_backward.py" if backward else "triton.py"), *folder.glob("triton_layout.py")}
    return written if backward or not HAS_GLUON else {*written, *folder.glob("gluon.py")}


def kernels_in(source: Path) -> set[str]:
    """The launchable kernels that a file defines."""
    return {
        line.removeprefix("def ").partition("(")[0]
        for line in source.read_text(encoding="utf-8").splitlines()
        if line.startswith("def _") and "_kernel(" in line
    }


def test_every_kernel_file_has_its_cases() -> None:
    names = ("triton*.py", "gluon.py") if HAS_GLUON else ("triton*.py",)
    written = [path for name in names for path in (ROOT / "fb_kernels").glob(f"*/{name}")]
    assert {path for path in written if kernels_in(path)} == {source for op in OPS for source in sources_of(op)}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """(exit code, what is printed) of the command."""
    with mock.patch("sys.argv", ["aot", *arguments, "--arch", "sm_90"]), pytest.raises(SystemExit) as ended:
        command.main()
    return int(ended.value.code or 0), capsys.readouterr().out


def test_a_fault_fails_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    case = calls.cases("swiglu")[0]
    monkeypatch.setattr(calls, "cases", lambda _: [replace(case, matmul=("_swiglu_fwd_kernel",))])
    code, printed = run(capsys, "swiglu")
    assert code == 1
    assert "FAULT no HGMMA" in printed
    assert "1 with a fault" in printed
    code, printed = run(capsys, "swiglu", "--quick", "--json")
    assert code == 1
    assert "no HGMMA" in json.loads(printed.splitlines()[0])["faults"][0]


def test_more_registers_than_a_multiprocessor_has_are_a_fault() -> None:
    """`maxnreg` allows them, and only the launch would fail."""
    launch = {"BLOCK": 1 << 16, "num_warps": 16, "maxnreg": 255}
    with mock.patch.object(compiler.tuning, "swiglu", return_value=launch):
        forward = compiler.launches(calls.cases("swiglu")[0], HOPPER)[0]
    made = compiler.compiled(forward, "aligned")
    assert made.registers > 128
    assert made.faults == (f"16 warps of {made.registers} registers a thread fit no multiprocessor",)


def test_the_quick_choice_has_every_constant_and_type() -> None:
    def shown(launches: list[Launch]) -> set[tuple]:
        return {(launch.arch.name, launch.name, *given) for launch in launches for given in launch.given()}

    every = list(command.launched(OPS, ["sm_90", "sm_100"]))
    chosen = list(representative(every))
    assert shown([launch for launch, _ in chosen]) == shown(every)
    named = {name for *_, name, _ in shown(every)}
    assert named >= {"SOFTCAP", "PAGED", "HEAD_DIM", "num_warps", "q", "logits", "bias"}
    assert not {"rows", "window"} & named
    assert {variant for _, variant in chosen} == {"aligned", "unaligned", "ones"}
    assert len(chosen) < len(every)


def gluon_code(cases: list[compiler.Case], folder: Path) -> sass.Code:
    """Machine code of the first case that launches Hopper's kernel."""
    case = next(case for case in cases if case.shape.endswith("gluon"))
    launch = next(each for each in compiler.launches(case, HOPPER) if "gluon" in each.name)
    with mock.patch.object(compiler, "_describe", lambda launch, variant, made: made):
        made = compiler.compiled(launch, "aligned")
    file = folder / "gluon.cubin"
    file.write_bytes(made.asm["cubin"])  # type: ignore[attr-defined]
    (lines,) = sass.functions(compiler._cuobjdump("--dump-sass", file)).values()
    return lines


@of_gluon
def test_hoppers_head_overlaps_its_products(tmp_path: Path) -> None:
    """Its machine code: four products a block of which one wait is not for the last, whole tiles copied, no spill."""
    lines = gluon_code(linear_logprob.cases(), tmp_path)
    assert sum("UTMALDG" in text for _, text in lines) == 3
    assert not any(name in text for _, text in lines for name in ("LDL", "STL"))
    blocks = sass.inner_loops(lines, "HGMMA")
    assert len(blocks) == 2  # one for each half of the rows
    for block in blocks:
        inside = [text for _, text in block]
        assert sum("HGMMA" in each for each in inside) == 4
        assert sum("WARPGROUP.ARRIVE" in each for each in inside) == 1
        assert [each for each in inside if "WARPGROUP.DEPBAR" in each] == ["WARPGROUP.DEPBAR.LE gsb0, 0x1"]
        assert len(inside) <= 70
        first = lines.index(block[0])
        around = (loop for loop in sass.loops(lines) if sass.contains(loop, range(first, first + len(block))))
        assert min(map(len, around)) - len(block) <= 1700  # with both branches that most tiles jump over


@of_gluon
def test_hoppers_attention_overlaps_its_products(tmp_path: Path) -> None:
    """Its machine code: both products of a block in one go each, exponentials while the second runs, no spill there."""
    blocks = sass.inner_loops(gluon_code(branch_attention.cases(), tmp_path), "HGMMA")
    assert len(blocks) == 4  # of each half of the rows, without and with masks
    for block in blocks:
        inside = [text for _, text in block]
        assert sum("HGMMA" in each for each in inside) == 16
        assert sum("WARPGROUP.ARRIVE" in each for each in inside) == 2
        waits = [place for place, each in enumerate(inside) if "WARPGROUP.DEPBAR" in each]
        assert [inside[place].split()[-1] for place in waits] == ["0x1", "0x0"]
        assert sum("MUFU.EX2" in each for each in inside[slice(*waits)]) == 64 + 2  # of a thread: scores, and two rows
        assert not any(name in each for each in inside for name in ("LDL", "STL"))
    assert min(map(len, blocks)) <= 500
    assert max(map(len, blocks)) <= 650  # with masks


def test_instructions_beyond_the_table_are_a_fault() -> None:
    """Only of a kernel that it has, and beside what else is wrong."""
    given = {"kernel": "k", "shape": "N=1", "variant": "aligned", "per_unit": 10.0, "faults": ("other",)}
    row, key = Compiled(**dict.fromkeys(field.name for field in fields(Compiled)) | given), "k N=1 aligned"
    assert command.gated(row, {}) == command.gated(row, {key: 10.0}) == row
    assert command.gated(row, {"k N=1 unaligned": 1.0}) == row
    assert command.gated(row, {key: 9.99}).faults == ("other", "10.00 instructions a unit, above 9.99")
    assert command.gated(replace(row, per_unit=None), {key: 1.0}).faults == ("other",)


def test_every_kernel_with_tiles_is_in_the_table() -> None:
    """Where it multiplies by HGMMA, without which its instructions are not counted; and the table has no others."""
    most = json.loads(command.TABLE.read_text(encoding="utf-8"))["most"]
    counted = [launch for launch in command.launched(OPS, ["sm_90"]) if launch.name in launch.case.tiles]
    wanted = {f"{each.name} {each.case.shape} aligned" for each in counted if each.name in each.case.matmul}
    assert wanted
    assert wanted <= most.keys()
    assert {key.rpartition(" ")[0] for key in most} <= {f"{each.name} {each.case.shape}" for each in counted}
    assert all(value > 0 for value in most.values())


@pytest.mark.slow
@pytest.mark.parametrize(("version", "faults"), [(triton.__version__, 1), ("0", 0)])
def test_the_table_is_that_of_one_compiler(
    version: str, faults: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one's counts are others: they fail nothing."""
    case = branch_attention.case([([1] * 13, 1024)], "L=1", width=64)
    monkeypatch.setattr(branch_attention, "cases", lambda: [case])
    monkeypatch.setattr(command, "TABLE", tmp_path / "table.json")
    most = {f"{branch_attention.SPLIT} {case.shape} aligned": 1.0}
    command.TABLE.write_text(json.dumps({"triton": version, "most": most}))
    code, printed = run(capsys, "branch_attention")
    assert code == faults
    assert ("instructions a unit, above 1.00" in printed) == bool(faults)
    assert f"{faults} with a fault" in printed


@pytest.mark.sweep
def test_model_of_time_against_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Cases that its constants were not fitted to, and the head, are predicted within 15%."""
    with pytest.raises(SystemExit) as ended:
        measured.main([str(ROOT / "benchmarks" / "results" / "h100")])
    printed = capsys.readouterr().out
    with capsys.disabled():
        print("\n" + printed)
    assert not ended.value.code
    assert (printed.count("| fit |"), printed.count("| check |")) == (5, 6)
    fitted = re.findall(r"(\S+) \(the fit: (\S+)\)", printed)
    assert len(fitted) == 3
    assert all(float(used) == pytest.approx(float(fit), rel=0.02) for used, fit in fitted)

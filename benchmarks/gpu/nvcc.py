"""`python -m benchmarks.gpu.nvcc`: compile csrc/ for its architectures and print the resources of each kernel.

Instructions are counted in the machine code, in all and in the main loop: the longest innermost loop, among those with
matrix products if there are any. A spill or a stack frame is a failure. Without nvcc it says so and passes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import triton

from benchmarks.gpu import sass
from setup import nvcc

CSRC = Path(__file__).resolve().parents[2] / "csrc"
ARCHITECTURES = ("80", "90a")

ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'")
STACK = re.compile(r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill")
USED = re.compile(r"Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?")


@dataclass(frozen=True)
class Resources:
    """A kernel's resources as ptxas reports them, and its instructions."""

    kernel: str
    arch: str
    registers: int
    shared: int  # bytes, static
    stack: int
    spills: int  # bytes stored and loaded
    instructions: int
    loop: int  # instructions of the main loop

    @property
    def fault(self) -> bool:
        return bool(self.stack or self.spills)


def compiled(source: Path, folder: Path) -> Iterator[Resources]:
    """The kernels of one source file."""
    code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
    target = folder / f"{source.stem}.o"
    command = [nvcc() or "nvcc", "-std=c++17", "-O3", "-Xptxas", "-v", *code, "-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{source.name}: {done.stderr}")
    texts = machine_code(target)
    entry = stack = None
    for line in done.stderr.splitlines():
        entry = ENTRY.search(line) or entry
        stack = STACK.search(line) or stack
        used = USED.search(line)
        if used and entry and stack:
            spills = int(stack["stores"]) + int(stack["loads"])
            name, shared = readable(entry["name"]), int(used["shared"] or 0)
            lines = texts[entry["name"], entry["arch"]]
            sizes = (int(stack["stack"]), spills, sass.counted(lines), main_loop(lines))
            yield Resources(name, entry["arch"], int(used["registers"]), shared, *sizes)
            entry = stack = None


def machine_code(target: Path) -> dict[tuple[str, str], list[tuple[int, str]]]:
    """The instructions of each (mangled name, architecture) in an object file."""
    tool = shutil.which("cuobjdump") or triton.knobs.nvidia.cuobjdump.path  # the toolkit's, or Triton's own
    done = subprocess.run([tool, "--dump-sass", str(target)], capture_output=True, text=True, check=True)
    return sass.functions(done.stdout)


def main_loop(code: sass.Code) -> int:
    """Instructions of the longest innermost loop, among those with matrix products if there are any."""
    return max(map(sass.counted, sass.inner_loops(code, "MMA") or sass.inner_loops(code)), default=0)


def readable(name: str) -> str:
    """A mangled name as `kernel<arguments>`."""
    if shutil.which("c++filt"):
        name = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()
        name = name.split("(", 1)[0] if "<" not in name else re.split(r">\(", name)[0] + ">"
    return name.replace("void ", "").replace("fb::", "").replace("__nv_bfloat16", "bf16").replace("__half", "fp16")


def main() -> None:
    if nvcc() is None:
        print("csrc: no nvcc found, nothing compiled")
        return
    print(f"{'csrc kernel':<72} {'arch':<8}{'regs':>6}{'shared':>8}{'stack':>7}{'spills':>8}{'loop':>6}{'all':>6}")
    count = faults = 0
    with tempfile.TemporaryDirectory() as folder:
        for source in sorted(CSRC.glob("*.cu")):
            for row in compiled(source, Path(folder)):
                count, faults = count + 1, faults + row.fault
                print(
                    f"{row.kernel:<72} {row.arch:<8}{row.registers:>6}{row.shared:>8}{row.stack:>7}{row.spills:>8}"
                    f"{row.loop:>6}{row.instructions:>6}" + ("  FAULT" if row.fault else "")
                )
    print(f"{count} compiled, {faults} with a fault")
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()

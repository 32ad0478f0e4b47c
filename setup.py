"""The compiled kernels of csrc/; everything else is in pyproject.toml.

FB_BUILD_CUDA=auto|force|skip: build those for GPUs where nvcc is, always (and fail where it is not), or never.
FB_BUILD_CPU=auto|force|skip: likewise those for CPUs where a C++ compiler is: $CXX, c++, g++ or clang++.

What they compile is kept in build/csrc, so another installation from this folder, as with one more extra, copies it.

`python -c "import setup; setup.build_in_place()"` compiles them beside the package, without setuptools.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

CSRC, MADE = Path("csrc"), Path("build", "csrc")
USUAL = "/usr/local/cuda"  # where the toolkit lies
CUDA, CPU = "fb_kernels.libfb_kernels", "fb_kernels.libfb_cpu"
SOURCES = {CUDA: sorted(map(str, CSRC.glob("*.cu"))), CPU: [str(CSRC / "cpu.cpp")]}
ARCHITECTURES = ("80", "90a")
FLAGS = ["-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", "-cudart", "static"]
CPU_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-shared", "-fPIC"]
THREADS = ["-fopenmp"]  # without it, where the compiler has none, all runs on one thread


def nvcc() -> str | None:
    """The compiler in $CUDA_HOME, $CUDA_PATH or /usr/local/cuda, or on the path: the first that is there."""
    homes = filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), USUAL))
    return shutil.which("nvcc", path=os.pathsep.join(os.path.join(home, "bin") for home in homes)) or shutil.which(
        "nvcc"
    )


def cxx() -> str | None:
    """The C++ compiler of $CXX, or the first on the path."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)


def wanted(variable: str, compiler: str | None, needed: str) -> str:
    """What an environment variable asks for: auto, force or skip; skip without a compiler."""
    value = os.environ.get(variable, "auto")
    if value not in ("auto", "force", "skip"):
        raise SystemExit(f"{variable}: expected auto, force or skip, got {value}; leave it out for auto")
    if value == "force" and compiler is None:
        raise SystemExit(f"{variable}=force: expected {needed}, got none; install it")
    return value if compiler else "skip"


def libraries() -> dict[str, bool]:
    """{library: whether the build may go on without it}, for those that are wanted and can be built."""
    searched = "nvcc in $CUDA_HOME, $CUDA_PATH, /usr/local/cuda or on the path"
    choices = {
        CUDA: wanted("FB_BUILD_CUDA", nvcc(), searched),
        CPU: wanted("FB_BUILD_CPU", cxx(), "a C++ compiler on the path or in $CXX"),
    }
    return {name: choice == "auto" for name, choice in choices.items() if choice != "skip"}


def compile_library(name: str, target: Path, optional: bool) -> None:
    """Compile csrc/*.cu for all architectures, or csrc/cpu.cpp, by one call of the compiler, unless it was done."""
    target.parent.mkdir(parents=True, exist_ok=True)
    commands = [[str(cxx()), *CPU_FLAGS, *THREADS], [str(cxx()), *CPU_FLAGS]]
    if name == CUDA:
        code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
        commands = [[str(nvcc()), *FLAGS, *code, "--threads", "0"]]
    for number, command in enumerate(commands, 1):
        command += SOURCES[name]
        try:
            made = MADE / f"{name}-{key(command)}.so"
            if not made.is_file():
                MADE.mkdir(parents=True, exist_ok=True)
                unfinished = made.with_suffix(f".{os.getpid()}")
                print(" ".join(command), flush=True)
                subprocess.run([*command, "-o", str(unfinished)], check=True)
                unfinished.replace(made)
            replace(target, made)
            break
        except (OSError, subprocess.CalledProcessError) as problem:
            target.unlink(missing_ok=True)
            last = number == len(commands)
            if last and not optional:
                raise
            print(f"csrc: {problem}; going on without {name if last else ' '.join(THREADS)}", file=sys.stderr)


def replace(target: Path, made: Path) -> None:
    """Copy a library beside its place, then move it there: a process may have loaded the one before."""
    beside = target.with_suffix(f".{os.getpid()}")
    shutil.copyfile(made, beside)
    beside.replace(target)


def key(command: list[str]) -> str:
    """What a compiler makes depends on: its version, its arguments and the sources."""
    version = subprocess.run([command[0], "--version"], check=True, capture_output=True).stdout
    sources = (path.name.encode() + path.read_bytes() for path in sorted(CSRC.iterdir()))
    return hashlib.sha256(b"\0".join([version, *map(str.encode, command), *sources])).hexdigest()[:16]


def file_of(name: str) -> str:
    """A library's path in the package, the same for every Python: it knows none."""
    return str(Path(*name.split("."))) + ".so"


def build_in_place() -> None:
    """Compile the libraries beside the package, and say what is left out."""
    wanted_here = libraries()
    if CPU not in wanted_here:
        print(
            "csrc: no kernels for CPUs: no C++ compiler, or FB_BUILD_CPU=skip; plain PyTorch runs instead", flush=True
        )
    for name, optional in wanted_here.items():
        compile_library(name, Path(file_of(name)), optional)


if __name__ == "__main__":  # what is above is for others too, and needs no setuptools
    from setuptools import Extension, setup
    from setuptools.command.bdist_wheel import bdist_wheel
    from setuptools.command.build_ext import build_ext

    class BuildLibrary(build_ext):
        """Each shared library by one call of its compiler, with no Python in it."""

        def get_ext_filename(self, fullname: str) -> str:
            return file_of(fullname)

        def build_extension(self, ext: Extension) -> None:
            compile_library(ext.name, Path(self.get_ext_fullpath(ext.name)), ext.optional)

        def copy_extensions_to_source(self) -> None:
            """For an editable installation: built beside the package, unless it could not be built."""
            for ext in self.extensions:
                built = Path(self.build_lib, file_of(ext.name))
                if built.is_file():
                    replace(Path(file_of(ext.name)), built)

    class Wheel(bdist_wheel):
        """A wheel for every Python 3: with the library it is bound to the platform alone."""

        def get_tag(self) -> tuple[str, str, str]:
            return "py3", "none", super().get_tag()[2]

    headers = sorted(map(str, CSRC.glob("*.*h")))
    extensions = [
        Extension(name, SOURCES[name], depends=headers, optional=optional) for name, optional in libraries().items()
    ]
    setup(ext_modules=extensions, cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel})

"""The compiled kernels of csrc/; everything else is in pyproject.toml.

FB_BUILD_CUDA=auto|force|skip: build those for GPUs where nvcc is, always (and fail where it is not), or never.
FB_BUILD_CPU=auto|force|skip: likewise those for CPUs where a C++ compiler is: $CXX, c++, g++ or clang++.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

CSRC = Path("csrc")
USUAL = "/usr/local/cuda"  # where the toolkit lies
CUDA, CPU = "fb_kernels.libfb_kernels", "fb_kernels.libfb_cpu"
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


class BuildLibrary(build_ext):
    """Each shared library by one call of its compiler, with no Python in it."""

    def get_ext_filename(self, fullname: str) -> str:
        """The same name for every Python: the library knows none."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile csrc/*.cu for all architectures, or csrc/cpu.cpp."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        commands = [[str(cxx()), *CPU_FLAGS, *THREADS], [str(cxx()), *CPU_FLAGS]]
        if ext.name == CUDA:
            code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
            commands = [[str(nvcc()), *FLAGS, *code, "--threads", "0"]]
        for place, command in enumerate(commands, 1):
            command += [*ext.sources, "-o", str(target)]
            self.announce(" ".join(command), level=2)
            try:
                subprocess.run(command, check=True)
                break
            except (OSError, subprocess.CalledProcessError) as problem:
                target.unlink(missing_ok=True)
                last = place == len(commands)
                if last and not ext.optional:
                    raise
                print(f"csrc: {problem}; going on without {ext.name if last else ' '.join(THREADS)}", file=sys.stderr)

    def copy_extensions_to_source(self) -> None:
        """For an editable installation: built beside the package, unless it could not be built."""
        for ext in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(ext.name))
            if built.is_file():
                shutil.copyfile(built, self.get_ext_filename(ext.name))


class Wheel(bdist_wheel):
    """A wheel for every Python 3: with the library it is bound to the platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-<platform>, or py3-none-any."""
        return "py3", "none", super().get_tag()[2]


def wanted(variable: str, compiler: str | None, needed: str) -> str:
    """What an environment variable asks for: auto, force or skip; skip without a compiler."""
    value = os.environ.get(variable, "auto")
    if value not in ("auto", "force", "skip"):
        raise SystemExit(f"{variable}: expected auto, force or skip, got {value}; leave it out for auto")
    if value == "force" and compiler is None:
        raise SystemExit(f"{variable}=force: expected {needed}, got none; install it")
    return value if compiler else "skip"


def extensions() -> list[Extension]:
    """The libraries that are wanted and can be built."""
    searched = "nvcc in $CUDA_HOME, $CUDA_PATH, /usr/local/cuda or on the path"
    cuda = wanted("FB_BUILD_CUDA", nvcc(), searched)
    cpu = wanted("FB_BUILD_CPU", cxx(), "a C++ compiler on the path or in $CXX")
    sources, headers = (sorted(map(str, CSRC.glob(pattern))) for pattern in ("*.cu", "*.*h"))
    built = [Extension(CUDA, sources, depends=headers, optional=cuda == "auto")] if cuda != "skip" else []
    if cpu != "skip":
        built.append(Extension(CPU, [str(CSRC / "cpu.cpp")], depends=headers, optional=cpu == "auto"))
    return built


if __name__ == "__main__":  # the search for nvcc is for others too
    setup(ext_modules=extensions(), cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel})

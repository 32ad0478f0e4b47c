"""The compiled kernels of csrc/; everything else is in pyproject.toml.

FB_BUILD_CUDA=auto|force|skip: build them where nvcc is, always (and fail where it is not), or never.
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
ARCHITECTURES = ("80", "90a")
FLAGS = ["-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", "-cudart", "static"]


def nvcc() -> str | None:
    """The compiler of $CUDA_HOME, or the one on the path."""
    home = os.environ.get("CUDA_HOME")
    candidate = Path(home) / "bin" / "nvcc" if home else None
    return str(candidate) if candidate and candidate.is_file() else shutil.which("nvcc")


class BuildLibrary(build_ext):
    """One shared library by one call of nvcc, with no Python in it."""

    def get_ext_filename(self, fullname: str) -> str:
        """The same name for every Python: the library knows none."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile csrc/*.cu for all architectures."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
        command = [str(nvcc()), *FLAGS, *code, "--threads", "0", *ext.sources, "-o", str(target)]
        self.announce(" ".join(command), level=2)
        try:
            subprocess.run(command, check=True)
        except subprocess.CalledProcessError as problem:
            if not ext.optional:
                raise
            target.unlink(missing_ok=True)
            print(f"csrc: {problem}; going on without compiled kernels", file=sys.stderr)

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


def extensions() -> list[Extension]:
    """The library, or nothing."""
    wanted = os.environ.get("FB_BUILD_CUDA", "auto")
    if wanted not in ("auto", "force", "skip"):
        raise SystemExit(f"FB_BUILD_CUDA: expected auto, force or skip, got {wanted}; leave it out for auto")
    if wanted == "force" and nvcc() is None:
        raise SystemExit("FB_BUILD_CUDA=force: expected nvcc on the path or in $CUDA_HOME, got none; install CUDA")
    if wanted == "skip" or nvcc() is None:
        return []
    sources, headers = (sorted(map(str, CSRC.glob(pattern))) for pattern in ("*.cu", "*.*h"))
    return [Extension("fb_kernels.libfb_kernels", sources, depends=headers, optional=wanted == "auto")]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel})

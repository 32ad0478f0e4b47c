"""What a compiled function takes is read from its library, and passed by name."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fb_kernels._runtime import cpu, cuda, shared_library

SOURCES = Path(__file__).resolve().parents[2] / "csrc"
LIBRARIES = {"cpu": (cpu, "fbcpu_", "cpu.cpp"), "cuda": (cuda, "fb_", "*.cu")}
SOURCE = """
#include "interface.h"

extern "C" int fb_abi_version() { return 7; }

#define BOTH const float *x, *y; int64_t rows;

FB_FUNCTION(fb_scaled, BOTH  // a note, with a comma;
            int flag; double by; float* out; int more;) {
  for (int64_t i = 0; i < given.rows; ++i) given.out[i] = (given.x[i] + given.y[i]) * static_cast<float>(given.by);
  return given.y == nullptr ? -1 : int64_t{1} << 40;
}
"""


def built(source: str, folder: Path) -> ctypes.CDLL | str:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [compiler, f"-I{SOURCES}", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(folder / "built.so")]
    subprocess.run(command, input=source, text=True, check=True)
    return shared_library.opened(folder / "built.so", "fb_", 7, ("scaled",))


def test_arguments_are_passed_by_name(tmp_path: Path) -> None:
    library = built(SOURCE, tmp_path)
    assert not isinstance(library, str)
    x, out = (ctypes.c_float * 2)(1.5, 2.5), (ctypes.c_float * 2)()
    addresses = {name: ctypes.addressof(values) for name, values in {"x": x, "y": x, "out": out}.items()}
    given = {"more": 3, "by": 1e300, "flag": True, "rows": 2, **addresses}
    assert library.fb_scaled(**given) == 1 << 40
    assert [*out] == [float("inf")] * 2
    assert library.fb_scaled(**given | {"rows": 0, "y": 0}) == -1
    with pytest.raises(KeyError, match="by"):
        library.fb_scaled(**{name: value for name, value in given.items() if name != "by"}, bye=1)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("return 7", "return 6", "built from other sources, for interface 6 instead of 7: install it anew"),
        ("fb_scaled,", "fb_else,", "built from other sources: install it anew"),
        ("int more;", "int more[3];", "fb_scaled takes 64 bytes instead of 56: install it anew"),
    ],
)
def test_a_library_that_does_not_fit_is_refused(old: str, new: str, reason: str, tmp_path: Path) -> None:
    assert built(SOURCE.replace(old, new), tmp_path) == reason


def test_fields_are_read_as_they_stand() -> None:
    text = "const float* x, * y; int64_t rows, columns; const void* const *each; int flag; double eps;"
    letters = {"x": "P", "y": "P", "rows": "q", "columns": "q", "each": "P", "flag": "i", "eps": "d"}
    assert shared_library.fields(text) == letters
    with pytest.raises(KeyError):
        shared_library.fields("float eps;")


@pytest.mark.parametrize("which", LIBRARIES)
def test_every_function_is_known_and_interfaces_have_one_version(which: str) -> None:
    module, prefix, pattern = LIBRARIES[which]
    text = "".join(path.read_text() for path in sorted(SOURCES.glob(pattern)))
    assert sorted(re.findall(rf"FB_FUNCTION\({prefix}(\w+),", text)) == sorted(module.FUNCTIONS)
    assert re.findall(rf"{prefix}abi_version\(\) \{{ return (\d+); \}}", text) == [str(module.ABI_VERSION)]

"""What ctypes is told of the compiled functions is what their sources say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fb_kernels import cpu, cuda, shared_library

SOURCES = Path(__file__).resolve().parents[2] / "csrc"
LETTERS = {"int": "i", "int64_t": "q", "float": "f"}
HELD_BACK = {"abi_version", "is_emulation", "error_string", "emulate_multiprocessors"}  # of loader and emulation
RETURNED = {"error_string": "const char*"} | {  # others: int
    f"{name}_workspace": "int64_t" for name in ("branch_attention", "branch_attention_qkv")
}


def letter(parameter: str) -> str:
    """Of `const float* x` or `int64_t rows`; a type that has none is an error."""
    kind = re.fullmatch(r"(?:const )?([\w ]+?)\s*([*]?)\s*\w+", parameter.strip())
    assert kind, parameter
    return "p" if kind[2] else LETTERS[kind[1]]


def declared(text: str, prefix: str) -> dict[str, tuple[str, str]]:
    """{name: (what it returns, letters)} of the functions with this prefix that a source defines."""
    text = re.sub(r"//[^\n]*", "", text)
    found = re.findall(rf"(\w[\w ]*[*]?)\s+{prefix}(\w+)\(([^)]*)\)\s*\{{", text)
    assert [name for _, name, _ in found] == re.findall(rf"[\w*] {prefix}(\w+)\(", text)  # none is missed
    return {name: (kind, "".join(map(letter, filter(str.strip, inside.split(","))))) for kind, name, inside in found}


LIBRARIES = {"cpu": (cpu, "fbcpu_", "cpu.cpp"), "cuda": (cuda, "fb_", "*.cu")}


@pytest.mark.parametrize("which", LIBRARIES)
def test_signatures_are_those_of_the_sources(which: str) -> None:
    module, prefix, pattern = LIBRARIES[which]
    found = declared("".join(path.read_text() for path in sorted(SOURCES.glob(pattern))), prefix)
    typed = {name: signature.replace(" ", "") for name, signature in module._SIGNATURES.items()}
    assert {name: letters for name, (_, letters) in found.items() if name not in HELD_BACK} == typed
    assert {name: kind for name, (kind, _) in found.items() if kind != "int"} == {
        name: kind for name, kind in RETURNED.items() if name in found
    }


def test_a_declaration_is_read_as_it_stands() -> None:
    text = """
extern "C" int fb_one(const float* x, int64_t x_stride, int flag, float eps,
                      void* stream) {  // (a note)
  return 0;
}
"""
    assert declared(text, "fb_") == {"one": ("int", "pqifp")}
    assert len(shared_library.kinds("pq ifp")) == 5
    with pytest.raises(KeyError):
        declared(text.replace("float eps", "double eps"), "fb_")


@pytest.mark.parametrize("which", LIBRARIES)
def test_interfaces_have_one_version(which: str) -> None:
    module, prefix, pattern = LIBRARIES[which]
    text = "".join(path.read_text() for path in SOURCES.glob(pattern))
    assert re.findall(rf"{prefix}abi_version\(\) \{{ return (\d+); \}}", text) == [str(module.ABI_VERSION)]

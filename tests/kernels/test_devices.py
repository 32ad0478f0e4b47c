"""What is known of a device: the package's file, the user's before it, and what neither may say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fb_kernels._runtime import devices


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """(the package's, the user's), both empty."""
    package, user = tmp_path / "package", tmp_path / "user"
    package.mkdir()
    monkeypatch.setattr(devices.resources, "files", lambda _: package)
    monkeypatch.setenv(devices.VARIABLE, str(user))
    devices.forget()
    yield package, user
    devices.forget()


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA Graphics Device", "nvidia-graphics-device"),
        ("../x/../y", "x-y"),
        ("", ""),
    ],
)
def test_the_name_of_a_devices_files(device: str, name: str) -> None:
    assert devices.file_name(device) == name


def test_nothing_is_known_at_first() -> None:
    assert devices.launches("h200") == devices.off("h200", "triton") == {}


def test_the_users_file_goes_before_the_packages_entry_by_entry(folders: tuple[Path, Path]) -> None:
    package, user = folders
    devices.write(
        package, "h200", {}, launches={"a/b/1": {"BLOCK": 1}, "a/b/2": {"BLOCK": 2}}, off={"swiglu/triton": "x"}
    )
    path = devices.write(user, "h200", {"device": "NVIDIA H200"}, launches={"a/b/2": {"BLOCK": 4}})
    assert path == user / "h200.json"
    assert devices.launches("h200") == {"a/b/1": {"BLOCK": 1}, "a/b/2": {"BLOCK": 4}}
    assert devices.off("h200", "triton") == {"swiglu": "x"}
    assert devices.off("h200", "cuda") == devices.off("h100", "triton") == {}


def test_a_part_that_is_not_given_stays(folders: tuple[Path, Path]) -> None:
    _, user = folders
    devices.write(user, "h200", {}, launches={"a/b/1": {"BLOCK": 1}})
    devices.write(user, "h200", {"device": "x"}, off={"swiglu/triton": "wrong"})
    assert json.loads((user / "h200.json").read_text()) == {
        "device": "x",
        "launches": {"a/b/1": {"BLOCK": 1}},
        "off": {"swiglu/triton": "wrong"},
    }
    devices.write(user, "h200", {}, off={})
    assert devices.off("h200", "triton") == {}
    assert devices.launches("h200") == {"a/b/1": {"BLOCK": 1}}
    assert [file.name for file in user.iterdir()] == ["h200.json"]  # nothing unfinished is left


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "expected JSON, got "),
        ("[]", "expected an object, got list"),
        ('{"launches": []}', "expected an object as launches, got list"),
        ('{"launches": {"a/b/1": {}}}', "expected an object of whole numbers as launch a/b/1, got {}"),
        ('{"launches": {"a/b/1": {"BLOCK": 1.5}}}', "expected an object of whole numbers as launch a/b/1, got "),
        ('{"launches": {"a/b/1": {"BLOCK": true}}}', "expected an object of whole numbers as launch a/b/1, got "),
        ('{"off": {"swiglu": "x"}}', "expected op/kernel and a reason as what is off, got "),
        ('{"off": {"swiglu/triton": 1}}', "expected op/kernel and a reason as what is off, got "),
    ],
)
def test_a_file_that_says_something_else_is_not_used(folders: tuple[Path, Path], text: str, sentence: str) -> None:
    """Nor written over: ops run without it and say so."""
    _, user = folders
    user.mkdir()
    (user / "h200.json").write_text(text)
    for ask in (lambda: devices.launches("h200"), lambda: devices.off("h200", "triton")):
        with pytest.warns(RuntimeWarning, match=r"h200\.json: expected ") as warned:
            assert ask() == {}
        assert sentence in str(warned[0].message)
        assert "; delete the file and write it anew; until then nothing of it is used" in str(warned[0].message)
    with pytest.raises(ValueError, match=r"h200\.json: expected "):
        devices.write(user, "h200", {}, off={})


def test_a_file_that_is_no_text_is_not_used(folders: tuple[Path, Path]) -> None:
    _, user = folders
    user.mkdir()
    (user / "h200.json").write_bytes(b"\xff\xfe")
    with pytest.warns(RuntimeWarning, match=r"h200\.json"):
        assert devices.launches("h200") == {}


def test_without_the_variable_it_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(devices.VARIABLE)
    monkeypatch.setenv("HOME", "nowhere")
    assert devices.folder() == Path("nowhere", ".cache", "futurebridge")

"""Files of a run: whole or not there, and every damage named."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import tiny

from fb_core._util import write_file
from fb_core.apps.pipeline.files import (
    FORMAT,
    Artefact,
    json_bytes,
    sealed_bytes,
    table_bytes,
    tensor_bytes,
)
from fb_core.models.checkpoints import load_model

IDENTITY = {"settings": {"quantile": 0.99, "max_states": 8}, "models": {"tokenizer": "abc"}, "inputs": {}}


def begun(folder: Path, name: str = "states") -> Artefact:
    artefact = Artefact(folder, name)
    artefact.path.mkdir(parents=True, exist_ok=True)
    artefact.begin(IDENTITY, {"token_budget": 7})
    return artefact


def filled(folder: Path, shards: int = 3) -> tuple[Artefact, list[str]]:
    artefact, names = begun(folder), [f"train-{index:05d}" for index in range(shards)]
    for index, shard in enumerate(names):
        table = table_bytes([{"tokens": list(range(index + 2))}], {"tokens": pa.list_(pa.int32())})
        tensors = tensor_bytes({"logprob": torch.full((2, 3), float(index))})
        files = {f"{shard}.parquet": table, f"{shard}.safetensors": tensors}
        artefact.put(shard, files, {"states": index}, 1.5, "cpu")
    return artefact, names


def test_what_is_put_is_read_back_and_counted(tmp_path):
    artefact, names = filled(tmp_path)
    manifest = artefact.complete(names, {"threshold": 1.25})
    written = json.loads((artefact.path / "manifest.json").read_text())
    assert artefact.finished() == manifest == {key: value for key, value in written.items() if key != "sha256"}
    assert manifest["counts"] == {"states": 3}
    assert manifest["summary"] == {"threshold": 1.25}
    assert manifest["chosen"] == {"token_budget": 7}
    assert manifest["cost"] == {"seconds": 4.5, "gpu_hours": 0.0, "devices": ["cpu"]}
    assert {"torch", "transformers", "python"} <= manifest["made_by"][0].keys()
    assert artefact.table(names[1]) == [{"tokens": [0, 1, 2]}]
    assert torch.equal(artefact.tensors(names[2])["logprob"], torch.full((2, 3), 2.0))


def test_gpu_time_is_counted(tmp_path):
    artefact = begun(tmp_path)
    artefact.put("a", {"a.jsonl": b"{}"}, {}, 7200.0, "NVIDIA H200")
    artefact.put("b", {"b.jsonl": b"{}"}, {}, 3600.0, "cpu")
    assert artefact.complete(["a", "b"], {})["cost"] == {
        "seconds": 10800.0,
        "gpu_hours": 2.0,
        "devices": ["NVIDIA H200", "cpu"],
    }


def test_same_contents_have_the_same_bytes_and_digest(tmp_path):
    first, names = filled(tmp_path / "a")
    second, _ = filled(tmp_path / "b")
    digests = [artefact.complete(names, {})["digest"] for artefact in (first, second)]
    assert digests[0] == digests[1]
    for name in names:
        for suffix in ("parquet", "safetensors"):
            assert first.read(name, suffix) == second.read(name, suffix)
    second.put(names[0], {f"{names[0]}.parquet": b"other"}, {}, 1.0, "cpu")
    assert second.complete(names, {})["digest"] != digests[0]


@pytest.mark.parametrize("suffix", ["parquet", "safetensors", "json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "empty", "grown"])
def test_a_damaged_shard_is_named_and_not_done(tmp_path, caplog, suffix, damage):
    artefact, names = filled(tmp_path)
    path = artefact.path / f"{names[1]}.{suffix}"
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        middle = len(data) // 2
        path.write_bytes(
            {
                "cut": data[:-3],
                "flipped": data[:middle] + bytes([data[middle] ^ 0x80]) + data[middle + 1 :],
                "empty": b"",
                "grown": data + b"x",
            }[damage]
        )
    assert artefact.receipts(names).keys() == {names[0], names[2]}
    if (suffix, damage) != ("json", "gone"):
        assert str(path) in caplog.text
    if suffix == "parquet":
        with pytest.raises(ValueError, match=r"train-00001\.parquet"):
            artefact.table(names[1])


@pytest.mark.parametrize(
    "receipt",
    [
        {},
        {"files": 3},
        {"files": {}, "counts": {}},
        [1],
        {"files": {"a": {}}, "counts": {}, "seconds": 1.0, "device": ""},
        {"identity": "", "files": {}, "counts": {}, "seconds": 1.0, "device": ""},
        {"identity": "", "files": {"train-00000/../../x": {}}, "counts": {}, "seconds": 1.0, "device": ""},
        {"identity": "", "files": {"/dev/zero": {}}, "counts": {}, "seconds": 1.0, "device": ""},
        {"identity": "", "files": {"train-00000.parquet": {}}, "counts": {"a": "b"}, "seconds": 1.0, "device": ""},
        {"identity": "", "files": {"train-00000.parquet": {}}, "counts": {}, "seconds": "1", "device": ""},
    ],
)
def test_a_receipt_of_another_kind_is_no_receipt(tmp_path, receipt):
    artefact, names = filled(tmp_path, 1)
    data = sealed_bytes(receipt) if isinstance(receipt, dict) else json.dumps(receipt).encode()
    (artefact.path / f"{names[0]}.json").write_bytes(data)
    with pytest.raises(ValueError, match=names[0]):
        artefact.receipt(names[0])
    assert artefact.receipts(names) == {}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"settings": {"quantile": 0.95, "max_states": 8}}, "settings.quantile 0.99, got 0.95"),
        ({"settings": {"max_states": 8}}, "settings.quantile 0.99, got nothing"),
        ({"models": {"tokenizer": "xyz"}}, "models.tokenizer abc, got xyz"),
        ({"inputs": {"states": "d"}}, "inputs.states nothing, got d"),
    ],
)
def test_another_identity_is_refused_by_name(tmp_path, changed, words):
    artefact, _ = filled(tmp_path)
    before = (artefact.path / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match=words):
        artefact.begin(IDENTITY | changed, {})
    assert (artefact.path / "manifest.json").read_bytes() == before
    artefact.begin(IDENTITY, {})


def test_a_stage_in_which_nothing_is_made_yet_begins_anew(tmp_path):
    changed = IDENTITY | {"inputs": {"scores": "d"}}
    assert begun(tmp_path).begin(changed, {"token_budget": 9})["chosen"] == {"token_budget": 9}
    assert Artefact(tmp_path, "states").manifest()["identity"] == changed


def test_shards_of_another_identity_are_not_done(tmp_path):
    artefact, names = filled(tmp_path)
    (artefact.path / "manifest.json").unlink()
    artefact.begin(IDENTITY, {})
    assert artefact.receipts(names).keys() == set(names)
    (artefact.path / "manifest.json").unlink()
    artefact.begin(IDENTITY | {"settings": {"quantile": 0.5}}, {})
    assert artefact.receipts(names) == {}


def test_the_first_choice_stays(tmp_path):
    artefact, _ = filled(tmp_path)
    assert artefact.begin(IDENTITY, {"token_budget": 9})["chosen"] == {"token_budget": 7}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"stage": "futures"}', "\xff", "[" * 100_000])
def test_a_damaged_manifest_is_named(tmp_path, text):
    artefact, _ = filled(tmp_path)
    (artefact.path / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"manifest\.json"):
        artefact.begin(IDENTITY, {})


DAMAGES = {  # of one field, or of the whole file
    "missing": lambda value, name: {key: old for key, old in value.items() if key != name},
    "null": lambda value, name: value | {name: None},
    "number": lambda value, name: value | {name: 7},
    "negative": lambda value, name: value | {name: -1.5},
    "text": lambda value, name: value | {name: "x"},
    "list": lambda value, name: value | {name: [1]},
    "object": lambda value, name: value | {name: {"a": 1}},
    "empty": lambda value, name: value | {name: {}},
    "NaN": lambda value, name: value | {name: math.nan},
    "infinity": lambda value, name: value | {name: math.inf},
    "huge": lambda value, name: value | {name: 10**400},
    "inside": lambda value, name: value | {name: {"a": math.nan, "b": [10**4000]}},
}


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def damaged_texts(text: str) -> dict[str, bytes]:
    """The file with each of its fields damaged in every way, and damaged as a whole."""
    value = json.loads(text)
    texts = {
        f"{name} {damage}": json.dumps(change(value, name)).encode()
        for name in [*value, "unknown"]
        for damage, change in DAMAGES.items()
        if change(value, name) != value
    }
    for name in value:
        for depth in (100, 900, 10_000, 1_000_000):
            whole = json.dumps(value | {name: "@"})
            texts[f"{name} nested {depth}"] = whole.replace('"@"', nested(depth)).encode()
        texts[f"{name} of many digits"] = json.dumps(value | {name: "@"}).replace('"@"', "1" * 5_000).encode()
    texts |= {f"cut at {at}": text.encode()[:at] for at in range(0, len(text) - 2, 97)}
    texts |= {"not UTF-8": b"\xff" + text.encode(), "NUL": b"\0" * 100}
    texts |= {"a list": b"[]", "a number": b"3", "null": b"null", "twice": text.encode() * 2, "nested": b"[" * 10_000}
    return texts


def unsaid(path, use):
    """What a use of a damaged file does other than to name it in one sentence; None where it does that."""
    try:
        use()
    except ValueError as problem:
        said = str(path) in str(problem) and "\n" not in str(problem) and len(str(problem)) < 1000
        return None if said else problem
    except Exception as problem:
        return repr(problem)[:100]
    return "taken"


def test_every_edit_of_a_manifest_is_one_sentence_with_its_name(tmp_path):
    artefact, names = filled(tmp_path)
    artefact.complete(names, {"threshold": 1.25})
    path = artefact.path / "manifest.json"
    whole = path.read_text()
    tried = damaged_texts(whole)
    uses = [artefact.manifest, artefact.finished, lambda: artefact.begin(IDENTITY, {}), artefact._identity]
    wrong = []
    for name, data in tried.items():
        path.write_bytes(data)
        wrong += [(name, fault) for use in uses if (fault := unsaid(path, use))]
    assert not wrong, f"{len(wrong)} of {len(uses) * len(tried)}"
    path.write_text(whole)
    assert artefact.finished()["complete"]


def test_every_edit_of_a_receipt_is_one_sentence_with_its_name(tmp_path):
    artefact, names = filled(tmp_path)
    path = artefact.path / f"{names[1]}.json"
    whole = path.read_text()
    wrong, tried = [], damaged_texts(whole)
    for name, data in tried.items():
        path.write_bytes(data)
        uses = (lambda: artefact.receipt(names[1]), lambda: artefact.table(names[1]))
        wrong += [(name, fault) for use in uses if (fault := unsaid(path, use))]
        with pytest.raises(ValueError, match="damaged meanwhile"):
            artefact.complete(names, {})
    assert not wrong, f"{len(wrong)} of {2 * len(tried)}"
    path.write_text(whole)
    assert artefact.complete(names, {})["counts"] == {"states": 3}


@pytest.mark.parametrize(
    "manifest",
    [
        {},
        {"stage": "states", "format": FORMAT},
        {"stage": "states", "format": FORMAT, "identity": {}, "chosen": {}, "made_by": [], "complete": True},
        {"stage": "states", "format": FORMAT, "identity": {}, "chosen": {}, "made_by": None, "complete": False},
        {"stage": "futures", "identity": {}, "chosen": {}, "made_by": [], "complete": False},
    ],
)
def test_a_manifest_of_another_kind_is_no_manifest(tmp_path, manifest):
    artefact, _ = filled(tmp_path)
    (artefact.path / "manifest.json").write_bytes(sealed_bytes(manifest))
    with pytest.raises(ValueError, match=r"manifest\.json: expected the manifest of states"):
        artefact.finished()


def test_files_of_another_format_are_refused_by_name(tmp_path):
    artefact, names = filled(tmp_path)
    assert artefact.table(names[0])
    buffer = io.BytesIO()
    pq.write_table(pa.table({"tokens": [[1]]}), buffer)  # as before tables said their format
    artefact.put(names[0], {f"{names[0]}.parquet": buffer.getvalue()}, {}, 1.0, "cpu")
    words = f"{names[0]}.parquet: expected files of format {FORMAT}, got format 1; run the stage again into a new run"
    with pytest.raises(ValueError, match=re.escape(words)):
        artefact.table(names[0])
    for format_, said in ((1, "1"), (None, "None"), ("9" * 5000, "999")):
        manifest = artefact.manifest()
        (artefact.path / "manifest.json").write_bytes(sealed_bytes(manifest | {"format": format_}))
        words = f"manifest.json: expected files of format {FORMAT}, got format {said}"
        for use in (artefact.finished, lambda: artefact.begin(IDENTITY, {}), lambda: artefact.receipt(names[1])):
            with pytest.raises(ValueError, match=re.escape(words)) as raised:
                use()
            assert str(raised.value).endswith("; run the stage again into a new run folder")
        (artefact.path / "manifest.json").write_bytes(sealed_bytes(manifest))
    before = {key: value for key, value in manifest.items() if key != "format"}  # of the first format
    (artefact.path / "manifest.json").write_bytes(sealed_bytes(before | {"shards": 3}))
    with pytest.raises(ValueError, match="expected files of format 3, got format 1"):
        artefact.begin(IDENTITY, {})


def test_an_unfinished_stage_is_not_finished(tmp_path):
    with pytest.raises(ValueError, match="expected finished states, got none"):
        Artefact(tmp_path, "states").finished()
    artefact, _ = filled(tmp_path)
    with pytest.raises(ValueError, match="expected finished states, got a part"):
        artefact.finished()


def test_two_processes_do_not_work_on_one_folder(tmp_path):
    artefact, _ = filled(tmp_path)
    code = (
        "import sys, pathlib\nfrom fb_core.apps.pipeline.files import Artefact\n"
        "with Artefact(pathlib.Path(sys.argv[1]), 'states').locked():\n    pass\n"
    )
    with artefact.locked():
        other = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert "expected to be the only process" in other.stderr
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 0


def test_what_a_killed_process_left_half_written_is_removed(tmp_path):
    artefact, names = filled(tmp_path)
    left = artefact.path / f".{names[0]}.parquet.host.123.part"
    left.write_bytes(b"half")
    with artefact.locked():
        assert not left.exists()
    assert artefact.receipts(names).keys() == set(names)


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_a_file_is_replaced_whole(before, after):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.bin"
        for data in (before, after):
            write_file(path, data)
            assert path.read_bytes() == data
        assert os.listdir(folder) == ["a.bin"]


def test_a_limit_on_file_sizes_leaves_what_was_there(tmp_path):
    code = (
        "import pathlib, resource, signal, sys\n"
        "from fb_core.atomic import write_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "write_file(path, b'before')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n    write_file(path, b'x' * 5000)\n"
        "except OSError as problem:\n    print(problem)\n"
    )
    path = tmp_path / "a.bin"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert "expected to write 5000 bytes" in done.stdout
    assert "what is finished is kept" in done.stdout
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting takes rights that this process has not")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_named_and_loses_nothing(small_disk):
    artefact = begun(small_disk)
    artefact.put("a", {"a.jsonl": b"a" * 60_000}, {"rows": 1}, 1.0, "cpu")
    with pytest.raises(OSError, match=r"expected to write 400000 bytes.*make room") as problem:
        artefact.put("b", {"b.jsonl": b"b" * 400_000}, {"rows": 1}, 1.0, "cpu")
    assert problem.value.errno == errno.ENOSPC
    assert artefact.receipts(["a", "b"]).keys() == {"a"}
    assert not [name for name in os.listdir(artefact.path) if name.endswith(".part")]
    artefact.put("b", {"b.jsonl": b"b" * 40_000}, {"rows": 1}, 1.0, "cpu")
    assert artefact.complete(["a", "b"], {})["counts"] == {"rows": 2}


def test_json_has_no_nan():
    with pytest.raises(ValueError):
        json_bytes({"a": float("nan")})


# --- checkpoints ------------------------------------------------------------------------------------------------------

LAST = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "layers", "words"),
    [
        (lambda t: {name: x for name, x in t.items() if name != LAST}, 2, f"got nothing for {LAST} (1 in all);"),
        (lambda t: t, 3, "got nothing for model.layers.2.input_layernorm.weight (11 in all);"),
        (lambda t: t, 1, "got no place for model.layers.1.input_layernorm.weight (11 in all);"),
        (
            lambda t: {"module." + name: x for name, x in t.items()},
            2,
            "no place for module.model.embed_tokens.weight (",
        ),
        (lambda t: t | {LAST: torch.ones(40, 32)}, 2, f"got another shape of {LAST} (1 in all);"),
        (lambda t: t | {"lm_head.bias": torch.ones(50)}, 2, "got no place for lm_head.bias (1 in all);"),
        (lambda t: t | {"score.weight": torch.ones(1, 32)}, 2, None),
        (lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, 2, None),
        (lambda t: {name.removeprefix("model."): x for name, x in t.items()}, 2, None),
    ],
)
def test_a_checkpoint_has_the_weights_of_its_config_and_no_others(tmp_path, change, layers, words):
    model = tiny("qwen3")
    model.config.num_hidden_layers, model.config.layer_types = layers, ["full_attention"] * layers
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    if words is None:
        loaded = load_model(str(tmp_path), "cpu")[0]
        assert all(map(torch.equal, loaded.parameters(), model.parameters()))
    else:
        with pytest.raises(ValueError, match=f"^{tmp_path}: expected the weights of the .*{re.escape(words)}"):
            load_model(str(tmp_path), "cpu")


@pytest.mark.parametrize("damage", [lambda _: b"", lambda _: b"version https://git-lfs", lambda data: data[:-9]])
@pytest.mark.parametrize("name", ["model-00002-of-00004.safetensors", "model.safetensors.index.json"])
def test_a_damaged_checkpoint_is_one_sentence_with_its_folder(tmp_path, name, damage):
    tiny("qwen3").save_pretrained(tmp_path, max_shard_size="20KB")
    file = tmp_path / name
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(OSError, match=f"^{tmp_path}: expected a model in safetensors, got a damaged file"):
        load_model(str(tmp_path), "cpu")

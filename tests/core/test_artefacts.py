"""Files of a run: whole or not there, and every damage named."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import resource
import signal
import subprocess
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from limits import HANG
from safetensors.torch import load_file, save_file
from tiny import tiny
from warm import context

from fb_core._util import write_file
from fb_core.apps.pipeline.files import FORMAT, Artefact, json_bytes, sealed_bytes, table_bytes, tensor_bytes
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
    cost = {"seconds": 10800.0, "gpu_hours": 2.0, "devices": ["NVIDIA H200", "cpu"]}
    assert artefact.complete(["a", "b"], {})["cost"] == cost
    with pytest.raises(ValueError, match="JSON"):
        json_bytes({"a": math.nan})


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


RECEIPT = {"identity": "", "files": {"train-00000.parquet": {}}, "counts": {}, "seconds": 1.0, "device": ""}


@pytest.mark.parametrize(
    "receipt",
    [
        *({}, {"files": 3}, {"files": {}, "counts": {}}, [1], {**RECEIPT, "files": {}}, {**RECEIPT, "seconds": "1"}),
        *({**RECEIPT, "files": {name: {}}} for name in ("train-00000/../../x", "/dev/zero")),
        {**RECEIPT, "counts": {"a": "b"}},
        {name: value for name, value in RECEIPT.items() if name != "identity"},
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
    ("name", "changed", "words"),
    [
        ("settings", {"quantile": 0.95, "max_states": 8}, "settings.quantile 0.99, got 0.95"),
        ("settings", {"max_states": 8}, "settings.quantile 0.99, got nothing"),
        ("models", {"tokenizer": "xyz"}, "models.tokenizer abc, got xyz"),
        ("inputs", {"states": "d"}, "inputs.states nothing, got d"),
    ],
)
def test_another_identity_is_refused_by_name(tmp_path, name, changed, words):
    artefact, _ = filled(tmp_path)
    before = (artefact.path / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match=words):
        artefact.begin(IDENTITY | {name: changed}, {})
    assert (artefact.path / "manifest.json").read_bytes() == before
    assert artefact.begin(IDENTITY, {"token_budget": 9})["chosen"] == {"token_budget": 7}  # the first choice stays


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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"stage": "futures"}', "\xff", "[" * 100_000])
def test_a_damaged_manifest_is_named(tmp_path, text):
    artefact, _ = filled(tmp_path)
    (artefact.path / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"manifest\.json"):
        artefact.begin(IDENTITY, {})


VALUES = {"null": None, "number": 7, "negative": -1.5, "text": "x", "list": [1], "object": {"a": 1}, "empty": {}}
VALUES |= {"NaN": math.nan, "infinity": math.inf, "huge": 10**400, "inside": {"a": math.nan, "b": [10**4000]}}


def damaged_texts(text: str) -> dict[str, bytes]:
    """The file with each of its fields damaged in every way, and damaged as a whole."""
    value = json.loads(text)
    texts = {
        f"{name} {damage}": json.dumps(value | {name: other}).encode()
        for name in [*value, "unknown"]
        for damage, other in VALUES.items()
        if value.get(name) != other
    }
    texts |= {f"{name} gone": json.dumps({k: old for k, old in value.items() if k != name}).encode() for name in value}
    for name in value:
        for depth in (100, 900, 10_000, 1_000_000):
            whole = json.dumps(value | {name: "@"})
            texts[f"{name} nested {depth}"] = whole.replace('"@"', "[" * depth + "]" * depth).encode()
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


@pytest.mark.parametrize("kind", ["manifest", "receipt"])
def test_every_edit_of_a_file_is_one_sentence_with_its_name(tmp_path, kind):
    artefact, names = filled(tmp_path)
    if kind == "manifest":
        artefact.complete(names, {"threshold": 1.25})
        path = artefact.path / "manifest.json"
        uses = [artefact.manifest, artefact.finished, lambda: artefact.begin(IDENTITY, {}), artefact._identity]
    else:
        path = artefact.path / f"{names[1]}.json"
        uses = [lambda: artefact.receipt(names[1]), lambda: artefact.table(names[1])]
    whole = path.read_text()
    wrong, tried = [], damaged_texts(whole)
    for name, data in tried.items():
        path.write_bytes(data)
        wrong += [(name, fault) for use in uses if (fault := unsaid(path, use))]
        if kind == "receipt":
            with pytest.raises(ValueError, match="damaged meanwhile"):
                artefact.complete(names, {})
    assert not wrong, f"{len(wrong)} of {len(uses) * len(tried)}"
    path.write_text(whole)
    assert artefact.complete(names, {})["counts"] == {"states": 3}


@pytest.mark.parametrize(
    "changes", [{"identity": None}, {"complete": True}, {"made_by": None}, {"stage": "futures"}, {"format": None}]
)
def test_a_manifest_of_another_kind_is_no_manifest(tmp_path, changes):
    artefact, _ = filled(tmp_path)
    manifest = {"stage": "states", "format": FORMAT, "identity": {}, "chosen": {}, "made_by": [], "complete": False}
    changed = {name: value for name, value in (manifest | changes).items() if value is not None or name == "made_by"}
    (artefact.path / "manifest.json").write_bytes(sealed_bytes(changed))
    with pytest.raises(ValueError, match=r"manifest\.json:"):
        artefact.finished()


def test_files_of_another_format_are_refused_by_name(tmp_path):
    artefact, names = filled(tmp_path)
    buffer = io.BytesIO()
    pq.write_table(pa.table({"tokens": [[1]]}), buffer)  # as before tables said their format
    artefact.put(names[0], {f"{names[0]}.parquet": buffer.getvalue()}, {}, 1.0, "cpu")
    with pytest.raises(ValueError, match=rf"{names[0]}\.parquet: .*format {FORMAT}, got format 1; run the stage again"):
        artefact.table(names[0])
    manifest, path = artefact.manifest(), artefact.path / "manifest.json"
    for format_, said in ((1, "1"), (None, "None"), ("9" * 5000, "999")):
        path.write_bytes(sealed_bytes(manifest | {"format": format_}))
        for use in (artefact.finished, lambda: artefact.begin(IDENTITY, {}), lambda: artefact.receipt(names[1])):
            with pytest.raises(ValueError, match=rf"manifest\.json: .*got format {said}.*run the stage again"):
                use()
    before = {key: value for key, value in manifest.items() if key != "format"}  # of the first format
    path.write_bytes(sealed_bytes(before | {"shards": 3}))
    with pytest.raises(ValueError, match="got format 1"):
        artefact.begin(IDENTITY, {})


def test_an_unfinished_stage_is_not_finished(tmp_path):
    for got in ("none", "a part"):
        with pytest.raises(ValueError, match=f"finished states, got {got}"):
            Artefact(tmp_path, "states").finished()
        filled(tmp_path)


def told(use, folder):
    """The exit code of a process of its own, and what it was told."""
    process = context().Process(target=tell, args=(use, folder))
    process.start()
    process.join(HANG)
    said = folder / "said"
    return process.exitcode, said.read_text() if said.exists() else ""


def tell(use, folder):
    try:
        use(folder)
    except Exception as problem:
        (folder / "said").write_text(str(problem))
        raise SystemExit(1) from None


def lock(folder):
    with Artefact(folder, "states").locked():
        pass


def test_two_processes_do_not_work_on_one_folder(tmp_path):
    artefact, _ = filled(tmp_path)
    with artefact.locked():
        code, said = told(lock, tmp_path)
    assert code == 1
    assert "expected to be the only process" in said
    assert told(lock, tmp_path)[0] == 0


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


def overwrite(folder):
    path = folder / "files" / "a.bin"
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    write_file(path, b"before")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    write_file(path, b"x" * 5000)


def test_a_limit_on_file_sizes_leaves_what_was_there(tmp_path):
    (tmp_path / "files").mkdir()
    code, said = told(overwrite, tmp_path)
    assert code == 1
    assert "expected to write 5000 bytes" in said
    assert "what is finished is kept" in said
    assert (tmp_path / "files" / "a.bin").read_bytes() == b"before"
    assert os.listdir(tmp_path / "files") == ["a.bin"]


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


# --- checkpoints ------------------------------------------------------------------------------------------------------

LAST = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "layers", "words"),
    [
        (lambda t: {name: x for name, x in t.items() if name != LAST}, 2, f"nothing for {LAST} (1 "),
        *((lambda t: t, 3, "nothing for model.layers.2."), (lambda t: t, 1, "no place for model.layers.1.")),
        (lambda t: {"module." + name: x for name, x in t.items()}, 2, "no place for module.model."),
        (lambda t: t | {LAST: torch.ones(40, 32)}, 2, f"another shape of {LAST} (1 "),
        (lambda t: t | {"lm_head.bias": torch.ones(50)}, 2, "no place for lm_head.bias (1 "),
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
        with pytest.raises(ValueError, match=f"^{tmp_path}: .*{re.escape(words)}"):
            load_model(str(tmp_path), "cpu")


@pytest.mark.parametrize("damage", [lambda _: b"", lambda _: b"version https://git-lfs", lambda data: data[:-9]])
@pytest.mark.parametrize("name", ["model-00002-of-00004.safetensors", "model.safetensors.index.json"])
def test_a_damaged_checkpoint_is_one_sentence_with_its_folder(tmp_path, name, damage):
    tiny("qwen3").save_pretrained(tmp_path, max_shard_size="20KB")
    file = tmp_path / name
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(OSError, match=f"^{tmp_path}: expected a model in safetensors, got a damaged file"):
        load_model(str(tmp_path), "cpu")

"""A run's files on disk: shards with receipts, and one manifest per stage. No file is ever there in part.

A stage's folder holds `<shard>.parquet`, `.safetensors` or `.jsonl`, for each shard a receipt `<shard>.json` (hashes,
counts, time), which is written last, and `manifest.json`. A shard is done if its receipt and all its files agree.
Receipts and manifests hold a hash of their contents. An edited or damaged shard is made anew when its stage runs again;
a later stage that reads it refuses it by name.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import platform
import reprlib
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fb_core._util import PART, read_file, write_file

try:
    import fcntl
except ImportError:  # on Windows; a second process is not kept out there
    fcntl = None  # type: ignore[assignment]

MANIFEST = "manifest.json"
LOCK = ".lock"
NO_GPU = ("cpu", "server")  # devices whose time does not count as GPU time
LONGEST_JSON = 64 << 20  # bytes
SEAL = "sha256"  # key of the hash of the rest of a receipt or manifest
FORMAT = 3  # of the files in a stage's folder; format 2 kept groups without a future
IN_TABLE = b"futurebridge.format"  # key of the format in a table's metadata
BEGUN = (("identity", dict), ("chosen", dict), ("made_by", list), ("complete", bool))  # keys of a manifest, with types
FINISHED = (*BEGUN, ("shards", list), ("counts", dict), ("summary", dict), ("digest", str), ("cost", dict))
SOFTWARE = ("futurebridge", "torch", "transformers", "peft", "accelerate", "pyarrow", "safetensors", "math-verify")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Receipt:
    """A finished shard."""

    identity: str  # digest of the stage's identity when it began
    files: dict[str, dict[str, Any]]  # name -> {"bytes", "sha256"}
    counts: dict[str, int]  # what the shard holds, by name
    seconds: float  # wall time of the work, summed over processes
    device: str  # where it ran, such as "cpu", "server" or "NVIDIA H200"


def count_all(receipts: Iterable[Receipt]) -> Counter[str]:
    """The counts of shards, added up by name."""
    counts: Counter[str] = Counter()
    for receipt in receipts:
        counts.update(receipt.counts)
    return counts


def table_bytes(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, pa.DataType]) -> bytes:
    """Rows as a parquet file; the same rows give the same bytes."""
    schema, buffer = pa.schema(list(columns.items()), {IN_TABLE: str(FORMAT)}), io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows), schema), buffer, compression="zstd")
    return buffer.getvalue()


def tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Named tensors as a safetensors file."""
    return save({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, {"format": "pt"})


def json_bytes(value: Any) -> bytes:
    """Plain values as JSON that a person can read."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def sealed_bytes(value: dict[str, Any]) -> bytes:
    """`json_bytes` of a dict together with its hash."""
    return json_bytes(value | {SEAL: digest(value)})


class Artefact:
    """One stage's folder: it has the stage's name and lies in the run's."""

    def __init__(self, run: Path, stage: str) -> None:
        self.path = run / stage
        self.stage = stage

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of the folder, and remove files that a killed process left unfinished.

        ValueError if another process works on it, OSError if it cannot be made.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("ab") as lock:
            try:
                if fcntl is not None:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                words = "expected to be the only process at work there, got another one; wait until it ends"
                raise ValueError(f"{self.path}: {words}") from None
            except OSError as problem:  # a file system without locks
                log.warning("%s: cannot be locked (%s); start no second process on it", self.path, problem.strerror)
            for left in self.path.rglob(f".*{PART}"):
                left.unlink(missing_ok=True)
            yield

    def manifest(self) -> dict[str, Any] | None:
        """The manifest; None if the stage has not begun, ValueError if it is damaged."""
        path = self.path / MANIFEST
        if not path.is_file():
            return None
        manifest = _read_sealed(path)
        if is_own := manifest.get("stage") == self.stage:
            _check_format(path, manifest.get("format", 1))
        kinds = FINISHED if manifest.get("complete") else BEGUN
        if not is_own or any(type(manifest.get(name)) is not kind for name, kind in kinds):
            words = f"expected the manifest of {self.stage}, got another one; choose another run folder"
            raise ValueError(f"{path}: {words}")
        return manifest

    def begin(self, identity: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
        """Begin the stage, or resume it; returns the manifest.

        `chosen` was decided for this machine; if the stage has begun, what its manifest holds counts. ValueError with
        the differences if it was begun with another identity.
        """
        identity = json.loads(json.dumps(identity))
        manifest = self.manifest()
        if manifest is None or self.empty():
            manifest = {"stage": self.stage, "format": FORMAT, "identity": identity, "chosen": chosen}
            manifest |= {"made_by": [], "complete": False}
        self.check(manifest, identity)
        software = _software()
        if software not in manifest["made_by"]:
            manifest["made_by"].append(software)
            self._write_manifest(manifest)
        return manifest

    def check(self, manifest: dict[str, Any], identity: dict[str, Any]) -> None:
        """ValueError if shards were made with other values of these parts of the stage's identity."""
        if self.empty():
            return
        before = {part: manifest["identity"].get(part) for part in identity}
        if differences := "; ".join(_differences(before, json.loads(json.dumps(identity)))):
            raise ValueError(
                f"{self.path}: begun with {differences}; put that back, or delete this folder, which makes "
                f"{self.stage} anew and keeps the stages before it"
            )

    def receipts(self, shards: Iterable[str]) -> dict[str, Receipt]:
        """The receipts of the shards that are done; a damaged shard is logged and counts as not done."""
        receipts = {}
        for shard in shards:
            try:
                if (receipt := self.receipt(shard)) is not None:
                    receipts[shard] = receipt
            except ValueError as problem:
                log.warning("%s; the shard is made anew", problem)
        return receipts

    def receipt(self, shard: str) -> Receipt | None:
        """A shard's receipt, once its files were checked against it; None if it is not done, or done for another run.

        ValueError if a file is damaged.
        """
        path = self.path / f"{shard}.json"
        if not path.is_file():
            return None
        try:
            receipt = Receipt(**_read_sealed(path))
            names = [Path(name) for name in receipt.files]
            if not names or any(".." in name.parts or not name.parts[0].startswith(shard) for name in names):
                raise TypeError(f"files {sorted(receipt.files)}")
            if not all(type(count) is int for count in receipt.counts.values()) or type(receipt.seconds) is not float:
                raise TypeError("counts and seconds that are no numbers")
            if receipt.identity != self._identity():
                return None
            for name, recorded in receipt.files.items():
                _checked_bytes(self.path / name, recorded)
        except (AttributeError, IndexError, KeyError, TypeError) as problem:
            raise ValueError(f"{path}: expected the receipt of a shard, got another file ({problem})") from None
        return receipt

    def put(
        self, shard: str, files: Mapping[str, bytes], counts: Mapping[str, int], seconds: float, device: str
    ) -> None:
        """Write a shard's files, named relative to the folder, then its receipt."""
        recorded = {}
        for name, data in files.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path / name, data)
            recorded[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        receipt = Receipt(self._identity(), recorded, dict(counts), round(float(seconds), 3), device)
        write_file(self.path / f"{shard}.json", sealed_bytes(asdict(receipt)))

    def complete(self, shards: Sequence[str], summary: dict[str, Any]) -> dict[str, Any]:
        """Write counts, cost and the digest of the files into the manifest, and return it; ValueError if one is bad."""
        receipts, manifest = self.receipts(shards), self.manifest()
        left = [shard for shard in shards if shard not in receipts]
        if left or manifest is None:
            raise ValueError(f"{self.path}: expected all shards done, got {left} damaged meanwhile; run again")
        made = receipts.values()
        hashes = {name: file["sha256"] for receipt in made for name, file in receipt.files.items()}
        gpu_seconds = sum(receipt.seconds for receipt in made if receipt.device not in NO_GPU)
        manifest |= {
            "complete": True,
            "shards": list(shards),
            "counts": dict(count_all(made)),
            "summary": summary,
            "digest": digest([manifest["identity"], sorted(hashes.items()), summary]),
            "cost": {
                "seconds": round(sum(receipt.seconds for receipt in made), 3),
                "gpu_hours": round(gpu_seconds / 3600, 4),
                "devices": sorted({receipt.device for receipt in made}),
            },
        }
        self._write_manifest(manifest)
        return manifest

    def finished(self, remedy: str = "run its command to the end") -> dict[str, Any]:
        """The manifest of a finished stage; ValueError, which ends with the remedy, if it is not finished."""
        manifest = self.manifest()
        if manifest is None or not manifest["complete"]:
            got = "none" if manifest is None else "a part"
            raise ValueError(f"{self.path}: expected finished {self.stage}, got {got}; {remedy}")
        return manifest

    def shards(self, split: str = "") -> list[str]:
        """The names of a finished stage's shards, optionally only those of one split; raises as `finished`."""
        return [shard for shard in self.finished()["shards"] if shard.startswith(split)]

    def table(self, shard: str) -> list[dict[str, Any]]:
        """The rows of a shard's parquet file; raises as `read`, and ValueError if its format is another."""
        data, path = self.read(shard, "parquet"), self.path / f"{shard}.parquet"
        try:
            table = pq.ParquetFile(io.BytesIO(data)).read()  # read_table would import datasets
        except pa.ArrowException as problem:
            raise ValueError(f"{path}: expected a table, got {problem}; make the shard anew") from None
        _check_format(path, (table.schema.metadata or {}).get(IN_TABLE, b"1").decode(errors="replace"), str(FORMAT))
        return table.to_pylist()

    def tensors(self, shard: str) -> dict[str, Tensor]:
        """A shard's tensors; raises as `read`."""
        data, path = self.read(shard, "safetensors"), self.path / f"{shard}.safetensors"
        try:
            return load(data)
        except SafetensorError as problem:
            raise ValueError(f"{path}: expected tensors, got {problem}; make the shard anew") from None

    def read(self, shard: str, suffix: str) -> bytes:
        """The bytes of a finished shard's file, checked against its receipt; ValueError if missing or damaged."""
        path, name = self.path / f"{shard}.json", f"{shard}.{suffix}"
        try:
            return _checked_bytes(self.path / name, _read_sealed(path)["files"][name])
        except (KeyError, TypeError):
            raise ValueError(f"{path}: expected the receipt of {name}, got none; run the stage again") from None

    def empty(self) -> bool:
        """Whether no shard is made yet."""
        return all(path.name == MANIFEST for path in self.path.glob("*.json"))

    def _identity(self) -> str:
        """The digest of the identity that the stage was begun with."""
        manifest = self.manifest()
        return "" if manifest is None else digest(manifest["identity"])

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        write_file(self.path / MANIFEST, sealed_bytes(manifest))


def digest(value: Any) -> str:
    """SHA-256 of plain values as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _checked_bytes(path: Path, recorded: dict[str, Any]) -> bytes:
    size = recorded["bytes"]
    try:
        data = read_file(path, size)
    except OSError as problem:
        raise ValueError(f"{path}: expected {size} bytes, got {problem.strerror}; run the stage again") from None
    except ValueError:
        data = b""
    if len(data) != size or hashlib.sha256(data).hexdigest() != recorded["sha256"]:
        words = f"expected the {size} bytes of its receipt, got others (damaged or edited); run the stage again"
        raise ValueError(f"{path}: {words}")
    return data


def _check_format(path: Path, number: Any, expected: Any = FORMAT) -> None:
    if number != expected:
        got = reprlib.repr(number).strip("'")
        words = f"expected files of format {FORMAT}, got format {got}; run the stage again into a new run folder"
        raise ValueError(f"{path}: {words}")


def _read_sealed(path: Path) -> dict[str, Any]:
    """The dict that `sealed_bytes` wrote, without its hash; ValueError if the file holds something else."""
    try:
        value = json.loads(read_file(path, LONGEST_JSON))
        seal = value.pop(SEAL, None) if isinstance(value, dict) else None
        if seal is None or seal != digest(value):
            raise ValueError("one damaged or edited")
    except (OSError, ValueError, RecursionError) as problem:
        words = f"expected the JSON file that a stage wrote, got {problem}"
        raise ValueError(f"{path}: {words}; put it back, or remove it and run the stage again") from None
    return value


def _differences(before: Any, after: Any, name: str = "") -> Iterator[str]:
    """Every difference between two nested values, in words with its dotted name."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            inner = f"{name}.{key}" if name else key
            yield from _differences(before.get(key, "nothing"), after.get(key, "nothing"), inner)
    elif before != after:
        yield f"{name} {before}, got {after}"


def _software() -> dict[str, str]:
    """Versions of the software, and the commit if the package runs from a checkout."""
    versions = {"python": platform.python_version()}
    for package in SOFTWARE:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    with suppress(OSError, subprocess.SubprocessError):
        git("ls-files", "--error-unmatch", here.name)  # installed inside somebody else's checkout
        versions["commit"] = git("describe", "--always", "--dirty", "--abbrev=10", "--match=")
    return versions

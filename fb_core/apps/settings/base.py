"""What all settings share: sections checked by pydantic, YAML files read within bounds, and errors of one line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, field_validator

LARGEST_FILE = 100_000  # bytes of a file with settings
MOST_VALUES = 10_000  # in such a file
MOST_LEVELS = 32
LONGEST_NUMBER = 1000  # characters
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
FOLDERS = ("slm", "llm", "adapter")  # settings that may name a folder beside the file that they are in
FILES = ("train", "held_out", "benchmarks")  # and those that may name files there
DATA = (".jsonl", ".json", ".parquet")  # ends of such files; no known set has one
Settings = TypeVar("Settings", bound=BaseModel)
Changes = Mapping[str, Mapping[str, Any]]  # new values, by section and key


def _check_url(url: str) -> str:
    from fb_core.llm.http import checked_url

    checked_url(url)  # settings are stored and shown: no secret may be in them
    return url


ServerUrl = Annotated[str, AfterValidator(_check_url)]
Flavour = Literal["vllm", "sglang", "llama.cpp"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class Section(BaseModel):
    """Settings that belong together: unknown keys and integers of more than 64 bits are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True)

    @field_validator("*")
    @classmethod
    def _fits_64_bits(cls, value: Any) -> Any:
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and abs(number) >= 1 << 63:
                raise ValueError("expected a number below 2**63")
        return value


def read_settings(path: Path, **changes: Any) -> dict[str, Any]:
    """The settings in a YAML file with some changed, by key; names of what lies in the file's folder become paths.

    OSError without such a file, ValueError if it is not YAML, too large, or gives a key twice.
    """
    with path.open("rb") as file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise ValueError(f"{path}: expected at most {LARGEST_FILE} bytes of settings, got more; name another file")
    try:
        values = parse_yaml(data.decode("utf-8-sig"))
    except ValueError as problem:
        raise ValueError(f"{path}: expected YAML in UTF-8, got {problem}; fix the file") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected settings by key, got {type(values).__name__}; name another file")
    return _resolve_paths(values | changes, path.parent)


def parse_yaml(text: str) -> Any:
    """The content of a YAML text; ValueError in a few words if it is none, or out of bounds."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as problem:
        raise ValueError(" ".join(str(problem).split())) from None
    except (LookupError, AttributeError, TypeError):  # of PyYAML, such as for !!int ""
        raise ValueError("a tag that does not fit its value") from None


class _Loader(yaml.SafeLoader):
    """YAML in bounded time and memory, in which each key is given once."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._values = 0
        self._sizes: dict[int, int] = {}  # values in a finished node, aliases counted as what they stand for

    def compose_node(self, parent: Any, index: Any) -> Any:
        before, alias = self._values, self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > MOST_LEVELS:
            raise ValueError(f"more than {MOST_LEVELS} levels")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if alias and id(node) not in self._sizes:
            raise ValueError("a value inside itself")
        self._values += self._sizes[id(node)] if alias else 1
        self._sizes[id(node)] = self._values - before
        if self._values > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES} values, aliases counted as what they stand for")
        if node.tag in NUMBERS and len(node.value) > LONGEST_NUMBER:
            raise ValueError(f"a number of {len(node.value)} characters")
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node, seen = super().compose_mapping_node(anchor), set()
        for key, _ in node.value:
            if (name := (key.tag, str(key.value))) in seen:
                raise ValueError(f"a key twice, again on line {key.start_mark.line + 1}")
            seen.add(name)
        return node


def _resolve_paths(value: Any, folder: Path, key: str = "") -> Any:
    """The values of a settings file, in which names of what lies in its folder have become paths."""
    if isinstance(value, dict):
        served = value.get("server") or value.get("llm_server")  # then llm is a name there
        return {
            name: inner if name == "llm" and served else _resolve_paths(inner, folder, name)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_resolve_paths(item, folder, key) for item in value]
    if key not in (*FOLDERS, *FILES) or not isinstance(value, str) or folder == Path() or value.startswith("demo:"):
        return value
    is_there = os.path.isdir if key in FOLDERS else os.path.isfile
    known_set, equals, file = value.rpartition("=")  # as in gsm8k=test.jsonl
    for before, name in (("", value), (known_set + equals, file)):
        if name and is_there(folder / name) and (key in FOLDERS or name.lower().endswith(DATA)):
            return f"{before}{folder / name}"
    return value


def change(settings: Settings, changes: Changes) -> Settings:
    """The settings with some changed; raises ValueError if they do not fit together."""
    values = settings.model_dump()
    for section, parts in changes.items():
        values[section] |= parts
    return type(settings).model_validate(values)


def validate(kind: type[Settings], values: Any, source: str) -> Settings:
    """Settings from plain values.

    ValueError with a line for each that does not fit: file, key, what is wrong. The value is not shown, since it may be
    long or secret.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as problem:
        lines = [f"{source}: {describe(error)}" if source else describe(error) for error in problem.errors()]
        raise ValueError("\n".join(lines)) from None


def describe(error: Any) -> str:
    """Key and text of one of pydantic's errors."""
    return ": ".join(filter(None, (".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, "))))

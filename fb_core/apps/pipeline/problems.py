r"""Problems with gold answers: known benchmarks from the hub or local files, the user's own, and how they are asked."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fb_core._util import require
from fb_core.models.facts import Tokenizer
from fb_core.models.tokens import chat_ids
from fb_core.verify.judges import boxed

log = logging.getLogger(__name__)

TEXT_FIELDS = ("problem", "question")
ID_FIELDS = ("unique_id", "id")
LONGEST_ROW = 10_000_000  # bytes of a line of JSON
LARGEST_SET = 1 << 28  # characters of all problems together
BATCH = 64  # rows of a parquet file decoded at once; fewer of a large one, whose rows may all be its largest value
FORBIDDEN = re.compile("[\0\ud800-\udfff]")  # no tokenizer takes a lone surrogate
DOLLAR = re.compile(r"(?<!\\)\$")
LEADING_ZEROS = re.compile(r"^0+(?=\d)")
BARE_BOX = re.compile(r"\\boxed ([^$\\{}]+)\$")
SIZED_FRACTION = re.compile(r"\\[dt]frac(?![A-Za-z])")
SPACING = re.compile(r"(\\\\)|\\[,;:!\s]|\\(?:q?quad|left|right)(?![A-Za-z])|[$~\s]+")  # a row break \\ stays

Rows = Iterable[tuple[str, Any]]  # (place in the source, row)


@dataclass(frozen=True)
class Problem:
    """A problem with its gold answer."""

    id: str  # unique within its set
    text: str  # what is asked
    answer: str  # the gold one, bare


@dataclass(frozen=True)
class Benchmark:
    """A known set of problems; the defaults are those of a user's own file."""

    hub_id: str = ""  # the data set on the hub
    split: str = ""
    revision: str = ""  # the commit of the data set
    count: int = 0  # number of rows in that split, over all configs
    configs: tuple[str | None, ...] = (None,)  # read one after the other; None is the default config
    field: str = "answer"  # the row's field that holds the gold answer
    gold: Callable[[str], str | None] = str.strip  # the answer in its text; None if there is none, "" if left empty
    expected: str = "an answer"  # what the field should hold, for error messages
    unsolved: bool = False  # whether rows with an empty gold answer are left out instead of refused
    repeats: int = 1  # number of runs with different seeds that an evaluation averages


def _after_hashes(text: str) -> str | None:
    _, hashes, number = text.rpartition("####")
    return number.replace(",", "").strip() if hashes else None


def _last_box(solution: str) -> str | None:
    if not solution.strip():
        return ""
    content = boxed(solution)
    if content is None:  # a solution may also be written with \fbox{7} or \boxed 7$
        content = boxed(solution.replace("\\fbox{", "\\boxed{"))
    bare = BARE_BOX.findall(solution)
    return bare[-1].strip() if content is None and bare else content


def _drop_dollars(text: str) -> str:
    return DOLLAR.sub("", text).strip()  # all of them: "$69$,$84$", and once "$221,$8$"


def _drop_zeros(text: str) -> str:
    return LEADING_ZEROS.sub("", text.strip())


_SUBJECTS = (
    *("algebra", "counting_and_probability", "geometry", "intermediate_algebra"),
    *("number_theory", "prealgebra", "precalculus"),
)
BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark(
        *("openai/gsm8k", "test", "740312add88f781978c0658806c59bc2815b9866", 1319, ("main",)),
        gold=_after_hashes,
        expected="a number after ####",
    ),
    "math-500": Benchmark("HuggingFaceH4/MATH-500", "test", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", 500),
    "olympiadbench": Benchmark(
        "Hothan/OlympiadBench",
        "train",
        "91184b52131e7fc9455fef848035173aea8cc01a",
        674,
        ("OE_TO_maths_en_COMP",),
        field="final_answer",
        gold=_drop_dollars,
        expected="a list of answers",
    ),
    "aime-2024": Benchmark(
        *("HuggingFaceH4/aime_2024", "train", "2fe88a2f1091d5048c0f36abc874fb997b3dd99a", 30),
        gold=_drop_zeros,
        repeats=3,
    ),
    "aime-2025": Benchmark(
        "math-ai/aime25", "test", "563bb8404243c5f09de6ec262f2db674fe5bce9b", 30, gold=_drop_zeros, repeats=3
    ),
    # Two problems of number theory come without an answer.
    "math-train": Benchmark(
        "EleutherAI/hendrycks_math",
        "train",
        "21a5633873b6a120296cce3e2df9d5550074f4a3",
        7500,
        _SUBJECTS,
        field="solution",
        gold=_last_box,
        expected="a solution with \\boxed{...}",
        unsolved=True,
    ),
}


def load_problems(source: str) -> list[Problem]:
    """The problems of a source, in its order; those of MATH train without an answer are left out and logged.

    The source is a name in `BENCHMARKS` (from the hub or its cache, through the `datasets` library), name=file for a
    local file with that set's fields, or a file with `problem` (or `question`), `answer` (a text, an integer, or a list
    of them) and an optional `id`. A file is .jsonl (one object per line), .json (one list of objects) or .parquet. An
    id is the set's own or the row's number; for a named set it starts with the set's name and a slash.

    Raises:
        ImportError: a library that reads the source is not installed.
        ValueError: the source cannot be found or is damaged; the message names the place and the remedy.
    """
    name, _, path = source.partition("=")
    if name not in BENCHMARKS:
        return _check_rows(source, _file_rows(source, Benchmark()), Benchmark(), "")
    rows = _hub_rows(name) if source == name else _file_rows(path, BENCHMARKS[name])
    return _check_rows(source, rows, BENCHMARKS[name], f"{name}/")


def without_overlap(problems: Iterable[Problem], held_out: Iterable[Problem]) -> list[Problem]:
    """The problems whose text is not also held out, ignoring spacing, case and the size of fractions."""
    seen = {_normal(problem.text) for problem in held_out}
    return [problem for problem in problems if _normal(problem.text) not in seen]


def split(problems: Sequence[Problem], validation: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """(train, validation), split by a hash of seed and id, each in the order of the input.

    Problems with the same text stay together, so fewer than `validation` may be set aside. Adding or moving problems
    hardly changes the split of the others. ValueError if `validation` is not in 0 .. len(problems) - 1.
    """
    if not 0 <= validation < len(problems):
        words = f"expected to set aside fewer problems than there are, got {validation} of {len(problems)}"
        raise ValueError(f"split: {words}; leave one to train on")
    groups: dict[str, list[int]] = {}
    for index, problem in enumerate(problems):
        groups.setdefault(_normal(problem.text), []).append(index)

    def rank(group: list[int]) -> bytes:
        return min(hashlib.sha256(f"{seed}/{problems[index].id}".encode()).digest() for index in group)

    chosen: set[int] = set()
    for group in sorted(groups.values(), key=rank):
        if len(chosen) + len(group) <= validation:
            chosen.update(group)
    train = [problem for index, problem in enumerate(problems) if index not in chosen]
    return train, [problems[index] for index in sorted(chosen)]


def draw_problems(problems: Sequence[Problem], count: int, seed: int) -> list[Problem]:
    """The `count` problems that `split` sets aside by the seed; all of them if there are no more."""
    return list(problems) if count >= len(problems) else split(problems, count, seed)[1]


def prompt_ids(tokenizer: Tokenizer, problem: Problem, template: str, thinking: bool = False) -> list[int]:
    """Token ids of a problem in a prompt, whose `{problem}` stands for its text, special tokens included.

    It is a user turn if the tokenizer has a chat template (`thinking` as for `chat_ids`), else the bare text.
    """
    return chat_ids(tokenizer, [{"role": "user", "content": template.replace("{problem}", problem.text)}], thinking)


def _check_rows(source: str, rows: Rows, layout: Benchmark, prefix: str) -> list[Problem]:
    """The problems in rows; ValueError with a row's place if it is no problem."""
    problems, seen_at = list[Problem](), dict[str, str]()
    size = unsolved = 0
    for index, (where, row) in enumerate(rows):
        if not isinstance(row, dict):
            raise _fault(where, "an object", _kind(row), "give each problem as {...}")
        text = _text(where, *_field(where, row, TEXT_FIELDS), str)
        if not text:
            raise _fault(where, "a problem", "an empty text", "correct or delete the row")
        name, value = _field(where, row, (layout.field,))
        parts = value if isinstance(value, list) else [value]
        answer = layout.gold(", ".join(_text(where, name, part, (str, int)) for part in parts))
        if answer == "" and layout.unsolved:
            unsolved += 1
            continue
        if not answer:
            raise _fault(where, f"{layout.expected} in {name!r}", repr(value)[-80:], "correct or delete the row")
        field = next((field for field in ID_FIELDS if row.get(field) is not None), None)
        name = prefix + (str(index) if field is None else _text(where, field, row[field], (str, int)))
        if name in seen_at:
            raise _fault(where, "an id of its own", f"{name[:80]!r} again as at {seen_at[name]}", "rename one")
        seen_at[name] = where
        size += len(text) + len(answer)
        if size > LARGEST_SET:
            raise _fault(where, f"at most {LARGEST_SET} characters in all", "more", "split the set")
        problems.append(Problem(name, text, answer))
    if not problems:
        raise _fault(source, "problems", "none", "give a file that holds some")
    if unsolved:
        log.warning("%s: left out %d problems without an answer", source, unsolved)
    return problems


def _field(where: str, row: dict[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    for name in names:
        if row.get(name) is not None:
            return name, row[name]
    fields = (f"{name!r} (null)" if value is None else repr(name) for name, value in list(row.items())[:8])
    got, remedy = ", ".join(fields), "give it, or name the set that the fields are of, as in gsm8k=test.jsonl"
    raise _fault(where, "a field " + " or ".join(map(repr, names)), got[:300] or "no field", remedy)


def _text(where: str, name: str, value: object, kinds: type | tuple[type, ...]) -> str:
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise _fault(where, f"a text in {name!r}", _kind(value), "write it as a string")
    text = str(value)
    if bad := FORBIDDEN.search(text):
        raise _fault(where, f"a text in {name!r}", f"one with the character {bad[0]!r}", "remove that")
    return text.strip()


def _file_rows(path: str, layout: Benchmark) -> Rows:
    readers = {".jsonl": _json_lines, ".json": _json_list, ".parquet": _parquet_rows}
    reader = readers.get(os.path.splitext(path)[1].lower())
    if reader is None or not os.path.isfile(path):
        expected = f"{', '.join(BENCHMARKS)}, or an existing {', '.join(readers)} file"
        raise _fault("source", expected, repr(path[:200]), "check the spelling")
    return reader(path, _fields(layout))


def _fields(layout: Benchmark) -> set[str]:
    """The fields of a row that are read."""
    return {*TEXT_FIELDS, *ID_FIELDS, layout.field}


def _json_lines(path: str, _: Collection[str]) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_ROW + 1), b""), 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, _parse_json(where, line)


def _json_list(path: str, _: Collection[str]) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as file:
        rows = _parse_json(path, file.read(LONGEST_ROW + 1))
    if not isinstance(rows, list):
        raise _fault(path, "a list of objects", _kind(rows), "put [...] around it, or name a file of lines .jsonl")
    yield from ((f"{path}, entry {number}", row) for number, row in enumerate(rows, 1))


def _parse_json(where: str, data: bytes) -> Any:
    if len(data) > LONGEST_ROW:
        raise _fault(where, f"at most {LONGEST_ROW} bytes", "more", "write one problem per line in a .jsonl file")
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _fault(where, "UTF-8", f"{error.reason} at byte {error.start}", "save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise _fault(where, "JSON", str(error).replace(": line 1 column", " at column"), "correct it") from error


def _parquet_rows(path: str, fields: Collection[str]) -> Iterator[tuple[str, Any]]:
    require("a .parquet file", "pyarrow")
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in fields]
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            parts = [group.column(index) for group in groups for index in range(group.num_columns)]
            read = [part for part in parts if part.path_in_schema.partition(".")[0] in fields]
            size = sum(part.total_uncompressed_size + 8 * part.num_values for part in read)
            if size > LARGEST_SET:
                raise ValueError(f"one of {size} bytes")
            for batch in file.iter_batches(max(1, min(BATCH, LARGEST_SET // max(size, 1))), columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except Exception as error:  # pyarrow's and, for dates, Python's many
        where, expected = f"{path} after row {number}", f"a sound parquet file of at most {LARGEST_SET} bytes"
        raise _fault(where, expected, _first_line(error), "write it again, or split the set") from error


def _hub_rows(name: str) -> Iterator[tuple[str, Any]]:
    benchmark = BENCHMARKS[name]
    require(name, "datasets", extra="data")
    import datasets

    fields = _fields(benchmark)
    files = f"give a local file of the same fields as {name}=file.jsonl or {name}=file.parquet"
    try:
        where = {"split": benchmark.split, "revision": benchmark.revision}
        parts = [datasets.load_dataset(benchmark.hub_id, config, **where) for config in benchmark.configs]
    except Exception as error:  # the hub's many: offline, not cached, gone, refused
        expected = f"{benchmark.hub_id} from the hub or its cache"
        raise _fault(name, expected, _first_line(error), f"go online, or {files}") from error
    if (count := sum(map(len, parts))) != benchmark.count:
        expected = f"{benchmark.count} problems in {benchmark.hub_id}"
        raise _fault(name, expected, str(count), f"clear its cache, or {files}")
    tables = (part.select_columns([name for name in part.column_names if name in fields]) for part in parts)
    rows = (row for table in tables for row in table)
    yield from ((f"{benchmark.hub_id}, row {number}", row) for number, row in enumerate(rows, 1))


def _normal(text: str) -> str:
    if not text.isascii():
        # Character by character: a long run of combining marks takes quadratic time to put in order.
        text = "".join(unicodedata.normalize("NFKD", character) for character in text)
    return SPACING.sub(r"\1", SIZED_FRACTION.sub(r"\\frac", text)).casefold()


def _kind(value: object) -> str:
    shown = f" {repr(value)[:80]}" if isinstance(value, (int, float)) else ""
    return "null" if value is None else f"{type(value).__name__}{shown}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _fault(where: str, expected: str, got: str, remedy: str) -> ValueError:
    return ValueError(f"load_problems: {where}: expected {expected}, got {got.rstrip('.')}; {remedy}.")

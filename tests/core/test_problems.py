"""Problems from the fields of the known sets, in every format; damaged files; splits and de-duplication."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import HANG
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fb_core.apps.pipeline import problems
from fb_core.apps.pipeline.problems import (
    BENCHMARKS,
    LONGEST_ROW,
    Problem,
    load_problems,
    prompt_ids,
    split,
    without_overlap,
)
from fb_core.apps.settings.run import ProblemSettings

Row = dict[str, Any]
MATH = {"level": "Level 5", "type": "Algebra"}
ROWS: dict[str, list[Row]] = {
    "gsm8k": [
        {"question": "Eggs?", "answer": "She sells 9.\n9 * 2 = $<<9*2=18>>18\n#### 18"},
        {"question": "Profit?", "answer": "#1 is a number\n#### -1,234,567"},
    ],
    "math-500": [
        {"problem": "Convert $(0,3)$.", "solution": "so $\\boxed{1}$", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)"}
        | {"subject": "Precalculus", "level": 2, "unique_id": "test/precalculus/807.json"}
    ],
    "olympiadbench": [
        {"id": 1606 + number, "subfield": "Combinatorics", "context": None, "question": "How many moves?"}
        | {"solution": ["Two."], "final_answer": final, "is_multiple_answer": False, "unit": None}
        | {"answer_type": "Numerical", "error": None}
        for number, final in enumerate(
            (["2"], ["$\\frac{1}{2}$"], ["$69$,$84$"], ["$221,$8$"], ["3", "$x$"], ["\\$ 5"], ["$(1,2), (3,4)$"])
        )
    ],
    "aime-2024": [
        {"id": id_, "problem": text, "solution": "s", "answer": answer, "url": "https://example.org", "year": "2024"}
        for id_, text, answer in ((60, "Aya walks.", "073"), (61, "Bea runs.", "000"))
    ],
    "aime-2025": [
        {"problem": "Bases.", "answer": "70", "id": "0"},
        {"problem": "Angles.", "answer": "336^\\circ", "id": "1"},
    ],
    "math-train": [
        {"problem": "ABCDEF"[number], "solution": solution, **MATH}
        for number, solution in enumerate(
            [
                *("$\\boxed{1}$ or $\\boxed{\\frac{1}{2}}$.", "so $\\fbox{7}$", "so $\\boxed 23$."),
                *("", "composite: $\\boxed{}$", "\\boxed{ 4 }"),
            ]
        )
    ],
}
EXPECTED = {
    "gsm8k": [("gsm8k/0", "Eggs?", "18"), ("gsm8k/1", "Profit?", "-1234567")],
    "math-500": [
        ("math-500/test/precalculus/807.json", "Convert $(0,3)$.", "\\left( 3, \\frac{\\pi}{2} \\right)"),
    ],
    "olympiadbench": [
        (f"olympiadbench/{1606 + number}", "How many moves?", answer)
        for number, answer in enumerate(("2", "\\frac{1}{2}", "69,84", "221,8", "3, x", "\\$ 5", "(1,2), (3,4)"))
    ],
    "aime-2024": [("aime-2024/60", "Aya walks.", "73"), ("aime-2024/61", "Bea runs.", "0")],
    "aime-2025": [("aime-2025/0", "Bases.", "70"), ("aime-2025/1", "Angles.", "336^\\circ")],
    "math-train": [
        *(("math-train/0", "A", "\\frac{1}{2}"), ("math-train/1", "B", "7"), ("math-train/2", "C", "23")),
        ("math-train/5", "F", "4"),
    ],
}


def jsonl(path: Path, rows: list[Row]) -> None:
    path.write_text("\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")


def json_list(path: Path, rows: list[Row]) -> None:
    path.write_text(json.dumps(rows), encoding="utf-8")


def parquet(path: Path, rows: list[Row]) -> None:
    names = dict.fromkeys(name for row in rows for name in row)
    pyarrow.parquet.write_table(pyarrow.table({name: [row.get(name) for row in rows] for name in names}), path)


WRITERS: dict[str, Callable[[Path, list[Row]], None]] = {".jsonl": jsonl, ".json": json_list, ".parquet": parquet}


def as_tuples(problems: list[Problem]) -> list[tuple[str, str, str]]:
    return [dataclasses.astuple(problem) for problem in problems]


def refused(source: str) -> str:
    """The message of the error, which must be one line and come."""
    start = time.monotonic()
    with pytest.raises(ValueError) as caught:
        load_problems(source)
    assert time.monotonic() - start < HANG
    message = str(caught.value)
    assert message.startswith("load_problems: ")
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < 1500
    return message


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_file_with_the_fields_of_a_known_set(tmp_path: Path, name: str, suffix: str) -> None:
    WRITERS[suffix](tmp_path / f"a=b{suffix}", ROWS[name])
    assert as_tuples(load_problems(f"{name}={tmp_path / f'a=b{suffix}'}")) == EXPECTED[name]


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_file_of_ones_own(tmp_path: Path, suffix: str) -> None:
    rows: list[Row] = [
        {"problem": " 1 + 1? ", "answer": " 2 ", "id": "a"},
        {"problem": "Größe?", "answer": "3", "id": None},
        {"problem": None, "question": "4?", "answer": "4", "id": "7"},
    ]
    WRITERS[suffix](path := tmp_path / f"own=1{suffix}", rows)
    assert as_tuples(load_problems(str(path))) == [("a", "1 + 1?", "2"), ("1", "Größe?", "3"), ("7", "4?", "4")]


def test_answers_may_be_integers_or_lists(tmp_path: Path) -> None:
    rows: list[Row] = [{"problem": "a", "answer": 2}, {"problem": "b", "answer": [1, "2"]}]
    jsonl(path := tmp_path / "p.jsonl", rows)
    assert [problem.answer for problem in load_problems(str(path))] == ["2", "1, 2"]


def test_problems_without_an_answer_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    jsonl(path := tmp_path / "p.jsonl", ROWS["math-train"])
    load_problems(f"math-train={path}")
    assert "left out 2 problems" in caplog.text


def test_known_sets() -> None:
    counts = {"gsm8k": 1319, "math-500": 500, "olympiadbench": 674, "aime-2024": 30, "aime-2025": 30}
    counts |= {"math-train": 7500}
    assert {name: benchmark.count for name, benchmark in BENCHMARKS.items()} == counts
    assert [name for name, one in BENCHMARKS.items() if one.repeats == 3] == ["aime-2024", "aime-2025"]
    assert sum(one.repeats for one in BENCHMARKS.values()) == 4 + 6
    subjects = BENCHMARKS["math-train"].configs
    assert len(subjects) == 7
    assert list(subjects) == sorted(map(str, subjects))


GOOD = b'{"problem": "1?", "answer": "1"}\n'


def row(answer: str = '"1"', problem: str = '"1?"', more: str = "") -> bytes:
    return f'{{"problem": {problem}, "answer": {answer}{more}}}'.encode()


DAMAGED = [  # a file's lines, and what is said of them
    *((b"", "problems, got none"), (b" \n\n", "problems, got none"), (GOOD + b"\n[1]", "line 3: .*list")),
    *((GOOD + b'{"problem": "\xff"}', "line 2: .*UTF-8"), (GOOD.decode().encode("utf-16"), "line 1: .*UTF-8")),
    *((GOOD + b'{"problem": ', "line 2: .*JSON.*column 13"), (GOOD + b'"' * (LONGEST_ROW + 1), "line 2: .*10000000")),
    *((b"[" * LONGEST_ROW, "line 1: .*JSON"), (b'{"problem":' * 100_000, "line 1: .*JSON"), (b"\0" * 1000, "line 1")),
    *((row("1" * 100_000), "line 1: .*JSON"), (row(problem='"1\0?"'), "line 1: .*JSON")),
    *((row(problem=r'"1\u0000?"'), r"character '\\x00'"), (row(r'"\ud800"'), "'answer'.*character")),
    *((b'{"answer": "1"}', "'problem' or 'question', got 'answer'"), (b"{}", "got no field")),
    *((row("null"), r"line 1: .*'answer', got 'problem', 'answer' \(null\)"), (b'{"problem": "1?"}', "'answer'")),
    (b'{"question": null, "answer": "1"}', r"'problem' or 'question', got 'question' \(null\), 'answer'"),
    *((row('["1", null]'), "'answer', got null"), (row(problem='" "'), "empty text"), (row('" "'), "'answer'")),
    *((row("[]"), "'answer'"), (row(problem="1"), "'problem', got int 1"), (row("0.5"), "'answer', got float 0.5")),
    *((row("NaN"), "'answer', got float nan"), (row("true"), "'answer', got bool"), (row('[["1"]]'), "got list")),
    *((row(more=', "id": {}'), "'id', got dict"), (row(more=', "id": 1') + b"\n" + GOOD, "line 2: .*'1' again")),
]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        *(("p.jsonl", *each) for each in DAMAGED),
        *(("p.json", b"[]", "problems, got none"), ("p.json", b"", "expected JSON"), ("p.json", GOOD, "got dict")),
        *(("p.json", 2 * GOOD, "Extra data"), ("p.json", b"[1]", "p.json, entry 1: .*int 1")),
        ("p.json", b"[" + b" " * LONGEST_ROW, "at most 10000000 bytes"),
        *(("p.parquet", data, "parquet") for data in (b"", b"PAR1" + 1000 * b"\xff" + b"PAR1")),
        ("p.txt", GOOD, "existing .jsonl, .json, .parquet file"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert re.search(words, refused(str(tmp_path / name)))


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        *(("gsm8k", {"question": "1?", "answer": text}, "number after ####") for text in ("1", "1 #### ")),
        *(("math-train", {"problem": "1?", "solution": text}, "boxed") for text in ("It is 1.", "\\boxed{1")),
        ("math-train", {"problem": "1?", "answer": "1"}, "'solution'"),
        *(("olympiadbench", {"question": "1?", "final_answer": it}, "list of answers") for it in ([], ["$$"])),
        ("olympiadbench", {"question": "1?", "final_answer": None}, "'final_answer'"),
    ],
)
def test_rows_without_gold(tmp_path: Path, name: str, row: Row, words: str) -> None:
    jsonl(path := tmp_path / "p.jsonl", [*ROWS[name][:1], row])
    assert re.search(rf"p\.jsonl, line 3: .*{words}", refused(f"{name}={path}"))


@pytest.mark.parametrize(
    "source", ["", "gsm8k=", "gsm8", "gsm8=p.jsonl", "p.jsonl", "gsm8k=p\0.jsonl", "x" * 10_000 + ".json"]
)
def test_sources_that_are_not_there(source: str) -> None:
    message = refused(source)
    assert "expected gsm8k, math-500, olympiadbench" in message
    assert "\0" not in message


def test_a_folder_is_no_file_nor_is_a_parquet_file_cut_short(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").mkdir()
    assert "existing" in refused(str(tmp_path / "p.jsonl"))
    rows = [{"problem": f"{number}?", "answer": str(number)} for number in range(1000)]
    parquet(path := tmp_path / "p.parquet", rows)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "a sound parquet file" in refused(str(path))
    path.write_bytes(whole[:64] + bytes(2000) + whole[2064:])
    assert "p.parquet" in refused(str(path))


def test_a_parquet_file_of_other_types(tmp_path: Path) -> None:
    parquet(path := tmp_path / "p.parquet", [{"problem": {"text": "1?"}, "answer": "1"}])
    assert "row 1: expected a text in 'problem', got dict" in refused(str(path))
    table = pyarrow.table({"problem": pyarrow.array([b"\xff"]).cast(pyarrow.string(), safe=False), "answer": ["1"]})
    pyarrow.parquet.write_table(table, path)
    assert "a sound parquet file" in refused(str(path))


def test_few_bytes_that_become_many(tmp_path: Path) -> None:
    repeated = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 200_000, pyarrow.int32()), ["x" * 500_000])
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"problem": repeated, "answer": ["1"] * len(repeated)}), path)
    assert path.stat().st_size < 2_000_000
    assert "characters in all" in refused(str(path))


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("problem", pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 64), ["x" * 300_000]), "characters in all"),
        ("answer", pyarrow.array([[None] * 200_000], pyarrow.list_(pyarrow.string())), "1048576 bytes, got one of"),
        ("id", pyarrow.array([2**60], pyarrow.timestamp("us")), "a sound parquet file"),
        ("id", pyarrow.array([0], pyarrow.timestamp("us", "Nowhere/Else")), "a sound parquet file"),
    ],
    ids=["one large value", "many empty values", "a late date", "an unknown time zone"],
)
def test_values_that_python_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, values: pyarrow.Array, words: str
) -> None:
    monkeypatch.setattr(problems, "LARGEST_SET", 1 << 20)
    columns = {"problem": ["1?"] * len(values), "answer": ["1"] * len(values)} | {column: values}
    pyarrow.parquet.write_table(pyarrow.table(columns), path := tmp_path / "p.parquet", compression="zstd")
    plain, counted = pyarrow.default_memory_pool(), pyarrow.system_memory_pool()  # no other test uses the second
    pyarrow.set_memory_pool(counted)
    try:
        assert words in refused(str(path))
    finally:
        pyarrow.set_memory_pool(plain)
    assert counted.max_memory() < 6 << 20


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for all sets on the hub, laid out as theirs are."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    for name, benchmark in BENCHMARKS.items():
        folder = tmp_path / name
        folder.mkdir()
        card = "---\nconfigs:\n"
        count = 0
        for config in benchmark.configs:
            rows = [row | {"problem": config} for row in ROWS[name]] if name == "math-train" else ROWS[name]
            count += len(rows)
            data = f"{config or 'data'}.parquet"
            parquet(folder / data, rows)
            card += (
                f"- config_name: {config or 'default'}\n  data_files:\n  - split: {benchmark.split}\n    path: {data}\n"
            )
        (folder / "README.md").write_text(card + "---\n")
        monkeypatch.setitem(BENCHMARKS, name, dataclasses.replace(benchmark, hub_id=str(folder), count=count))
    return tmp_path


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "math-train"])
def test_sets_from_the_hub(hub: Path, name: str) -> None:
    assert as_tuples(load_problems(name)) == EXPECTED[name]


def test_subjects_are_joined_in_order(hub: Path) -> None:
    problems = load_problems("math-train")
    assert list(dict.fromkeys(problem.text for problem in problems)) == list(BENCHMARKS["math-train"].configs)
    assert [problem.id for problem in problems[3:6]] == ["math-train/5", "math-train/6", "math-train/7"]


def test_an_incomplete_set_is_refused(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BENCHMARKS, "gsm8k", dataclasses.replace(BENCHMARKS["gsm8k"], count=1319))
    assert "expected 1319 problems" in refused("gsm8k")


def test_a_set_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    message = refused("gsm8k")
    assert "openai/gsm8k" in message
    assert "gsm8k=file.jsonl" in message


@pytest.mark.parametrize(
    ("library", "extra", "source"), [("datasets", "data", "gsm8k"), ("pyarrow", "run", "p.parquet")]
)
def test_a_missing_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, extra: str, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.parquet").touch()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"got no {library}; pip install '\.\[{extra}\]' in the clone"):
        load_problems(source)


def problem(text: str, identity: str = "1") -> Problem:
    return Problem(identity, text, "1")


@pytest.mark.parametrize(
    ("text", "other", "same"),
    [
        *(("What is  $x+1$?", "what is $x + 1$?\n", True), ("a\\;b\\!c\\ d\\quad e", "abcde", True)),
        ("$\\dfrac{1}{2}$, \\tfrac12", "$\\frac{1}{2}$, \\frac12", True),
        *(("\\left(1,\\,2\\right)", "(1,2)", True), ("x² and ﬁve", "x2 and five", True), ("STRASSE", "straße", True)),
        *(("Cafe\u0301", "café", True), ("non\u00a0breaking~space", "nonbreakingspace", True)),
        *(("$x+1$", "$x-1$", False), ("\\leftarrow", "\\arrow", False), ("\\rightarrow", "\\leftarrow", False)),
        *(("\\quadratic", "ratic", False), ("\\dfraction", "\\fraction", False), ("a\\\\ b", "a\\b", False)),
        ("\\frac{1}{2}", "\\frac{1}{3}", False),
    ],
)
def test_texts_that_overlap(text: str, other: str, same: bool) -> None:
    assert without_overlap([problem(text)], [problem(other)]) == ([] if same else [problem(text)])


def test_overlap_keeps_the_order() -> None:
    problems = [problem(text, text) for text in "abcab"]
    assert "".join(kept.text for kept in without_overlap(problems, [problem("B")])) == "aca"
    assert without_overlap([], []) == []


def test_overlap_takes_linear_time() -> None:
    hostile = ["\u0301\u0323" * 500_000, "\\" * 1_000_000, "\\left" * 200_000, " $" * 500_000, "\\dfra" * 200_000]
    start = time.monotonic()
    assert len(without_overlap([problem(text) for text in hostile], [problem("1?")])) == len(hostile)
    assert time.monotonic() - start < HANG


problem_lists = st.lists(st.sampled_from(["a", "b", "c", "A ", *map(str, range(20))]), min_size=1, max_size=30).map(
    lambda texts: [problem(text, str(number)) for number, text in enumerate(texts)]
)


@given(problem_lists, st.data())
def test_split_is_disjoint_complete_and_blind_to_order(problems: list[Problem], data: st.DataObject) -> None:
    size = data.draw(st.integers(0, len(problems) - 1))
    seed = data.draw(st.integers(0, 3))
    train, validation = split(problems, size, seed)
    assert sorted(train + validation, key=problems.index) == problems
    assert train == [kept for kept in problems if kept in train]
    assert validation == [kept for kept in problems if kept in validation]
    assert len(validation) <= size
    assert without_overlap(train, validation) == train
    moved = data.draw(st.permutations(problems))
    assert {kept.id for kept in split(moved, size, seed)[1]} == {kept.id for kept in validation}


def test_split_is_exact_the_same_everywhere_and_hardly_moved_by_more_problems() -> None:
    few = split([problem(f"{number}?", f"gsm8k/{number}") for number in range(10)], 3, 7)[1]
    assert [kept.id for kept in few] == ["gsm8k/0", "gsm8k/5", "gsm8k/9"]
    problems = [problem(f"{number}?", f"math-train/{number}") for number in range(1000)]
    train, validation = split(problems, 100, 0)
    assert (len(train), len(validation)) == (900, 100)
    more = [problem(f"{number}!", f"other/{number}") for number in range(10)]
    assert len(set(validation) - set(split(more + problems, 100, 0)[1])) <= 10
    assert len(set(validation) & set(split(problems, 100, 1)[1])) < 30
    random.Random(0).shuffle(problems)
    assert set(split(problems, 100, 0)[1]) == set(validation)


@pytest.mark.parametrize(("count", "validation"), [(0, 0), (1, 1), (3, 3), (3, -1)])
def test_split_leaves_one_to_train_on(count: int, validation: int) -> None:
    with pytest.raises(ValueError, match="split:"):
        split([problem(str(number), str(number)) for number in range(count)], validation, 0)


def characters(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A token a character, and <s> in front of what is not a chat."""
    vocabulary = {token: number for number, token in enumerate(["<s>", "<u>", *map(chr, range(10, 127))])}
    built = Tokenizer(models.WordLevel(vocabulary, unk_token="<u>"))
    built.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=built, bos_token="<s>", unk_token="<u>", chat_template=chat_template
    )


def spelled(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def test_prompts_are_bare_text_without_a_chat_template() -> None:
    tokenizer = characters()
    template = ProblemSettings().prompt
    ids = prompt_ids(tokenizer, problem("\\frac{1}{2} {problem} {0}?"), template)
    assert spelled(tokenizer, ids) == "<s>" + template.replace("{problem}", "\\frac{1}{2} {problem} {0}?")
    assert ids == list(tokenizer(template.replace("{problem}", "\\frac{1}{2} {problem} {0}?")).input_ids)
    assert spelled(tokenizer, prompt_ids(tokenizer, problem("1?"), "{} {problem}{x}")) == "<s>{} 1?{x}"


def test_prompts_are_a_user_turn_where_there_is_a_chat_template() -> None:
    template = (
        "{% for message in messages %}[{{ message.role }}:{{ message.content }}]{% endfor %}"
        "{% if add_generation_prompt %}[assistant:{% endif %}{{ enable_thinking }}"
    )
    tokenizer = characters(template)
    assert spelled(tokenizer, prompt_ids(tokenizer, problem("1?"), "Q: {problem}")) == "[user:Q: 1?][assistant:False"
    thinks = prompt_ids(tokenizer, problem("1?"), "Q: {problem}", thinking=True)
    assert spelled(tokenizer, thinks) == "[user:Q: 1?][assistant:True"
    other = characters("{{ messages[0].content }}{% if thinking %}<think>{% endif %}")  # DeepSeek's and Granite's name
    for thinking, end in ((False, ""), (True, "<think>")):
        assert spelled(other, prompt_ids(other, problem("1?"), "{problem}", thinking)) == f"1?{end}"

"""The report: its numbers are the runs', what is missing is said, and no text gets out of its place."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt
from report_runs import METHODS, around, everywhere, items, read, render, rows_of, section, tiny
from warm import python

from benchmarks.paper import report
from benchmarks.paper.orderings import orderings
from benchmarks.paper.report import PARTS, write_report
from benchmarks.paper.rows import tables_bytes
from benchmarks.paper.tables import TABLES
from fb_core._util import escaped
from fb_core.apps.settings.run import AVERAGE

HOSTILE = [
    "<script>alert(1)</script>",
    "a | b || c \\| d \\",
    "`code` ``` $x$ *b* _i_ ~~s~~ [^1]",
    "![x](https://evil.example/x.png) [x][y]",
    "[x]: https://evil.example",
    "line\n# heading\n- item\n```\n| a |\n|---|",
    "\x1b[31m\u202egnorw\x00",
    "</pre></td>&amp;<!-- x",
]


def numbers(value) -> list[float]:
    if isinstance(value, dict):
        return numbers(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def test_every_number_of_a_table_is_the_runs():
    found = tiny()
    allowed = set(re.findall(r"\d+(?:\.\d+)?", json.dumps(found)))
    for number in map(abs, numbers(found)):
        allowed |= {f"{number:.4f}".rstrip("0").rstrip("."), f"{100 * number:.1f}"}
    for one in orderings(read(found).results):  # the paper's, and differences that are not paired: tests of their own
        allowed |= set(re.findall(r"\d+\.\d+", one.published + one.shown * (not one.paired)))
    cells = " ".join(cell for row in rows_of(render(found)) for cell in row.values())
    shown = {number.replace(",", "") for number in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", cells)}
    assert len(shown) > 150
    assert shown <= allowed


def test_rows_and_verdicts_are_as_found():
    page = render(tiny())
    methods = section(page, "Methods")
    rows = {row["label"]: row for row in rows_of(methods)}
    assert list(rows) == [label for label, *_ in METHODS.values() if label not in ("Published recipe", "Takeover")] + [
        *("GRPO", "Published recipe", "Takeover")
    ]
    ours = rows["Published recipe"]
    assert (ours["accuracy"], ours["minus greedy"]) == ("0.958 [0.928, 0.988]", "0.246 [0.209, 0.283]")
    assert (ours["llm tokens"], ours["problems"], ours["seeds"]) == ("1.91 [1.81, 2.01]", "400", "0, 1")
    assert {name for name, cell in rows["GRPO"].items() if cell} == {"label", "note"}
    assert "x" not in ours  # empty in every row
    first, *_, tokens, positions = items(methods)
    assert first == (
        "Significantly above greedy: Direct LLM score; R2R; Published recipe; Takeover. Significantly below greedy: "
        "Random choice. Not significantly different from greedy: Maj@8; S2T."
    )
    assert tokens.startswith("Significantly above the line to takeover at equal LLM tokens: Direct LLM score; R2R; P")
    assert positions.startswith("Significantly above the line to takeover at equal LLM positions: Published recipe. ")
    (words,) = items(section(page, "Request quantiles"))[:1]
    assert words.startswith("Significantly below greedy: Published recipe at quantile 0.9; ")
    assert rows_of(section(page, "Deployment"))[1]["relative"] == "1.55 [1.5, 1.61]"
    assert rows_of(section(page, "Deployed recipe"))[0]["minus greedy low"] == "0.35"
    assert items(section(page, "Agreement with rollouts"))[0] == (
        "At all events, validation. Significantly above chance: LLM. Significantly below chance: reranker. "
        "Not significantly different from chance: SLM."
    )


def test_three_sentences_say_what_was_compared_what_won_and_what_is_lost():
    def told(*found: dict) -> list[str]:
        return items(render(*found).split("\n## ")[0])

    compared, won, lost = told(tiny())
    assert compared == "8 methods were compared on demo:plans (400 problems)."
    assert won.endswith(
        ": on demo:plans Published recipe 95.8% with 1.9 LLM tokens per problem (Greedy 71.2% with 0.0 LLM tokens per "
        "problem, Takeover 99.2% with 40.2 LLM tokens per problem)."
    )
    words = "nowhere significantly worse than greedy decoding or the direct LLM score or takeover."
    assert lost == f"Here Published recipe is {words}"
    _, won, lost = told(tiny("good"), tiny("bad", 0.5))
    assert "on good, demo:plans Published recipe 95.8%" in won
    assert "on bad, demo:plans R2R 90.1%" in won
    worse = "significantly worse than greedy decoding on bad, demo:plans (-25.4 [-29.1, -21.7] pp),"
    assert lost.startswith(f"Here Published recipe is {worse}")
    assert "good, demo:plans" not in lost
    found = tiny()
    by_key = {row["key"]: row for row in found["results"] if row["table"] == "methods"}
    by_key["takeover"]["minus"]["published"] = [0.034, 0.02, 0.05]  # known from its side alone
    by_key["direct"] |= {"accuracy": by_key["published"]["accuracy"], "llm_tokens": [1.5, 1.4, 1.6]}
    _, won, lost = told(found)
    assert "is significantly worse than takeover on demo:plans (-3.4 [-5.0, -2.0] pp)." in lost
    assert ": on demo:plans Direct LLM score 95.8% with 1.5 LLM tokens" in won  # of equals the cheapest


def test_runs_and_benchmarks_stand_side_by_side():
    rows = [row for row in tiny(benchmarks=("x", "y"))["results"] if row["table"] == "methods"]
    rows = [row for row in rows if (row["benchmark"], row["key"]) != ("y", "s2t")]
    greedy = next(row for row in rows if row["key"] == "greedy")
    rows += [greedy | {"benchmark": AVERAGE, "accuracy": around(0.656, 0.02), "problems": 800}]
    page = render({"name": "n", "results": rows}, tiny("n", 0.6))
    assert re.findall("^## (.*)", page, re.M) == ["n (1)", "n (2)", "How to read the numbers"]
    by_label = {row["accuracy"]: row for row in rows_of(page.split("\n## ")[0])}
    assert list(by_label["Greedy"])[1:] == ["x", "y", "average", "demo:plans"]
    assert by_label["Greedy"]["average"] == "0.656 [0.636, 0.676]"
    assert (by_label["S2T"]["y"], by_label["S2T"]["demo:plans"]) == ("", "0.69 [0.66, 0.72]")
    assert ": on average Greedy 65.6%" in page  # the primary one alone


def test_what_was_not_run_is_named_with_its_command():
    whole = tiny()
    assert "### Not run" not in render(whole)
    for name, one in TABLES.items():
        left = whole | {"results": [row for row in whole["results"] if row["table"] != name]}
        missing = [f"{one.title}: run `python -m benchmarks.paper tables {name}`"]
        assert items(section(render(left), "Not run")) == missing
    for name, (title, _, command) in PARTS.items():
        parts = {other: part for other, part in whole["parts"].items() if other != name}
        left = whole | {"parts": parts, "timed": whole["timed"] * (name != "deployment")}
        assert items(section(render(left), "Not run")) == [f"{title}: run `{command}`"]


def test_of_an_empty_run_nothing_is_invented():
    page = render({"name": "bare"})
    titles = [one.title for one in TABLES.values()] + [title for title, *_ in PARTS.values()]
    assert [item.split(":")[0] for item in items(section(page, "Not run"))] == titles
    assert report.draw([read({"name": "bare"})]) == {}
    assert not re.search(r"\d", page.split("## How to read")[0])
    with pytest.raises(ValueError, match="runs: expected one or more, got none"):
        report.render([], {})


class Shown(HTMLParser):
    """The tags of a page as Markdown's readers show it, and its texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.texts = list[tuple](), list[str]()
        html = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(page)
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, *attrs))

    def handle_data(self, data):
        self.texts.append(data)

    def handle_comment(self, data):
        self.tags.append(("comment", data))


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_gets_out_of_its_place(text):
    hostile, harmless = (Shown(render(everywhere(tiny(), one))) for one in (text, "text"))
    assert hostile.tags == harmless.tags
    assert hostile.texts.count(escaped(text)) == harmless.texts.count("text") > 20  # once read, it is what was written
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", "".join(hostile.texts))


def test_written_files_repeat_byte_for_byte(tmp_path):
    written = write_report([read(tiny())], tmp_path / "a" / "b")
    names = [path.relative_to(tmp_path / "a" / "b").as_posix() for path in written]
    assert names == ["tables.json", "rows.parquet", "figures/forest.svg", "figures/frontier-1.svg", "report.md"]
    page = written[-1].read_text()
    assert re.findall(r"^!\[.*\]\((.*)\)$", page, re.M) == names[2:4]
    again = write_report([read(tiny())], tmp_path / "c")
    assert [path.read_bytes() for path in written] == [path.read_bytes() for path in again]
    wrong = {"name": "n", "policy": {"threshold": math.nan, "quantile": 0.9, "top_k": 64}}
    with pytest.raises(ValueError):
        write_report([read(wrong)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_report_without_room_leaves_the_one_before(tmp_path):
    (tmp_path / "tables.json").write_bytes(tables_bytes([read(tiny())]))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.md").write_text(5000 * "x")
    code = (
        "import resource, signal; from pathlib import Path; from benchmarks.paper.rows import read_tables; "
        "from benchmarks.paper.report import write_report; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "runs = read_tables(Path('tables.json')); resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)); "
        "write_report(runs, Path('out'))"
    )
    assert "expected to write" in python(code, tmp_path).stderr
    assert (tmp_path / "out" / "report.md").read_text() == 5000 * "x"
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name.endswith(".part")]

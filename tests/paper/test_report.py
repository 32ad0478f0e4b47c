"""The report: its numbers are those of the rows, what is missing is said, and no text gets at the reader."""

from __future__ import annotations

import base64
import hashlib
import inspect
import itertools
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from markdown_it import MarkdownIt
from matplotlib import style
from matplotlib.text import Text
from pages import ESCAPED, Tree
from paper_runs import settings
from pydantic import TypeAdapter

from benchmarks import theme
from benchmarks.paper import figures, gather, intervals, report
from benchmarks.paper.gather import published
from benchmarks.paper.orderings import orderings
from benchmarks.paper.page import Document, Figure, Items, Link, Paragraph, Section, Span, Table
from benchmarks.paper.report import PARTS, write_report
from benchmarks.paper.rows import Decoded, Run, read_tables, results, rows_bytes, tables_bytes, timed
from benchmarks.paper.settings import PaperSettings
from benchmarks.paper.tables import TABLES, Plan
from benchmarks.paper.tables import Table as Experiment
from benchmarks.theme import Picture
from fb_core import statistics
from fb_core.config import AVERAGE, ModelSettings
from fb_core.terminal import escaped

ROOT = Path(__file__).parents[2]
HOSTILE = [
    "<script>alert(1)</script>",
    '" onload="alert(1)',
    "a | b || c \\| d",
    "`code` ``` $x$ *b* _i_ ~s~",
    "![x](https://evil.example/x.png)",
    "[x]: https://evil.example",
    "line\n# heading\n- item",
    "\x1b[31m\u202egnorw\x00",
    "</pre></td>&amp;",
    "<!-- x",
    "{{ 7 * 7 }}{% raw %}",
]
METHODS = {  # label, accuracy, events, tokens
    "greedy": ("Greedy", 0.712, 0.0, 34.5),
    "majority": ("Maj@8", 0.735, 0.0, None),
    "random": ("Random choice", 0.64, 2.17, 34.1),
    "s2t": ("S2T", 0.69, 2.12, 35.6),
    "direct": ("Direct LLM score", 0.87, 1.92, 39.5),
    "r2r": ("R2R", 0.901, 3.3, 40.2),
    "futurebridge": ("FutureBridge", 0.958, 1.91, 41.8),
    "takeover": ("Takeover", 0.992, 1.0, 41.8),
}
ENDS = ("greedy", "takeover")  # of the line
VARIANTS = {
    "pools": [("pool-slm", "SLM pool", 0.898, None), ("pool-llm", "LLM pool", 0.952, None)],
    "horizons": [("futurebridge", "H = 16", 0.958, 16.0), ("horizon-4", "H = 4", 0.592, 4.0)],
    "futures": [("future-verified", "Verified", 0.949, None), ("future-shuffled", "Shuffled", 0.55, None)],
    "alpha": [("alpha-0.5", "alpha = 0.5", 0.94, 0.5)],
    "temperature": [("temperature-1", "temperature 1", 0.956, 1.0)],
    "scope": [("scope-sequence", "Whole sequence", 0.962, None)],
}
SWEPT = {0.9: (0.81, 0.63, 0.992), 0.92: (0.81, 0.868, 0.99), 0.94: (0.87, 0.958, 0.992)}


def read(found: dict) -> Run:
    return TypeAdapter(Run).validate_python(found)


def render(*found: dict, tables=TABLES) -> Document:
    return report.render([read(one) for one in found], tables)


def around(mean: float, half: float = 0.03) -> list[float]:
    return [mean, max(mean - half, -1.0), min(mean + half, 1.0)]


def row_of(table: str, benchmark: str, key: str, label: str, accuracy: float, base: dict, **more) -> dict:
    events, tokens = more.pop("events", 1.91), more.pop("tokens", 40.1)
    asked = {"greedy": 0.0, "majority": 0.0, "takeover": 40.2}.get(key, events)
    row = {"table": table, "benchmark": benchmark, "key": key, "label": label, "problems": 400, "seeds": [0, 1]}
    row |= {"accuracy": around(accuracy), "events": events, "tokens": tokens, "llm_tokens": around(asked, 0.1)}
    row["llm_tokens"] = [asked, max(asked - 0.1, 0.0), asked + 0.1]
    row["calls"] = [events, 0.9 * events, 1.1 * events]
    row["minus"] = {other: around(accuracy - value, 0.037) for other, value in base.items() if key != other}
    if key not in ENDS:
        row["above_line"] = around(accuracy - 0.712 - asked / 40.2 * 0.28)
    return row | more


def tiny(name: str = "tiny", shift: float = 0.0, benchmarks: tuple[str, ...] = ("demo:plans",)) -> dict:
    """A run in which everything was measured; `shift` lowers what is FutureBridge's."""
    ours = ("futurebridge", *(key for variants in VARIANTS.values() for key, *_ in variants))
    base = {key: METHODS[key][1] - shift * (key in ours) for key in ("greedy", "direct", "futurebridge")}
    rows = []
    for benchmark in benchmarks:
        for key, (label, accuracy, events, tokens) in METHODS.items():
            seeds = [0, 1] if key in ("futurebridge", "majority", "random") else []
            more = {"events": events, "tokens": tokens, "seeds": seeds}
            rows.append(row_of("methods", benchmark, key, label, accuracy - shift * (key in ours), base, **more))
        unseen = {"table": "methods", "benchmark": benchmark, "key": "external-grpo", "label": "GRPO"}
        rows.append(unseen | {"note": "no checkpoint given: compare.external"})
        for table, variants in VARIANTS.items():
            for key, label, accuracy, x in variants:
                rows.append(row_of(table, benchmark, key, label, accuracy - shift, base, x=x))
        for quantile, accuracies in SWEPT.items():
            there = dict(zip(("direct", "futurebridge", "takeover"), accuracies, strict=True))
            there["futurebridge"] -= shift
            beside = {"greedy": base["greedy"]} | {key: there[key] for key in ("direct", "futurebridge")}
            more = {"x": quantile, "quantile": quantile, "threshold": round(10 * quantile - 8, 3)}
            for key, accuracy in there.items():
                rows.append(row_of("quantiles", benchmark, key, METHODS[key][0], accuracy, beside, **more))
    scores = {"SLM": 0.52, "LLM": 0.685, "Direct-B_16": 0.895, "FutureBridge": 0.824 - shift}
    states = {"where": "validation", "states": 318, "mixed_states": 132}
    agreement = [
        states
        | {"score": score, "kind": kind, "pairs": 1069, "problems": 149}
        | {"pairwise": None if (score, kind) == ("SLM", "mark") else around(mean), "top1": around(mean, 0.04)}
        | {"top1_mixed": around(mean - 0.03, 0.06), "top1_minus_slm": around(mean - 0.52) if score != "SLM" else None}
        | {"top1_minus_llm": around(mean - 0.685) if score != "LLM" else None}
        for kind in ("all", "word", "mark")
        for score, mean in scores.items()
    ]
    tested = {"seed": 0, "words": "value: the best of 1 of 1 tested recipes.", "problems": 300, "delta": 0.02}
    costs = {"units": 1150, "unit": "problems", "seconds": 4.5, "gpu_hours": 0.0, "devices": ["cpu"], "published": None}
    return {
        "name": name,
        "settings": {"models": {"slm": "demo:plans", "llm": "demo:plans"}, "train": {"horizons": [4, 8, 16]}},
        "pair": {"slm": "demo:plans", "llm": "demo:plans", "slm_parameters": 162000, "llm_parameters": 363000},
        "policy": {"threshold": 1.695, "quantile": 0.94, "top_k": 64},
        "seeds": [0, 1],
        "results": rows,
        "timed": [
            {"method": METHODS[key][0], "key": key, "loop": loop, "problems": 50, "calls": 1.5, "pool": 6.07}
            | {"llm_tokens": 33.2, "seconds": 0.031 * times, "relative": [times, times - 0.05, times + 0.06]}
            for key, loop, times in (
                ("greedy", "fast", 1.0),
                ("majority", "plain", 2.6),
                ("futurebridge", "fast", 1.55),
                ("takeover", "plain", 1.87),
                ("futurebridge", "plain", 1.7),
            )
        ],
        "parts": {
            "agreement": agreement,
            "coverage": [
                states | {"pool": pool, "mean_size": size, "coverage": around(share), "coverage_mixed": around(share)}
                for pool, size, share in (("SLM", 4.0, 0.836), ("joint", 6.07, 0.862))
            ],
            "changes": [
                {
                    "benchmark": "demo:plans",
                    "problem": f"plans/test/{n}",
                    "method": "FutureBridge",
                    "seed": 0,
                    "step": 17,
                }
                | {"gained": n > 2, "kind": "digit" if n % 2 else None}
                | ({"page": f"problems/{n}.html"} if n < 9 else {})
                for n in range(12)
            ],
            "future_quality": [
                {"future": "verified", "states": 214, "4": 0.475, "16": 0.895},
                {"future": "shuffled", "states": 214, "4": 0.502, "16": None},
            ],
            "certification": [
                tested
                | {"label": label, "accuracy": accuracy, "calls": calls, "llm_tokens": calls, "level": 0.95}
                | {"minus_greedy": {"mean": accuracy - 0.5, "low": accuracy - 0.55}}
                | {"minus_direct": {"mean": accuracy - 0.8, "low": accuracy - 0.85}}
                for label, accuracy, calls in (("SLM greedy", 0.5, 0.0), ("direct", 0.8, 2.5), ("value", 0.9, 2.25))
            ],
            "offline": [{"stage": "trajectories", **costs}],
        },
        "about": {"machine": "2 CPU cores, torch 2.13.0", "commit": "0123456789"},
    }


def strings(value) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.items() for text in strings(list(item))]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


def numbers(value) -> list[float]:
    if isinstance(value, dict):
        return numbers(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


FREE = {"label", "note", "problem", "future", "slm", "llm", "machine", "commit", "name", "score", "kind", "pool"}
FREE |= {"method", "stage", "unit", "words", "loop"}


def everywhere(value, text: str):
    """The same with this text in place of every one that a model, a person or a file may have written."""
    if isinstance(value, dict):
        hostile = {key: text for key, item in value.items() if key in FREE and isinstance(item, str)}
        return {key: everywhere(item, text) for key, item in value.items()} | hostile
    return [everywhere(item, text) for item in value] if isinstance(value, list) else value


class Page(HTMLParser):
    """Checks that tags are closed in their order and collects what a page holds."""

    VOID = ("meta", "img")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.tags, self.attributes = list[str](), list[str](), list[tuple[str, str | None]]()
        self.tables: list[list[list[str]]] = []
        self.titles: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag in ("h2", "h3"):
            self.titles.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.text += data
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data
        if {"h2", "h3"} & set(self.open):
            self.titles[-1] += data


def of_markdown(text: str) -> Page:
    html = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text)
    return Page(re.sub(r"<(img[^>]*?) /?>", r"<\1>", html))


def stripped(tables):
    return [[[cell.strip() for cell in row] for row in table] for table in tables]


def blocks_of(document: Document) -> list:
    def inside(sections):
        for section in sections:
            yield from section.blocks
            yield from inside(section.sections)

    return list(inside(document.sections))


def table(document: Document, caption: str) -> Table:
    (found,) = [block for block in blocks_of(document) if isinstance(block, Table) and block.caption == caption]
    return found


def plain(text) -> str:
    pieces = text if isinstance(text, tuple) else (text,)
    return "".join(piece if isinstance(piece, str) else piece.text for piece in pieces)


def rows_of(found: Table) -> dict[str, list[str]]:
    return {plain(name): [plain(cell) for cell in cells] for name, *cells in found.rows}


def items(document: Document, title: str) -> list[str]:
    """The list items of a section; of the first screen without a title."""
    (section,) = [one for one in document.sections if one.title == title] if title else [document]
    return [plain(text) for block in section.blocks if isinstance(block, Items) for text in block.texts]


@pytest.fixture(scope="module")
def single() -> Document:
    return render(tiny() | {"pages": {"problems/0.html": b"x", "problems/3.html": b"y"}})


@pytest.fixture(scope="module")
def runs() -> Document:
    several = tiny("several", benchmarks=("gsm8k", "math-500"))
    return render(tiny(), tiny("control", 0.6), several | {"parts": {}, "timed": []})


@pytest.fixture
def undrawn(monkeypatch):
    """Without figures, which take a second each."""
    for name in ("forest", "agreement", "curve", "frontier"):
        monkeypatch.setattr(figures, name, lambda *_: None)


# The long table and its groups


@pytest.fixture(scope="module")
def decoded() -> list[Decoded]:
    """Two benchmarks of 7 and 5 problems, decoded by four methods (one with two seeds), and three problems timed."""
    draw, rows = np.random.default_rng(0), []
    for method, seeds in (("greedy", [None]), ("direct", [None]), ("futurebridge", [0, 1]), ("takeover", [None])):
        for benchmark, count in (("demo:plans", 7), ("b", 5)):
            for problem, seed in itertools.product(range(count), seeds):
                verdict = "correct" if draw.random() < 0.6 else "wrong"
                calls, tokens = (0, 0) if method == "greedy" else draw.integers(1, 9, 2).tolist()
                about = ("run", method, method, benchmark, seed, "batch", f"{benchmark}/{problem}", verdict)
                rows.append(Decoded(*about, 30 + problem, calls, calls, tokens, 4.0, None, None))
    for method, loop in (("greedy", "fast"), ("direct", "fast"), ("greedy", "plain")):
        for problem in range(3):
            about = ("run", "", method, "demo:plans", None, loop, str(problem), "correct")
            rows.append(Decoded(*about, 9, 1, 2, 3, None if problem else 6.0, float(draw.random()) + 1, 7 + problem))
    return rows


@pytest.fixture
def plan(tmp_path) -> Plan:
    chosen = settings(
        evaluate={"benchmarks": ["demo:plans", "b"]}, compare={"methods": ["greedy", "takeover", "direct"]}
    )
    return Plan(chosen, tmp_path, 8)


def test_a_tables_numbers_are_groups_of_the_rows(decoded, plan):
    rows = [row._asdict() for row in decoded if row.variant]

    def column(method, name, benchmark):
        found = {}
        for row in rows:
            if (row["method"], row["benchmark"]) == (method, benchmark):
                value = row["verdict"] == "correct" if name == "correct" else row[name]
                found.setdefault(row["problem"], []).append(float(value))
        return [sum(values) / len(values) for values in found.values()]

    found = {(row.key, row.benchmark): row for row in results(plan, decoded, {"methods": TABLES["methods"]})}
    for members, name in ((["demo:plans"], "demo:plans"), (["b"], "b"), (["demo:plans", "b"], AVERAGE)):
        for method in ("greedy", "direct", "futurebridge", "takeover"):
            own = {part: [column(method, part, one) for one in members] for part in ("correct", "calls", "llm_tokens")}
            row = found[method, name]
            assert row.problems == sum(map(len, own["correct"]))
            assert row.accuracy == statistics.average_interval(own["correct"])
            assert row.accuracy.mean == pytest.approx(np.mean([np.mean(one) for one in own["correct"]]))
            assert (row.calls, row.llm_tokens) == tuple(
                map(statistics.average_interval, (own["calls"], own["llm_tokens"]))
            )
            assert row.tokens == pytest.approx(np.mean([np.mean(column(method, "tokens", one)) for one in members]))
            for other in {"greedy", "direct", "futurebridge"} - {method}:
                theirs = [column(other, "correct", one) for one in members]
                assert row.minus[other] == statistics.average_interval(own["correct"], theirs)
            ends = [[column(end, part, one) for one in members] for end, part in ENDS_OF_LINE]
            line = intervals.above_line_interval(own["correct"], own["llm_tokens"], *ends)
            assert row.above_line == (None if method in ENDS else line)
            assert row.seeds == ((0, 1) if method == "futurebridge" else ())
    assert found["distilled", "b"].note == "not run"
    assert found["TaH", "b"].note.startswith("changes the SLM itself")
    assert list(results(plan, decoded, {"pools": TABLES["pools"]})) == []  # none of its own rows was tried


ENDS_OF_LINE = (("greedy", "correct"), ("takeover", "correct"), ("takeover", "llm_tokens"))


def test_times_are_groups_of_the_timed_rows(decoded, plan):
    seconds = {}
    for row in decoded:
        if not row.variant:
            seconds.setdefault((row.method, row.loop), []).append(row.seconds)
    found = {(row.key, row.loop): row for row in timed(plan, decoded)}
    assert list(found) == list(seconds)
    direct = found["direct", "fast"]
    assert direct.seconds == pytest.approx(np.mean(seconds["direct", "fast"]))
    assert direct.relative == intervals.ratio_interval(seconds["direct", "fast"], seconds["greedy", "fast"])
    assert (direct.method, direct.problems, direct.calls, direct.llm_tokens) == ("Direct LLM score", 3, 2.0, 3.0)
    assert (direct.pool, direct.peak_bytes) == (6.0, 9)


def test_the_long_table_is_a_parquet_file(decoded, tmp_path):
    (tmp_path / "rows.parquet").write_bytes(rows_bytes(decoded))
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == [row._asdict() for row in decoded]


def test_tables_are_read_back_as_they_were_written(tmp_path):
    found = (read(tiny()), read(tiny("other", benchmarks=("x", "y"))), read({"name": "bare"}))
    path = tmp_path / "tables.json"
    path.write_bytes(tables_bytes(found))
    brief = read_tables(path)
    assert tables_bytes(brief) == path.read_bytes()
    for row, kept in zip(found[0].results, brief[0].results, strict=True):
        assert (kept.table, kept.label, kept.minus.keys()) == (row.table, row.label, row.minus.keys())
        assert kept.accuracy == (row.accuracy and pytest.approx(row.accuracy, abs=1e-6))
    assert [(one.policy, one.seeds, one.pair) for one in brief] == [(one.policy, one.seeds, one.pair) for one in found]
    assert [one.key for one in brief[0].timed] == [one.key for one in found[0].timed]
    assert (brief[0].parts, brief[0].settings) == ({}, {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Invalid JSON"),
        ("[" * 10_000, "Invalid JSON"),
        ('[{"results": []}]', "0.name: Field required"),
        ('[{"name": "n", "results": [{"table": 3}]}]', "0.results.0.table: Input should be a valid string"),
    ],
)
def test_files_that_are_no_tables_are_named(text, words, tmp_path):
    path = tmp_path / "tables.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="expected tables of a report, got ") as wrong:
        read_tables(path)
    assert str(path) in str(wrong.value)
    assert words in str(wrong.value)
    assert "\n" not in str(wrong.value)


# What the report says


def test_every_number_of_a_table_is_the_runs(single):
    found = tiny()
    allowed = {word for text in strings(found) for word in re.findall(r"\d+(?:\.\d+)?", text)}
    for number in numbers(found):
        for value in (abs(number), abs(100 * number)):
            allowed |= {f"{value:.{digits}f}" for digits in range(5)} | {f"{value:g}"}
    for one in orderings(read(found).results):  # the paper's, and differences that are not paired: tests of their own
        allowed |= set(re.findall(r"\d+\.\d+", one.published + one.shown * (not one.paired)))
    tables = [
        block for block in blocks_of(single) if isinstance(block, Table) and "Changed outcomes" not in block.caption
    ]
    words = [word for one in tables for row in one.rows for cell in row for word in plain(cell).split()]
    shown = {number.replace(",", "") for word in words for number in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", word)}
    assert len(shown) > 200
    assert shown <= allowed


def test_rows_of_methods_are_as_found(single):
    found = table(single, "Methods on demo:plans")
    assert rows_of(found)["FutureBridge"] == [
        *("95.8 [92.8, 98.8]", "+24.6 [+20.9, +28.3]", "+8.8 [+5.1, +12.5]", "", "1.91", "1.91", "41.8")
    ]
    assert rows_of(found)["GRPO"] == ["see below", *[""] * 6]
    assert "GRPO: no checkpoint given: compare.external." in items(single, "Methods")
    for words in ("SLM demo:plans, LLM demo:plans", "400 problems", "seeds 0, 1", "greedy decoding between events"):
        assert words in found.note
    assert "quantile 0.94, 1.695 nats; 95% bootstrap over problems, differences paired" in found.note


@pytest.mark.usefixtures("undrawn")
def test_unequal_problem_counts_are_shown():
    found = tiny()
    found["results"] = found["results"][:2]
    found["results"][0] |= {"problems": 1319}
    shown = table(render(found), "Methods on demo:plans")
    assert shown.head[-1] == "problems"
    assert (rows_of(shown)["Greedy"][-1], rows_of(shown)["Maj@8"][-1]) == ("1,319", "400")
    assert "400 to 1,319 problems" in shown.note


def test_verdicts_follow_the_intervals(single):
    first, *more = items(single, "Methods")
    assert first == (
        "Significantly above greedy: Direct LLM score; R2R; FutureBridge; Takeover. Significantly below greedy: Random "
        "choice. Not significantly different from greedy: Maj@8; S2T."
    )
    assert len(more) == 3
    assert "Significantly below greedy: FutureBridge at quantile 0.9." in items(single, "Request quantiles")[0]


@pytest.mark.usefixtures("undrawn")
def test_three_sentences_say_what_was_compared_what_won_and_what_is_lost():
    compared, won, lost = items(render(tiny()), "")
    assert compared == "8 methods were compared on demo:plans (400 problems), SLM demo:plans, LLM demo:plans."
    assert won.endswith(
        ": FutureBridge on demo:plans, 95.8% with 1.9 LLM tokens per problem "
        "(greedy 71.2% with 0.0, takeover 99.2% with 40.2)."
    )
    assert lost == "FutureBridge: nowhere significantly worse than greedy decoding or the direct LLM score or takeover."
    _, won, lost = items(render(tiny("good"), tiny("bad", 0.5)), "")
    assert "FutureBridge on good, demo:plans, 95.8%" in won
    assert "R2R on bad, demo:plans, 90.1%" in won
    assert (
        "FutureBridge: significantly worse than greedy decoding on bad, demo:plans (-25.4 [-29.1, -21.7] pp)," in lost
    )
    assert "good, demo:plans" not in lost
    found = tiny()
    takeover = next(row for row in found["results"] if row["key"] == "takeover")
    takeover["minus"]["futurebridge"] = [0.034, 0.02, 0.05]  # known from its side alone
    by_key = {row["key"]: row for row in found["results"] if row["table"] == "methods"}
    by_key["direct"] |= {"accuracy": by_key["futurebridge"]["accuracy"], "llm_tokens": [1.5, 1.4, 1.6]}
    _, won, lost = items(render(found), "")
    assert "FutureBridge: significantly worse than takeover on demo:plans (-3.4 [-5.0, -2.0] pp)." in lost
    assert ": Direct LLM score on demo:plans, 95.8% with 1.5 LLM tokens per problem (" in won  # of equals the cheapest


@pytest.mark.usefixtures("undrawn")
def test_the_frontier_tells_what_is_worth_more_than_taking_over(single):
    rows = rows_of(table(single, "Accuracy and the LLM's work on demo:plans"))
    distance = 95.8 - 71.2 - 1.91 / 40.2 * 28
    last = f"{distance:+.1f} [{distance - 3:+.1f}, {distance + 3:+.1f}]"
    assert rows["FutureBridge"] == [
        *("95.8 [92.8, 98.8]", "1.9 [1.8, 2.0]", "1.91 [1.72, 2.10]", "0.048, 1.55 [1.50, 1.61] × greedy, fast", last)
    ]
    assert (rows["Greedy"][-1], rows["Takeover"][-1]) == ("", "")
    takeover, worth = items(single, "Accuracy against the LLM's work")
    assert takeover.startswith("Takeover is right on 99.2 [96.2, 100.0]% of the problems with 40.2 [40.1, 40.3] LLM ")
    more, less = worth.split("Significantly worse: ")
    assert more.endswith("LLM tokens: Direct LLM score; R2R; FutureBridge. ")
    assert less == "Random choice; S2T. Not significantly different: Maj@8."
    found = tiny()
    found["results"] = [row | {"llm_tokens": None} for row in found["results"]]
    assert "Accuracy against the LLM's work" not in [section.title for section in render(found).sections]


@pytest.mark.usefixtures("undrawn")
def test_changed_problems_are_counted_and_lead_to_their_pages(single):
    counts = table(single, "Changed outcomes by kind of event")
    assert [plain(cell) for cell in counts.head] == ["", "greedy → method", "no event", "digit", "all"]
    assert [[plain(cell) for cell in row] for row in counts.rows] == [
        ["FutureBridge", "right → wrong", "2", "1", "3"],
        ["FutureBridge", "wrong → right", "4", "5", "9"],
    ]
    shown = table(single, "Changed problems")
    assert [plain(row[0]) for row in shown.rows] == [f"plans/test/{number}" for number in range(9)]
    links = [row[0] for row in shown.rows if isinstance(row[0], Link)]
    assert links == [Link("plans/test/0", "problems/0.html"), Link("plans/test/3", "problems/3.html")]
    assert {value for name, value in Page(single.html()).attributes if name == "href"} == {link.to for link in links}
    assert "[plans/test/0](problems/0.html)" in single.markdown("figures")


def test_the_deployed_recipe_is_shown_with_its_bounds(single):
    assert items(single, "Deployed recipe") == ["Seed 0: value: the best of 1 of 1 tested recipes."]
    found = table(single, "Certification, seed 0")
    assert rows_of(found)["value"] == ["90.0", "+40.0 [+35.0]", "+10.0 [+5.0]", "2.25", "2.25"]
    assert found.note.endswith("valid together at 95%. A recipe may be deployed if both are above -2.")


def test_scores_are_better_or_worse_than_chance(single):
    (section,) = [one for one in single.sections if one.title == "Agreement with rollouts"]
    texts = [block.text for block in section.blocks if isinstance(block, Paragraph)]
    assert texts[1] == (
        "All events, validation. Better than chance: LLM; Direct-B_16; FutureBridge. Not significantly different from "
        "chance: SLM."
    )
    assert rows_of(table(single, "Agreement with rollouts, mark events"))["SLM"][2] == ""  # known nowhere


@pytest.mark.usefixtures("undrawn")
def test_several_benchmarks_have_an_average_where_all_are_known():
    rows = [row for row in tiny(benchmarks=("x", "y"))["results"] if row["table"] == "methods"]
    rows = [row for row in rows if (row["benchmark"], row["key"]) != ("y", "s2t")]
    greedy = next(row for row in rows if row["key"] == "greedy")
    rows += [greedy | {"benchmark": AVERAGE, "accuracy": around(0.656, 0.02), "problems": 800}]
    document = render({"name": "n", "results": rows})
    found = table(document, "Methods: accuracy, %")
    assert list(found.head) == ["", "x", "y", "average"]
    assert rows_of(found)["Greedy"] == ["71.2 ▽", "71.2 ▽", "65.6 [63.6, 67.6] ▽"]
    assert rows_of(found)["S2T"] == ["69.0 ▽", "", ""]
    assert ": Greedy on average, 65.6%" in items(document, "")[1]  # the primary one alone


def test_several_runs_are_compared(runs):
    titles = [section.title for section in runs.sections]
    assert titles == ["All runs", "tiny", "control", "several", "How to read the numbers"]
    found = table(runs, "Accuracy, % [95%], by run")
    assert list(found.head) == ["", "tiny: demo:plans", "control: demo:plans", "several: gsm8k", "several: math-500"]
    assert rows_of(found)["FutureBridge"][:2] == ["95.8 [92.8, 98.8]", "35.8 [32.8, 38.8] ▼▽"]
    assert [row[0] for row in found.rows] == [label for label, *_ in METHODS.values()]
    names = [figure.name for figure in runs.figures()]
    assert len(set(names)) == len(names) > 10
    same = render({"name": "a"}, {"name": "a"})
    assert [section.title for section in same.sections] == ["All runs", "a (1)", "a (2)", "How to read the numbers"]


SHOWN = [(one.title, f"python -m benchmarks.paper tables {name}") for name, one in TABLES.items()]
SHOWN += [(one.title, one.command) for one in PARTS]


@pytest.mark.usefixtures("undrawn")
def test_what_was_not_run_is_named_with_its_command():
    whole = tiny()
    for name, one in TABLES.items():
        left = whole | {"results": [row for row in whole["results"] if row["table"] != name]}
        missing = [f"{one.title}: run python -m benchmarks.paper tables {name}"]
        missing += ["Accuracy against the LLM's work: run python -m benchmarks.paper tables methods"] * (
            name == "methods"
        )
        assert items(render(left), "Not run") == missing
    for name in whole["parts"].keys() - {"offline", "changes"}:
        left = whole | {"parts": {other: part for other, part in whole["parts"].items() if other != name}}
        assert len(items(render(left), "Not run")) == 1
    same = render(whole | {"parts": whole["parts"] | {"changes": []}})
    assert "No problem has another outcome than with greedy decoding." in same.markdown("figures")
    assert "Costs: run python -m benchmarks.paper tables costs" in items(
        render(whole | {"timed": [], "parts": {}}), "Not run"
    )


def test_of_an_empty_run_nothing_is_invented():
    document = render({"name": "bare"})
    assert [section.title for section in document.sections] == ["Not run", "How to read the numbers"]
    text = Page(document.html()).text
    assert all(title in text and command in text for title, command in SHOWN)
    assert not list(document.figures())
    assert not re.search(r"\d", text.replace("95%", "").replace("excludes 0", "").replace("FutureBridge", ""))
    with pytest.raises(ValueError, match="runs: expected one or more, got none"):
        report.render([])


def test_an_experiment_is_shown_as_its_entry_says():
    entry = Experiment("widths", "Widths", "How wide it is.", lambda plan: [], "accuracy", "Dots.")
    row = row_of("widths", "b", "wide", "twice as wide", 0.9, {"greedy": 0.7, "the narrow one": 0.7})
    document = render({"name": "n", "results": [row]}, tables={"widths": entry})
    (section,) = [section for section in document.sections if section.title == "Widths"]
    assert section.brief == "How wide it is."
    assert "minus the narrow one, pp [95%]" in table(document, "Widths on b").head
    assert (type(section.blocks[-1]), section.blocks[-1].caption) == (Figure, "Dots.")


@pytest.mark.usefixtures("undrawn")
def test_a_column_of_published_figures_is_there_where_there_are_some():
    found = tiny()
    assert not [
        head for one in ("Offline stages", "Deployment") for head in table(render(found), one).head if "pub" in head
    ]
    found["parts"]["offline"] += [found["parts"]["offline"][0] | {"stage": "scores", "published": 8.6}]
    shown = table(render(found), "Offline stages")
    assert shown.head[-1] == "published, GPU hours"
    assert (rows_of(shown)["scores"][-1], rows_of(shown)["trajectories"][-1]) == ("8.6", "")


PAPER = PaperSettings(models=ModelSettings(slm="Qwen/Qwen3-1.7B", llm="Qwen/Qwen3-32B"))


def test_published_figures_stand_beside_their_own_settings_and_benchmark_alone(tmp_path, monkeypatch):
    offline = {"states": 5.8, "futures": 29.4, "scores": 8.6, "training": 7.2}
    assert published(PAPER) == {"offline": offline}  # its deployment is of a benchmark that is not known here
    assert published(PaperSettings.of_config("tiny")) == {}
    monkeypatch.setattr(gather, "resources", SimpleNamespace(files=lambda package: tmp_path))
    for name, wanted in (("gsm8k", {"deployment": {"s2t": 3.18}}), ("math-500", {})):  # the first is timed
        rows = {"deployment": {"table": 9, "benchmark": name, "rows": {"s2t": 3.18}}}
        (tmp_path / "published.yaml").write_text(yaml.safe_dump(rows))
        assert published(PAPER) == wanted


# One page that is safe to open


def test_the_page_is_one_file_that_loads_nothing_and_runs_what_its_policy_names(single):
    html = single.html()
    page = Page(html)
    assert not {"link", "iframe", "object", "svg", "base", "form"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "style"]
    places = [value for name, value in page.attributes if name in ("src", "srcset", "action", "poster")]
    assert places
    assert all(value.startswith("data:image/svg+xml;base64,") for value in places)
    assert "http" not in html.split("</style>")[0].replace("http-equiv", "")
    (policy,) = [value for name, value in page.attributes if value and "default-src" in value]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for tag in ("style", "script"):
        assert page.tags.count(tag) == 1
        text = html.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        hashed = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules.pop(f"{tag}-src") == f"'sha256-{hashed}'"
        assert not re.search(r"url\(|@import|fetch|http|innerHTML", text)
    assert rules == {"default-src": "'none'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}


TITLES = ["The run", "The paper's orderings", "Methods", "Accuracy against the LLM's work"]
TITLES += ["Problems with changed outcomes", "Deployed recipe", "Costs", "Candidate pools", "Pool coverage", "Horizon"]
TITLES += ["Futures", "Future quality", "Hybrid targets", "Adapter scope", "Target temperature", "Request quantiles"]
TITLES += ["Agreement with rollouts", "Settings", "How to read the numbers"]


def test_all_but_the_first_screen_is_folded_under_its_title(single):
    html = single.html()
    page = Page(html)
    assert page.titles == TITLES
    assert page.tags.count("details") == page.tags.count("summary") == len(TITLES)
    assert "open" not in {name for name, _ in page.attributes}
    first = Page(html.split("<details>")[0].replace("<main>", "") + "</body></html>")
    assert (first.tags.count("li"), first.tags.count("figure"), first.tags.count("table")) == (3, 1, 0)
    assert all(section.brief for section in single.sections if section.title != "How to read the numbers")


def test_both_renderings_hold_the_same(single, runs):
    for document in (single, runs):
        made, markdown = Page(document.html()), of_markdown(document.markdown("figures"))
        assert stripped(markdown.tables) == stripped(made.tables)
        assert [title.strip() for title in markdown.titles] == made.titles
        drawn = list(document.figures())
        assert markdown.tags.count("img") == len(drawn)
        assert made.tags.count("img") == 2 * len(drawn) + 2  # the first for a narrow screen too


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.usefixtures("undrawn")
def test_no_text_gets_at_the_reader(text):
    document, harmless = (render(everywhere(tiny(), one)) for one in (text, "text"))
    html = document.html()
    made, markdown, tree = Page(html), of_markdown(document.markdown("figures")), Tree(html)
    assert tree.tags == Tree(harmless.html()).tags
    assert tree.entities <= ESCAPED
    assert tree.other == []
    tags = {"h1", "h2", "h3", "p", "ul", "li", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    assert set(markdown.tags) <= {*tags, "code"}
    assert not [value for name, value in markdown.attributes if name == "src"]
    for seen in (made, markdown):
        assert escaped(text) in {row[0] for cells in seen.tables for row in cells}  # once read, it is what was written
        assert all(len(row) == len(cells[0]) for cells in seen.tables for row in cells)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", seen.text)
    assert stripped(markdown.tables) == stripped(made.tables)


@pytest.mark.parametrize("text", ["1. x", "# x", "- x", "+ x", "> x", "=== x", "    x", "* x", "```", "~~~ x", "7) x"])
def test_no_text_begins_a_block_of_markdown(text):
    blocks = [Paragraph(text), Items([text]), Table("c", ("a",), [[text]], text)]
    page = of_markdown(Document("t", [], [Section(text, blocks)]).markdown("figures"))
    assert page.tags.count("ul") == page.tags.count("li") == page.tags.count("h2") == 1
    assert not {"ol", "h3", "blockquote", "hr", "em", "del", "pre"} & set(page.tags)
    assert page.text.count(text.strip()) == 5


def test_pictures_and_titles_cannot_become_markup():
    for text in HOSTILE:
        picture = Figure(text, text, Picture("<svg/>", "<svg/>"))
        document = Document(text, [Paragraph((text, Span(text, "code")))], [Section(text, [picture])])
        tree = Tree(document.html())
        assert tree.tags == Tree(Document("t", document.blocks, [Section("t", [picture])]).html()).tags
        assert tree.entities <= ESCAPED


@pytest.mark.parametrize(
    "address", ["https://evil.example", "//evil.example/x.html", "javascript:x", "/x.html", "../x.html"]
)
def test_a_link_leads_nowhere_but_beside_the_report(address):
    with pytest.raises(ValueError, match="to: expected a page beside the report, got "):
        Link("text", address)


@pytest.mark.parametrize("text", ["a](https://evil.example)", "[x](y)", "]", "\\](z"])
def test_the_text_of_a_link_cannot_end_it(text):
    document = Document("t", [Paragraph(Link(text, "problems/1.html"))], [])
    for made in (of_markdown(document.markdown("figures")), Page(document.html())):
        assert [value for name, value in made.attributes if name == "href"] == ["problems/1.html"]
        assert text in made.text


@pytest.mark.usefixtures("undrawn")
def test_the_name_of_an_experiment_is_no_path(monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "forest", lambda *_: Picture("<svg/>", "<svg/>"))
    entry = Experiment("../../../owned", "Owned", "It.", lambda plan: [], "accuracy")
    rows = [row_of(entry.name, "b", "x", "x", 0.9, {})]
    write_report([read({"name": "n", "results": rows})], tmp_path / "a" / "report", tables={entry.name: entry})
    assert [path.parent.name for path in tmp_path.rglob("*owned*")] == ["figures"]


def test_written_files_repeat_byte_for_byte(tmp_path):
    found = [read(tiny() | {"pages": {"problems/0.html": b"x"}})]
    written = write_report(found, tmp_path / "a" / "b")
    names = [path.relative_to(tmp_path / "a" / "b").as_posix() for path in written]
    assert (names[0], names[-2:]) == ("tables.json", ["report.md", "report.html"])
    assert (tmp_path / "a" / "b" / "problems" / "0.html").read_bytes() == b"x"
    again = write_report(found, tmp_path / "c")
    assert [path.read_bytes() for path in written] == [path.read_bytes() for path in again]
    shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", written[-2].read_text())
    assert shown
    assert all((written[-2].parent / name).is_file() for name in shown)
    with pytest.raises(ValueError):
        write_report(
            [read({"name": "n", "policy": {"threshold": math.nan, "quantile": 0.9, "top_k": 64}})], tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


def test_a_report_without_room_leaves_the_one_before(tmp_path):
    (tmp_path / "tables.json").write_bytes(tables_bytes([read(tiny())]))
    code = (
        "import resource, signal; from pathlib import Path; from benchmarks.paper.rows import read_tables; "
        "from benchmarks.paper.report import write_report; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "runs = read_tables(Path('tables.json')); write_report(runs, Path('out')); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)); write_report(runs, Path('out'))"
    )
    found = os.environ | {"PYTHONPATH": str(ROOT)}  # where a process of its own finds the benchmarks
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=found, capture_output=True, text=True)
    assert "expected to write" in done.stderr
    assert len((tmp_path / "out" / "report.html").read_bytes()) > 4000
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name.endswith(".part")]


# Figures


def drawn_with(name: str, found: Run) -> list:
    """What a figure is made of."""
    methods = figures.panels([found], "methods")
    return {
        "forest": [methods],
        "narrow": [methods, True],
        "agreement": [found.parts.get("agreement", ())],
        "curve": [found, "quantiles", "request quantile"],
        "horizons": [found, "horizons", "horizon"],
        "frontier": [found],
    }[name]


DRAWN = {"forest": "forest", "narrow": "forest", "agreement": "agreement", "curve": "curve", "horizons": "curve"}
DRAWN |= {"frontier": "frontier"}


def drawn(name: str, found: Run):
    """A figure by itself, laid out."""
    data, *more = drawn_with(name, found)
    with style.context(["default", theme._style(theme.LIGHT)]):
        figure = inspect.unwrap(getattr(figures, DRAWN[name]))(data, theme.LIGHT, *more)
        figure.draw_without_rendering()
    return figure


@pytest.mark.parametrize("name", DRAWN)
def test_figures_are_svg_by_themselves_in_two_themes(name):
    draw, found = getattr(figures, DRAWN[name]), read(tiny())
    before = dict(matplotlib.rcParams)
    picture = draw(*drawn_with(name, found))
    assert draw(*drawn_with(name, found)) == picture
    assert dict(matplotlib.rcParams) == before
    assert draw(*drawn_with(name, read({"name": "bare"}))) is None
    for svg in picture:
        root = ElementTree.fromstring(svg)
        assert root.tag.endswith("svg")
        assert not {"script", "image", "text"} & {e.tag.split("}")[1] for e in root.iter()}
        links = [value for e in root.iter() for key, value in e.attrib.items() if key.split("}")[-1] == "href"]
        assert all(link.startswith("#") for link in links)
        assert "dc:date" not in svg
    assert theme.LIGHT.ink in picture.light
    assert theme.DARK.ink in picture.dark
    assert theme.LIGHT.ink not in picture.dark


@pytest.mark.parametrize("name", DRAWN)
def test_figures_take_hostile_text_and_many_benchmarks(name, recwarn):
    hostile = ("$\\frac{1", "--><b>", "\x1b[31m\u202e\n", "漢字 \U0001f600", "", "x" * 500)
    found = tiny(benchmarks=("$a", "b^{", "c"))
    for rows in (found["results"], *found["parts"].values()):
        rows[:] = [everywhere(row, text) for row, text in zip(rows, itertools.cycle(hostile), strict=False)]
    for svg in getattr(figures, DRAWN[name])(*drawn_with(name, read(found))):
        ElementTree.fromstring(svg)
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def dots(axis):
    """(low, high) in percent by the place of each dot, from the top."""
    lines = (container.lines[2][0].get_segments()[0] for container in axis.containers)
    return {round(float(line[0, 1])): tuple(line[:, 0].round(6).tolist()) for line in lines}


def test_dots_are_the_rows_intervals_in_one_order():
    found = tiny(benchmarks=("one", "other"))
    found["results"] = [row for row in found["results"] if (row["benchmark"], row["key"]) != ("other", "majority")][
        ::-1
    ]
    axes = drawn("forest", read(found)).axes
    assert [text.get_text() for text in axes[0].get_yticklabels()] == [label for label, *_ in METHODS.values()]
    ends = (around(mean)[1:] for _, mean, *_ in METHODS.values())
    wanted = {place: (round(100 * low, 6), round(100 * high, 6)) for place, (low, high) in enumerate(ends)}
    by_title = {axis.get_title(loc="left"): dots(axis) for axis in axes}
    assert by_title["one"] == wanted
    assert by_title["other"] == {place: ends for place, ends in wanted.items() if place != 1}
    axes = drawn("agreement", read(tiny())).axes
    assert dots(axes[0])[0] == (49, 55)
    assert 0 not in dots(axes[2])  # known nowhere


def test_curves_go_through_the_means_of_their_rows():
    axis = drawn("curve", read(tiny())).axes[0]
    lines = {line.get_label(): line for line in axis.lines}
    wanted = [(quantile, 100 * accuracies[1]) for quantile, accuracies in SWEPT.items()]
    assert np.allclose(lines["FutureBridge"].get_xydata(), wanted)
    assert lines["Greedy"].get_ydata()[0] == pytest.approx(71.2)
    assert (lines["FutureBridge"].get_color(), lines["Direct LLM score"].get_color()) == (
        theme.LIGHT.ours,
        theme.LIGHT.others,
    )
    (line,) = [one for one in drawn("horizons", read(tiny())).axes[0].lines if one.get_label() == "FutureBridge"]
    assert np.allclose(line.get_xydata(), [(4, 59.2), (16, 95.8)])


def test_the_line_of_the_frontier_ends_at_greedy_and_takeover():
    tokens, calls, time = drawn("frontier", read(tiny(benchmarks=("one", "other", "average")))).axes
    assert tokens.get_ylabel() == "accuracy on average, %"
    for axis, ends in ((tokens, (0.0, 40.2)), (calls, (0.0, 1.0)), (time, (1.0, 1.87))):
        (line,) = [one for one in axis.lines if one.get_linestyle() == "--"]
        xs, ys = line.get_data()
        assert (xs[0], xs[-1]) == pytest.approx(ends)
        assert (ys[0], ys[-1]) == pytest.approx((71.2, 99.2))
        assert np.allclose(np.diff(ys) / np.diff(xs), (99.2 - 71.2) / (ends[1] - ends[0]))  # straight; the axis is not
    assert (len(tokens.containers), len(time.containers)) == (len(METHODS), 4)
    assert [text.get_text() for text in time.texts][-1] == "Takeover, plain loop"
    colours = {text.get_text(): text.get_color() for text in tokens.texts}
    assert colours["FutureBridge"] == theme.LIGHT.ours
    assert {colours[name] for name in ("Direct LLM score", "R2R", "Maj@8")} == {theme.LIGHT.others}
    looks = {figures._look(theme.LIGHT, key) for key in ("greedy", "s2t", "deployed")}
    assert len({marker for marker, _ in looks}) == len({colour for _, colour in looks}) == 3


def written_in(figure):
    """Every text of a figure with its place."""
    texts = [text for legend in figure.legends for text in legend.get_texts()]
    for axis in figure.axes:
        xs, ys = sorted(axis.get_xlim()), sorted(axis.get_ylim())
        texts += [text for text in axis.get_xticklabels() if xs[0] <= text.get_position()[0] <= xs[1]]
        texts += [text for text in axis.get_yticklabels() if ys[0] <= text.get_position()[1] <= ys[1]]
        texts += [axis._left_title, axis.title, axis.xaxis.label, axis.yaxis.label, *axis.texts]
    shown = [text for text in texts if text.get_text() and text.get_visible()]
    return [(text, Text.get_window_extent(text)) for text in shown]  # an annotation's own has its arrow too


@pytest.mark.parametrize("name", DRAWN)
def test_labels_can_be_read_and_do_not_overlap(name):
    figure = drawn(name, read(tiny(benchmarks=("one", "other"))))
    texts = written_in(figure)
    assert len(texts) > 5
    assert all(text.get_fontsize() >= 8 for text, _ in texts)
    assert figure.get_figwidth() <= (figures.NARROW if name == "narrow" else figures.WIDTH)  # shown at that size
    for (one, its), (other, others) in itertools.combinations(texts, 2):
        across, down = min(its.x1, others.x1) - max(its.x0, others.x0), min(its.y1, others.y1) - max(its.y0, others.y0)
        assert min(across, down) < 1.5, (one.get_text(), other.get_text())
    assert min(box.x0 for _, box in texts) >= -1
    assert max(box.x1 for _, box in texts) <= figure.bbox.x1 + 1

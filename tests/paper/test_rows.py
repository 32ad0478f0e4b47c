"""The long table: tables and times are groups of its rows, and files hold what they were written with."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow.parquet as pq
import pytest
from paper_runs import settings
from report_runs import ENDS, read, tiny

from benchmarks.paper import intervals
from benchmarks.paper.rows import Decoded, read_tables, results, rows_bytes, tables_bytes, timed
from benchmarks.paper.tables import TABLES, Plan
from fb_core.apps.pipeline import statistics
from fb_core.apps.settings.run import AVERAGE


@pytest.fixture(scope="module")
def decoded() -> list[Decoded]:
    """Two benchmarks of 7 and 5 problems, decoded by four methods (one with two seeds), and three problems timed."""
    draw, rows = np.random.default_rng(0), []
    for method, seeds in (("greedy", [None]), ("direct", [None]), ("published", [0, 1]), ("takeover", [None])):
        for benchmark, count in (("demo:plans", 7), ("b", 5)):
            for problem, seed in itertools.product(range(count), seeds):
                verdict = "correct" if draw.random() < 0.6 else "wrong"
                calls, tokens = (0, 0) if method == "greedy" else draw.integers(1, 9, 2).tolist()
                about = ("run", method, method, benchmark, seed, "batch", f"{benchmark}/{problem}", verdict)
                rows.append(Decoded(*about, 30 + problem, calls, calls, tokens, 20 + tokens, 4.0, None, None))
    for method, loop in (("greedy", "fast"), ("direct", "fast"), ("greedy", "plain")):
        for problem in range(3):
            about = ("run", "", method, "demo:plans", None, loop, str(problem), "correct")
            rows.append(
                Decoded(*about, 9, 1, 2, 3, 23, None if problem else 6.0, float(draw.random()) + 1, 7 + problem)
            )
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
        return list(found.values())

    found = {(row.key, row.benchmark): row for row in results(plan, decoded, {"methods": TABLES["methods"]})}
    for members, name in ((["demo:plans"], "demo:plans"), (["b"], "b"), (["demo:plans", "b"], AVERAGE)):
        for method in ("greedy", "direct", "published", "takeover"):
            own = {part: [column(method, part, one) for one in members] for part in ("correct", "calls", "llm_tokens")}
            row = found[method, name]
            assert row.problems == sum(map(len, own["correct"]))
            assert row.accuracy == statistics.average_interval(own["correct"])
            assert row.accuracy.mean == pytest.approx(np.mean([np.mean(one) for one in own["correct"]]))
            assert (row.calls, row.llm_tokens) == tuple(
                map(statistics.average_interval, (own["calls"], own["llm_tokens"]))
            )
            assert row.tokens == pytest.approx(np.mean([np.mean(column(method, "tokens", one)) for one in members]))
            for other in {"greedy", "direct", "published"} - {method}:
                theirs = [column(other, "correct", one) for one in members]
                assert row.minus[other] == statistics.average_interval(own["correct"], theirs)
            ends = [[column(end, part, one) for one in members] for end, part in ENDS_OF_LINE]
            line = intervals.above_line_interval(own["correct"], own["llm_tokens"], *ends)
            assert row.above_line == (None if method in ENDS else line)
            assert row.seeds == ((0, 1) if method == "published" else ())
    without = results(plan, [row for row in decoded if row.method != "takeover"], {"methods": TABLES["methods"]})
    assert all(row.above_line is None and row.llm_tokens for row in without if row.accuracy)
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
    assert brief[0].parts.keys() == {"agreement", "coverage"} < found[0].parts.keys()
    assert brief[0].parts["coverage"][0]["states"] == found[0].parts["coverage"][0]["states"]
    assert brief[0].settings == {}


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

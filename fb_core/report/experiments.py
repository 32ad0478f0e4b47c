"""The report's tables of variants: every row against its references, in one run and over all of them."""

from __future__ import annotations

from collections.abc import Sequence

from fb_core.config import AVERAGE
from fb_core.report.columns import (
    LEGEND,
    Column,
    above,
    below,
    column_table,
    made_with,
    number,
    number_column,
    percent,
    said,
    text_column,
)
from fb_core.report.findings import OURS, Experiment, Findings, Result
from fb_core.report.page import Block, Items, Paragraph, Section, Span, Table, Text
from fb_core.report.recipes import benchmarks, marked, recipe_blocks, recipe_key
from fb_core.statistics import Interval

REFERENCES = {"greedy": "greedy", "direct": "the direct LLM score", OURS: "FutureBridge"}


def headlines(findings: Findings) -> list[Block]:
    """Where FutureBridge stands, above or below, in one sentence a reference and benchmark."""
    rows = sorted(findings.of("methods"), key=lambda row: row.benchmark != AVERAGE)  # the primary one first
    names = benchmarks(rows)
    found: list[Text] = []
    for row in (row for row in rows if row.key == OURS):
        where = f" on {row.benchmark}" if len(names) > 1 else ""
        for key in ("greedy", "direct"):
            if difference := row.minus.get(key):
                start = f"FutureBridge minus {REFERENCES[key]}{where}: {percent(difference, signed=True)} pp, "
                found.append((start, _verdict(difference), "."))
    return [Items(found)] if found else []


def _verdict(difference: Interval) -> Span:
    if above(difference):
        return Span("above 0 beyond chance", "good")
    return Span("below 0 beyond chance", "bad") if below(difference) else Span("not told apart from 0", "faint")


def experiment_blocks(findings: Findings, shown: Experiment) -> list[Block]:
    """What one experiment found: a verdict and a table for every benchmark; nothing where it was not run."""
    rows = findings.of(shown.name)
    if not rows:
        return []
    names = benchmarks(rows)
    blocks: list[Block] = [Paragraph(shown.varies)]
    if len(names) > 1:
        blocks.append(_by_benchmark(findings, rows, shown.title))
    for name in names:
        inside = [row for row in rows if row.benchmark == name]
        blocks += [*_verdicts(inside), _rows_table(findings, inside, shown, name)]
        notes = [f"{row.label}: {row.note}." for row in inside if row.note]
        blocks += [Items(notes)] if notes else []
    return [*blocks, *recipe_blocks([findings])] if any(row.quantile is not None for row in rows) else blocks


def _verdicts(rows: Sequence[Result]) -> list[Block]:
    """Which differences are beyond chance and which are not, a point for each method to compare with."""
    points: list[Text] = []
    for key, reference in REFERENCES.items():
        known = [(row, row.minus[key]) for row in rows if key in row.minus and row.key != key]
        sides = {
            f"Above {reference} beyond chance": [row for row, difference in known if above(difference)],
            f"Below {reference} beyond chance": [row for row, difference in known if below(difference)],
            f"Not told apart from {reference}": [
                row for row, difference in known if not above(difference) and not below(difference)
            ],
        }
        points += [said({words: _names(members) for words, members in sides.items()})] if known else []
    return [Items(points)] if points else []


def _names(rows: Sequence[Result]) -> list[str]:
    """Labels, each once, with the quantiles where they have any."""
    quantiles: dict[str, list[str]] = {row.label: [] for row in rows}
    for row in rows:
        quantiles[row.label] += [] if row.quantile is None else [f"{row.quantile:g}"]
    return [f"{label} at quantile {', '.join(at)}" if at else label for label, at in quantiles.items()]


def _rows_table(findings: Findings, rows: Sequence[Result], shown: Experiment, benchmark: str) -> Table:
    columns = [text_column("label")]
    if any(row.quantile is not None for row in rows):
        columns.append(Column("quantile", lambda row: "" if row.quantile is None else f"{row.quantile:g}"))
        columns.append(number_column("threshold", "nats", 3))
    columns.append(Column("accuracy, % [95%]", lambda row: percent(row.accuracy) or "see below" * bool(row.note)))
    beside = dict.fromkeys(["greedy", "direct", OURS, *(name for row in rows for name in row.minus)])
    columns += [_minus_column(name) for name in beside]
    columns += [number_column("events", "events a problem", 2), number_column("calls", "LLM calls a problem", 2)]
    columns.append(number_column("tokens", "tokens a problem", 1))
    if shown.spans:
        columns.append(Column("of them the LLM's", lambda row: number(row.llm_tokens and row.llm_tokens.mean, 1)))
        columns.append(number_column("llm_written", "LLM tokens taken or offered", 1))
    unequal = len({row.problems for row in rows if row.problems}) > 1
    columns += [number_column("problems", "problems")] if unequal else []
    return column_table(f"{shown.title} on {benchmark}", rows, columns, made_with(findings, rows))


def _minus_column(name: str) -> Column:
    head = f"minus {'FutureBridge' if name == OURS else name}, pp [95%]"
    return Column(head, lambda row: percent(row.minus.get(name), signed=True))


def _by_benchmark(findings: Findings, rows: Sequence[Result], title: str) -> Table:
    """Methods by benchmarks, the average last and with its interval."""
    names = benchmarks(rows)
    body: list[list[Text]] = []
    for label in dict.fromkeys(name for row in rows for name in _names([row])):
        own = {row.benchmark: row for row in rows if _names([row]) == [label] and row.accuracy}
        body.append([label, *(marked(own.get(name), short=name != AVERAGE) for name in names)])
    note = (
        "The average counts every benchmark alike; its interval is of the problems within them. "
        f"{LEGEND} {made_with(findings, rows)}"
    )
    return Table(f"{title}: accuracy, %", ["", *names], body, note)


def across(findings: Sequence[Findings]) -> Section:
    """What several runs have in common: every method and recipe in every run, benchmark and quantile."""
    columns: dict[str, dict[str, Result]] = {}
    labels: dict[str, str] = {}
    for table in ("methods", "repairs"):
        for one in findings:
            for row in (row for row in one.of(table) if row.accuracy):
                columns.setdefault(f"{one.name}: {row.benchmark}", {}).setdefault(recipe_key(row), row)
                labels.setdefault(recipe_key(row), row.label)
    stand: dict[str, list[str]] = {}
    for head, rows in columns.items():
        for key, reference in REFERENCES.items():
            if OURS in rows and (difference := rows[OURS].minus.get(key)):
                stand.setdefault(f"FutureBridge minus {reference}, {_verdict(difference).text}", []).append(head)
    blocks: list[Block] = [Items([said({words: heads}) for words, heads in stand.items()])] if stand else []
    if columns:
        body = [[label, *(marked(rows.get(key)) for rows in columns.values())] for key, label in labels.items()]
        made = " ".join(f"{one.name}: {made_with(one, one.of('methods'))}" for one in findings)
        blocks.append(Table("Accuracy, % [95%], by run", ["", *columns], body, f"{LEGEND} {made}"))
    return Section("All runs", [*blocks, *recipe_blocks(findings)])

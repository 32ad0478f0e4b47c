"""The report's summary and its tables of variants: every row against its references, in one run and across runs."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.paper.report.columns import (
    LEGEND,
    Column,
    Panels,
    above,
    below,
    benchmarks,
    column_table,
    flipped,
    made_with,
    marked,
    mean_column,
    number,
    number_column,
    panels,
    percent,
    primary,
    said,
    share,
    text_column,
)
from benchmarks.paper.report.findings import DEPLOYED, OURS, Experiment, Findings, Result, in_order
from benchmarks.paper.report.page import Block, Items, Section, Text
from fb_core.config import AVERAGE
from fb_core.page import Table

REFERENCES = {"greedy": "greedy", "direct": "the direct LLM score", OURS: "FutureBridge"}
RIVALS = {"greedy": "greedy decoding", "direct": "the direct LLM score", "takeover": "takeover"}


def in_short(findings: Sequence[Findings]) -> list[Block]:
    """Three sentences: what was compared, which method was most accurate at what cost, where FutureBridge is worse."""
    found = panels(findings, "methods")
    if not found:
        return []
    methods = {row.label for rows in found.values() for row in rows}
    counts = {head: number(max(row.problems or 0 for row in rows)) for head, rows in found.items()}
    where = ", ".join(f"{head} ({count} problems)" for head, count in counts.items())
    pair = findings[0].pair if len(findings) == 1 else None
    models = f", SLM {pair.slm}, LLM {pair.llm}" if pair else ""
    best = "; ".join(_best(head, rows) for head, rows in panels(findings, "methods", primary).items())
    return [
        Items(
            [
                f"{len(methods)} methods were compared on {where}{models}.",
                f"Most accurate apart from takeover (picked on these same problems): {best}.",
                f"{_losses(found)}.",
            ]
        )
    ]


def _best(head: str, rows: Sequence[Result]) -> str:
    """The most accurate row apart from takeover (the cheapest if tied), then greedy and takeover, with their costs."""

    def priced(row: Result) -> str:
        tokens = f" with {number(row.llm_tokens.mean, 1)} LLM tokens per problem" if row.llm_tokens else ""
        return f"{share(row.accuracy and row.accuracy.mean)}%{tokens}"

    def rank(row: Result) -> tuple[float, float]:
        return -row.accuracy.mean if row.accuracy else 0.0, row.llm_tokens.mean if row.llm_tokens else 0.0

    best = min((row for row in rows if row.key != "takeover"), key=rank, default=rows[0])
    ends = [priced(row).removesuffix(" LLM tokens per problem") for row in rows if row.key in ("greedy", "takeover")]
    names = [row.label.lower() for row in rows if row.key in ("greedy", "takeover")]
    beside = f" ({', '.join(map(' '.join, zip(names, ends, strict=True)))})" if ends else ""
    return f"{best.label} on {head}, {priced(best)}{beside}"


def _losses(found: Panels) -> str:
    """Than what FutureBridge, as published and as deployed, is significantly worse, and where."""
    told = []
    for key in (OURS, DEPLOYED):
        lost: dict[str, list[str]] = {}
        label = ""
        for head, rows in found.items():
            by_key = {row.key: row for row in rows}
            if key not in by_key:
                continue
            label = by_key[key].label
            for rival, words in RIVALS.items():
                minus = by_key[key].minus.get(rival)
                if minus is None and rival in by_key:
                    minus = flipped(by_key[rival].minus.get(key))
                if minus is not None:
                    lost.setdefault(words, []).extend([f"{head} ({percent(minus, signed=True)} pp)"] * below(minus))
        where = [f"than {words} on {', '.join(heads)}" for words, heads in lost.items() if heads]
        if lost:
            nowhere = f"nowhere significantly worse than {' or '.join(lost)}"
            told.append(f"{label}: {'significantly worse ' * bool(where)}{', '.join(where) or nowhere}")
    return ". ".join(told) or "FutureBridge: not compared with any other method"


def experiment_blocks(findings: Findings, shown: Experiment) -> list[Block]:
    """One experiment's verdicts and table for every benchmark; empty if it was not run."""
    rows = findings.of(shown.name)
    if not rows:
        return []
    names = benchmarks(rows)
    blocks: list[Block] = []
    if len(names) > 1:
        blocks.append(_by_benchmark(findings, rows, shown.title))
    for name in names:
        inside = [row for row in rows if row.benchmark == name]
        blocks += [*_verdicts(inside), _rows_table(findings, inside, shown, name)]
        notes = [f"{row.label}: {row.note}." for row in inside if row.note]
        blocks += [Items(notes)] if notes else []
    return blocks


def _verdicts(rows: Sequence[Result]) -> list[Block]:
    """Which differences are statistically significant and which are not, one list item per reference method."""
    points: list[Text] = []
    for key, reference in REFERENCES.items():
        known = [(row, row.minus[key]) for row in rows if key in row.minus and row.key != key]
        sides = {
            f"Significantly above {reference}": [row for row, difference in known if above(difference)],
            f"Significantly below {reference}": [row for row, difference in known if below(difference)],
            f"Not significantly different from {reference}": [
                row for row, difference in known if not above(difference) and not below(difference)
            ],
        }
        points += [said({words: _names(members) for words, members in sides.items()})] if known else []
    return [Items(points)] if points else []


def _names(rows: Sequence[Result]) -> list[str]:
    """Each label once, with its request quantiles if it has any."""
    quantiles: dict[str, list[str]] = {row.label: [] for row in rows}
    for row in rows:
        quantiles[row.label] += [] if row.quantile is None else [f"{row.quantile:g}"]
    return [f"{label} at quantile {', '.join(at)}" if at else label for label, at in quantiles.items()]


def _rows_table(findings: Findings, rows: Sequence[Result], shown: Experiment, benchmark: str) -> Table:
    columns = [text_column("label")]
    if any(row.quantile is not None for row in rows):
        columns.append(Column("quantile", lambda row: "" if row.quantile is None else f"{row.quantile:g}"))
        columns.append(number_column("threshold", "threshold, nats", 3))
    columns.append(Column("accuracy, % [95%]", lambda row: percent(row.accuracy) or "see below" * bool(row.note)))
    beside = dict.fromkeys(["greedy", "direct", OURS, *(name for row in rows for name in row.minus)])
    columns += [_minus_column(name) for name in beside]
    columns += [number_column("events", "events per problem", 2), mean_column("calls", "LLM calls per problem", 2)]
    columns.append(number_column("tokens", "tokens per problem", 1))
    unequal = len({row.problems for row in rows if row.problems}) > 1
    columns += [number_column("problems", "problems")] if unequal else []
    return column_table(f"{shown.title} on {benchmark}", rows, columns, made_with(findings, rows))


def _minus_column(name: str) -> Column:
    head = f"minus {'FutureBridge' if name == OURS else name}, pp [95%]"
    return Column(head, lambda row: percent(row.minus.get(name), signed=True))


def _by_benchmark(findings: Findings, rows: Sequence[Result], title: str) -> Table:
    """Accuracy of every method on every benchmark; the average comes last, with its interval."""
    names = benchmarks(rows)
    body: list[list[Text]] = []
    for label in dict.fromkeys(name for row in rows for name in _names([row])):
        own = {row.benchmark: row for row in rows if _names([row]) == [label] and row.accuracy}
        body.append([label, *(marked(own.get(name), short=name != AVERAGE) for name in names)])
    note = (
        "The average gives all benchmarks equal weight; its interval resamples the problems within each benchmark. "
        f"{LEGEND} {made_with(findings, rows)}"
    )
    return Table(f"{title}: accuracy, %", ["", *names], body, note)


def across(findings: Sequence[Findings]) -> Section:
    """The section across runs: every method in every run and benchmark."""
    columns: dict[str, dict[str, Result]] = {}
    for one in findings:
        for row in one.of("methods"):
            if row.accuracy:
                columns.setdefault(f"{one.name}: {row.benchmark}", {}).setdefault(row.label, row)
    labels = dict.fromkeys(row.label for row in in_order(row for found in columns.values() for row in found.values()))
    blocks: list[Block] = []
    if columns:
        body = [[label, *(marked(found.get(label)) for found in columns.values())] for label in labels]
        made = " ".join(f"{one.name}: {made_with(one, one.of('methods'))}" for one in findings)
        blocks.append(Table("Accuracy, % [95%], by run", ["", *columns], body, f"{LEGEND} {made}"))
    return Section("All runs", blocks, brief="The accuracy of every method in every run and benchmark.")

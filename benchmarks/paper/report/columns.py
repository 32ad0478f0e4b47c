"""How the report's tables format numbers and text, and the kinds of columns that they have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from benchmarks.paper.report.findings import Choice, Findings, Result
from benchmarks.paper.report.page import Span, Text
from fb_core.config import AVERAGE
from fb_core.page import Table
from fb_core.statistics import Interval
from fb_core.terminal import IN_TOKEN, escaped

SHOWN_END = 200  # characters at either end of a long text
BELOW_GREEDY, BELOW_DIRECT = "▼", "▽"
LEGEND = f"{BELOW_GREEDY} significantly below greedy, {BELOW_DIRECT} significantly below the direct LLM score."
BOOTSTRAP = "95% bootstrap over problems, differences paired"
SHARES = "95% score intervals with each problem as one trial at most, differences paired"


class Column(NamedTuple):
    """A column: its head, the function that makes a cell from a row, and its alignment ("l" or "r")."""

    head: str
    cell: Callable[[Any], Text]
    side: str = "r"


def column_table(caption: str, rows: Sequence[Any], columns: Sequence[Column], note: str = "") -> Table:
    """A table with one line per row and one cell per column."""
    cells = [[column.cell(row) for column in columns] for row in rows]
    return Table(caption, [column.head for column in columns], cells, note, "".join(column.side for column in columns))


def percent(interval: Interval | None, signed: bool = False) -> str:
    """A share and its interval, or a difference of shares, in percent or percentage points."""
    if interval is None:
        return ""
    mean, low, high = (f"{round(100 * part, 1) + 0.0:{'+' if signed else ''}.1f}" for part in interval)
    return f"{mean} [{low}, {high}]"


def spread(interval: Interval | None, decimals: int = 1) -> str:
    """A number and its interval."""
    if interval is None:
        return ""
    mean, low, high = (number(part, decimals) for part in interval)
    return f"{mean} [{low}, {high}]"


def share(value: float | None) -> str:
    """A share in percent."""
    return "" if value is None else f"{100 * value:.1f}"


def number(value: float | None, decimals: int = 0) -> str:
    """A number with commas between thousands; empty for None."""
    return "" if value is None else f"{value:,.{decimals}f}"


def token(text: str) -> Span:
    """A token's text with invisible characters escaped."""
    return Span(escaped(text, IN_TOKEN), "code")


def shortened(text: str) -> str:
    """A text; of a long one only its beginning and end."""
    return text if len(text) <= 2 * SHOWN_END else f"{text[:SHOWN_END]} […] {text[-SHOWN_END:]}"


def text_column(key: str, head: str = "") -> Column:
    """A left-aligned column of text."""
    return Column(head, lambda row: str(getattr(row, key) or ""), "l")


def number_column(key: str, head: str, decimals: int = 0) -> Column:
    """A column of numbers."""
    return Column(head, lambda row: number(getattr(row, key), decimals))


def mean_column(key: str, head: str, decimals: int = 0) -> Column:
    """A column of the means of intervals."""
    return Column(head, lambda row: number(interval.mean if (interval := getattr(row, key)) else None, decimals))


def interval_column(key: str, head: str, signed: bool = False) -> Column:
    """A column of shares or differences in percent, with their intervals."""
    return Column(head, lambda row: percent(getattr(row, key), signed))


def flipped(interval: Interval | None) -> Interval | None:
    """The interval of b - a from that of a - b."""
    return None if interval is None else Interval(-interval.mean, -interval.high, -interval.low)


def above(interval: Interval | None) -> bool:
    """Whether a difference is significantly above 0."""
    return interval is not None and interval.low > 0


def below(interval: Interval | None) -> bool:
    """Whether a difference is significantly below 0."""
    return interval is not None and interval.high < 0


def said(sides: dict[str, list[str]]) -> str:
    """One sentence per heading with its names; a heading without names is left out."""
    return " ".join(f"{words}: {'; '.join(names)}." for words, names in sides.items() if names)


def made_with(
    findings: Findings, rows: Sequence[Result | Choice] = (), *, decoded: bool = True, intervals: str = BOOTSTRAP
) -> str:
    """The note under a table: pair, problems, seeds, decoding, request policy and kind of interval, if they apply."""
    pair, policy = findings.pair, findings.policy
    problems = sorted({row.problems for row in rows if row.problems})
    seeds = sorted({seed for row in rows if isinstance(row, Result) for seed in row.seeds})
    parts = [f"SLM {pair.slm}, LLM {pair.llm}"] if pair else []
    if problems:
        parts.append(" to ".join(map(number, dict.fromkeys((problems[0], problems[-1])))) + " problems")
    if seeds:
        parts.append(f"seeds {', '.join(map(str, seeds))}")
    parts += ["greedy decoding between events"] if decoded else []
    if policy:
        elsewhere = " unless the row has its own" if any(row.quantile is not None for row in rows) else ""
        parts.append(f"request quantile {policy.quantile:g}, {policy.threshold:.3f} nats{elsewhere}")
    parts += [intervals] if intervals else []
    return f"{'; '.join(parts)}." if parts else ""


Panels: TypeAlias = dict[str, list[Result]]


def benchmarks(rows: Sequence[Result]) -> list[str]:
    """The benchmarks of rows, in their order."""
    return list(dict.fromkeys(row.benchmark for row in rows))


def primary(rows: Sequence[Result]) -> list[Result]:
    """The rows of the primary benchmark: the average if there is one, else the first."""
    names = benchmarks(rows)
    return [row for row in rows if row.benchmark == (AVERAGE if AVERAGE in names else names[0])]


def panels(findings: Sequence[Findings], table: str, of: Callable[[list[Result]], list[Result]] = list) -> Panels:
    """The rows of a table that have an accuracy, for every run and benchmark.

    Args:
        findings: of the runs.
        table: the table's name.
        of: selects among one run's rows.

    Returns:
        the rows by the benchmark's name, preceded by the run's name if several runs have that benchmark.
    """
    by_run = [(one.name, of([row for row in one.of(table) if row.accuracy])) for one in findings]
    names = [name for _, rows in by_run for name in benchmarks(rows)]
    found: Panels = {}
    for run, rows in by_run:
        for row in rows:
            head = row.benchmark if names.count(row.benchmark) == 1 else f"{run}, {row.benchmark}"
            found.setdefault(head, []).append(row)
    return found


def marked(row: Result | None, short: bool = False) -> str:
    """An accuracy with the symbols of `LEGEND`, and with its interval unless `short`."""
    if row is None:
        return ""
    marks = [mark for key, mark in (("greedy", BELOW_GREEDY), ("direct", BELOW_DIRECT)) if below(row.minus.get(key))]
    accuracy = share(row.accuracy and row.accuracy.mean) if short else percent(row.accuracy)
    return f"{accuracy} {''.join(marks)}" if marks else accuracy

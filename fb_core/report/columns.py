"""Numbers, words and columns of the report's tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fb_core.report.findings import Choice, Findings, Result
from fb_core.report.page import Span, Table, Text
from fb_core.statistics import Interval
from fb_core.terminal import IN_TOKEN, escaped

SHOWN_END = 200  # characters at either end of a long text
BELOW_GREEDY, BELOW_DIRECT = "▼", "▽"
LEGEND = f"{BELOW_GREEDY} below greedy, {BELOW_DIRECT} below the direct LLM score, both significantly."
BEYOND_CHANCE = "95% bootstrap over problems, differences paired"
SHARES = "95% score intervals, a problem one trial at most, differences paired"
MARGIN = 0.02  # of a difference that does not count


class Column(NamedTuple):
    """A head, what stands under it in a row's line, and the side that it keeps to."""

    head: str
    cell: Callable[[Any], Text]
    side: str = "r"


def column_table(caption: str, rows: Sequence[Any], columns: Sequence[Column], note: str = "") -> Table:
    """A table whose cells the columns make of the rows."""
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
    """With a comma at every thousand; nothing of None."""
    return "" if value is None else f"{value:,.{decimals}f}"


def token(text: str) -> Span:
    """A token's text, what cannot be seen in it escaped."""
    return Span(escaped(text, IN_TOKEN), "code")


def shortened(text: str) -> str:
    """Both ends of a long text."""
    return text if len(text) <= 2 * SHOWN_END else f"{text[:SHOWN_END]} […] {text[-SHOWN_END:]}"


def text_column(key: str, head: str = "") -> Column:
    """Of words."""
    return Column(head, lambda row: str(getattr(row, key) or ""), "l")


def number_column(key: str, head: str, decimals: int = 0) -> Column:
    """Of numbers."""
    return Column(head, lambda row: number(getattr(row, key), decimals))


def interval_column(key: str, head: str, signed: bool = False) -> Column:
    """Of shares or differences with their intervals."""
    return Column(head, lambda row: percent(getattr(row, key), signed))


def flipped(interval: Interval | None) -> Interval | None:
    """Of a - b that of b - a."""
    return None if interval is None else Interval(-interval.mean, -interval.high, -interval.low)


def above(interval: Interval | None) -> bool:
    """Whether a difference is significantly above 0."""
    return interval is not None and interval.low > 0


def below(interval: Interval | None) -> bool:
    """Whether it is below."""
    return interval is not None and interval.high < 0


def within_margin(interval: Interval) -> bool:
    """Whether a difference lies significantly above minus the margin, or ends there."""
    return interval.low >= -MARGIN - 1e-9  # a mean of outcomes is rounded


def said(sides: dict[str, list[str]]) -> str:
    """What stands on each side, one sentence a side that is not empty."""
    return " ".join(f"{words}: {'; '.join(names)}." for words, names in sides.items() if names)


def made_with(
    findings: Findings, rows: Sequence[Result | Choice] = (), *, decoded: bool = True, intervals: str = BEYOND_CHANCE
) -> str:
    """The settings of a table: pair, problems, seeds, decoding, policy, and what its intervals are, if it has any."""
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
        elsewhere = " unless the row says another" if any(row.quantile is not None for row in rows) else ""
        parts.append(f"request quantile {policy.quantile:g}, {policy.threshold:.3f} nats{elsewhere}")
    parts += [intervals] if intervals else []
    return f"{'; '.join(parts)}." if parts else ""

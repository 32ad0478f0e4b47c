"""How the report's tables show numbers, differences and text, and the note that says what they were made with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.paper.page import Text
from benchmarks.paper.rows import Result, Run
from fb_core.apps.pipeline.page import Table
from fb_core.apps.pipeline.statistics import Interval

BELOW_GREEDY, BELOW_DIRECT = "▼", "▽"
LEGEND = f"{BELOW_GREEDY} significantly below greedy, {BELOW_DIRECT} significantly below the direct LLM score."
BOOTSTRAP = "95% bootstrap over problems and training seeds, differences paired"
SHARES = "95% score intervals with each problem as one trial at most, differences paired"

Columns = dict[str, Callable[[Any], Text]]  # what makes a cell of a row, by head; heads that end in "|" are text


def table(caption: str, rows: Sequence[Any], columns: Columns, note: str = "") -> Table:
    """A table with one line per row and one cell per column; the first column and those marked "|" are left-aligned."""
    heads = list(columns)
    align = "".join("l" if index == 0 or head.endswith("|") else "r" for index, head in enumerate(heads))
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    return Table(caption, [head.removesuffix("|") for head in heads], cells, note, align)


def percent(interval: Sequence[float] | None, signed: bool = False) -> str:
    """A share and its interval, or a difference of shares, in percent or percentage points."""
    if interval is None:
        return ""
    mean, low, high = (f"{round(100 * part, 1) + 0.0:{'+' if signed else ''}.1f}" for part in interval)
    return f"{mean} [{low}, {high}]"


def spread(interval: Sequence[float] | None, decimals: int = 1) -> str:
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


def marked(row: Result | None, short: bool = False) -> str:
    """An accuracy with the symbols of `LEGEND`, and with its interval unless `short`."""
    if row is None or row.accuracy is None:
        return ""
    marks = [mark for key, mark in (("greedy", BELOW_GREEDY), ("direct", BELOW_DIRECT)) if below(row.minus.get(key))]
    return " ".join(
        [share(row.accuracy.mean) if short else percent(row.accuracy), *(["".join(marks)] if marks else [])]
    )


def flipped(interval: Interval | None) -> Interval | None:
    """The interval of b - a from that of a - b."""
    return None if interval is None else Interval(-interval.mean, -interval.high, -interval.low)


def above(interval: Interval | None) -> bool:
    """Whether a difference is significantly above 0."""
    return interval is not None and interval.low > 0


def below(interval: Interval | None) -> bool:
    """Whether a difference is significantly below 0."""
    return interval is not None and interval.high < 0


def said(sides: Mapping[str, Sequence[str]]) -> str:
    """One sentence per heading with its names; a heading without names is left out."""
    return " ".join(f"{words}: {'; '.join(names)}." for words, names in sides.items() if names)


def by_significance(words: Sequence[str], differences: Sequence[tuple[str, Interval]]) -> str:
    """Names by whether their difference is above 0, below 0 or neither, each under its words."""
    sides: dict[str, list[str]] = {phrase: [] for phrase in words}
    for name, difference in differences:
        sides[words[0 if above(difference) else 1 if below(difference) else 2]].append(name)
    return said(sides)


def made_with(run: Run, rows: Sequence[Result] = (), *, decoded: bool = True, intervals: str = BOOTSTRAP) -> str:
    """The note under a table: pair, problems, seeds, decoding, request policy and kind of interval, if they apply."""
    problems = sorted({row.problems for row in rows if row.problems})
    seeds = sorted({seed for row in rows for seed in row.seeds})
    parts = [f"SLM {run.pair['slm']}, LLM {run.pair['llm']}"] if run.pair else []
    if problems:
        parts.append(" to ".join(map(number, dict.fromkeys((problems[0], problems[-1])))) + " problems")
    if seeds:
        parts.append(f"seeds {', '.join(map(str, seeds))}")
    parts += ["greedy decoding between events"] if decoded else []
    if run.policy:
        elsewhere = " unless the row has its own" if any(row.quantile is not None for row in rows) else ""
        parts.append(f"request quantile {run.policy['quantile']:g}, {run.policy['threshold']:.3f} nats{elsewhere}")
    parts += [intervals] if intervals else []
    return f"{'; '.join(parts)}." if parts else ""

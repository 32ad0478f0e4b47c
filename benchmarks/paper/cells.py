"""How the report's tables show numbers, differences and text, in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.paper.rows import Result
from fb_core._util import escaped
from fb_core.apps.pipeline.page import markdown_table
from fb_core.apps.pipeline.statistics import Interval

BELOW_GREEDY, BELOW_DIRECT = "▼", "▽"
LEGEND = f"{BELOW_GREEDY} significantly below greedy, {BELOW_DIRECT} significantly below the direct LLM score."


def literal(text: str) -> str:
    """Markdown that shows a text as it is, on one line; its first character may still begin a list."""
    return re.sub(r"([\\`*_\[\]<>&|~$#])", r"\\\1", escaped(text))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of rows of any values, with a column for every name that has a value in a row."""
    flat = [dict(_cells(row)) for row in rows]
    heads = [head for head in dict.fromkeys(head for row in flat for head in row) if any(row.get(head) for row in flat)]
    body = [[row.get(head, "") for head in heads] for row in flat]
    return "\n".join(markdown_table([literal(head.replace("_", " ")) for head in heads], body))


def _cells(row: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Heads and cells of a row; a mapping in it has a cell for each of its values."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _cells(value, f"{above}{name} ")
        else:
            yield f"{above}{name}", shown(value)


def shown(value: Any) -> str:
    """A value as Markdown: texts as they are, numbers with at most four decimals, intervals as "mean [low, high]"."""
    if value is None:
        return ""
    if isinstance(value, Interval):
        mean, low, high = map(shown, value)
        return f"{mean} [{low}, {high}]"
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    if isinstance(value, float):
        text = number(round(value, 4) + 0.0, 4)
        return text.rstrip("0").rstrip(".")
    return literal(value) if isinstance(value, str) else number(value)


def bullets(texts: Iterable[str]) -> list[str]:
    """A block with a list of these texts in Markdown; none without texts."""
    return ["\n".join(f"- {text}" for text in texts)] if (texts := list(texts)) else []


def percent(interval: Sequence[float] | None, signed: bool = False) -> str:
    """A share and its interval, or a difference of shares, in percent or percentage points."""
    if interval is None:
        return ""
    mean, low, high = (f"{round(100 * part, 1) + 0.0:{'+' if signed else ''}.1f}" for part in interval)
    return f"{mean} [{low}, {high}]"


def number(value: float | None, decimals: int = 0) -> str:
    """A number with commas between thousands; empty for None."""
    return "" if value is None else f"{value:,.{decimals}f}"


def marked(row: Result | None) -> str:
    """An accuracy with its interval and the symbols of `LEGEND`."""
    if row is None or row.accuracy is None:
        return ""
    marks = [mark for key, mark in (("greedy", BELOW_GREEDY), ("direct", BELOW_DIRECT)) if below(row.minus.get(key))]
    return " ".join([percent(row.accuracy), *(["".join(marks)] if marks else [])])


def flipped(interval: Interval | None) -> Interval | None:
    """The interval of b - a from that of a - b."""
    return None if interval is None else Interval(-interval.mean, -interval.high, -interval.low)


def above(interval: Interval | None) -> bool:
    """Whether a difference is significantly above 0."""
    return interval is not None and interval.low > 0


def below(interval: Interval | None) -> bool:
    """Whether a difference is significantly below 0."""
    return interval is not None and interval.high < 0


def by_significance(reference: str, differences: Sequence[tuple[str, Interval]]) -> str:
    """Names by whether their difference to the reference is above 0, below 0 or neither."""
    sides: dict[str, list[str]] = {
        f"{words} {reference}": []
        for words in ("Significantly above", "Significantly below", "Not significantly different from")
    }
    for name, difference in differences:
        side = 0 if above(difference) else 1 if below(difference) else 2
        list(sides.values())[side].append(literal(name))
    return " ".join(f"{words}: {'; '.join(names)}." for words, names in sides.items() if names)

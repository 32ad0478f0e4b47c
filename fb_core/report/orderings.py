"""Which of the paper's orderings hold in a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from fb_core.report.columns import above, below, flipped, made_with, percent, said
from fb_core.report.findings import OURS, Findings, Result
from fb_core.report.page import Block, Paragraph, Span, Table, Text
from fb_core.report.recipes import benchmarks
from fb_core.statistics import Interval

VERDICTS: dict[str, Literal["good", "bad", "faint"]] = {
    "holds": "good",
    "reversed": "bad",
    "not decided": "faint",
    "not measured": "faint",
}


class Ordering(NamedTuple):
    """An ordering that the paper reports, and this run's difference that confirms it or not."""

    words: str
    difference: Interval | None
    may_be_equal: bool = False

    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if self.difference is None:
            return "not measured"
        if below(self.difference):
            return "reversed"
        return "holds" if above(self.difference) or (self.may_be_equal and self.difference.low == 0) else "not decided"


def orderings(rows: Sequence[Result], horizon: int | None) -> Iterator[Ordering]:
    """The paper's orderings on one benchmark.

    Args:
        rows: of that benchmark, from all tables.
        horizon: of the run's own reranker.
    """

    def difference(table: str, key: str, other: str) -> Interval | None:
        return next((row.minus.get(other) for row in rows if (row.table, row.key) == (table, key)), None)

    def others(table: str) -> list[Result]:
        return [row for row in rows if row.table == table and row.key != OURS and row.accuracy]

    yield Ordering("FutureBridge > direct LLM score", difference("methods", OURS, "direct"))
    yield Ordering("direct LLM score > S2T", flipped(difference("methods", "s2t", "direct")))
    yield Ordering("S2T > greedy", difference("methods", "s2t", "greedy"))
    pools = others("pools")
    yield from (Ordering(f"joint pool > {row.label}", flipped(row.minus.get(OURS))) for row in pools)
    yield from (Ordering(f"joint pool > {name} pool", None) for name in ("SLM", "LLM") if not pools)
    for name in ("cross-state", "shuffled", "incorrect"):
        row = next((row for row in others("futures") if row.key == f"future-{name}"), None)
        minus = {} if row is None else row.minus
        better = "first correct sample"  # both are samples: only the answer differs
        if better not in minus:
            better = "verified future"
        against = minus.get("first correct sample") or minus.get("verified") or minus.get(OURS)
        yield Ordering(f"{better} > {name if row is None else row.label}", flipped(against))
    lengths = [(row.x, row) for row in others("horizons") if row.x not in (None, horizon) and horizon is not None]
    for x, row in lengths:
        assert x is not None
        assert horizon is not None
        longer, shorter = sorted((x, horizon), reverse=True)
        found = row.minus.get(OURS)
        found = found if x == longer else flipped(found)
        yield Ordering(f"horizon {longer:g} ≥ horizon {shorter:g}", found, may_be_equal=True)
    if not lengths:
        yield Ordering("longer horizon ≥ shorter", None, may_be_equal=True)
    for key, label in ((OURS, "FutureBridge"), ("direct", "direct LLM score"), ("greedy", "greedy")):
        yield Ordering(f"Takeover > {label}", difference("methods", "takeover", key))


def ordering_blocks(findings: Findings) -> list[Block]:
    """Which of the paper's orderings hold in a run, on each of its benchmarks."""
    names = benchmarks(findings.rows)
    if not names:
        return []
    horizon = None if findings.selection is None else findings.selection.horizon
    found: dict[str, dict[str, Ordering]] = {}  # by words and benchmark
    sides: dict[str, list[str]] = {verdict: [] for verdict in VERDICTS}
    for name in names:
        for ordering in orderings([row for row in findings.rows if row.benchmark == name], horizon):
            found.setdefault(ordering.words, {})[name] = ordering
            sides[ordering.verdict()].append(f"{ordering.words} on {name}" if len(names) > 1 else ordering.words)
    body: list[list[Text]] = []
    for words, by_name in found.items():
        body.append([words])
        for ordering in (by_name.get(name, Ordering(words, None)) for name in names):
            verdict = ordering.verdict()
            body[-1] += [percent(ordering.difference, signed=True), Span(verdict, VERDICTS[verdict])]
    head = ["", *(text for name in names for text in (f"{name}, pp [95%]", ""))]
    counts = ", ".join(f"{verdict} {len(members)}" for verdict, members in sides.items())
    note = (
        "Differences are left side minus right side. “>” holds if the interval is above 0, “≥” if it does not reach "
        "below 0. An ordering is reversed if the interval is below 0, else not decided. Pools, horizons and futures "
        "are compared with the run's own reranker; if possible, futures are compared with the verified future on the "
        f"same states, and a wrong sample with a correct one. {made_with(findings, findings.of('methods'))}"
    )
    return [
        Paragraph(f"Verdicts on the paper's orderings: {counts}."),
        *([Paragraph(said({"Reversed": sides["reversed"]}))] if sides["reversed"] else []),
        Table("The paper's orderings in this run", head, body, note, "l" + "rl" * len(names)),
    ]

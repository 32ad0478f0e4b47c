"""Which of the paper's orderings hold in a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.paper.cells import above, below, flipped, literal, percent
from benchmarks.paper.published import averages
from benchmarks.paper.rows import Result
from benchmarks.paper.tables import PUBLISHED
from fb_core.apps.pipeline.page import markdown_table
from fb_core.apps.pipeline.statistics import Interval

VERDICTS = ("reversed", "holds", "not decided", "not measured")
UNPAIRED = "†"
NOTE = (
    "Differences are left side minus right side; the paper's are of its averages over five benchmarks (Qwen3-1.7B, "
    "Qwen3-32B). “>” holds if the interval is above 0, “≥” if it does not reach below 0. An ordering is reversed if "
    f"the interval is below 0, else not decided. {UNPAIRED}: not paired; the interval joins those of the two "
    "accuracies, so it is wider than needed. Pools and horizons are compared with the run's own reranker, futures on "
    "the same states, and a sample with a correct sample if possible."
)
TABLES = {  # by table: a row, and those that it is above in the paper
    "methods": {
        PUBLISHED: ("takeover", "r2r", "s2t", "s2t-local", "direct", "distilled", "greedy"),
        "s2t": ("takeover", "direct", "greedy"),
        "takeover": ("r2r", "direct", "greedy"),
    },
    "pools": {
        PUBLISHED: ("pool-slm", "pool-llm", "pool-slm-wide"),
        "pool-llm": ("pool-slm",),
        "pool-slm-wide": ("pool-slm",),
    },
    "futures": {
        PUBLISHED: ("future-greedy",),
        "future-verified": ("future-unverified", "future-incorrect", "future-cross-state", "future-shuffled"),
        "future-unverified": ("future-incorrect",),
        "future-incorrect": ("future-cross-state",),
        "future-cross-state": ("future-shuffled",),
    },
}
NAMES = {
    PUBLISHED: "published recipe",
    "s2t": "S2T",
    "r2r": "R2R",
    "s2t-local": "S2T-Local",
    "direct": "direct LLM score",
    "distilled": "distilled LLM preference",
    "pool-slm": "SLM pool",
    "pool-llm": "LLM pool",
    "pool-slm-wide": "SLM pool as large as both",
    "future-verified": "verified future",
    "future-sampled": "first correct sample",
    "future-greedy": "unverified greedy future",
    "future-unverified": "unverified sample",
    "future-incorrect": "incorrect sample",
    "future-cross-state": "cross-state future",
    "future-shuffled": "shuffled future",
}
BESIDE = {"future-verified": "verified", "future-sampled": "first correct sample"}  # as `Result.minus` names them
SAMPLES = ("future-unverified", "future-incorrect")


class Ordering(NamedTuple):
    """An ordering that the paper reports, and this run's difference that confirms it or not."""

    words: str  # which is above which
    # the difference of the paper's averages in points; None if the paper has not compared these two
    paper: float | None
    difference: Interval | None  # this run's, None if it was not measured
    paired: bool = True  # whether the difference is paired by problem
    may_be_equal: bool = False  # whether no difference confirms it too

    @property
    def published(self) -> str:
        """The paper's difference in points, if there is one."""
        return "" if self.paper is None else f"{self.paper:+.1f}"

    @property
    def shown(self) -> str:
        """The difference in percentage points, marked if it is not paired."""
        return percent(self.difference, signed=True) + UNPAIRED * (not self.paired)

    @property
    def cell(self) -> str:
        """The difference, if it was measured, with the verdict."""
        return f"{self.shown} {self.verdict()}".strip()

    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if self.difference is None:
            return "not measured"
        if below(self.difference):
            return "reversed"
        return "holds" if above(self.difference) or (self.may_be_equal and self.difference.low == 0) else "not decided"


def difference(rows: Mapping[str, Result], left: str, right: str) -> tuple[Interval | None, bool]:
    """The difference of two rows of one table and benchmark, and whether it is paired."""
    left_row, right_row = rows.get(left), rows.get(right)
    if left_row and (interval := left_row.minus.get(BESIDE.get(right, right))):
        return interval, True
    if right_row and (interval := flipped(right_row.minus.get(BESIDE.get(left, left)))):
        return interval, True
    if not (left_row and right_row and left_row.accuracy and right_row.accuracy):
        return None, True
    (mean, low, high), (minus, least, most) = left_row.accuracy, right_row.accuracy
    return Interval(mean - minus, low - most, high - least), False


def orderings(rows: Sequence[Result]) -> Iterator[Ordering]:
    """The paper's orderings on one benchmark, from its rows of all tables."""
    paper = averages()
    paper["future-unverified"] = paper["future-greedy"]  # a sample in its place, on the states of the others
    for table, pairs in TABLES.items():
        by_key = {row.key: row for row in rows if row.table == table}
        for left, others in pairs.items():
            for right in others:
                ours = left
                if left == "future-verified" and right in SAMPLES and "future-sampled" in by_key:
                    ours = "future-sampled"  # both are samples: only the answer differs
                name = (
                    {"pools": "joint pool", "futures": "verified greedy future"}.get(table)
                    if left == PUBLISHED
                    else None
                )
                name = name or NAMES.get(ours, ours)
                words = f"{name} > {NAMES.get(right, right)}"
                yield Ordering(words, paper[left] - paper[right], *difference(by_key, ours, right))
    yield from _horizons([row for row in rows if row.table == "horizons" and row.x is not None])


def _horizons(rows: Sequence[Result]) -> Iterator[Ordering]:
    """The run's own horizon is above the shorter ones, and the longer ones are not below it."""
    own = next((row for row in rows if row.key == PUBLISHED), None)
    if own is None or len(rows) == 1:
        yield Ordering("horizon > shorter horizons", None, None)
        return
    for row in rows:
        if row is not own:
            longer, shorter = sorted((own, row), key=lambda result: result.x or 0.0, reverse=True)
            sign = ">" if longer is own else "≥"
            above_, under = (averages().get(f"horizon-{result.x:g}") for result in (longer, shorter))
            paper = None if above_ is None or under is None else above_ - under
            words = f"horizon {longer.x:g} {sign} horizon {shorter.x:g}"
            minus = difference({result.key: result for result in rows}, longer.key, shorter.key)
            yield Ordering(words, paper, *minus, may_be_equal=longer is row)


def ordering_lines(columns: Mapping[str, Sequence[Result]], reversed_only: bool = False) -> list[str]:
    """Markdown on which of the paper's orderings hold, those that are reversed first; unmeasured ones are counted.

    Args:
        columns: the rows of one benchmark each, by a head such as its name.
        reversed_only: list the orderings that some column reverses; others are only counted.
    """
    named_orderings: dict[str, dict[str, Ordering]] = {}
    counts = {head: Counter[str]() for head in columns}
    for head, own in columns.items():
        for ordering in orderings(own):
            named_orderings.setdefault(ordering.words, {})[head] = ordering
            counts[head][ordering.verdict()] += 1
    said = (
        f"{literal(head)}: {', '.join(f'{verdict} {counted[verdict]}' for verdict in VERDICTS)}"
        for head, counted in counts.items()
    )
    measured = [
        (words, by_head)
        for words, by_head in named_orderings.items()
        if any(ordering.difference is not None for ordering in by_head.values())
        and (not reversed_only or "reversed" in map(Ordering.verdict, by_head.values()))
    ]
    measured.sort(key=lambda item: "reversed" not in map(Ordering.verdict, item[1].values()))
    rows = [
        [
            words,
            next(iter(by_head.values())).published,
            *(by_head[head].cell if head in by_head else "" for head in columns),
        ]
        for words, by_head in measured
    ]
    heads = ["", "paper, pp", *(f"{literal(head)}, pp [95%]" for head in columns)]
    return [f"Verdicts: {'; '.join(said)}.", "", *markdown_table(heads, rows), "", f"*{NOTE}*"]

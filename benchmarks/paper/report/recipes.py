"""Every recipe in every cell (run, benchmark and request quantile), and in how many cells it does no harm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from benchmarks.paper.report.columns import (
    BELOW_DIRECT,
    BELOW_GREEDY,
    BOOTSTRAP,
    LEGEND,
    MARGIN,
    above,
    below,
    percent,
    share,
    within_margin,
)
from benchmarks.paper.report.findings import OURS, Findings, Result, place_of
from benchmarks.paper.report.page import Block, Items
from fb_core.config import AVERAGE
from fb_core.page import Table
from fb_core.statistics import Interval

WITHIN = f"lower bound against direct ≥ -{100 * MARGIN:.1f} pp"
COUNTED = (
    "not significantly worse than greedy",
    "not significantly worse than direct",
    WITHIN,
    "significantly better than FutureBridge",
)


Panels: TypeAlias = dict[str, list[Result]]


class Recipe(NamedTuple):
    """A recipe (a way to choose at events) and its rows by cell."""

    key: str
    label: str
    rows: dict[str, Result]

    def minus(self, other: str) -> dict[str, Interval]:
        """The paired differences to another method by cell, where they are known."""
        return {cell: row.minus[other] for cell, row in self.rows.items() if other in row.minus}


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


def recipe_key(row: Result) -> str:
    """Identifies a recipe across tables: the key of a reference method, else the label."""
    return row.key if row.key in (OURS, "direct", "greedy") else row.label


def by_cell(findings: Findings) -> dict[tuple[str, str, float], Result]:
    """Rows of repairs, of other quantiles and of their references, by (recipe, benchmark, quantile)."""
    quantile = None if findings.policy is None else findings.policy.quantile
    repairs = [row for row in (*findings.of("quantiles"), *findings.of("repairs")) if row.accuracy]
    beside = {OURS, "direct", *map(recipe_key, repairs)} if repairs else set()
    methods = [row for row in findings.of("methods") if row.accuracy and recipe_key(row) in beside]
    found: dict[tuple[str, str, float], Result] = {}
    for row in (*methods, *repairs):
        at = quantile if row.quantile is None else row.quantile
        if at is not None:
            found.setdefault((recipe_key(row), row.benchmark, at), row)
    return found


def recipes(findings: Sequence[Findings]) -> tuple[list[str], list[Recipe]]:
    """(cells, recipes): every repair and its references, at every quantile of every run."""
    cells: list[str] = []
    found: dict[str, Recipe] = {}
    several = any(len(benchmarks(list(by_cell(one).values()))) > 1 for one in findings)
    for one in findings:
        known = {cell: row for cell, row in by_cell(one).items() if cell[1] != AVERAGE}  # no cell of its own
        for (key, benchmark, quantile), row in sorted(known.items(), key=lambda cell: cell[0][1:]):
            where = [one.name] * (len(findings) > 1) + [benchmark] * several
            cell = ", ".join([*where, f"q {quantile:g}"])
            cells += [cell] if cell not in cells else []
            found.setdefault(key, Recipe(key, row.label, {})).rows[cell] = row
    return cells, sorted(found.values(), key=lambda recipe: place_of(next(iter(recipe.rows.values()))))


def counted(recipe: Recipe) -> list[str]:
    """In how many cells each condition of `COUNTED` holds, such as "3 of 4"; empty if no difference is known."""
    greedy, direct, ours = (list(recipe.minus(other).values()) for other in ("greedy", "direct", OURS))
    counts = (
        (sum(not below(difference) for difference in greedy), greedy),
        (sum(not below(difference) for difference in direct), direct),
        (sum(map(within_margin, direct)), direct),
        (sum(map(above, ours)), ours),
    )
    return [f"{good} of {len(known)}" if known else "" for good, known in counts]


def caveats(findings: Sequence[Findings], found: Sequence[Recipe]) -> str:
    """Two sentences: what the cells share, and how many comparisons are made of them."""
    tried = {cell for recipe in found for cell in recipe.rows}
    compared = sum(len(recipe.minus(other)) for recipe in found for other in ("direct", "greedy", OURS))
    seeds = sorted({len(one.seeds) for one in findings if one.seeds})
    shared = "some share their problems and their SLM"
    slms = [one.pair and one.pair.slm_hash for one in findings]
    if all(slms) and all(one.test_sets for one in findings):
        sets = {digest for one in findings for digest in one.test_sets.values()}
        shared = f"they use {_count(len(sets), 'test set')} and {_count(len(set(slms)), 'SLM')}"
    trained = f", and each run has one training set and {' or '.join(map(str, seeds))} reranker seeds" if seeds else ""
    return (
        f"The {_count(len(tried), 'cell')} are not independent: {shared}{trained}. Intervals are not corrected for "
        f"the {_count(compared, 'comparison')}."
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def recipe_blocks(findings: Sequence[Findings]) -> list[Block]:
    """The table of every recipe in every cell, with verdicts; empty if there are no recipes."""
    cells, found = recipes(findings)
    if not cells:
        return []
    methods = {recipe_key(row) for one in findings for row in one.of("methods")}
    tried = max((len(recipe.minus("direct")) for recipe in found if recipe.key not in methods), default=0)
    safe, harmful, body = [], [], []
    for recipe in found:
        direct, greedy = recipe.minus("direct"), recipe.minus("greedy")
        under_direct, under_greedy = sum(map(below, direct.values())), sum(map(below, greedy.values()))
        new = recipe.key not in methods
        if new and greedy and len(direct) == tried and not under_direct and not under_greedy:
            safe.append(recipe.label)
        if under_greedy and (recipe.key == OURS or new):
            harmful.append(f"{recipe.label} ({under_greedy} of {len(greedy)})")
        body.append([recipe.label, *counted(recipe), *(marked(recipe.rows.get(cell)) for cell in cells)])
    verdicts = [
        "Tried in all cells and nowhere significantly below greedy or the direct LLM score: "
        f"{'; '.join(safe) or 'no recipe'}.",
        f"Significantly below greedy in some cells: {'; '.join(harmful) or 'no recipe'}.",
    ]
    note = (
        "Counts are over the cells in which the paired difference to that method is known. A recipe is not "
        "significantly worse if the interval is not wholly below 0, which says little if it is wide, and significantly "
        f"better if it is wholly above 0. {caveats(findings, found)} {LEGEND} {BOOTSTRAP}."
    )
    return [Items(verdicts), Table("Recipes in every cell: accuracy, % [95%]", ["", *COUNTED, *cells], body, note)]


def marked(row: Result | None, short: bool = False) -> str:
    """An accuracy with the symbols of `LEGEND`, and with its interval unless `short`."""
    if row is None:
        return ""
    marks = [mark for key, mark in (("greedy", BELOW_GREEDY), ("direct", BELOW_DIRECT)) if below(row.minus.get(key))]
    accuracy = share(row.accuracy and row.accuracy.mean) if short else percent(row.accuracy)
    return f"{accuracy} {''.join(marks)}" if marks else accuracy

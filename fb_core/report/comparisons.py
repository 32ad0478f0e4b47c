"""The report's comparisons: rows of every table against their references, the paper's orderings, and all runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from fb_core.config import AVERAGE
from fb_core.report.figures import OURS, Findings, benchmarks, cells, identity
from fb_core.report.page import Block, Items, Paragraph, Section, Span, Table, Text
from fb_core.report.tables import (
    BELOW_DIRECT,
    BELOW_GREEDY,
    BEYOND_CHANCE,
    LEGEND,
    MARGIN,
    Column,
    Interval,
    Row,
    above,
    below,
    column_table,
    flipped,
    interval_column,
    made_with,
    number_column,
    percent,
    rows_of,
    said,
    share,
    text_column,
    within_margin,
)

REFERENCES = {"greedy": "greedy", "direct": "the direct LLM score", OURS: "FutureBridge"}


def headlines(findings: Findings) -> list[Block]:
    """Where FutureBridge stands, above or below, in one sentence a reference and benchmark."""
    rows = sorted(rows_of(findings, "methods"), key=lambda row: row["benchmark"] != AVERAGE)  # the primary one first
    names = benchmarks(rows)
    found: list[Text] = []
    for row in (row for row in rows if row["key"] == OURS):
        where = f" on {row['benchmark']}" if len(names) > 1 else ""
        for key in ("greedy", "direct"):
            if difference := row.get(f"minus_{key}"):
                start = f"FutureBridge minus {REFERENCES[key]}{where}: {percent(difference, signed=True)} pp, "
                found.append((start, _verdict(difference), "."))
    return [Items(found)] if found else []


def _verdict(difference: Interval) -> Span:
    if above(difference):
        return Span("above 0 beyond chance", "good")
    return Span("below 0 beyond chance", "bad") if below(difference) else Span("not told apart from 0", "faint")


VERDICTS: dict[str, Literal["good", "bad", "faint"]] = {
    "holds": "good",
    "reversed": "bad",
    "not decided": "faint",
    "not measured": "faint",
}


class Ordering(NamedTuple):
    """Something that the paper finds, and the difference that says whether it is so here."""

    words: str
    difference: Interval | None
    may_be_equal: bool = False

    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if self.difference is None:
            return "not measured"
        if below(self.difference):
            return "reversed"
        return "holds" if above(self.difference) or (self.may_be_equal and self.difference[1] == 0) else "not decided"


def orderings(rows: Sequence[Row], horizon: int | None) -> Iterator[Ordering]:
    """The paper's orderings on one benchmark.

    Args:
        rows: of that benchmark, all tables.
        horizon: of the run's own reranker.
    """

    def difference(table: str, key: str, other: str) -> Interval | None:
        return next((row.get(f"minus_{other}") for row in rows if (row["table"], row["key"]) == (table, key)), None)

    def others(table: str) -> list[Row]:
        return [row for row in rows if row["table"] == table and row["key"] != OURS and row.get("accuracy")]

    yield Ordering("FutureBridge > direct LLM score", difference("methods", OURS, "direct"))
    yield Ordering("direct LLM score > S2T", flipped(difference("methods", "s2t", "direct")))
    yield Ordering("S2T > greedy", difference("methods", "s2t", "greedy"))
    pools = [row for row in others("pools") if row["key"] != "joint"]
    yield from (Ordering(f"joint pool > {row['label']}", flipped(row.get("minus_futurebridge"))) for row in pools)
    yield from (Ordering(f"joint pool > {name} pool", None) for name in ("SLM", "LLM") if not pools)
    for name in ("cross-state", "shuffled", "incorrect"):
        row = next((row for row in others("futures") if row["key"] == f"future-{name}"), {})
        sampled = row.get("minus_sampled")  # both are samples: only the answer differs
        against = sampled or row.get("minus_verified") or row.get("minus_futurebridge")
        better = "first correct sample" if sampled else "verified future"
        yield Ordering(f"{better} > {row.get('label', name)}", flipped(against))
    lengths = [row for row in others("horizons") if row.get("x") not in (None, horizon) and horizon is not None]
    for row in lengths:
        longer, shorter = sorted((row["x"], horizon), reverse=True)
        against = row.get("minus_futurebridge")
        found = against if row["x"] == longer else flipped(against)
        yield Ordering(f"horizon {longer:g} ≥ horizon {shorter:g}", found, may_be_equal=True)
    if not lengths:
        yield Ordering("longer horizon ≥ shorter", None, may_be_equal=True)
    for key, label in ((OURS, "FutureBridge"), ("direct", "direct LLM score"), ("greedy", "greedy")):
        yield Ordering(f"Takeover > {label}", difference("methods", "takeover", key))


def orderings_here(findings: Findings) -> list[Block]:
    """Which of the paper's orderings hold in a run, on each of its benchmarks."""
    rows = findings.get("rows") or []
    names = benchmarks(rows)
    if not names:
        return []
    horizon = (findings.get("selection") or {}).get("horizon")
    found: dict[str, dict[str, Ordering]] = {}  # by words and benchmark
    sides: dict[str, list[str]] = {verdict: [] for verdict in VERDICTS}
    for name in names:
        for ordering in orderings([row for row in rows if row["benchmark"] == name], horizon):
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
        "Left side minus right side. “>” holds where the interval lies above 0, “≥” where it does not reach below 0; "
        "reversed where it lies below 0; not decided otherwise. Pools, horizons and futures are compared with the "
        "run's own reranker, futures with the verified one on the same states if that is known, and a wrong sample "
        "with a correct one. "
        f"{made_with(findings, rows_of(findings, 'methods'))}"
    )
    return [
        Paragraph(f"Of the paper's orderings: {counts}."),
        *([Paragraph(said({"Reversed": sides["reversed"]}))] if sides["reversed"] else []),
        Table("Which orderings hold here", head, body, note, "l" + "rl" * len(names)),
    ]


def experiment(findings: Findings, table: str, title: str, varied: str) -> list[Block]:
    """What one experiment found: a verdict and a table for every benchmark.

    Args:
        findings: of a run.
        table: among its rows.
        title: of the section.
        varied: what differs from row to row.
    """
    rows = rows_of(findings, table)
    if not rows:
        return []
    names = benchmarks(rows)
    blocks: list[Block] = [Paragraph(varied)]
    if len(names) > 1:
        blocks.append(_by_benchmark(findings, rows, title))
    for name in names:
        inside = [row for row in rows if row["benchmark"] == name]
        blocks += [*_verdicts(inside), _rows_table(findings, inside, f"{title} on {name}")]
        notes = [f"{row['label']}: {row['note']}." for row in inside if row.get("note")]
        blocks += [Items(notes)] if notes else []
    if table == "quantiles" and (recipes := _recipes([findings])):
        blocks += recipes
    return blocks


def _verdicts(rows: Sequence[Row]) -> list[Block]:
    """Which differences are beyond chance and which are not, a point for each method to compare with."""
    points: list[Text] = []
    for key, reference in REFERENCES.items():
        known = [(row, row[f"minus_{key}"]) for row in rows if row.get(f"minus_{key}") and row["key"] != key]
        sides = {
            f"Above {reference} beyond chance": [row for row, difference in known if above(difference)],
            f"Below {reference} beyond chance": [row for row, difference in known if below(difference)],
            f"Not told apart from {reference}": [
                row for row, difference in known if not above(difference) and not below(difference)
            ],
        }
        points += [said({words: _names(members) for words, members in sides.items()})] if known else []
    return [Items(points)] if points else []


def _names(rows: Sequence[Row]) -> list[str]:
    """Labels, each once, with the quantiles where they have any."""
    quantiles: dict[str, list[str]] = {row["label"]: [] for row in rows}
    for row in rows:
        quantiles[row["label"]] += [] if row.get("quantile") is None else [f"{row['quantile']:g}"]
    return [f"{label} at quantile {', '.join(at)}" if at else label for label, at in quantiles.items()]


def _rows_table(findings: Findings, rows: Sequence[Row], caption: str) -> Table:
    columns = [text_column("label")]
    if any(row.get("quantile") is not None for row in rows):
        columns.append(Column("quantile", lambda row: "" if row.get("quantile") is None else f"{row['quantile']:g}"))
        columns.append(number_column("threshold", "nats", 3))
    columns += [
        Column(
            "accuracy, % [95%]", lambda row: percent(row.get("accuracy")) or ("see below" if row.get("note") else "")
        ),
        interval_column("minus_greedy", "minus greedy, pp [95%]", signed=True),
        interval_column("minus_direct", "minus direct, pp [95%]", signed=True),
        interval_column("minus_futurebridge", "minus FutureBridge, pp [95%]", signed=True),
    ]
    if any(row.get("minus_verified") for row in rows):
        columns.append(interval_column("minus_verified", "minus verified, pp [95%]", signed=True))
    if any(row.get("minus_sampled") for row in rows):
        columns.append(interval_column("minus_sampled", "minus first correct sample, pp [95%]", signed=True))
    columns += [number_column("events", "events a problem", 2), number_column("calls", "LLM calls a problem", 2)]
    columns.append(number_column("tokens", "tokens a problem", 1))
    columns += (
        [number_column("problems", "problems")]
        if len({row["problems"] for row in rows if row.get("problems")}) > 1
        else []
    )
    return column_table(caption, rows, columns, made_with(findings, rows))


def _by_benchmark(findings: Findings, rows: Sequence[Row], title: str) -> Table:
    """Methods by benchmarks, the average last and with its interval."""
    names = benchmarks(rows)
    body: list[list[Text]] = []
    for label in dict.fromkeys(name for row in rows for name in _names([row])):
        own = {row["benchmark"]: row for row in rows if _names([row]) == [label] and row.get("accuracy")}
        body.append([label, *(_marked(own.get(name), short=name != AVERAGE) for name in names)])
    note = (
        "The average counts every benchmark alike; its interval is of the problems within them. "
        f"{LEGEND} {made_with(findings, rows)}"
    )
    return Table(f"{title}: accuracy, %", ["", *names], body, note)


def _marks(row: Row) -> str:
    """The symbols of `LEGEND` behind an accuracy."""
    marks = [
        mark
        for key, mark in (("greedy", BELOW_GREEDY), ("direct", BELOW_DIRECT))
        if row["key"] != key and below(row.get(f"minus_{key}"))
    ]
    return f" {''.join(marks)}" if marks else ""


def _marked(row: Row | None, short: bool = False) -> str:
    """An accuracy with its interval, if not wanted short, and its marks."""
    if row is None:
        return ""
    return (share(row["accuracy"][0]) if short else percent(row.get("accuracy"))) + _marks(row)


def across(findings: Sequence[Findings]) -> Section:
    """What several runs have in common: every method and recipe in every run, benchmark and quantile."""
    columns: dict[str, dict[str, Row]] = {}
    labels: dict[str, str] = {}
    for table in ("methods", "repairs"):
        for one in findings:
            for row in (row for row in rows_of(one, table) if row.get("accuracy")):
                columns.setdefault(f"{one['name']}: {row['benchmark']}", {}).setdefault(identity(row), row)
                labels.setdefault(identity(row), row["label"])
    stand: dict[str, list[str]] = {}
    for head, rows in columns.items():
        for key, reference in REFERENCES.items():
            if difference := rows.get(OURS, {}).get(f"minus_{key}"):
                stand.setdefault(f"FutureBridge minus {reference}, {_verdict(difference).text}", []).append(head)
    blocks: list[Block] = [Items([said({words: heads}) for words, heads in stand.items()])] if stand else []
    if columns:
        body = [[label, *(_marked(rows.get(key)) for rows in columns.values())] for key, label in labels.items()]
        made = " ".join(f"{one['name']}: {made_with(one, rows_of(one, 'methods'))}" for one in findings)
        blocks.append(Table("Accuracy, % [95%], by run", ["", *columns], body, f"{LEGEND} {made}"))
    return Section("All runs", [*blocks, *_recipes(findings)])


class Recipe(NamedTuple):
    """A way of choosing at events, and its rows by cell: run, benchmark and request quantile."""

    key: str
    label: str
    rows: dict[str, Row]

    def minus(self, other: str) -> dict[str, Interval]:
        """The paired differences to a method in the same cells, where they are known."""
        return {cell: row[f"minus_{other}"] for cell, row in self.rows.items() if row.get(f"minus_{other}")}


def recipes(findings: Sequence[Findings]) -> tuple[list[str], list[Recipe]]:
    """(cells, recipes): every repair and what it is compared with, at every quantile of every run."""
    columns: list[str] = []
    found: dict[str, Recipe] = {}
    several = any(len(benchmarks(list(cells(one).values()))) > 1 for one in findings)
    for one in findings:
        known = {cell: row for cell, row in cells(one).items() if cell[1] != AVERAGE}  # which is no cell of its own
        for (key, benchmark, quantile), row in sorted(known.items(), key=lambda cell: cell[0][1:]):
            where = [one["name"]] * (len(findings) > 1) + [benchmark] * several
            cell = ", ".join([*where, f"q {quantile:g}"])
            columns += [cell] if cell not in columns else []
            found.setdefault(key, Recipe(key, row["label"], {})).rows[cell] = row
    return columns, list(found.values())


WITHIN = f"lower bound against direct ≥ -{100 * MARGIN:.1f} pp"
COUNTED = (
    "not significantly worse than greedy",
    "not significantly worse than direct",
    WITHIN,
    "significantly better than FutureBridge",
)


def counted(recipe: Recipe) -> list[str]:
    """In how many of its cells a recipe is what the heads of `COUNTED` say; nothing where none is known."""
    greedy, direct, ours = (list(recipe.minus(other).values()) for other in ("greedy", "direct", OURS))
    counts = (
        (sum(not below(difference) for difference in greedy), greedy),
        (sum(not below(difference) for difference in direct), direct),
        (sum(map(within_margin, direct)), direct),
        (sum(map(above, ours)), ours),
    )
    return [f"{good} of {len(known)}" if known else "" for good, known in counts]


def caveats(findings: Sequence[Findings], found: Sequence[Recipe]) -> str:
    """What the cells have in common and how many comparisons of them are made, in a sentence or two."""
    tried = {cell for recipe in found for cell in recipe.rows}
    comparisons = sum(len(recipe.minus(other)) for recipe in found for other in ("direct", "greedy", OURS))
    seeds = sorted({len(one["seeds"]) for one in findings if one.get("seeds")})
    known = all(one.get("test_sets") and (one.get("pair") or {}).get("slm_hash") for one in findings)
    shared = "some share their problems and their SLM"
    if known:
        sets = {digest for one in findings for digest in one["test_sets"].values()}
        slms = {one["pair"]["slm_hash"] for one in findings}
        shared = f"they are of {_count(len(sets), 'test set')} and {_count(len(slms), 'SLM')}"
    trained = f"one training set and {' or '.join(map(str, seeds))} reranker seeds a run" if seeds else ""
    return (
        f"The {_count(len(tried), 'cell')} are not independent: {shared}{', ' * bool(trained)}{trained}. "
        f"{_count(comparisons, 'comparison')}, not corrected for their number."
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _recipes(findings: Sequence[Findings]) -> list[Block]:
    """Every recipe in every cell, and in how many it does no harm."""
    columns, found = recipes(findings)
    if not columns:
        return []
    methods = {identity(row) for one in findings for row in rows_of(one, "methods")}
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
        body.append([recipe.label, *counted(recipe), *(_marked(recipe.rows.get(column)) for column in columns)])
    verdicts = [
        "Tried in all cells and nowhere below greedy or the direct LLM score beyond chance: "
        f"{'; '.join(safe) or 'no recipe'}.",
        f"Below greedy beyond chance in some cells: {'; '.join(harmful) or 'no recipe'}.",
    ]
    head = ["", *COUNTED, *columns]
    note = (
        "Counts are of cells with a paired difference, to the method in the same cell: not significantly worse where "
        "the interval does not lie wholly below 0, which says little where it is wide; significantly better where it "
        f"lies wholly above 0. {caveats(findings, found)} {LEGEND} {BEYOND_CHANCE}."
    )
    return [Items(verdicts), Table("Recipes in every cell: accuracy, % [95%]", head, body, note)]

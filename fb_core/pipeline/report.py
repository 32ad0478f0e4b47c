"""`futurebridge report`: what runs found, as one HTML file and as Markdown.

The findings of a run are plain values. Shares and differences of shares come as [mean, low, high] in 0..1. Keys with a
part in a verdict: "greedy", "direct", "s2t", "takeover" and "futurebridge" among the rows of the table "methods"; in
the other tables a row of key "futurebridge" is the run's own; among those of "futures" "future-cross-state",
"future-shuffled" and "future-incorrect". The differences of a row at another request quantile are to the methods at
that same quantile; those of a row of "futures" may also be to the verified one, as "minus_verified". A section that is
absent or None was not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fb_core.explain import IN_TOKEN, escaped
from fb_core.pipeline import figures
from fb_core.pipeline.artefacts import json_bytes, write_file
from fb_core.pipeline.figures import OURS, Findings, benchmarks, cells, identity
from fb_core.pipeline.page import (
    Block,
    Document,
    Figure,
    Items,
    Paragraph,
    Picture,
    Section,
    Span,
    Table,
    Text,
    Verbatim,
)

Row = dict[str, Any]
Interval = Sequence[float]

FIGURES = "figures"  # folder beside report.md
FILTERS = ("admitted", "verified", "long_enough", "valid_group", "train groups", "validation groups")  # one by one
SHOWN_END = 200  # characters at either end of a rollout
REFERENCES = {"greedy": "greedy", "direct": "the direct LLM score", OURS: "FutureBridge"}
BELOW_GREEDY, BELOW_DIRECT = "▼", "▽"
LEGEND = f"{BELOW_GREEDY} below greedy, {BELOW_DIRECT} below the direct LLM score, both beyond chance."
BEYOND_CHANCE = "95% bootstrap over problems, differences paired"
ROLLOUTS = "futurebridge rollouts"


class Part(NamedTuple):
    """A section of a run's report: its title, the command that makes what it shows, and its figure."""

    title: str
    command: str
    draw: Callable[[Findings], Picture | None] = lambda findings: None
    caption: str = ""


PARTS = {  # by the section or the table of the findings, in the order shown
    "methods": Part(
        "Methods",
        "futurebridge experiment methods",
        figures.accuracy,
        "Accuracy by method with 95% intervals; the dashed line is greedy decoding of the SLM.",
    ),
    "costs": Part(
        "Costs",
        "futurebridge experiment costs",
        figures.cost,
        "Time a problem, in times of greedy decoding, against accuracy, both with 95% intervals.",
    ),
    "pools": Part("Candidate pools", "futurebridge experiment pools"),
    "coverage": Part("Pool coverage", ROLLOUTS),
    "horizons": Part(
        "Horizon",
        "futurebridge experiment horizons",
        figures.horizon,
        "By horizon: accuracy of the rerankers, and how many pairs of candidates the target itself puts in the order "
        "of the SLM's rollouts. Bands are 95% intervals.",
    ),
    "futures": Part("Futures", "futurebridge experiment futures"),
    "future_quality": Part(
        "Future quality",
        "futurebridge experiment futures",
        figures.quality,
        "Pairs in order, in percent, by kind of future and horizon; 50 is chance.",
    ),
    "alpha": Part("Hybrid targets", "futurebridge experiment alpha"),
    "temperature": Part("Target temperature", "futurebridge experiment temperature"),
    "scope": Part("Adapter scope", "futurebridge experiment scope"),
    "agreement": Part(
        "Agreement with rollouts",
        ROLLOUTS,
        figures.agreement,
        "Pairs of candidates that each score puts in the order of the SLM's rollouts, with 95% intervals; the dotted "
        "line is chance.",
    ),
    "advice": Part("Advice", ROLLOUTS),
    "calibration": Part("Calibration", "futurebridge experiment repairs"),
    "repairs": Part("Repairs", "futurebridge experiment repairs"),
    "quantiles": Part(
        "Request quantiles",
        "futurebridge experiment quantiles",
        figures.sweep,
        "Accuracy by request quantile with 95% intervals; the dashed line is greedy decoding of the SLM.",
    ),
    "trajectory": Part(
        "One trajectory",
        ROLLOUTS,
        figures.trajectory,
        "Entropy of the SLM along the text. Diamonds are events, with the SLM's own token and the one chosen there; "
        "the dashed line is the request threshold.",
    ),
    "worked_event": Part(
        "One event in full",
        ROLLOUTS,
        figures.event,
        "Score of every candidate; the colour says whether the SLM's rollout behind it reaches the right answer.",
    ),
    "selection": Part("Choice on validation", "futurebridge train"),
    "filters": Part("States", "futurebridge score"),
}
TABLES = {  # of rows, and what each of them varies
    "methods": "The reranker beside its rivals, on the same problems.",
    "pools": "Whose candidates the reranker is trained on and chooses from.",
    "horizons": "How many tokens of the future make the target.",
    "futures": "What stands as the future behind every candidate when the target is made.",
    "alpha": "How much of the target is the future's score, the rest being the LLM's preference.",
    "temperature": "How soft the target is.",
    "scope": "Whether the adapter acts on the candidate alone or on its prefix too.",
    "repairs": "Recipes beyond the published one.",
    "quantiles": "States, futures and rerankers made again at other request quantiles.",
}


def write_report(findings: Sequence[Findings], folder: Path) -> list[Path]:
    """Write report.html, report.md with its figures/*.svg, and findings.json.

    Args:
        findings: of one run or several.
        folder: where to; made if need be.

    Returns:
        the files.

    Raises:
        ValueError: no findings, or numbers that are not finite.
        OSError: the folder cannot be written.
    """
    document = render(findings)
    files = {"findings.json": json_bytes(list(findings))}
    files |= {f"{FIGURES}/{figure.name}.svg": figure.picture.light.encode() for figure in document.figures()}
    files |= {"report.md": document.markdown(FIGURES).encode(), "report.html": document.html().encode()}
    (folder / FIGURES).mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        write_file(folder / name, data)
    return [folder / name for name in files]


def render(findings: Sequence[Findings]) -> Document:
    """The report: of several runs what they have in common first, then each by itself.

    Raises:
        ValueError: no findings.
    """
    if not findings:
        raise ValueError("findings: expected those of one run or more, got none; name a run's folder")
    names = [str(one["name"]) for one in findings]
    if len(set(names)) < len(names):
        names = [f"{name} ({number})" for number, name in enumerate(names, 1)]
    how = Paragraph(
        "Accuracy is in percent, differences in percentage points (pp), both with 95% bootstrap intervals in brackets: "
        "problems are drawn again with all their runs, and differences are taken problem by problem. A difference is "
        "called beyond chance where its interval leaves out 0. Columns headed “published” stay empty unless models, "
        "data and settings are the paper's."
    )
    if len(findings) == 1:
        return Document(f"FutureBridge report: {names[0]}", [how], _run(findings[0], ""))
    named = [{**one, "name": name} for name, one in zip(names, findings, strict=True)]
    runs = [Section(one["name"], [], _run(one, f"run-{number}-")) for number, one in enumerate(named, 1)]
    return Document(f"FutureBridge report: {', '.join(names)}", [how], [_across(named), *runs])


def _run(findings: Findings, prefix: str) -> list[Section]:
    """Everything about one run; `prefix` begins the names of its figures."""
    sections, absent = [], []
    for name, part in PARTS.items():
        if name in TABLES:
            blocks = _experiment(findings, name)
        else:
            blocks = DIAGNOSTICS[name](findings) if findings.get(name) else []
        if (picture := part.draw(findings)) is not None:
            blocks.append(Figure(f"{prefix}{name.replace('_', '-')}", part.caption, picture))
        if blocks:
            sections.append(Section(part.title, blocks))
        else:
            absent.append(part)
    return [
        Section("At a glance", [*_overview(findings), *_orderings(findings)]),
        *sections,
        *([Section("Not run", _missing(absent))] if absent else []),
        Section("Settings", _settings(findings)),
    ]


def _missing(parts: Sequence[Part]) -> list[Block]:
    return [
        Paragraph("These parts are left out, since the run's folder does not hold what they show."),
        Items([(f"{part.title}: made by ", Span(part.command, "code")) for part in parts]),
    ]


# Numbers, words and columns.


class Column(NamedTuple):
    """A head, what stands under it in a row's line, and the side that it keeps to."""

    head: str
    cell: Callable[[Row], Text]
    side: str = "r"


def _table(caption: str, rows: Sequence[Row], columns: Sequence[Column], note: str = "") -> Table:
    cells = [[column.cell(row) for column in columns] for row in rows]
    return Table(caption, [column.head for column in columns], cells, note, "".join(column.side for column in columns))


def _percent(interval: Interval | None, signed: bool = False) -> str:
    if interval is None:
        return ""
    mean, low, high = (f"{round(100 * part, 1) + 0.0:{'+' if signed else ''}.1f}" for part in interval)
    return f"{mean} [{low}, {high}]"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _number(value: float | None, decimals: int = 0) -> str:
    return "" if value is None else f"{value:,.{decimals}f}"


def _token(text: str) -> Span:
    return Span(escaped(text, IN_TOKEN), "code")


def _shortened(text: str) -> str:
    """Both ends of a long text."""
    return text if len(text) <= 2 * SHOWN_END else f"{text[:SHOWN_END]} […] {text[-SHOWN_END:]}"


def _text(key: str, head: str = "") -> Column:
    return Column(head, lambda row: str(row.get(key) or ""), "l")


def _count(key: str, head: str, decimals: int = 0) -> Column:
    return Column(head, lambda row: _number(row.get(key), decimals))


def _span(key: str, head: str, signed: bool = False) -> Column:
    return Column(head, lambda row: _percent(row.get(key), signed))


def _flipped(interval: Interval | None) -> Interval | None:
    """Of a - b that of b - a."""
    return None if interval is None else (-interval[0], -interval[2], -interval[1])


def _above(interval: Interval | None) -> bool:
    return interval is not None and interval[1] > 0


def _below(interval: Interval | None) -> bool:
    return interval is not None and interval[2] < 0


def _said(sides: dict[str, list[str]]) -> str:
    """What stands on each side, one sentence a side that is not empty."""
    return " ".join(f"{words}: {'; '.join(names)}." for words, names in sides.items() if names)


def _rows(findings: Findings, table: str) -> list[Row]:
    return [row for row in findings.get("rows") or () if row["table"] == table]


def _made_with(findings: Findings, rows: Sequence[Row] = (), *, decoded: bool = True, intervals: bool = True) -> str:
    """The settings of a table: pair, problems, seeds, decoding, policy, intervals."""
    pair, policy = findings.get("pair") or {}, findings.get("policy") or {}
    problems = sorted({row["problems"] for row in rows if row.get("problems")})
    seeds = sorted({seed for row in rows for seed in row.get("seeds") or ()})
    parts = [f"SLM {pair['slm']}, LLM {pair['llm']}"] if pair else []
    if problems:
        parts.append(" to ".join(map(_number, dict.fromkeys((problems[0], problems[-1])))) + " problems")
    if seeds:
        parts.append(f"seeds {', '.join(map(str, seeds))}")
    parts += ["greedy decoding between events"] if decoded else []
    if policy:
        elsewhere = " unless the row says another" if any(row.get("quantile") is not None for row in rows) else ""
        parts.append(f"request quantile {policy['quantile']:g}, {policy['threshold']:.3f} nats{elsewhere}")
    parts += [BEYOND_CHANCE] if intervals else []
    return f"{'; '.join(parts)}." if parts else ""


# At a glance.


def _overview(findings: Findings) -> list[Block]:
    pair, policy, selection = (findings.get(name) or {} for name in ("pair", "policy", "selection"))

    def model(which: str) -> str:
        count = pair.get(f"{which}_parameters")
        return f"{pair[which]}, {_number(count)} parameters" if count else str(pair[which])

    facts = [("SLM", model("slm")), ("LLM", model("llm"))] if pair else []
    if policy:
        asks = f"entropy above {policy['threshold']:.3f} nats: quantile {policy['quantile']:g} on validation problems"
        facts.append(("the LLM is asked at", f"{asks}, softmax of the {policy['top_k']} largest logits"))
    if selection:
        facts.append(("reranker", f"horizon {selection['horizon']}, epoch {selection['epoch']}, chosen on validation"))
    if findings.get("seeds"):
        facts.append(("seeds", ", ".join(map(str, findings["seeds"]))))
    facts += [(name, str(findings[name])) for name in ("machine", "commit") if findings.get(name)]
    table = Table("The run", ("", ""), facts, align="ll")
    return [*([table] if facts else []), *_headlines(findings)]


def _headlines(findings: Findings) -> list[Block]:
    """Where FutureBridge stands, above or below, in one sentence a reference and benchmark."""
    rows = _rows(findings, "methods")
    names = benchmarks(rows)
    found: list[Text] = []
    for row in (row for row in rows if row["key"] == OURS):
        where = f" on {row['benchmark']}" if len(names) > 1 else ""
        for key in ("greedy", "direct"):
            if difference := row.get(f"minus_{key}"):
                start = f"FutureBridge minus {REFERENCES[key]}{where}: {_percent(difference, signed=True)} pp, "
                found.append((start, _verdict(difference), "."))
    return [Items(found)] if found else []


def _verdict(difference: Interval) -> Span:
    if _above(difference):
        return Span("above 0 beyond chance", "good")
    return Span("below 0 beyond chance", "bad") if _below(difference) else Span("not told apart from 0", "faint")


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
        if _below(self.difference):
            return "reversed"
        return "holds" if _above(self.difference) or (self.may_be_equal and self.difference[1] == 0) else "not decided"


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
    yield Ordering("direct LLM score > S2T", _flipped(difference("methods", "s2t", "direct")))
    yield Ordering("S2T > greedy", difference("methods", "s2t", "greedy"))
    pools = [row for row in others("pools") if row["key"] != "joint"]
    yield from (Ordering(f"joint pool > {row['label']}", _flipped(row.get("minus_futurebridge"))) for row in pools)
    yield from (Ordering(f"joint pool > {name} pool", None) for name in ("SLM", "LLM") if not pools)
    for name in ("cross-state", "shuffled", "incorrect"):
        row = next((row for row in others("futures") if row["key"] == f"future-{name}"), {})
        against = row.get("minus_verified") or row.get("minus_futurebridge")
        yield Ordering(f"verified future > {row.get('label', name)}", _flipped(against))
    lengths = [row for row in others("horizons") if row.get("x") not in (None, horizon) and horizon is not None]
    for row in lengths:
        longer, shorter = sorted((row["x"], horizon), reverse=True)
        against = row.get("minus_futurebridge")
        found = against if row["x"] == longer else _flipped(against)
        yield Ordering(f"horizon {longer:g} ≥ horizon {shorter:g}", found, may_be_equal=True)
    if not lengths:
        yield Ordering("longer horizon ≥ shorter", None, may_be_equal=True)
    for key, label in ((OURS, "FutureBridge"), ("direct", "direct LLM score"), ("greedy", "greedy")):
        yield Ordering(f"Takeover > {label}", difference("methods", "takeover", key))


def _orderings(findings: Findings) -> list[Block]:
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
            body[-1] += [_percent(ordering.difference, signed=True), Span(verdict, VERDICTS[verdict])]
    head = ["", *(text for name in names for text in (f"{name}, pp [95%]", ""))]
    counts = ", ".join(f"{verdict} {len(members)}" for verdict, members in sides.items())
    note = (
        "Left side minus right side. “>” holds where the interval lies above 0, “≥” where it does not reach below 0; "
        "reversed where it lies below 0; not decided otherwise. Pools, horizons and futures are compared with the "
        "run's own reranker, futures with the verified one on the same states if that is known. "
        f"{_made_with(findings, _rows(findings, 'methods'))}"
    )
    return [
        Paragraph(f"Of the paper's orderings: {counts}."),
        *([Paragraph(_said({"Reversed": sides["reversed"]}))] if sides["reversed"] else []),
        Table("Which orderings hold here", head, body, note, "l" + "rl" * len(names)),
    ]


# Tables of rows.


def _experiment(findings: Findings, table: str) -> list[Block]:
    """What one experiment found: a verdict and a table for every benchmark."""
    rows = _rows(findings, table)
    if not rows:
        return []
    names = benchmarks(rows)
    blocks: list[Block] = [Paragraph(TABLES[table])]
    if len(names) > 1:
        blocks.append(_by_benchmark(findings, rows, PARTS[table].title))
    for name in names:
        inside = [row for row in rows if row["benchmark"] == name]
        blocks += [*_verdicts(inside), _rows_table(findings, inside, f"{PARTS[table].title} on {name}")]
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
            f"Above {reference} beyond chance": [row for row, difference in known if _above(difference)],
            f"Below {reference} beyond chance": [row for row, difference in known if _below(difference)],
            f"Not told apart from {reference}": [
                row for row, difference in known if not _above(difference) and not _below(difference)
            ],
        }
        points += [_said({words: _names(members) for words, members in sides.items()})] if known else []
    return [Items(points)] if points else []


def _names(rows: Sequence[Row]) -> list[str]:
    """Labels, each once, with the quantiles where they have any."""
    quantiles: dict[str, list[str]] = {row["label"]: [] for row in rows}
    for row in rows:
        quantiles[row["label"]] += [] if row.get("quantile") is None else [f"{row['quantile']:g}"]
    return [f"{label} at quantile {', '.join(at)}" if at else label for label, at in quantiles.items()]


def _rows_table(findings: Findings, rows: Sequence[Row], caption: str) -> Table:
    columns = [_text("label")]
    if any(row.get("quantile") is not None for row in rows):
        columns.append(Column("quantile", lambda row: "" if row.get("quantile") is None else f"{row['quantile']:g}"))
        columns.append(_count("threshold", "nats", 3))
    columns += [
        Column(
            "accuracy, % [95%]", lambda row: _percent(row.get("accuracy")) or ("see below" if row.get("note") else "")
        ),
        _span("minus_greedy", "minus greedy, pp [95%]", signed=True),
        _span("minus_direct", "minus direct, pp [95%]", signed=True),
        _span("minus_futurebridge", "minus FutureBridge, pp [95%]", signed=True),
    ]
    if any(row.get("minus_verified") for row in rows):
        columns.append(_span("minus_verified", "minus verified, pp [95%]", signed=True))
    columns += [_count("events", "events a problem", 2), _count("calls", "LLM calls a problem", 2)]
    columns.append(_count("tokens", "tokens a problem", 1))
    columns += (
        [_count("problems", "problems")] if len({row["problems"] for row in rows if row.get("problems")}) > 1 else []
    )
    columns.append(_count("published", "published, %", 1))
    return _table(caption, rows, columns, _made_with(findings, rows))


def _by_benchmark(findings: Findings, rows: Sequence[Row], title: str) -> Table:
    """Methods by benchmarks, the average last."""
    names = benchmarks(rows)
    body: list[list[Text]] = []
    for label in dict.fromkeys(name for row in rows for name in _names([row])):
        own = {row["benchmark"]: row for row in rows if _names([row]) == [label] and row.get("accuracy")}
        means = [own[name]["accuracy"][0] for name in names if name in own]
        average = sum(means) / len(means) if len(means) == len(names) else None
        cells = [_share(own[name]["accuracy"][0]) + _marks(own[name]) if name in own else "" for name in names]
        body.append([label, *cells, _share(average)])
    note = f"The average counts every benchmark alike and has no interval. {LEGEND} {_made_with(findings, rows)}"
    return Table(f"{title}: accuracy, %", ["", *names, "average"], body, note)


def _marks(row: Row) -> str:
    """The symbols of `LEGEND` behind an accuracy."""
    marks = [
        mark
        for key, mark in (("greedy", BELOW_GREEDY), ("direct", BELOW_DIRECT))
        if row["key"] != key and _below(row.get(f"minus_{key}"))
    ]
    return f" {''.join(marks)}" if marks else ""


def _marked(row: Row | None) -> str:
    return "" if row is None else _percent(row.get("accuracy")) + _marks(row)


# Several runs.


def _across(findings: Sequence[Findings]) -> Section:
    columns: dict[str, dict[str, Row]] = {}
    labels: dict[str, str] = {}
    for table in ("methods", "repairs"):
        for one in findings:
            for row in (row for row in _rows(one, table) if row.get("accuracy")):
                columns.setdefault(f"{one['name']}: {row['benchmark']}", {}).setdefault(identity(row), row)
                labels.setdefault(identity(row), row["label"])
    stand: dict[str, list[str]] = {}
    for head, rows in columns.items():
        for key, reference in REFERENCES.items():
            if difference := rows.get(OURS, {}).get(f"minus_{key}"):
                stand.setdefault(f"FutureBridge minus {reference}, {_verdict(difference).text}", []).append(head)
    blocks: list[Block] = [Items([_said({words: heads}) for words, heads in stand.items()])] if stand else []
    if columns:
        body = [[label, *(_marked(rows.get(key)) for rows in columns.values())] for key, label in labels.items()]
        made = " ".join(f"{one['name']}: {_made_with(one, _rows(one, 'methods'))}" for one in findings)
        blocks.append(Table("Accuracy, % [95%], by run", ["", *columns], body, f"{LEGEND} {made}"))
    return Section("All runs", [*blocks, *_recipes(findings)])


def _recipes(findings: Sequence[Findings]) -> list[Block]:
    """Every recipe in every cell of run, benchmark and quantile, and in how many it does no harm."""
    columns: dict[str, dict[str, Row]] = {}
    labels: dict[str, str] = {}
    methods = {identity(row) for one in findings for row in _rows(one, "methods")}
    several = len(benchmarks([row for one in findings for row in cells(one).values()])) > 1
    for one in findings:
        for (key, benchmark, quantile), row in sorted(cells(one).items(), key=lambda cell: cell[0][1:]):
            where = [one["name"]] * (len(findings) > 1) + [benchmark] * several
            columns.setdefault(", ".join([*where, f"q {quantile:g}"]), {})[key] = row
            labels.setdefault(key, row["label"])
    if not columns:
        return []
    safe, harmful, body = [], [], []
    for key, label in labels.items():
        rows = [column.get(key) for column in columns.values()]
        known = {
            other: [row[f"minus_{other}"] for row in rows if row and row.get(f"minus_{other}")] for other in REFERENCES
        }
        worse, below = (sum(map(_below, known[other])) for other in ("direct", "greedy"))
        counts = [(len(known["direct"]) - worse, known["direct"]), (len(known["greedy"]) - below, known["greedy"])]
        counts.append((sum(map(_above, known[OURS])), known[OURS]))
        if key not in methods and known["direct"] and known["greedy"] and not worse and not below:
            safe.append(label)
        if below and (key == OURS or key not in methods):
            harmful.append(f"{label} ({below} of {len(known['greedy'])})")
        told = [f"{good} of {len(all_known)}" if all_known else "" for good, all_known in counts]
        body.append([label, *told, *map(_marked, rows)])
    said = [
        f"Nowhere below greedy or the direct LLM score beyond chance: {'; '.join(safe) or 'no recipe'}.",
        f"Below greedy beyond chance in some cells: {'; '.join(harmful) or 'no recipe'}.",
    ]
    head = ["", "not worse than direct", "not below greedy", "better than FutureBridge", *columns]
    note = (
        "Counts are of cells with a paired difference, to the method in the same cell: not worse and not below where "
        f"the interval does not lie below 0, better where it lies above 0. {LEGEND} {BEYOND_CHANCE}."
    )
    return [Items(said), Table("Recipes in every cell: accuracy, % [95%]", head, body, note)]


# Diagnostics and costs.


def _filters(findings: Findings) -> list[Block]:
    counts = findings["filters"]
    names = [*(name for name in FILTERS if name in counts), *(name for name in counts if name not in FILTERS)]
    rows = [{"filter": name.replace("_", " "), "count": counts[name]} for name in names]
    note = _made_with(findings, decoded=False, intervals=False)
    return [_table("States left after each filter", rows, [_text("filter"), _count("count", "count")], note)]


def _selection(findings: Findings) -> list[Block]:
    selection = findings["selection"]
    chosen = selection["epoch"], selection["horizon"]

    def of_seeds(row: Row) -> str:
        return ", ".join(f"{_share(seed['accuracy'])} (seed {seed['seed']})" for seed in row.get("seeds") or ())

    columns = [
        _count("horizon", "horizon"),
        _count("epoch", "epoch"),
        Column("accuracy, %", lambda row: _share(row["accuracy"])),
        Column("of each seed, %", of_seeds, "l"),
        _count("cross_entropy", "cross-entropy, nats", 3),
        Column("pairs in order, %", lambda row: _share(row.get("pairwise_accuracy"))),
        Column("", lambda row: "chosen" if (row["epoch"], row["horizon"]) == chosen else "", "l"),
    ]
    problems = f"{_number(selection['problems'])} validation problems; " if selection.get("problems") else ""
    note = f"{problems}the highest accuracy averaged over seeds is chosen; no intervals. "
    made = _made_with(findings, intervals=False)
    return [_table("Rerankers on validation problems", selection["table"], columns, note + made)]


def _agreement(findings: Findings) -> list[Block]:
    blocks: list[Block] = [
        Paragraph(
            "How well each score orders the candidates of held-out states, judged by the SLM's own greedy rollouts "
            "behind them. A pair counts where its rollouts differ, score ties count one half. Mixed states are those "
            "whose candidates differ in outcome. A target needs a verified future, so it is seen on fewer states."
        )
    ]
    columns = [
        _text("score"),
        _span("pairwise", "pairs in order, % [95%]"),
        _count("pairs", "pairs"),
        _span("top1", "best one right, % [95%]"),
        _count("states", "states"),
        _span("top1_mixed", "best one right, mixed states, % [95%]"),
        _count("mixed_states", "mixed states"),
    ]
    note = _made_with(findings, decoded=False)
    for kind in dict.fromkeys(row["kind"] for row in findings["agreement"]):
        rows = [row for row in findings["agreement"] if row["kind"] == kind]
        known = {row["score"]: row["pairwise"] for row in rows if row.get("pairwise")}
        sides = {
            "Better than chance": [score for score, (_, low, _) in known.items() if low > 0.5],
            "Worse than chance": [score for score, (_, _, high) in known.items() if high < 0.5],
            "Not told apart from chance": [score for score, (_, low, high) in known.items() if low <= 0.5 <= high],
        }
        blocks += [Paragraph(f"{str(kind).capitalize()} events. {_said(sides)}")] if known else []
        blocks.append(_table(f"Agreement with rollouts, {kind} events", rows, columns, note))
    return blocks


def _coverage(findings: Findings) -> list[Block]:
    columns = [
        _text("pool"),
        _count("mean_size", "mean size", 2),
        _span("coverage", "covered, % [95%]"),
        _count("states", "states"),
        _span("coverage_mixed", "covered, mixed states, % [95%]"),
        _count("mixed_states", "mixed states"),
    ]
    note = _made_with(findings, decoded=False)
    return [
        Paragraph("A state is covered where the SLM's rollout behind some candidate of the pool is right."),
        _table("Coverage of held-out states", findings["coverage"], columns, note),
    ]


def _future_quality(findings: Findings) -> list[Block]:
    found = findings["future_quality"]
    body = [[name, *map(_share, shares)] for name, shares in zip(found["qualities"], found["pairwise"], strict=True)]
    head = ["", *(f"H = {horizon}, %" for horizon in found["horizons"])]
    note = f"{_number(found['states'])} states that have every kind of future; no intervals. "
    made = _made_with(findings, decoded=False, intervals=False)
    return [
        Paragraph("How many pairs the target puts in the order of the rollouts, by what stands as the future."),
        Table("Pairs in order by future and horizon", head, body, note + made),
    ]


def _trajectory(findings: Findings) -> list[Block]:
    found = findings["trajectory"]
    columns = [
        _count("step", "step"),
        Column("entropy, nats", lambda row: _number(found["entropy"][row["step"]], 3)),
        Column("the SLM's token", lambda row: _token(row["slm"]), "l"),
        Column("chosen", lambda row: _token(row["chosen"]), "l"),
    ]
    note = f"{_number(len(found['entropy']))} steps, threshold {found['threshold']:.3f} nats."
    return [Verbatim("Problem", found["problem"]), _table("Its events", found["events"], columns, note)]


def _worked_event(findings: Findings) -> list[Block]:
    found = findings["worked_event"]
    columns = [
        Column("", lambda row: _token(row["token"]), "l"),
        _text("source", "proposed by"),
        _count("p_slm", "p SLM", 4),
        _count("p_llm", "p LLM", 4),
        _count("compatibility", "compatibility, nats", 3),
        _count("score", "score", 3),
        Column("leads to", lambda row: Span("right", "good") if row["correct"] else Span("wrong", "bad"), "l"),
        Column("the SLM's rollout", lambda row: Span(_shortened(row["rollout"]), "code"), "l"),
    ]
    candidates = sorted(found["candidates"], key=lambda row: -row["score"])
    return [
        Paragraph(f"The right answer is {found['gold']}; entropy {found['entropy']:.3f} nats."),
        Verbatim("Problem", found["problem"]),
        Verbatim("Prompt", found["prompt"]),
        *([Verbatim("Written so far", found["prefix"])] if found["prefix"] else []),
        Verbatim("Shared future", found["future"]),
        _table("Its candidates, best score first", candidates, columns, _made_with(findings, intervals=False)),
    ]


def _calibration(findings: Findings) -> list[Block]:
    found = findings["calibration"]
    mixed, wanted = found["mixed"], found["minimum_mixed"]
    terms = {"b": "compatibility", "llm": "log p of the LLM", "slm": "log p of the SLM"}
    rows = [
        {"term": term, "weight": found["theta"][key], "certain": found["theta"][f"{key}_certain"]}
        for key, term in terms.items()
    ]
    columns = [
        _text("term", "standardised in the pool"),
        _count("weight", "weight", 3),
        _count("certain", "weight × the LLM's certainty", 3),
    ]
    enough = f"the {wanted} wanted at least" if mixed >= wanted else f"fewer than the {wanted} wanted, so doubtful"
    return [
        Paragraph(
            f"Fitted on {_number(found['states'])} rolled-out training states, {_number(mixed)} of which have "
            f"candidates that differ in outcome ({enough})."
        ),
        _table("Weights of the calibrated target", rows, columns, _made_with(findings, decoded=False, intervals=False)),
    ]


def _advice(findings: Findings) -> list[Block]:
    return [Items(findings["advice"])]


def _costs(findings: Findings) -> list[Block]:
    deployment, offline = (findings["costs"].get(part) or [] for part in ("deployment", "offline"))
    where = f"on {findings.get('machine') or 'a machine that was not recorded'}."

    def relative(row: Row) -> str:
        return "{:.2f} [{:.2f}, {:.2f}]".format(*row["relative"]) if row.get("relative") else ""

    def memory(row: Row) -> str:
        return "" if row.get("peak_bytes") is None else _number(row["peak_bytes"] / 2**20, 1)

    of_methods = [
        _text("method"),
        *([_text("loop", "loop")] if any(row.get("loop") for row in deployment) else []),
        _count("problems", "problems"),
        _count("calls", "LLM calls a problem", 2),
        _count("pool", "candidates an event", 2),
        _count("appended", "tokens chosen at events", 2),
        _count("suffix", "LLM tokens beyond them", 1),
        _count("seconds", "seconds a problem", 4),
        Column("× greedy [95%]", relative),
        Column("peak memory, MiB", memory),
        _count("published_relative", "published, × greedy", 2),
    ]
    of_stages = [
        _text("stage"),
        _count("units", "units"),
        _text("unit"),
        _count("seconds", "seconds", 1),
        _count("gpu_hours", "GPU hours", 4),
        Column("devices", lambda row: ", ".join(row["devices"]), "l"),
        _count("published_gpu_hours", "published, GPU hours", 1),
    ]
    blocks: list[Block] = []
    if not deployment:
        blocks.append(Paragraph(("Deployment was not timed; ", Span(PARTS["costs"].command, "code"), " does it.")))
    else:
        note = f"One problem at a time, {where} {_made_with(findings)}"
        blocks.append(_table("Deployment", deployment, of_methods, note))
    if offline:
        note = f"Work of all processes together, {where} {_made_with(findings, intervals=False)}"
        blocks.append(_table("Offline stages", offline, of_stages, note))
    return blocks


def _settings(findings: Findings) -> list[Block]:
    settings = [(name, Span(value, "code")) for name, value in _flat(findings.get("settings") or {})]
    made = [(name, str(version)) for name, version in (findings.get("made") or {}).items()]
    blocks: list[Block] = [Table("Every setting", ("", "value"), settings, align="ll")] if settings else []
    return [*blocks, *([Table("Made with", ("", "version"), made, align="ll")] if made else [])]


def _flat(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", str(value)


DIAGNOSTICS: dict[str, Callable[[Findings], list[Block]]] = {
    "filters": _filters,
    "selection": _selection,
    "agreement": _agreement,
    "coverage": _coverage,
    "future_quality": _future_quality,
    "trajectory": _trajectory,
    "worked_event": _worked_event,
    "calibration": _calibration,
    "advice": _advice,
    "costs": _costs,
}

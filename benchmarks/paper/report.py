"""`python -m benchmarks.paper report`: tables and figures of one or several runs as one HTML file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.paper import figures
from benchmarks.paper.agreement import POOLS, SCORES
from benchmarks.paper.cells import (
    LEGEND,
    SHARES,
    Columns,
    below,
    by_significance,
    flipped,
    made_with,
    marked,
    number,
    percent,
    share,
    spread,
    table,
)
from benchmarks.paper.figures import by_benchmark, panels, primary
from benchmarks.paper.orderings import ordering_blocks
from benchmarks.paper.page import Block, Document, Figure, Items, Paragraph, Section, Span, Text
from benchmarks.paper.rows import DEPLOYED, Result, Run, in_order, rows_bytes, tables_bytes
from benchmarks.paper.tables import PUBLISHED, TABLES
from benchmarks.paper.tables import Table as Experiment
from benchmarks.theme import Picture
from fb_core.apps.pipeline.page import Table
from fb_core.apps.pipeline.statistics import Interval
from fb_core.apps.settings.config import AVERAGE
from fb_core.atomic import write_file

FIGURES = "figures"  # folder beside report.html
FOREST = (
    "Accuracy with 95% intervals. The dashed line is greedy decoding with the SLM. Circles are FutureBridge and "
    "the published recipe, diamonds greedy decoding and takeover, squares all other methods."
)
HOW = (
    "Accuracies are in percent, differences in percentage points (pp). Brackets hold 95% bootstrap intervals: problems "
    "and training seeds are resampled, and differences are paired by both. Two or three seeds show little of their "
    "spread. A difference is called statistically "
    "significant if its interval excludes 0. Intervals are not corrected for multiple comparisons. If there are "
    "several benchmarks, “average” is the primary result: all benchmarks have equal weight, and problems are resampled "
    "within each. A column headed “published” holds the paper's figures, if the models are the paper's; it says “other "
    "setting” if data, settings, dtype or, for costs, the GPU are not."
)
POSITIONS = (
    "LLM positions are those that the LLM computes, each once, as if it kept its cache: prompt, text that it reads or "
    "writes, rejected drafts; a position costs about two FLOPs a parameter. "
)
REFERENCES = {"greedy": "greedy", "direct": "the direct LLM score", PUBLISHED: "the published recipe"}
RIVALS = {"greedy": "greedy decoding", "direct": "the direct LLM score", "takeover": "takeover"}
NO_EVENT = "no event"
LISTED = 10  # changed problems listed per method, direction and kind of event


def write_report(runs: Sequence[Run], folder: Path, tables: Mapping[str, Experiment] = TABLES) -> list[Path]:
    """Write report.html, figures/*.svg, rows.parquet and tables.json.

    Args:
        runs: one or several.
        folder: of the files; created if missing.
        tables: those that a run may have, by name.

    Returns:
        the paths of the files.

    Raises:
        ValueError: no runs, or numbers that are not finite.
        OSError: the folder cannot be written.
    """
    document = render(runs, tables)
    made = {"tables.json": tables_bytes(runs), "rows.parquet": rows_bytes([row for run in runs for row in run.rows])}
    made |= {f"{FIGURES}/{figure.name}.svg": figure.picture.alone.encode() for figure in document.figures()}
    made["report.html"] = document.html().encode()
    for name, data in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_file(folder / name, data)
    return [folder / name for name in made]


def render(runs: Sequence[Run], tables: Mapping[str, Experiment] = TABLES) -> Document:
    """The report: a summary of all runs, then tables across them if there are several, then each run's own sections.

    Raises:
        ValueError: no runs.
    """
    if not runs:
        raise ValueError("runs: expected one or more, got none; name a run's folder")
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        runs = [replace(run, name=f"{run.name} ({index})") for index, run in enumerate(runs, 1)]
    rows_by_head = panels(runs, "methods")
    first: list[Block] = in_short(runs, rows_by_head)
    first += _figure("forest", FOREST, figures.forest(rows_by_head))
    how = Section("How to read the numbers", [Paragraph(HOW)])
    title = f"FutureBridge report: {', '.join(run.name for run in runs)}"
    if len(runs) == 1:
        return Document(title, first, [*_sections(runs[0], "", tables), how])
    parts = [
        Section(run.name, [], _sections(run, f"run-{index}-", tables), ", ".join(by_benchmark(run.results)))
        for index, run in enumerate(runs, 1)
    ]
    return Document(title, first, [_across(runs), *parts, how])


def in_short(runs: Sequence[Run], rows_by_head: Mapping[str, Sequence[Result]]) -> list[Block]:
    """Three sentences: what was compared, which method was most accurate at what cost, where ours are worse."""
    if not rows_by_head:
        return []
    methods = {row.label for rows in rows_by_head.values() for row in rows}
    counts = {head: number(max(row.problems or 0 for row in rows)) for head, rows in rows_by_head.items()}
    where = ", ".join(f"{head} ({count} problems)" for head, count in counts.items())
    pair = f", SLM {runs[0].pair['slm']}, LLM {runs[0].pair['llm']}" if len(runs) == 1 and runs[0].pair else ""
    heads = {id(row): head for head, rows in rows_by_head.items() for row in rows}
    firsts = [[row for row in primary(run.of("methods")) if row.accuracy] for run in runs]
    best = "; ".join(_best(heads[id(rows[0])], rows) for rows in firsts if rows)
    texts = [
        f"{len(methods)} methods were compared on {where}{pair}.",
        f"Most accurate apart from takeover (picked on these same problems): {best}.",
        *(f"{words}." for key in (DEPLOYED, PUBLISHED) if (words := _losses(key, rows_by_head))),
    ]
    return [Items(texts)]


def _best(head: str, rows: Sequence[Result]) -> str:
    """The most accurate row apart from takeover (the cheapest if tied), with greedy and takeover beside it."""

    def priced(row: Result, words: str = "") -> str:
        tokens = f" with {number(row.llm_tokens.mean, 1)}{words}" if row.llm_tokens else ""
        return f"{share(row.accuracy and row.accuracy.mean)}%{tokens}"

    def rank(row: Result) -> tuple[float, float]:
        return -row.accuracy.mean if row.accuracy else 0.0, row.llm_tokens.mean if row.llm_tokens else 0.0

    best = min((row for row in rows if row.key != "takeover"), key=rank, default=rows[0])
    ends = ", ".join(f"{row.label.lower()} {priced(row)}" for row in rows if row.key in ("greedy", "takeover"))
    beside = f" ({ends})" if ends else ""
    return f"{best.label} on {head}, {priced(best, ' LLM tokens per problem')}{beside}"


def _losses(key: str, rows_by_head: Mapping[str, Sequence[Result]]) -> str:
    """Than what FutureBridge, or the published recipe, is significantly worse, and where."""
    lost: dict[str, list[str]] = {}
    label = ""
    for head, rows in rows_by_head.items():
        by_key = {row.key: row for row in rows}
        for rival, words in RIVALS.items() if key in by_key else ():
            label = by_key[key].label
            if (minus := difference(by_key, key, rival)) is not None:
                lost.setdefault(words, []).extend([f"{head} ({percent(minus, signed=True)} pp)"] * below(minus))
    where = ", ".join(f"than {words} on {', '.join(heads)}" for words, heads in lost.items() if heads)
    if not lost:
        return ""
    return f"{label}: " + (
        f"significantly worse {where}" if where else f"nowhere significantly worse than {' or '.join(lost)}"
    )


def difference(rows: Mapping[str, Result], key: str, other: str) -> Interval | None:
    """The paired difference of two rows by their keys, from whichever side it is known."""
    if (minus := rows[key].minus.get(other)) is not None or other not in rows:
        return minus
    return flipped(rows[other].minus.get(key))


def _across(runs: Sequence[Run]) -> Section:
    """The section across runs: every method in every run and benchmark."""
    columns = {
        f"{run.name}: {benchmark}": {row.label: row for row in rows if row.accuracy}
        for run in runs
        for benchmark, rows in by_benchmark(run.of("methods")).items()
    }
    labels = dict.fromkeys(
        row.label for row in in_order(row for by_label in columns.values() for row in by_label.values())
    )
    made = " ".join(f"{run.name}: {made_with(run, run.of('methods'))}" for run in runs)
    body = [[label, *(marked(by_label.get(label)) for by_label in columns.values())] for label in labels]
    blocks: list[Block] = [Table("Accuracy, % [95%], by run", ["", *columns], body, f"{LEGEND} {made}")] if body else []
    return Section("All runs", blocks, brief="The accuracy of every method in every run and benchmark.")


class Part(NamedTuple):
    """A section of a run's report.

    Attributes:
        title: of the section.
        brief: a sentence on it.
        command: what produces its results.
        after: the table that it follows.
        blocks: makes its content; empty if it was not run.
    """

    title: str
    brief: str
    command: str
    after: str
    blocks: Callable[[Run, str], list[Block]]  # of the run; its figures' names begin with the prefix


def _sections(run: Run, prefix: str, tables: Mapping[str, Experiment]) -> list[Section]:
    """All sections of one run: the tables in order, each with what follows it; what was not run is named at the end."""
    shown = [(part, part.blocks(run, prefix)) for part in _parts(tables)]
    missing: list[Text] = [(f"{part.title}: run ", Span(part.command, "code")) for part, blocks in shown if not blocks]
    not_run: list[Block] = (
        [Paragraph("The run's folder has no results for these parts."), Items(missing)] if missing else []
    )
    sections = [
        Section("The run", _overview(run), brief="Models, request policy and seeds."),
        Section("The paper's orderings", ordering_blocks(run), brief="Which of them hold in this run."),
        *(Section(part.title, blocks, brief=part.brief) for part, blocks in shown),
        Section("Not run", not_run, brief="Parts without results, and the commands that produce them."),
        Section("Settings", _settings(run), brief="All settings."),
    ]
    return [section for section in sections if section.blocks]


def _figure(name: str, caption: str, picture: Picture | None) -> list[Block]:
    return [] if picture is None else [Figure(name, caption, picture)]


def _overview(run: Run) -> list[Block]:
    facts = []
    for which in ("slm", "llm") if run.pair else ():
        count = run.pair.get(f"{which}_parameters")
        facts.append((which.upper(), f"{run.pair[which]}{f', {count:,} parameters' if count else ''}"))
    if run.policy:
        source = f"the {run.policy['quantile']:g} quantile on validation problems"
        softmax = f"softmax over the {run.policy['top_k']} largest logits"
        facts.append(
            ("the LLM is asked", f"above an entropy of {run.policy['threshold']:.3f} nats ({source}; {softmax})")
        )
    facts += [("seeds", ", ".join(map(str, run.seeds)))] if run.seeds else []
    facts += run.about.items()
    return [Table("The run", ("", ""), facts, align="ll")] if facts else []


def _settings(run: Run) -> list[Block]:
    def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Span]]:
        for name, value in values.items():
            if isinstance(value, dict) and value:
                yield from flat(value, f"{above}{name}.")
            else:
                yield f"{above}{name}", Span(str(value), "code")

    rows = list(flat(run.settings))
    return [Table("All settings", ("setting", "value"), rows, align="ll")] if rows else []


def _parts(tables: Mapping[str, Experiment]) -> Iterator[Part]:
    """The tables in order, each followed by what belongs to it."""
    for experiment in tables.values():
        command = f"{TABLE} {experiment.name}"
        yield Part(experiment.title, _sentences(experiment)[0], command, "", partial(_experiment, experiment))
        yield from (part for part in PARTS if part.after == experiment.name)


def _sentences(experiment: Experiment) -> list[str]:
    """The first sentence on what a table varies, and the others."""
    return re.split(r"(?<=\.) ", experiment.varies, maxsplit=1)


def _experiment(experiment: Experiment, run: Run, prefix: str) -> list[Block]:
    """A table's verdicts and rows for every benchmark, and its figure."""
    groups = by_benchmark(run.of(experiment.name))
    if not groups:
        return []
    blocks: list[Block] = [Paragraph(text) for text in _sentences(experiment)[1:]]
    blocks += [_by_benchmark(run, groups, experiment.title)] if len(groups) > 1 else []
    for benchmark, rows in groups.items():
        blocks += [*verdicts(rows), _rows_table(run, rows, f"{experiment.title} on {benchmark}")]
        notes = [f"{row.label}: {row.note}." for row in rows if row.note]
        blocks += [Items(notes)] if notes else []
    picture = None
    if experiment.figure == "accuracy":
        picture = figures.forest(panels([run], experiment.name))
    elif experiment.figure == "curve":
        picture = figures.curve(run, experiment.name, experiment.title.lower())
    name = prefix + re.sub(r"[^\w-]+", "-", experiment.name)  # a name from a file is no path
    return [*blocks, *_figure(name, experiment.caption, picture)]


def verdicts(rows: Sequence[Result]) -> list[Block]:
    """Which differences are statistically significant and which are not, one list item per reference method."""
    points: list[Text] = []
    for key, reference in REFERENCES.items():
        words = ("Significantly above", "Significantly below", "Not significantly different from")
        differences = [(_name(row), row.minus[key]) for row in rows if key in row.minus and row.key != key]
        points += [by_significance([f"{phrase} {reference}" for phrase in words], differences)] if differences else []
    return [Items(points)] if points else []


def _name(row: Result) -> str:
    """A row's label, with its request quantile if it has one."""
    return row.label if row.quantile is None else f"{row.label} at quantile {row.quantile:g}"


def _rows_table(run: Run, rows: Sequence[Result], caption: str) -> Table:
    def minus(name: str) -> Callable[[Result], Text]:
        return lambda row: percent(row.minus.get(name), signed=True)

    columns: dict[str, Callable[[Result], Text]] = {"": lambda row: row.label}
    if any(row.quantile is not None for row in rows):
        columns["quantile"] = lambda row: "" if row.quantile is None else f"{row.quantile:g}"
        columns["threshold, nats"] = lambda row: number(row.threshold, 3)
    columns["accuracy, % [95%]"] = lambda row: percent(row.accuracy) or "see below" * bool(row.note)
    for name in dict.fromkeys(["greedy", "direct", PUBLISHED, *(name for row in rows for name in row.minus)]):
        columns[f"minus {'published recipe' if name == PUBLISHED else name}, pp [95%]"] = minus(name)
    if any(row.published is not None for row in rows):
        columns[f"{run.published}, %"] = lambda row: share(row.published)
    columns["events per problem"] = lambda row: number(row.events, 2)
    columns["LLM calls per problem"] = lambda row: number(row.calls and row.calls.mean, 2)
    columns["tokens per problem"] = lambda row: number(row.tokens, 1)
    if len({row.problems for row in rows if row.problems}) > 1:
        columns["problems"] = lambda row: number(row.problems)
    return table(caption, rows, columns, made_with(run, rows))


def _by_benchmark(run: Run, groups: Mapping[str, Sequence[Result]], title: str) -> Table:
    """Accuracy of every method on every benchmark; the average comes last, with its interval."""
    rows = [row for group in groups.values() for row in group]
    body: list[list[Text]] = []
    for label in dict.fromkeys(map(_name, rows)):
        own = {row.benchmark: row for row in rows if _name(row) == label}
        body.append([label, *(marked(own.get(name), short=name != AVERAGE) for name in groups)])
    note = (
        "The average gives all benchmarks equal weight; its interval resamples the problems within each benchmark. "
        f"{LEGEND} {made_with(run, rows)}"
    )
    return Table(f"{title}: accuracy, %", ["", *groups], body, note)


def _frontier(run: Run, prefix: str) -> list[Block]:
    rows = [row for row in primary(run.of("methods")) if row.accuracy and row.llm_tokens]
    if not rows:
        return []
    times = figures.times(run)

    def seconds(row: Result) -> str:
        timing = times.get(row.key)
        relative = f"{spread(timing.relative, 2)} × greedy" if timing and timing.relative else ""
        return ", ".join(filter(None, (number(timing.seconds, 3), relative, timing.loop))) if timing else ""

    columns: Columns = {
        "": lambda row: row.label,
        "accuracy, % [95%]": lambda row: percent(row.accuracy),
        "LLM tokens per problem [95%]": lambda row: spread(row.llm_tokens),
        "LLM calls per problem [95%]": lambda row: spread(row.calls, 2),
        "LLM positions per problem [95%]": lambda row: spread(row.read),
        **({"seconds per problem [95%], loop": seconds} if times else {}),
        "above the line to takeover, pp [95%]": lambda row: percent(row.above_line, signed=True),
        "above it at equal LLM positions, pp [95%]": lambda row: percent(row.above_read_line, signed=True),
    }
    by_key, points = {row.key: row for row in rows}, list[Text]()
    stand = [
        f"{row.label} is right on {percent(row.accuracy)}% of the problems with {spread(row.llm_tokens)} LLM tokens "
        f"and {spread(row.calls, 2)} LLM calls per problem"
        for row in (by_key.get("takeover"), by_key.get(DEPLOYED, by_key.get(PUBLISHED)))
        if row
    ]
    points += [f"{stand[0]}; {stand[1]}."] if len(stand) == 2 else []
    for cost, name in (("LLM tokens", "above_line"), ("LLM positions", "above_read_line")):
        words = (
            f"Significantly better than takeover on a share of the problems with the same number of {cost}",
            "Significantly worse",
            "Not significantly different",
        )
        distances = [(row.label, distance) for row in rows if (distance := getattr(row, name))]
        points += [by_significance(words, distances)] if distances else []
    note = (
        "LLM tokens are the tokens of the answer that the LLM wrote or that were chosen when it was asked. The line "
        "joins greedy decoding and takeover: it is the accuracy if the LLM takes over a random share of the problems, "
        f"at the same number of LLM tokens. {POSITIONS}{'Seconds are from the table of costs. ' * bool(times)}"
    )
    caption = (
        "Accuracy against LLM tokens, LLM calls and time, all with 95% intervals. A method above the dashed line is "
        "more accurate than takeover on a share of the problems at the same cost."
    )
    return [
        *([Items(points)] if points else []),
        table(f"Accuracy and the LLM's work on {rows[0].benchmark}", rows, columns, note + made_with(run, rows)),
        *_figure(f"{prefix}frontier", caption, figures.frontier(run)),
    ]


def _changes(run: Run, _: str) -> list[Block]:
    """How many outcomes changed at which kind of event, and the first changed problems of each."""
    changes = run.parts.get("changes", ())
    kinds = list(dict.fromkeys(row["kind"] or NO_EVENT for row in changes))
    groups: dict[tuple[str, bool], list[str]] = {}
    for row in changes:
        groups.setdefault((row["method"], row["gained"]), []).append(row["kind"] or NO_EVENT)
    if not groups:
        compared = {row.key for row in run.of("methods") if row.accuracy}
        same = "greedy" in compared and compared & {DEPLOYED, PUBLISHED}
        return [Paragraph("No problem has another outcome than with greedy decoding.")] if same else []

    def way(gained: bool) -> Span:
        return Span("wrong → right", "good") if gained else Span("right → wrong", "bad")

    body = [
        [label, way(gained), *(number(own_kinds.count(kind)) for kind in kinds), number(len(own_kinds))]
        for (label, gained), own_kinds in sorted(groups.items())
    ]
    note = (
        "The event is the first at which the method took another token than the SLM's own; its kind is the kind of the "
        "SLM's token."
    )
    columns: Columns = {
        "problem": lambda row: row["problem"],
        "benchmark|": lambda row: row["benchmark"],
        "method|": lambda row: row["method"],
        "seed": lambda row: number(row["seed"]),
        "greedy → method|": lambda row: way(row["gained"]),
        "kind of event|": lambda row: row["kind"] or NO_EVENT,
        "step": lambda row: number(row["step"]),
    }
    heads = ["", "greedy → method", *kinds, "all"]
    listed, shown = [], Counter[tuple[str, bool, str | None]]()
    for row in changes:
        shown[alike := (row["method"], row["gained"], row["kind"])] += 1
        listed += [row] * (shown[alike] <= LISTED)
    return [
        Table("Changed outcomes by kind of event", heads, body, note, "ll" + "r" * (len(kinds) + 1)),
        table("Changed problems", listed, columns, made_with(run, intervals="")),
    ]


def _certification(run: Run, _: str) -> list[Block]:
    """Why each seed's adapter is deployed with its recipe, and all recipes tested against greedy and direct."""
    rows, blocks = run.parts.get("certification", ()), list[Block]()

    def bound(name: str) -> Callable[[Any], Text]:
        return lambda row: f"{100 * row[name]['mean']:+.1f} [{100 * row[name]['low']:+.1f}]"

    columns: Columns = {
        "": lambda row: row["label"],
        "accuracy, %": lambda row: share(row["accuracy"]),
        "minus greedy, pp [lower bound]": bound("minus_greedy"),
        "minus direct, pp [lower bound]": bound("minus_direct"),
        "LLM calls per problem": lambda row: number(row["calls"], 2),
        "LLM tokens per problem": lambda row: number(row["llm_tokens"], 2),
    }
    for seed in dict.fromkeys(row["seed"] for row in rows):
        own = [row for row in rows if row["seed"] == seed]
        first = own[0]
        note = (
            f"{first['problems']} problems that were not used to fit or choose anything. Brackets hold lower bounds, "
            f"which are valid together at {first['level']:.0%}. A recipe may be deployed if both are above "
            f"-{100 * first['delta']:g}."
        )
        blocks += [Items([f"Seed {seed}: {first['words']}"]), table(f"Certification, seed {seed}", own, columns, note)]
    return blocks


def _costs(run: Run, _: str) -> list[Block]:
    offline, blocks = run.parts.get("offline", ()), list[Block]()
    where = f"on {run.about.get('machine', 'a machine that was not recorded')}."
    of_methods: dict[str, Callable[[Any], Text]] = {
        "": lambda row: row.method,
        "loop|": lambda row: row.loop,
        "problems": lambda row: number(row.problems),
        "LLM calls per problem": lambda row: number(row.calls, 2),
        "candidates per event": lambda row: number(row.pool, 2),
        "LLM tokens per problem": lambda row: number(row.llm_tokens, 1),
        "seconds per problem": lambda row: number(row.seconds, 4),
        "× greedy [95%]": lambda row: spread(row.relative, 2),
        "peak memory, MiB": lambda row: number(row.peak_bytes and row.peak_bytes / 2**20, 1),
    }
    of_stages: dict[str, Callable[[Any], Text]] = {
        "": lambda row: row["stage"],
        "units": lambda row: number(row["units"]),
        "unit|": lambda row: row["unit"],
        "seconds": lambda row: number(row["seconds"], 1),
        "GPU hours": lambda row: number(row["gpu_hours"], 4),
        "devices|": lambda row: ", ".join(row["devices"]),
    }
    if any(row.published for row in run.timed):
        words = {"calls": "calls", "pool": "candidates per event", "seconds": "× greedy", "memory": "GB"}
        of_methods[f"{run.published_costs}|"] = lambda row: ", ".join(
            f"{number(row.published[name], 2)} {unit}" for name, unit in words.items() if name in row.published
        )
    if any(row["published"] for row in offline):
        of_stages[f"{run.published_costs}, H200 hours"] = lambda row: number(row["published"], 1)
    if run.timed:
        blocks.append(table("Deployment", run.timed, of_methods, f"One problem at a time, {where} {made_with(run)}"))
    elif offline:
        command = Span("python -m benchmarks.paper tables costs", "code")
        blocks.append(Paragraph(("Deployment was not timed. To time it, run ", command, ".")))
    if offline:
        note = f"Time summed over all processes, {where} {made_with(run, intervals='')}"
        blocks.append(table("Offline stages", offline, of_stages, note))
    return blocks


WHERE: Columns = {"states of|": lambda row: row["where"]}


def _coverage(run: Run, _: str) -> list[Block]:
    if not (rows := run.parts.get("coverage", ())):
        return []
    text = "A state is covered if the SLM's rollout after at least one candidate of the pool is right."
    columns: Columns = {"pool": lambda row: row["pool"], **WHERE, **POOLS}
    if any(row.get("published") for row in rows):
        columns |= {
            f"{run.published}, mean pool size": lambda row: number(row["published"].get("size"), 1),
            f"{run.published}, covered, %": lambda row: number(row["published"].get("coverage"), 1),
        }
    note = made_with(run, decoded=False, intervals=SHARES)
    return [
        Paragraph(text),
        table("Coverage of held-out states", rows, columns, note),
    ]


def _filter(run: Run, _: str) -> list[Block]:
    if not (rows := run.parts.get("filter", ())):
        return []
    columns: Columns = {
        "condition": lambda row: row["condition"],
        "states": lambda row: number(row["states"]),
        "share of admitted, %": lambda row: share(row["states"] / max(1, rows[0]["states"])),
    }
    if any(row["published"] for row in rows):
        columns[f"{run.published}, states"] = lambda row: number(row["published"])
    return [table("States left after each condition", rows, columns, made_with(run, decoded=False, intervals=""))]


def _quality(run: Run, _: str) -> list[Block]:
    if not (rows := run.parts.get("future_quality", ())):
        return []
    horizons = [name for name in rows[0] if name not in ("future", "states")]
    body = [[row["future"], number(row["states"]), *(share(row[horizon]) for horizon in horizons)] for row in rows]
    note = "No intervals; 50 is chance. "
    text = (
        "How often the target ranks two candidates as their rollouts do, by kind of future and horizon. All but the "
        "unverified greedy future are on the states that have every kind."
    )
    head = ["", "states", *(f"H = {horizon}, %" for horizon in horizons)]
    note += made_with(run, decoded=False, intervals="")
    return [Paragraph(text), Table("Pairwise accuracy by future and horizon", head, body, note)]


def _agreement(run: Run, prefix: str) -> list[Block]:
    if not (rows := run.parts.get("agreement", ())):
        return []
    blocks: list[Block] = [
        Paragraph(
            "How well each score ranks the candidates of held-out states, compared with the SLM's own greedy rollout "
            "after each candidate. Pairwise accuracy is the share of pairs with different outcomes that the score puts "
            "in the right order; a tie counts one half. Top-1 success is the share of states whose best-scored "
            "candidate leads to the right answer. Mixed states are those whose candidates differ in outcome. Targets "
            "exist only at states with a verified future, so they cover fewer states; matched events are those where "
            "every score is known, so that all are compared on the same states."
        )
    ]
    words = "Better than chance", "Worse than chance", "Not significantly different from chance"
    for kind, where in dict.fromkeys((row["kind"], row["where"]) for row in rows):
        own = [row for row in rows if (row["kind"], row["where"]) == (kind, where) and row["pairwise"]]
        sides = [(row["score"], Interval(*(part - 0.5 for part in row["pairwise"]))) for row in own]
        blocks += [Paragraph(f"{kind.capitalize()} events, {where}. {by_significance(words, sides)}")] if own else []
    columns: Columns = {"score": lambda row: row["score"], **WHERE, **SCORES}
    if any(row.get("published") for row in rows):
        head = f"{run.published}: pairwise (validation) or top-1 (benchmarks), %"
        columns[head] = lambda row: number(row.get("published"), 1)
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        note = made_with(run, decoded=False, intervals=SHARES)
        blocks.append(table(f"Agreement with rollouts, {kind} events", own, columns, note))
    caption = (
        "Pairwise accuracy of each score against the SLM's rollouts, with 95% intervals; the dotted line is chance."
    )
    return [*blocks, *_figure(f"{prefix}agreement", caption, figures.agreement(rows))]


TABLE, ROLLOUTS = "python -m benchmarks.paper tables", "python -m benchmarks.paper rollouts"
PARTS = (
    Part(
        "Accuracy against the LLM's work",
        "Is a method better than handing a share of the problems to the LLM?",
        f"{TABLE} methods",
        "methods",
        _frontier,
    ),
    Part(
        "Problems with changed outcomes",
        "Wrong → right and right → wrong compared with greedy decoding, by kind of event, with links to the texts.",
        f"{TABLE} methods",
        "methods",
        _changes,
    ),
    Part(
        "Deployed recipe",
        "Which recipe the run chose to deploy, and the evidence for it.",
        "futurebridge train",
        "methods",
        _certification,
    ),
    Part("Data filter", "Which admitted states are trained on.", "futurebridge score", "methods", _filter),
    Part("Costs", "Time and memory per problem, and time of the offline stages.", f"{TABLE} costs", "methods", _costs),
    Part(
        "Pool coverage", "How often a pool holds a candidate from which the SLM succeeds.", ROLLOUTS, "pools", _coverage
    ),
    Part(
        "Future quality",
        "How well the target agrees with rollouts, by kind of future.",
        f"{TABLE} futures",
        "futures",
        _quality,
    ),
    Part(
        "Agreement with rollouts",
        "How well each score predicts whether a candidate leads to the right answer.",
        ROLLOUTS,
        "quantiles",
        _agreement,
    ),
)

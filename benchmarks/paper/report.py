"""`python -m benchmarks.paper report`: tables and figures of one or several runs as one Markdown page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.pages.theme import alone
from benchmarks.paper import figures
from benchmarks.paper.cells import below, bullets, by_significance, literal, number, percent, table
from benchmarks.paper.figures import by_benchmark, panels, primary
from benchmarks.paper.orderings import difference, ordering_lines
from benchmarks.paper.rows import DEPLOYED, Result, Run, rows_bytes, tables_bytes
from benchmarks.paper.tables import PUBLISHED, TABLES
from benchmarks.paper.tables import Table as Experiment
from fb_core._util import write_file
from fb_core.apps.pipeline.statistics import Interval

FIGURES = (
    "All accuracies have 95% intervals. In the forest plot the dashed line is greedy decoding with the SLM; circles "
    "are FutureBridge and the published recipe, diamonds greedy decoding and takeover, squares all other methods. The "
    "frontier of each run shows accuracy against LLM tokens, LLM calls, LLM positions and time. A method above its "
    "dashed line is more accurate than takeover on a share of the problems at the same cost."
)
HOW = (
    "In tables, shares and their differences lie in 0..1, as in tables.json; elsewhere accuracies are in percent and "
    "differences in percentage points (pp). Brackets hold 95% bootstrap intervals: problems and training seeds are "
    "resampled, and differences (minus) are paired by both. Two or three seeds show little of their spread. A "
    "difference is called statistically significant if its interval excludes 0. Intervals are not corrected for "
    "multiple comparisons. If there are several benchmarks, “average” is the primary result: all benchmarks have equal "
    "weight, and problems are resampled within each. Between events, decoding is greedy. A column “published” holds "
    "the paper's figures, if the models are the paper's; the run says “other setting” if data, settings, dtype or, for "
    "costs, the GPU are not.",
    "Events, calls, tokens, LLM tokens and read are means per problem. LLM tokens are the tokens of the answer that "
    "the LLM wrote or that were chosen when it was asked. LLM positions (read) are those that the LLM computes, each "
    "once, as if it kept its cache: prompt, text that it reads or writes, rejected drafts; a position costs about two "
    "FLOPs a parameter. The line to takeover is the accuracy if the LLM takes over a random share of the problems and "
    "the SLM decodes the others, at equal LLM tokens (above line) or LLM positions (above read line). Thresholds "
    "are in nats, seconds are per problem and relative to greedy decoding in the same loop.",
)
DIFFERENCES: dict[str, Callable[[Result], Interval | None]] = {
    "greedy": lambda row: row.minus.get("greedy"),
    "the direct LLM score": lambda row: row.minus.get("direct"),
    "the published recipe": lambda row: row.minus.get(PUBLISHED),
    "the line to takeover at equal LLM tokens": lambda row: row.above_line,
    "the line to takeover at equal LLM positions": lambda row: row.above_read_line,
}
RIVALS = {"greedy": "greedy decoding", "direct": "the direct LLM score", "takeover": "takeover"}


def write_report(runs: Sequence[Run], folder: Path, tables: Mapping[str, Experiment] = TABLES) -> list[Path]:
    """Write report.md, figures/*.svg, rows.parquet and tables.json; returns their paths."""
    drawn = draw(runs)
    made = {"tables.json": tables_bytes(runs), "rows.parquet": rows_bytes([row for run in runs for row in run.rows])}
    made |= {name: svg.encode() for name, svg in drawn.items()}
    made["report.md"] = render(runs, drawn, tables).encode()
    for name, data in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_file(folder / name, data)
    return [folder / name for name in made]


def draw(runs: Sequence[Run]) -> dict[str, str]:
    """The figures of the report as SVG by the names of their files: one of all runs, then one of each run."""
    found = {"forest": figures.forest(panels(runs, "methods"))}
    found |= {f"frontier-{index}": figures.frontier(run) for index, run in enumerate(runs, 1)}
    return {f"figures/{name}.svg": alone(svg) for name, svg in found.items() if svg}


def render(runs: Sequence[Run], drawn: Mapping[str, str], tables: Mapping[str, Experiment] = TABLES) -> str:
    """The page: a summary of all runs, then each run's tables, then the figures."""
    if not runs:
        raise ValueError("runs: expected one or more, got none; name a run's folder")
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        runs = [replace(run, name=f"{run.name} ({index})") for index, run in enumerate(runs, 1)]
    rows_by_head = panels(runs, "methods")
    blocks = [f"# FutureBridge report: {', '.join(literal(run.name) for run in runs)}"]
    blocks += [*bullets(in_short(runs, rows_by_head)), *_side_by_side(rows_by_head)]
    for run in runs:
        blocks += [f"## {literal(run.name)}", *_of_run(run, tables)]
    if drawn:
        blocks += ["## Figures", FIGURES, *(f"![{name}]({name})" for name in drawn)]
    return "\n\n".join([*blocks, "## How to read the numbers", *HOW]) + "\n"


def in_short(runs: Sequence[Run], rows_by_head: Mapping[str, Sequence[Result]]) -> list[str]:
    """Three sentences: what was compared, which method was most accurate at what cost, where ours are worse."""
    if not rows_by_head:
        return []
    methods = {row.label for rows in rows_by_head.values() for row in rows}
    counts = {head: number(max(row.problems or 0 for row in rows)) for head, rows in rows_by_head.items()}
    where = ", ".join(f"{literal(head)} ({count} problems)" for head, count in counts.items())
    heads = {id(row): head for head, rows in rows_by_head.items() for row in rows}
    firsts = [[row for row in primary(run.of("methods")) if row.accuracy] for run in runs]
    best = "; ".join(_best(heads[id(rows[0])], rows) for rows in firsts if rows)
    return [
        f"{len(methods)} methods were compared on {where}.",
        f"Most accurate apart from takeover (picked on these same problems): {best}.",
        *(f"{words}." for key in (DEPLOYED, PUBLISHED) if (words := _losses(key, rows_by_head))),
    ]


def _best(head: str, rows: Sequence[Result]) -> str:
    """The most accurate row apart from takeover (the cheapest if tied), with greedy and takeover beside it."""

    def tokens(row: Result) -> float:
        return row.llm_tokens.mean if row.llm_tokens else 0.0

    def accuracy(row: Result) -> float:
        return row.accuracy.mean if row.accuracy else 0.0

    best = min(
        (row for row in rows if row.key != "takeover"), key=lambda row: (-accuracy(row), tokens(row)), default=rows[0]
    )
    label, *beside = (
        f"{literal(row.label)} {100 * accuracy(row):.1f}%"
        + f" with {tokens(row):.1f} LLM tokens per problem" * (row.llm_tokens is not None)
        for row in (best, *(row for row in rows if row.key in ("greedy", "takeover")))
    )
    return f"on {literal(head)} {label} ({', '.join(beside)})"


def _losses(key: str, rows_by_head: Mapping[str, Sequence[Result]]) -> str:
    """Than what FutureBridge, or the published recipe, is significantly worse, and where."""
    lost: dict[str, list[str]] = {}
    label = ""
    for head, rows in rows_by_head.items():
        by_key = {row.key: row for row in rows}
        for rival, words in RIVALS.items() if key in by_key else ():
            label = literal(by_key[key].label)
            if (minus := difference(by_key, key, rival)[0]) is not None:
                worse = f"{literal(head)} ({percent(minus, signed=True)} pp)"
                lost.setdefault(words, []).extend([worse] * below(minus))
    where = ", ".join(f"than {words} on {', '.join(heads)}" for words, heads in lost.items() if heads)
    if where:
        return f"Here {label} is significantly worse {where}"
    return f"Here {label} is nowhere significantly worse than {' or '.join(lost)}" if lost else ""


def _side_by_side(rows_by_head: Mapping[str, Sequence[Result]]) -> list[str]:
    """The accuracy of every method in every run and benchmark, if there are several."""
    cells: dict[str, dict[str, Any]] = {}
    for head, rows in rows_by_head.items():
        for row in rows:
            cells.setdefault(row.label, {"accuracy": row.label})[head] = row.accuracy
    return [table(list(cells.values()))] if len(rows_by_head) > 1 else []


def _of_run(run: Run, tables: Mapping[str, Experiment]) -> list[str]:
    """All sections of one run; what was not run is named at the end."""
    blocks, missing = _overview(run), []
    if groups := by_benchmark(run.results):
        blocks += ["### The paper's orderings", "\n".join(ordering_lines(groups))]
    parts = {**run.parts, "deployment": [asdict(timing) for timing in run.timed]}
    sections = [(one.title, one.varies, f"{TABLE} {name}", _experiment(run, name)) for name, one in tables.items()]
    for name, (title, brief, command) in PARTS.items():
        rows = parts.get(name)
        sections.append((title, brief, command, [*bullets(chances(rows)), table(rows)] if rows else []))
    for title, brief, command, shown in sections:
        if shown:
            blocks += [f"### {title}", brief, *shown]
        else:
            missing.append(f"{title}: run `{command}`")
    if missing:
        blocks += ["### Not run", "The run's folder has no results for these parts.", *bullets(missing)]
    if run.settings:
        blocks += ["### Settings", f"```json\n{json.dumps(run.settings, indent=1)}\n```"]
    return blocks


def _overview(run: Run) -> list[str]:
    facts = []
    for which in ("slm", "llm") if run.pair else ():
        count = run.pair.get(f"{which}_parameters")
        facts.append(f"{which.upper()}: {literal(str(run.pair[which]))}{f', {count:,} parameters' if count else ''}")
    if run.policy:
        source = f"the {run.policy['quantile']:g} quantile on validation problems"
        softmax = f"softmax over the {run.policy['top_k']} largest logits"
        facts.append(f"the LLM is asked above an entropy of {run.policy['threshold']:.3f} nats ({source}; {softmax})")
    facts += [f"seeds: {', '.join(map(str, run.seeds))}"] if run.seeds else []
    facts += [f"{literal(name)}: {literal(text)}" for name, text in run.about.items()]
    if any(row.published is not None for row in run.results):
        facts.append(f"the paper's figures: {run.published}; of costs: {run.published_costs}")
    return bullets(facts)


def _experiment(run: Run, name: str) -> list[str]:
    """A table's verdicts and rows for every benchmark."""
    blocks = []
    for benchmark, results in by_benchmark(run.of(name)).items():
        rows = [
            {head: value for head, value in asdict(row).items() if head not in ("table", "benchmark", "key")}
            for row in results
        ]
        blocks += [f"**On {literal(benchmark)}**", *bullets(verdicts(results)), table(rows)]
    return blocks


def verdicts(rows: Sequence[Result]) -> Iterator[str]:
    """Which differences are statistically significant and which are not, a text for each reference."""
    for reference, minus in DIFFERENCES.items():
        if differences := [(_name(row), interval) for row in rows if (interval := minus(row)) is not None]:
            yield by_significance(reference, differences)


def _name(row: Result) -> str:
    """A row's label, with its request quantile if it has one."""
    return row.label if row.quantile is None else f"{row.label} at quantile {row.quantile:g}"


def chances(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Which scores order candidates better or worse than chance, a text for each kind of event and set of states."""
    groups: dict[tuple[str, str], list[tuple[str, Interval]]] = {}
    for row in rows:
        if pairwise := row.get("pairwise"):
            above = Interval(*(share - 0.5 for share in pairwise))
            groups.setdefault((row["kind"], row["where"]), []).append((row["score"], above))
    for (kind, where), sides in groups.items():
        yield f"At {literal(kind)} events, {literal(where)}. {by_significance('chance', sides)}"


TABLE, ROLLOUTS = "python -m benchmarks.paper tables", "python -m benchmarks.paper rollouts"
SHARES = "Brackets hold 95% score intervals with each problem as one trial at most; differences are paired."
PARTS = {  # by name of a run's part: title, brief description, and the command that makes it
    "changes": (
        "Problems with changed outcomes",
        "Outcomes that differ from greedy decoding's, by the first event at which the method took another token than "
        "the SLM's own; its kind is the kind of the SLM's token.",
        f"{TABLE} methods",
    ),
    "certification": (
        "Deployed recipe",
        "Which recipe each seed's adapter is deployed with, and why, on problems that were not used to fit or choose "
        "anything. Lower bounds are valid together at the level. A recipe may be deployed if both are above -delta.",
        "futurebridge train",
    ),
    "deployment": ("Deployment", "Time and memory per problem, one problem at a time.", f"{TABLE} costs"),
    "filter": ("Data filter", "The states left after each condition, and their share of all.", "futurebridge score"),
    "offline": ("Offline stages", "Time summed over all processes. Published are hours of H200.", f"{TABLE} costs"),
    "coverage": (
        "Pool coverage",
        "A held-out state is covered if the SLM's rollout after at least one candidate of the pool is right. " + SHARES,
        ROLLOUTS,
    ),
    "future_quality": (
        "Future quality",
        "How often the target ranks two candidates as their rollouts do, by kind of future and horizon; 0.5 is chance. "
        "All but the unverified greedy future are on the states that have every kind.",
        f"{TABLE} futures",
    ),
    "agreement": (
        "Agreement with rollouts",
        "How well each score ranks the candidates of held-out states, compared with the SLM's own greedy rollout "
        "after each candidate. Pairwise accuracy is the share of pairs with different outcomes that the score puts "
        "in the right order; a tie counts one half. Top-1 success is the share of states whose best-scored "
        "candidate leads to the right answer. Mixed states are those whose candidates differ in outcome. Targets "
        "exist only at states with a verified future, so they cover fewer states; matched events are those where "
        "every score is known, so that all are compared on the same states. Published are pairwise accuracy on "
        "validation problems and top-1 success on benchmarks. " + SHARES,
        ROLLOUTS,
    ),
}

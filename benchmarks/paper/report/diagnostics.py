"""The report's sections on one run's states, rollouts, choices and costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.paper.report import figures
from benchmarks.paper.report import findings as values
from benchmarks.paper.report.columns import (
    BELOW_DIRECT,
    BELOW_GREEDY,
    LEGEND,
    SHARES,
    Column,
    above,
    below,
    column_table,
    interval_column,
    made_with,
    number,
    number_column,
    percent,
    primary,
    said,
    share,
    shortened,
    spread,
    text_column,
    token,
)
from benchmarks.paper.report.findings import Findings
from benchmarks.paper.report.page import Block, Items, Link, Paragraph, Picture, Span, Text, Verbatim
from fb_core.page import Table

FILTERS = ("admitted", "verified", "long_enough", "valid_group", "train groups", "validation groups")  # in order


NO_EVENT = "no event"


def _filters(findings: Findings, counts: Mapping[str, int]) -> list[Block]:
    names = [*(name for name in FILTERS if name in counts), *(name for name in counts if name not in FILTERS)]
    rows = [[name.replace("_", " "), number(counts[name])] for name in names]
    note = made_with(findings, decoded=False, intervals="")
    return [Table("States left after each filter", ["", "count"], rows, note)]


def _selection(findings: Findings, found: values.Selection) -> list[Block]:
    def of_seeds(row: values.Trial) -> str:
        return ", ".join(f"{share(seed.accuracy)} (seed {seed.seed})" for seed in row.seeds)

    def chosen(row: values.Trial) -> str:
        return "chosen" * ((row.epoch, row.horizon) == (found.epoch, found.horizon))

    columns = [
        number_column("horizon", "horizon"),
        number_column("epoch", "epoch"),
        Column("accuracy, %", lambda row: share(row.accuracy)),
        Column("by seed, %", of_seeds, "l"),
        number_column("cross_entropy", "cross-entropy, nats", 3),
        Column("pairwise accuracy, %", lambda row: share(row.pairwise_accuracy)),
        Column("", chosen, "l"),
    ]
    problems = f"{number(found.problems)} validation problems; " if found.problems else ""
    note = f"{problems}chosen is the highest accuracy averaged over seeds; no intervals. "
    made = made_with(findings, intervals="")
    return [column_table("Rerankers on validation problems", found.table, columns, note + made)]


def _agreement(findings: Findings, found: Sequence[values.Agreement]) -> list[Block]:
    blocks: list[Block] = [
        Paragraph(
            "How well each score ranks the candidates of held-out states, compared with the SLM's own greedy rollout "
            "after each candidate. Pairwise accuracy is the share of pairs with different outcomes that the score puts "
            "in the right order; a tie counts one half. Top-1 success is the share of states whose best-scored "
            "candidate leads to the right answer. Mixed states are those whose candidates differ in outcome. Targets "
            "exist only at states with a verified future, so they cover fewer states."
        )
    ]
    columns = [
        *_states_of(found),
        text_column("score"),
        interval_column("pairwise", "pairwise accuracy, % [95%]"),
        number_column("pairs", "pairs"),
        interval_column("top1", "top-1 success, % [95%]"),
        interval_column("top1_minus_llm", "top-1 success minus the LLM's, pp [95%]", signed=True),
        number_column("states", "states"),
        interval_column("top1_mixed", "top-1 success, mixed states, % [95%]"),
        number_column("mixed_states", "mixed states"),
    ]
    note = made_with(findings, decoded=False, intervals=SHARES)
    for kind in dict.fromkeys(row.kind for row in found):
        rows = [row for row in found if row.kind == kind]
        for benchmark in dict.fromkeys(row.benchmark for row in rows):
            known = {row.score: row.pairwise for row in rows if row.benchmark == benchmark and row.pairwise}
            sides = {
                "Better than chance": [score for score, (_, low, _) in known.items() if low > 0.5],
                "Worse than chance": [score for score, (_, _, high) in known.items() if high < 0.5],
                "Not significantly different from chance": [
                    score for score, (_, low, high) in known.items() if low <= 0.5 <= high
                ],
            }
            where = f" on {benchmark}" if benchmark else ""
            blocks += [Paragraph(f"{kind.capitalize()} events{where}. {said(sides)}")] if known else []
        blocks.append(column_table(f"Agreement with rollouts, {kind} events", rows, columns, note))
    return blocks


def _states_of(rows: Sequence[values.Agreement | values.Coverage]) -> list[Column]:
    """The column of problem sets, if not all states are of validation problems."""
    several = any(row.benchmark for row in rows)
    return [Column("problems", lambda row: row.benchmark or "validation", "l")] if several else []


def _choices(findings: Findings, found: Sequence[values.Choice]) -> list[Block]:
    quantiles = sorted({row.quantile for row in found})
    blocks: list[Block] = [
        Paragraph(
            "How often the SLM's own greedy rollout succeeds after the candidate with the best score, at the held-out "
            "states of every request quantile."
        )
    ]
    for kind in dict.fromkeys(row.kind for row in found):
        inside = [row for row in found if row.kind == kind]
        at = {(row.label, row.quantile): row for row in inside}
        states = {q: max((row.states for row in inside if row.quantile == q), default=None) for q in quantiles}
        counts = ", ".join(f"{count} at {q:g}" for q, count in states.items() if count is not None)
        body: list[list[Text]] = []
        sides: dict[str, list[str]] = {f"Better than the LLM's choice at {kind} events": [], "Worse": []}
        for label in dict.fromkeys(row.label for row in inside):
            body.append([label, *(_choice(at.get((label, quantile))) for quantile in quantiles)])
            for side, beyond in zip(sides, (above, below), strict=True):
                where = [q for q in quantiles if (label, q) in at and beyond(at[label, q].top1_minus_llm)]
                sides[side] += [f"{label} at quantile {', '.join(f'{q:g}' for q in where)}"] if where else []
        blocks += [Paragraph(said(sides))] if any(sides.values()) else []
        head = ["", *(f"q {quantile:g}, % [95%]" for quantile in quantiles)]
        note = (
            f"States at each quantile: {counts}. {LEGEND} {made_with(findings, found, decoded=False, intervals=SHARES)}"
        )
        blocks.append(Table(f"Choices that lead to success, {kind} events", head, body, note))
    return blocks


def _choice(row: values.Choice | None) -> str:
    if row is None:
        return ""
    marks = [(BELOW_GREEDY, row.top1_minus_slm), (BELOW_DIRECT, row.top1_minus_llm)]
    return " ".join([percent(row.top1), *(mark for mark, difference in marks if below(difference))])


def _coverage(findings: Findings, found: Sequence[values.Coverage]) -> list[Block]:
    columns = [
        *_states_of(found),
        text_column("pool"),
        number_column("mean_size", "mean pool size", 2),
        interval_column("coverage", "covered, % [95%]"),
        number_column("states", "states"),
        interval_column("coverage_mixed", "covered, mixed states, % [95%]"),
        number_column("mixed_states", "mixed states"),
    ]
    note = made_with(findings, decoded=False, intervals=SHARES)
    return [
        Paragraph("A state is covered if the SLM's rollout after at least one candidate of the pool is right."),
        column_table("Coverage of held-out states", found, columns, note),
    ]


def _future_quality(findings: Findings, found: values.FutureQuality) -> list[Block]:
    body = [[name, *map(share, shares)] for name, shares in zip(found.qualities, found.pairwise, strict=True)]
    head = ["", *(f"H = {horizon}, %" for horizon in found.horizons)]
    note = f"{number(found.states)} states that have every kind of future; no intervals. "
    made = made_with(findings, decoded=False, intervals="")
    return [
        Paragraph("How often the target ranks two candidates as their rollouts do, by kind of future and horizon."),
        Table("Pairwise accuracy by future and horizon", head, body, note + made),
    ]


def _trajectory(findings: Findings, found: values.Trajectory) -> list[Block]:
    columns = [
        number_column("step", "step"),
        Column("entropy, nats", lambda row: number(found.entropy[row.step], 3)),
        Column("the SLM's token", lambda row: token(row.slm), "l"),
        Column("chosen", lambda row: token(row.chosen), "l"),
    ]
    note = f"{number(len(found.entropy))} steps, threshold {found.threshold:.3f} nats."
    return [Verbatim("Problem", found.problem), column_table("Events", found.events, columns, note)]


def _worked_event(findings: Findings, found: values.WorkedEvent) -> list[Block]:
    columns = [
        Column("", lambda row: token(row.token), "l"),
        text_column("source", "proposed by"),
        number_column("p_slm", "p SLM", 4),
        number_column("p_llm", "p LLM", 4),
        number_column("compatibility", "compatibility, nats", 3),
        number_column("score", "score", 3),
        Column("outcome", lambda row: Span("right", "good") if row.correct else Span("wrong", "bad"), "l"),
        Column("the SLM's rollout", lambda row: Span(shortened(row.rollout), "code"), "l"),
    ]
    candidates = sorted(found.candidates, key=lambda row: -row.score)
    return [
        Paragraph(f"The gold answer is {found.gold}. The SLM's entropy at this step is {found.entropy:.3f} nats."),
        Verbatim("Problem", found.problem),
        Verbatim("Prompt", found.prompt),
        *([Verbatim("Written so far", found.prefix)] if found.prefix else []),
        Verbatim("Shared future", found.future),
        column_table("Candidates, best score first", candidates, columns, made_with(findings, intervals="")),
    ]


def _turned(findings: Findings, found: values.Turned) -> list[Block]:
    """How many outcomes changed at which kind of event, and the first changed problems with links to their texts."""
    changes = found.changes
    kinds = sorted({one.kind for one in changes}, key=lambda kind: (kind is None, kind or ""))
    body: list[list[Text]] = []
    for label in found.methods:
        for gained in (False, True):
            turned = [one.kind for one in changes if (one.label, one.gained) == (label, gained)]
            body.append([label, _way(gained), *(number(turned.count(kind)) for kind in kinds), number(len(turned))])
    heads = ["", "greedy → method", *(kind or NO_EVENT for kind in kinds), "all"]
    columns = [
        Column("problem", lambda row: Link(row.problem, row.page) if row.page else row.problem, "l"),
        *([text_column("benchmark", "benchmark")] if len({one.benchmark for one in changes}) > 1 else []),
        text_column("label", "method"),
        *([number_column("seed", "seed")] if len({one.seed for one in changes}) > 1 else []),
        Column("greedy → method", lambda row: _way(row.gained), "l"),
        Column("kind of event", lambda row: row.kind or NO_EVENT, "l"),
        number_column("step", "step"),
    ]
    note = (
        "The event is the first at which the method took another token than the SLM's own; its kind is the kind of the "
        "SLM's token. "
    )
    counted = Table("Changed outcomes by kind of event", heads, body, note, "ll" + "r" * (len(kinds) + 1))
    few = f"At most {values.LISTED} per method, direction and kind of event. {made_with(findings, intervals='')}"
    return [counted, column_table("Changed problems", values.listed(changes), columns, few)] if changes else [counted]


def _way(gained: bool) -> Span:
    return Span("wrong → right", "good") if gained else Span("right → wrong", "bad")


def _frontier(findings: Findings, found: Sequence[values.Result]) -> list[Block]:
    rows = primary(found)
    seconds: dict[str, str] = {}
    for one in (findings.costs and findings.costs.deployment) or ():  # of the fast loop if there are both
        times = f"{spread(one.relative, 2)} × greedy" if one.relative else ""
        seconds.setdefault(one.key, ", ".join(filter(None, (number(one.seconds, 3), times, one.loop))))
    columns = [
        text_column("label"),
        interval_column("accuracy", "accuracy, % [95%]"),
        Column("LLM tokens per problem [95%]", lambda row: spread(row.llm_tokens)),
        Column("LLM calls per problem [95%]", lambda row: spread(row.calls, 2)),
        *([Column("seconds per problem [95%], loop", lambda row: seconds.get(row.key, ""))] if seconds else []),
        interval_column("above_line", "above the line to takeover, pp [95%]", signed=True),
    ]
    note = (
        "LLM tokens are the tokens of the answer that the LLM wrote or that were chosen when it was asked. The line "
        "joins greedy decoding and takeover: it is the accuracy if the LLM takes over a random share of the problems, "
        f"at the same number of LLM tokens. {'Seconds are from the table of costs. ' * bool(seconds)}"
    )
    caption = f"Accuracy and the LLM's work on {rows[0].benchmark}"
    table = column_table(caption, rows, columns, note + made_with(findings, rows))
    return [*_worth(rows), table]


def _worth(rows: Sequence[values.Result]) -> list[Block]:
    """Accuracy and cost of takeover and FutureBridge, and which rows beat takeover on a share of the problems."""
    known = {row.key: row for row in rows}
    points: list[Text] = []
    stand = [
        f"{row.label} is right on {percent(row.accuracy)}% of the problems with {spread(row.llm_tokens)} LLM tokens "
        f"and {spread(row.calls, 2)} LLM calls per problem"
        for row in (known.get("takeover"), known.get(values.DEPLOYED, known.get(values.OURS)))
        if row
    ]
    if len(stand) == 2:
        points.append(f"{stand[0]}; {stand[1]}.")
    distances = [(row.label, row.above_line) for row in rows if row.above_line]
    sides = {
        "Significantly better than takeover on a share of the problems with the same number of LLM tokens": [
            label for label, distance in distances if above(distance)
        ],
        "Significantly worse": [label for label, distance in distances if below(distance)],
        "Not significantly different": [
            label for label, distance in distances if not above(distance) and not below(distance)
        ],
    }
    points += [said(sides)] if distances else []
    return [Items(points)] if points else []


def _costs(findings: Findings, found: values.Costs) -> list[Block]:
    deployment, offline = found.deployment or (), found.offline
    where = f"on {findings.machine or 'a machine that was not recorded'}."
    of_methods = [
        text_column("method"),
        *([text_column("loop", "loop")] if any(row.loop for row in deployment) else []),
        number_column("problems", "problems"),
        number_column("calls", "LLM calls per problem", 2),
        number_column("pool", "candidates per event", 2),
        number_column("appended", "tokens chosen at events", 2),
        number_column("suffix", "further LLM tokens", 1),
        number_column("seconds", "seconds per problem", 4),
        Column("× greedy [95%]", lambda row: "{:.2f} [{:.2f}, {:.2f}]".format(*row.relative) if row.relative else ""),
        Column("peak memory, MiB", lambda row: number(row.peak_bytes and row.peak_bytes / 2**20, 1)),
        *_published(deployment, "published, × greedy", 2),
    ]
    of_stages = [
        text_column("stage"),
        number_column("units", "units"),
        text_column("unit"),
        number_column("seconds", "seconds", 1),
        number_column("gpu_hours", "GPU hours", 4),
        Column("devices", lambda row: ", ".join(row.devices), "l"),
        *_published(offline, "published, GPU hours", 1),
    ]
    command = Span("python -m benchmarks.paper tables costs", "code")
    blocks: list[Block] = (
        [] if deployment else [Paragraph(("Deployment was not timed. To time it, run ", command, "."))]
    )
    if deployment:
        note = f"One problem at a time, {where} {made_with(findings)}"
        blocks.append(column_table("Deployment", deployment, of_methods, note))
    if offline:
        note = f"Time summed over all processes, {where} {made_with(findings, intervals='')}"
        blocks.append(column_table("Offline stages", offline, of_stages, note))
    return blocks


def _published(rows: Sequence[Any], head: str, decimals: int) -> list[Column]:
    """A column of the paper's figures, if there are any for these rows."""
    return [number_column("published", head, decimals)] if any(row.published for row in rows) else []


def _deployed(findings: Findings, chosen: Sequence[values.Deployed]) -> list[Block]:
    """Why each seed's adapter is deployed with its recipe, and all recipes tested against greedy and direct."""
    blocks: list[Block] = [Items([f"Seed {one.seed}: {one.words}" for one in chosen])]
    for one in chosen:
        body = [
            [
                row.label,
                f"{100 * row.accuracy:.1f}",
                *(f"{100 * mean:+.1f} [{100 * low:+.1f}]" for mean, low in (row.minus_greedy, row.minus_direct)),
                number(row.calls, 2),
                number(row.llm_tokens, 2),
            ]
            for row in one.tested
        ]
        note = (
            f"{one.problems} problems that were not used to fit or choose anything. Brackets hold lower bounds, which "
            f"are valid together at {one.level:.0%}. A recipe may be deployed if both are above -{100 * one.delta:g}."
        )
        minus = [f"minus {other}, pp [lower bound]" for other in ("greedy", "direct")]
        head = ("", "accuracy, %", *minus, "LLM calls per problem", "LLM tokens per problem")
        blocks.append(Table(f"Certification, seed {one.seed}", head, body, note))
    return blocks


class Diagnostic(NamedTuple):
    """How a part of the findings is shown, the command that produces it, and the experiment that it follows."""

    title: str
    brief: str
    command: str
    after: str
    blocks: Callable[[Findings, Any], list[Block]]
    draw: Callable[[Findings], Picture | None] = lambda findings: None
    caption: str = ""


ROLLOUTS = "python -m benchmarks.paper rollouts"
DIAGNOSTICS = {  # by attribute of the findings
    "frontier": Diagnostic(
        "Accuracy against the LLM's work",
        "Is a method better than handing a share of the problems to the LLM?",
        "python -m benchmarks.paper tables methods",
        "methods",
        _frontier,
        figures.frontier,
        "Accuracy against LLM tokens and LLM calls, all with 95% intervals. A method above the dashed line is more "
        "accurate than takeover on a share of the problems with the same number of LLM tokens, or of calls.",
    ),
    "turned": Diagnostic(
        "Problems with changed outcomes",
        "Wrong → right and right → wrong compared with greedy decoding, by kind of event, with links to the texts.",
        "python -m benchmarks.paper tables methods",
        "methods",
        _turned,
    ),
    "deployed": Diagnostic(
        "Deployed recipe",
        "Which recipe the run chose to deploy, and the evidence for it.",
        "futurebridge train",
        "methods",
        _deployed,
    ),
    "costs": Diagnostic(
        "Costs",
        "Time and memory per problem, and time of the offline stages.",
        "python -m benchmarks.paper tables costs",
        "methods",
        _costs,
        figures.cost,
        "Accuracy against time per problem, as a multiple of greedy decoding's time, both with 95% intervals.",
    ),
    "coverage": Diagnostic(
        "Pool coverage", "How often a pool holds a candidate from which the SLM succeeds.", ROLLOUTS, "pools", _coverage
    ),
    "future_quality": Diagnostic(
        "Future quality",
        "How well the target agrees with rollouts, by kind of future.",
        "python -m benchmarks.paper tables futures",
        "futures",
        _future_quality,
        figures.quality,
        "Pairwise accuracy in percent, by kind of future and horizon; 50 is chance.",
    ),
    "agreement": Diagnostic(
        "Agreement with rollouts",
        "How well each score predicts whether a candidate leads to the right answer.",
        ROLLOUTS,
        "temperature",
        _agreement,
        figures.agreement,
        "Pairwise accuracy of each score against the SLM's rollouts, with 95% intervals; the dotted line is chance.",
    ),
    "choices": Diagnostic(
        "Choices by kind of event",
        "How often the chosen candidate leads to success, by kind of event.",
        "python -m benchmarks.paper tables quantiles",
        "quantiles",
        _choices,
    ),
    "trajectory": Diagnostic(
        "One trajectory",
        "Where in one text the LLM is asked.",
        ROLLOUTS,
        "quantiles",
        _trajectory,
        figures.trajectory,
        "Entropy of the SLM along the text. Diamonds are events, labelled with the SLM's own token and the chosen one; "
        "the dashed line is the request threshold.",
    ),
    "worked_event": Diagnostic(
        "One event in full",
        "All candidates of one event, and the SLM's rollout after each.",
        ROLLOUTS,
        "quantiles",
        _worked_event,
        figures.event,
        "Score of every candidate; the colour shows whether the SLM's rollout after it reaches the right answer.",
    ),
    "selection": Diagnostic(
        "Reranker selection",
        "All rerankers of the sweep on validation problems, and which was chosen.",
        "futurebridge train",
        "quantiles",
        _selection,
    ),
    "filters": Diagnostic("States", "How many states each filter leaves.", "futurebridge score", "quantiles", _filters),
}

"""The report's sections on one run's states, rollouts, choices and costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fb_core.report import figures
from fb_core.report import findings as values
from fb_core.report.columns import (
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
    said,
    share,
    shortened,
    spread,
    text_column,
    token,
)
from fb_core.report.findings import Findings
from fb_core.report.page import Block, Items, Link, Paragraph, Picture, Span, Table, Text, Verbatim
from fb_core.report.recipes import primary

FILTERS = ("admitted", "verified", "long_enough", "valid_group", "train groups", "validation groups")  # one by one


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
        Column("of each seed, %", of_seeds, "l"),
        number_column("cross_entropy", "cross-entropy, nats", 3),
        Column("pairs in order, %", lambda row: share(row.pairwise_accuracy)),
        Column("", chosen, "l"),
    ]
    problems = f"{number(found.problems)} validation problems; " if found.problems else ""
    note = f"{problems}the highest accuracy averaged over seeds is chosen; no intervals. "
    made = made_with(findings, intervals="")
    return [column_table("Rerankers on validation problems", found.table, columns, note + made)]


def _agreement(findings: Findings, found: Sequence[values.Agreement]) -> list[Block]:
    blocks: list[Block] = [
        Paragraph(
            "How well each score orders the candidates of held-out states, judged by the SLM's own greedy rollouts "
            "behind them. A pair counts where its rollouts differ, score ties count one half. Mixed states are those "
            "whose candidates differ in outcome. A target needs a verified future, so it is seen on fewer states."
        )
    ]
    columns = [
        *_states_of(found),
        text_column("score"),
        interval_column("pairwise", "pairs in order, % [95%]"),
        number_column("pairs", "pairs"),
        interval_column("top1", "best one right, % [95%]"),
        interval_column("top1_minus_llm", "minus the LLM's, pp [95%]", signed=True),
        number_column("states", "states"),
        interval_column("top1_mixed", "best one right, mixed states, % [95%]"),
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
                "Not told apart from chance": [score for score, (_, low, high) in known.items() if low <= 0.5 <= high],
            }
            where = f" on {benchmark}" if benchmark else ""
            blocks += [Paragraph(f"{kind.capitalize()} events{where}. {said(sides)}")] if known else []
        blocks.append(column_table(f"Agreement with rollouts, {kind} events", rows, columns, note))
    return blocks


def _states_of(rows: Sequence[values.Agreement | values.Coverage]) -> list[Column]:
    """Whose problems the states are of, where they are not all the validation problems'."""
    several = any(row.benchmark for row in rows)
    return [Column("states of", lambda row: row.benchmark or "validation", "l")] if several else []


def _choices(findings: Findings, found: Sequence[values.Choice]) -> list[Block]:
    quantiles = sorted({row.quantile for row in found})
    blocks: list[Block] = [
        Paragraph(
            "How often the candidate with the best score is one from which the SLM's own greedy rollout succeeds, at "
            "the held-out states of every request quantile."
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
        note = f"Of {counts} states. {LEGEND} {made_with(findings, found, decoded=False, intervals=SHARES)}"
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
        number_column("mean_size", "mean size", 2),
        interval_column("coverage", "covered, % [95%]"),
        number_column("states", "states"),
        interval_column("coverage_mixed", "covered, mixed states, % [95%]"),
        number_column("mixed_states", "mixed states"),
    ]
    note = made_with(findings, decoded=False, intervals=SHARES)
    return [
        Paragraph("A state is covered where the SLM's rollout behind some candidate of the pool is right."),
        column_table("Coverage of held-out states", found, columns, note),
    ]


def _future_quality(findings: Findings, found: values.FutureQuality) -> list[Block]:
    body = [[name, *map(share, shares)] for name, shares in zip(found.qualities, found.pairwise, strict=True)]
    head = ["", *(f"H = {horizon}, %" for horizon in found.horizons)]
    note = f"{number(found.states)} states that have every kind of future; no intervals. "
    made = made_with(findings, decoded=False, intervals="")
    return [
        Paragraph("How many pairs the target puts in the order of the rollouts, by what stands as the future."),
        Table("Pairs in order by future and horizon", head, body, note + made),
    ]


def _trajectory(findings: Findings, found: values.Trajectory) -> list[Block]:
    columns = [
        number_column("step", "step"),
        Column("entropy, nats", lambda row: number(found.entropy[row.step], 3)),
        Column("the SLM's token", lambda row: token(row.slm), "l"),
        Column("chosen", lambda row: token(row.chosen), "l"),
    ]
    note = f"{number(len(found.entropy))} steps, threshold {found.threshold:.3f} nats."
    return [Verbatim("Problem", found.problem), column_table("Its events", found.events, columns, note)]


def _worked_event(findings: Findings, found: values.WorkedEvent) -> list[Block]:
    columns = [
        Column("", lambda row: token(row.token), "l"),
        text_column("source", "proposed by"),
        number_column("p_slm", "p SLM", 4),
        number_column("p_llm", "p LLM", 4),
        number_column("compatibility", "compatibility, nats", 3),
        number_column("score", "score", 3),
        Column("leads to", lambda row: Span("right", "good") if row.correct else Span("wrong", "bad"), "l"),
        Column("the SLM's rollout", lambda row: Span(shortened(row.rollout), "code"), "l"),
    ]
    candidates = sorted(found.candidates, key=lambda row: -row.score)
    return [
        Paragraph(f"The right answer is {found.gold}; entropy {found.entropy:.3f} nats."),
        Verbatim("Problem", found.problem),
        Verbatim("Prompt", found.prompt),
        *([Verbatim("Written so far", found.prefix)] if found.prefix else []),
        Verbatim("Shared future", found.future),
        column_table("Its candidates, best score first", candidates, columns, made_with(findings, intervals="")),
    ]


def _turned(findings: Findings, found: values.Turned) -> list[Block]:
    """How many problems turned at which kind of event, and the first of them with a link to how each was solved."""
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
        Column("at", lambda row: row.kind or NO_EVENT, "l"),
        number_column("step", "step"),
    ]
    note = (
        "A text leaves greedy decoding's at the first event at which another token is taken than the SLM's own, "
        "whose kind is the event's. "
    )
    counted = Table("Problems by kind of event", heads, body, note, "ll" + "r" * (len(kinds) + 1))
    few = f"At most {values.LISTED} of every method, direction and kind. {made_with(findings, intervals='')}"
    return [counted, column_table("Which they are", values.listed(changes), columns, few)] if changes else [counted]


def _way(gained: bool) -> Span:
    return Span("wrong → right", "good") if gained else Span("right → wrong", "bad")


def _calibration(findings: Findings, found: values.Calibration) -> list[Block]:
    mixed, wanted = found.mixed, found.minimum_mixed
    terms = {"b": "compatibility", "llm": "log p of the LLM", "slm": "log p of the SLM"}
    rows = [[term, *(number(found.theta[name], 3) for name in (key, f"{key}_certain"))] for key, term in terms.items()]
    head = ["standardised in the pool", "weight", "weight × the LLM's certainty"]
    enough = f"the {wanted} wanted at least" if mixed >= wanted else f"fewer than the {wanted} wanted, so doubtful"
    return [
        Paragraph(
            f"Fitted on {number(found.states)} rolled-out training states, {number(mixed)} of which have "
            f"candidates that differ in outcome ({enough})."
        ),
        Table("Weights of the calibrated target", head, rows, made_with(findings, decoded=False, intervals="")),
    ]


def _advice(findings: Findings, found: Sequence[str]) -> list[Block]:
    return [Items(found)]


def _frontier(findings: Findings, found: Sequence[values.Result]) -> list[Block]:
    rows = primary(found)
    seconds: dict[str, str] = {}
    for one in (findings.costs and findings.costs.deployment) or ():  # the fast loop's first, where there are both
        seconds.setdefault(one.key, f"{number(one.seconds, 4)}{f', {one.loop}' if one.loop else ''}")
    columns = [
        text_column("label"),
        interval_column("accuracy", "accuracy, % [95%]"),
        Column("LLM tokens a problem [95%]", lambda row: spread(row.llm_tokens)),
        number_column("calls", "LLM calls a problem", 2),
        *([Column("seconds a problem, loop", lambda row: seconds.get(row.key, ""))] if seconds else []),
        interval_column("above_line", "above the line to takeover, pp [95%]", signed=True),
    ]
    note = (
        "LLM tokens are those of the answer that it wrote or that were chosen where it was asked. The line joins "
        "greedy decoding and takeover: accuracy where the LLM takes over a random share of the problems, so large that "
        f"it costs as many tokens. {'Seconds are those of the table of costs. ' * bool(seconds)}"
    )
    caption = f"Accuracy and the large model's work on {rows[0].benchmark}"
    table = column_table(caption, rows, columns, note + made_with(findings, rows))
    return [*_worth(rows), table]


def _worth(rows: Sequence[values.Result]) -> list[Block]:
    """What takeover brings and costs beside FutureBridge, and which rows are worth more than a share of it."""
    known = {row.key: row for row in rows}
    points: list[Text] = []
    stand = [
        f"{row.label} is right on {percent(row.accuracy)}% at {spread(row.llm_tokens)} LLM tokens and "
        f"{number(row.calls, 2)} LLM calls a problem"
        for row in (known.get("takeover"), known.get(values.DEPLOYED, known.get(values.OURS)))
        if row
    ]
    if len(stand) == 2:
        points.append(f"{stand[0]}; {stand[1]}.")
    distances = [(row.label, row.above_line) for row in rows if row.above_line]
    sides = {
        "Significantly better than taking over on a share of the problems for as many tokens": [
            label for label, distance in distances if above(distance)
        ],
        "Significantly worse": [label for label, distance in distances if below(distance)],
        "Not told apart": [label for label, distance in distances if not above(distance) and not below(distance)],
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
        number_column("calls", "LLM calls a problem", 2),
        number_column("pool", "candidates an event", 2),
        number_column("appended", "tokens chosen at events", 2),
        number_column("suffix", "LLM tokens beyond them", 1),
        number_column("seconds", "seconds a problem", 4),
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
    command = Span("futurebridge experiment costs", "code")
    blocks: list[Block] = [] if deployment else [Paragraph(("Deployment was not timed; ", command, " does it."))]
    if deployment:
        note = f"One problem at a time, {where} {made_with(findings)}"
        blocks.append(column_table("Deployment", deployment, of_methods, note))
    if offline:
        note = f"Work of all processes together, {where} {made_with(findings, intervals='')}"
        blocks.append(column_table("Offline stages", offline, of_stages, note))
    return blocks


def _published(rows: Sequence[Any], head: str, decimals: int) -> list[Column]:
    """A column of the paper's figures, where there are any to stand beside these rows."""
    return [number_column("published", head, decimals)] if any(row.published for row in rows) else []


def _deployed(findings: Findings, chosen: Sequence[values.Deployed]) -> list[Block]:
    """Why each seed's adapter is deployed as it is, and the recipes that were held against the two others."""
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
            f"{one.problems} problems on which nothing was fitted or chosen; in brackets lower bounds, which hold "
            f"together at {one.level:.0%}. A recipe may be deployed where both are above -{100 * one.delta:g}."
        )
        head = ("", "accuracy, %", "minus greedy, pp", "minus direct, pp", "LLM calls", "LLM tokens")
        blocks.append(Table(f"Certification, seed {one.seed}", head, body, note))
    return blocks


class Diagnostic(NamedTuple):
    """How a section of the findings is shown, the command that makes it, and the experiment that it stands behind."""

    title: str
    brief: str
    command: str
    behind: str
    blocks: Callable[[Findings, Any], list[Block]]
    draw: Callable[[Findings], Picture | None] = lambda findings: None
    caption: str = ""


ROLLOUTS = "futurebridge rollouts"
DIAGNOSTICS = {  # by the section of the findings
    "frontier": Diagnostic(
        "Accuracy against the large model's work",
        "Is it worth more than handing a share of the problems to the LLM?",
        "futurebridge experiment methods repairs",
        "methods",
        _frontier,
        figures.frontier,
        "Accuracy against the large model's tokens, both with 95% intervals. A method above the dashed line is worth "
        "more than taking over on a share of the problems at the same number of tokens.",
    ),
    "turned": Diagnostic(
        "Problems that turned",
        "Wrong → right and right → wrong against greedy decoding, by kind of event, with their texts.",
        "futurebridge experiment methods",
        "methods",
        _turned,
    ),
    "deployed": Diagnostic(
        "The recipe deployed",
        "What the run chose to deploy, and on what evidence.",
        "futurebridge train",
        "methods",
        _deployed,
    ),
    "costs": Diagnostic(
        "Costs",
        "Time and memory of a problem, and of the offline stages.",
        "futurebridge experiment costs",
        "methods",
        _costs,
        figures.cost,
        "Time a problem, in times of greedy decoding, against accuracy, both with 95% intervals.",
    ),
    "coverage": Diagnostic(
        "Pool coverage", "How often a pool holds a candidate from which the SLM succeeds.", ROLLOUTS, "pools", _coverage
    ),
    "future_quality": Diagnostic(
        "Future quality",
        "What the target is worth by what stands as the future.",
        "futurebridge experiment futures",
        "futures",
        _future_quality,
        figures.quality,
        "Pairs in order, in percent, by kind of future and horizon; 50 is chance.",
    ),
    "agreement": Diagnostic(
        "Agreement with rollouts",
        "How well each score tells what becomes of a candidate.",
        ROLLOUTS,
        "temperature",
        _agreement,
        figures.agreement,
        "Pairs of candidates that each score puts in the order of the SLM's rollouts, with 95% intervals; the dotted "
        "line is chance.",
    ),
    "advice": Diagnostic("Advice", "Which recipe to train, from the rollouts.", ROLLOUTS, "temperature", _advice),
    "calibration": Diagnostic(
        "Calibration",
        "Weights of the calibrated target.",
        "futurebridge experiment repairs",
        "temperature",
        _calibration,
    ),
    "choices": Diagnostic(
        "Choices by kind of event",
        "How often the choice leads to success, by kind of event.",
        "futurebridge experiment repairs quantiles",
        "quantiles",
        _choices,
    ),
    "trajectory": Diagnostic(
        "One trajectory",
        "Where along a text the LLM is asked.",
        ROLLOUTS,
        "quantiles",
        _trajectory,
        figures.trajectory,
        "Entropy of the SLM along the text. Diamonds are events, with the SLM's own token and the one chosen there; "
        "the dashed line is the request threshold.",
    ),
    "worked_event": Diagnostic(
        "One event in full",
        "Every candidate of one event, and what became of it.",
        ROLLOUTS,
        "quantiles",
        _worked_event,
        figures.event,
        "Score of every candidate; the colour says whether the SLM's rollout behind it reaches the right answer.",
    ),
    "selection": Diagnostic(
        "Choice on validation",
        "The sweep of rerankers, and which was chosen.",
        "futurebridge train",
        "quantiles",
        _selection,
    ),
    "filters": Diagnostic("States", "How many states each filter leaves.", "futurebridge score", "quantiles", _filters),
}

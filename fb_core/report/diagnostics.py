"""The report's sections on one run's states, rollouts, choices and costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fb_core.report.figures import Findings
from fb_core.report.page import Block, Items, Paragraph, Span, Table, Text, Verbatim
from fb_core.report.tables import (
    BELOW_DIRECT,
    BELOW_GREEDY,
    LEGEND,
    SHARES,
    Column,
    Row,
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
    text_column,
    token,
)

FILTERS = ("admitted", "verified", "long_enough", "valid_group", "train groups", "validation groups")  # one by one


def _filters(findings: Findings) -> list[Block]:
    counts = findings["filters"]
    names = [*(name for name in FILTERS if name in counts), *(name for name in counts if name not in FILTERS)]
    rows = [{"filter": name.replace("_", " "), "count": counts[name]} for name in names]
    note = made_with(findings, decoded=False, intervals="")
    return [
        column_table(
            "States left after each filter", rows, [text_column("filter"), number_column("count", "count")], note
        )
    ]


def _selection(findings: Findings) -> list[Block]:
    selection = findings["selection"]
    chosen = selection["epoch"], selection["horizon"]

    def of_seeds(row: Row) -> str:
        return ", ".join(f"{share(seed['accuracy'])} (seed {seed['seed']})" for seed in row.get("seeds") or ())

    columns = [
        number_column("horizon", "horizon"),
        number_column("epoch", "epoch"),
        Column("accuracy, %", lambda row: share(row["accuracy"])),
        Column("of each seed, %", of_seeds, "l"),
        number_column("cross_entropy", "cross-entropy, nats", 3),
        Column("pairs in order, %", lambda row: share(row.get("pairwise_accuracy"))),
        Column("", lambda row: "chosen" if (row["epoch"], row["horizon"]) == chosen else "", "l"),
    ]
    problems = f"{number(selection['problems'])} validation problems; " if selection.get("problems") else ""
    note = f"{problems}the highest accuracy averaged over seeds is chosen; no intervals. "
    made = made_with(findings, intervals="")
    return [column_table("Rerankers on validation problems", selection["table"], columns, note + made)]


def _agreement(findings: Findings) -> list[Block]:
    blocks: list[Block] = [
        Paragraph(
            "How well each score orders the candidates of held-out states, judged by the SLM's own greedy rollouts "
            "behind them. A pair counts where its rollouts differ, score ties count one half. Mixed states are those "
            "whose candidates differ in outcome. A target needs a verified future, so it is seen on fewer states."
        )
    ]
    columns = [
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
    for kind in dict.fromkeys(row["kind"] for row in findings["agreement"]):
        rows = [row for row in findings["agreement"] if row["kind"] == kind]
        known = {row["score"]: row["pairwise"] for row in rows if row.get("pairwise")}
        sides = {
            "Better than chance": [score for score, (_, low, _) in known.items() if low > 0.5],
            "Worse than chance": [score for score, (_, _, high) in known.items() if high < 0.5],
            "Not told apart from chance": [score for score, (_, low, high) in known.items() if low <= 0.5 <= high],
        }
        blocks += [Paragraph(f"{str(kind).capitalize()} events. {said(sides)}")] if known else []
        blocks.append(column_table(f"Agreement with rollouts, {kind} events", rows, columns, note))
    return blocks


def _choices(findings: Findings) -> list[Block]:
    rows = findings["choices"]
    quantiles = sorted({row["quantile"] for row in rows})
    blocks: list[Block] = [
        Paragraph(
            "How often the candidate with the best score is one from which the SLM's own greedy rollout succeeds, at "
            "the held-out states of every request quantile."
        )
    ]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        inside = [row for row in rows if row["kind"] == kind]
        found = {(row["label"], row["quantile"]): row for row in inside}
        states = ", ".join(
            f"{max(row['states'] for row in inside if row['quantile'] == q)} at {q:g}"
            for q in quantiles
            if any(row["quantile"] == q for row in inside)
        )
        body: list[list[Text]] = []
        sides: dict[str, list[str]] = {f"Better than the LLM's choice at {kind} events": [], "Worse": []}
        for label in dict.fromkeys(row["label"] for row in inside):
            body.append([label, *(_choice(found.get((label, quantile))) for quantile in quantiles)])
            for side, beyond in zip(sides, (above, below), strict=True):
                at = [q for q in quantiles if beyond(found.get((label, q), {}).get("top1_minus_llm"))]
                sides[side] += [f"{label} at quantile {', '.join(f'{q:g}' for q in at)}"] if at else []
        blocks += [Paragraph(said(sides))] if any(sides.values()) else []
        head = ["", *(f"q {quantile:g}, % [95%]" for quantile in quantiles)]
        note = f"Of {states} states. {LEGEND} {made_with(findings, rows, decoded=False, intervals=SHARES)}"
        blocks.append(Table(f"Choices that lead to success, {kind} events", head, body, note))
    return blocks


def _choice(row: Row | None) -> str:
    if row is None:
        return ""
    marks = [(BELOW_GREEDY, row.get("top1_minus_slm")), (BELOW_DIRECT, row.get("top1_minus_llm"))]
    return " ".join([percent(row["top1"]), *(mark for mark, difference in marks if below(difference))])


def _coverage(findings: Findings) -> list[Block]:
    columns = [
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
        column_table("Coverage of held-out states", findings["coverage"], columns, note),
    ]


def _future_quality(findings: Findings) -> list[Block]:
    found = findings["future_quality"]
    body = [[name, *map(share, shares)] for name, shares in zip(found["qualities"], found["pairwise"], strict=True)]
    head = ["", *(f"H = {horizon}, %" for horizon in found["horizons"])]
    note = f"{number(found['states'])} states that have every kind of future; no intervals. "
    made = made_with(findings, decoded=False, intervals="")
    return [
        Paragraph("How many pairs the target puts in the order of the rollouts, by what stands as the future."),
        Table("Pairs in order by future and horizon", head, body, note + made),
    ]


def _trajectory(findings: Findings) -> list[Block]:
    found = findings["trajectory"]
    columns = [
        number_column("step", "step"),
        Column("entropy, nats", lambda row: number(found["entropy"][row["step"]], 3)),
        Column("the SLM's token", lambda row: token(row["slm"]), "l"),
        Column("chosen", lambda row: token(row["chosen"]), "l"),
    ]
    note = f"{number(len(found['entropy']))} steps, threshold {found['threshold']:.3f} nats."
    return [Verbatim("Problem", found["problem"]), column_table("Its events", found["events"], columns, note)]


def _worked_event(findings: Findings) -> list[Block]:
    found = findings["worked_event"]
    columns = [
        Column("", lambda row: token(row["token"]), "l"),
        text_column("source", "proposed by"),
        number_column("p_slm", "p SLM", 4),
        number_column("p_llm", "p LLM", 4),
        number_column("compatibility", "compatibility, nats", 3),
        number_column("score", "score", 3),
        Column("leads to", lambda row: Span("right", "good") if row["correct"] else Span("wrong", "bad"), "l"),
        Column("the SLM's rollout", lambda row: Span(shortened(row["rollout"]), "code"), "l"),
    ]
    candidates = sorted(found["candidates"], key=lambda row: -row["score"])
    return [
        Paragraph(f"The right answer is {found['gold']}; entropy {found['entropy']:.3f} nats."),
        Verbatim("Problem", found["problem"]),
        Verbatim("Prompt", found["prompt"]),
        *([Verbatim("Written so far", found["prefix"])] if found["prefix"] else []),
        Verbatim("Shared future", found["future"]),
        column_table("Its candidates, best score first", candidates, columns, made_with(findings, intervals="")),
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
        text_column("term", "standardised in the pool"),
        number_column("weight", "weight", 3),
        number_column("certain", "weight × the LLM's certainty", 3),
    ]
    note = made_with(findings, decoded=False, intervals="")
    enough = f"the {wanted} wanted at least" if mixed >= wanted else f"fewer than the {wanted} wanted, so doubtful"
    return [
        Paragraph(
            f"Fitted on {number(found['states'])} rolled-out training states, {number(mixed)} of which have "
            f"candidates that differ in outcome ({enough})."
        ),
        column_table("Weights of the calibrated target", rows, columns, note),
    ]


def _advice(findings: Findings) -> list[Block]:
    return [Items(findings["advice"])]


def _costs(findings: Findings) -> list[Block]:
    deployment, offline = (findings["costs"].get(part) or [] for part in ("deployment", "offline"))
    where = f"on {findings.get('machine') or 'a machine that was not recorded'}."

    def relative(row: Row) -> str:
        return "{:.2f} [{:.2f}, {:.2f}]".format(*row["relative"]) if row.get("relative") else ""

    def memory(row: Row) -> str:
        return "" if row.get("peak_bytes") is None else number(row["peak_bytes"] / 2**20, 1)

    of_methods = [
        text_column("method"),
        *([text_column("loop", "loop")] if any(row.get("loop") for row in deployment) else []),
        number_column("problems", "problems"),
        number_column("calls", "LLM calls a problem", 2),
        number_column("pool", "candidates an event", 2),
        number_column("appended", "tokens chosen at events", 2),
        number_column("suffix", "LLM tokens beyond them", 1),
        number_column("seconds", "seconds a problem", 4),
        Column("× greedy [95%]", relative),
        Column("peak memory, MiB", memory),
        *_published(deployment, "published, × greedy", 2),
    ]
    of_stages = [
        text_column("stage"),
        number_column("units", "units"),
        text_column("unit"),
        number_column("seconds", "seconds", 1),
        number_column("gpu_hours", "GPU hours", 4),
        Column("devices", lambda row: ", ".join(row["devices"]), "l"),
        *_published(offline, "published, GPU hours", 1),
    ]
    blocks: list[Block] = []
    if not deployment:
        blocks.append(
            Paragraph(("Deployment was not timed; ", Span("futurebridge experiment costs", "code"), " does it."))
        )
    else:
        note = f"One problem at a time, {where} {made_with(findings)}"
        blocks.append(column_table("Deployment", deployment, of_methods, note))
    if offline:
        note = f"Work of all processes together, {where} {made_with(findings, intervals='')}"
        blocks.append(column_table("Offline stages", offline, of_stages, note))
    return blocks


def _published(rows: Sequence[Row], head: str, decimals: int) -> list[Column]:
    """A column of the paper's figures, where there are any to stand beside these rows."""
    return [number_column("published", head, decimals)] if any(row.get("published") for row in rows) else []


DIAGNOSTICS: dict[str, Callable[[Findings], list[Block]]] = {
    "filters": _filters,
    "selection": _selection,
    "agreement": _agreement,
    "choices": _choices,
    "coverage": _coverage,
    "future_quality": _future_quality,
    "trajectory": _trajectory,
    "worked_event": _worked_event,
    "calibration": _calibration,
    "advice": _advice,
    "costs": _costs,
}

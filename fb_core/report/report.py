"""`futurebridge report`: what runs found, as one HTML file and as Markdown.

The findings of a run are plain values. Shares and differences of shares come as [mean, low, high] in 0..1. Keys with a
part in a verdict: "greedy", "direct", "s2t", "takeover" and "futurebridge" among the rows of the table "methods"; in
the other tables a row of key "futurebridge" is the run's own; among those of "futures" "future-cross-state",
"future-shuffled" and "future-incorrect". The differences of a row at another request quantile are to the methods at
that same quantile; those of a row of "futures" may also be to the verified one, as "minus_verified", and those of a
sample to the first correct one, as "minus_sampled". A section that is absent or None was not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fb_core.report import figures
from fb_core.report.comparisons import across, experiment, headlines, orderings_here
from fb_core.report.diagnostics import DIAGNOSTICS
from fb_core.report.figures import Findings
from fb_core.report.page import Block, Document, Figure, Items, Paragraph, Picture, Section, Span, Table
from fb_core.report.tables import number
from fb_core.stages.artefacts import json_bytes, write_file

FIGURES = "figures"  # folder beside report.md
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
    "choices": Part("Choices by kind of event", "futurebridge experiment repairs quantiles"),
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
    "futures": "What stands as the future behind every candidate when the target is made, on one set of states. "
    "Verified and first correct sample differ in how they were decoded alone, the samples among each other in their "
    "answers alone, cross-state and shuffled from verified in the state and in the order alone.",
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
        "called beyond chance where its interval leaves out 0; intervals are not corrected for how many there are. Of "
        "several benchmarks “average” is the primary figure: it counts every benchmark alike, and problems are drawn "
        "within each. A column headed “published” is there only beside the paper's models, data and settings."
    )
    if len(findings) == 1:
        return Document(f"FutureBridge report: {names[0]}", [how], _run(findings[0], ""))
    named = [{**one, "name": name} for name, one in zip(names, findings, strict=True)]
    runs = [Section(one["name"], [], _run(one, f"run-{number}-")) for number, one in enumerate(named, 1)]
    return Document(f"FutureBridge report: {', '.join(names)}", [how], [across(named), *runs])


def _run(findings: Findings, prefix: str) -> list[Section]:
    """Everything about one run; `prefix` begins the names of its figures."""
    sections, absent = [], []
    for name, part in PARTS.items():
        if name in TABLES:
            blocks = experiment(findings, name, part.title, TABLES[name])
        else:
            blocks = DIAGNOSTICS[name](findings) if findings.get(name) else []
        if (picture := part.draw(findings)) is not None:
            blocks.append(Figure(f"{prefix}{name.replace('_', '-')}", part.caption, picture))
        if blocks:
            sections.append(Section(part.title, blocks))
        else:
            absent.append(part)
    return [
        Section("At a glance", [*_overview(findings), *orderings_here(findings)]),
        *sections,
        *([Section("Not run", _missing(absent))] if absent else []),
        Section("Settings", _settings(findings)),
    ]


def _missing(parts: Sequence[Part]) -> list[Block]:
    return [
        Paragraph("These parts are left out, since the run's folder does not hold what they show."),
        Items([(f"{part.title}: made by ", Span(part.command, "code")) for part in parts]),
    ]


def _overview(findings: Findings) -> list[Block]:
    pair, policy, selection = (findings.get(name) or {} for name in ("pair", "policy", "selection"))

    def model(which: str) -> str:
        count = pair.get(f"{which}_parameters")
        return f"{pair[which]}, {number(count)} parameters" if count else str(pair[which])

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
    return [*([table] if facts else []), *headlines(findings)]


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

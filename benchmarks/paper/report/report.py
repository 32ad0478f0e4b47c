"""`python -m benchmarks.paper report`: the findings of one or several runs as one HTML file and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.paper.report import figures
from benchmarks.paper.report.columns import benchmarks, number
from benchmarks.paper.report.diagnostics import DIAGNOSTICS, Diagnostic
from benchmarks.paper.report.experiments import across, experiment_blocks, in_short
from benchmarks.paper.report.findings import Experiment, Findings, findings_bytes, rows_bytes
from benchmarks.paper.report.orderings import ordering_blocks
from benchmarks.paper.report.page import Block, Document, Figure, Items, Paragraph, Picture, Section, Span
from fb_core.files import write_file
from fb_core.page import Table

FIGURES = "figures"  # folder beside report.md
FOREST = (
    "Accuracy with 95% intervals. The dashed line is greedy decoding with the SLM. Circles are FutureBridge as "
    "published and as deployed, diamonds greedy decoding and takeover, squares all other methods."
)
HOW = (
    "Accuracies are in percent, differences in percentage points (pp). Brackets hold 95% bootstrap intervals: problems "
    "are resampled with all their runs, and differences are paired by problem. A difference is called statistically "
    "significant if its interval excludes 0. Intervals are not corrected for multiple comparisons. If there are "
    "several benchmarks, “average” is the primary result: all benchmarks have equal weight, and problems are resampled "
    "within each. A column headed “published” appears only if models, data and settings are the paper's."
)
EXPERIMENT_FIGURES: Mapping[str, Callable[[Findings, str], Picture | None]] = {
    "accuracy": figures.accuracy,
    "horizon": figures.horizon,
    "sweep": figures.sweep,
}


class Part(NamedTuple):
    """A section of a run's report, with the command that produces its results; no blocks if they do not exist."""

    title: str
    brief: str
    command: str
    blocks: list[Block]


def write_report(findings: Sequence[Findings], folder: Path, pages: Mapping[str, bytes] | None = None) -> list[Path]:
    """Write report.html, report.md with its figures/*.svg, findings.json, and rows.json with the tables' rows alone.

    Args:
        findings: of one run or several.
        folder: of the files; created if missing.
        pages: contents of the pages that explain single problems, by file name; the report links to them.

    Returns:
        the paths of the files, without those of `pages`.

    Raises:
        ValueError: no findings, or settings with numbers that are not finite.
        OSError: the folder cannot be written.
    """
    files = {"findings.json": findings_bytes(findings), "rows.json": rows_bytes(findings)}
    files |= document_files(render(findings, pages or {}))
    write_files(pages or {}, folder)
    return write_files(files, folder)


def document_files(document: Document) -> dict[str, bytes]:
    """report.md with its figures/*.svg, and report.html, by name."""
    files = {f"{FIGURES}/{figure.name}.svg": figure.picture.alone.encode() for figure in document.figures()}
    return files | {"report.md": document.markdown(FIGURES).encode(), "report.html": document.html().encode()}


def write_files(files: Mapping[str, bytes], folder: Path) -> list[Path]:
    """Write files into a folder, created if missing; returns their paths."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_file(folder / name, data)
    return [folder / name for name in files]


def render(findings: Sequence[Findings], pages: Collection[str] = ()) -> Document:
    """The report: a summary of all runs, then tables across them if there are several, then each run's own sections.

    Args:
        findings: of one run or several.
        pages: names of the files that explain single problems; a problem without one gets no link.

    Raises:
        ValueError: no findings.
    """
    if not findings:
        raise ValueError("findings: expected those of one run or more, got none; name a run's folder")
    names = [one.name for one in findings]
    if len(set(names)) < len(names):
        names = [f"{name} ({number})" for number, name in enumerate(names, 1)]
    named = [_linked(one.model_copy(update={"name": name}), pages) for name, one in zip(names, findings, strict=True)]
    first = [*in_short(named), *_figure("forest", FOREST, figures.forest(named), figures.forest(named, "narrow"))]
    how = Section("How to read the numbers", [Paragraph(HOW)])
    title = f"FutureBridge report: {', '.join(names)}"
    if len(named) == 1:
        return Document(title, first, [*_run(named[0], ""), how])
    runs = [
        Section(one.name, [], _run(one, f"run-{number}-"), brief=", ".join(benchmarks(one.rows)))
        for number, one in enumerate(named, 1)
    ]
    return Document(title, first, [across(named), *runs, how])


def _linked(findings: Findings, pages: Collection[str]) -> Findings:
    """The findings without links to pages that do not exist."""
    if findings.turned is None:
        return findings
    changes = (one if one.page in pages else one.model_copy(update={"page": None}) for one in findings.turned.changes)
    turned = findings.turned.model_copy(update={"changes": tuple(changes)})
    return findings.model_copy(update={"turned": turned})


def _run(findings: Findings, prefix: str) -> list[Section]:
    """All sections of one run; the names of its figures start with `prefix`."""
    parts = list(_parts(findings, prefix))
    absent = [part for part in parts if not part.blocks]
    sections = [
        Section("The run", _overview(findings), brief="Models, request policy and seeds."),
        Section("The paper's orderings", ordering_blocks(findings), brief="Which of them hold in this run."),
        *(Section(part.title, part.blocks, brief=part.brief) for part in parts),
        Section(
            "Not run",
            _missing(absent) if absent else [],
            brief="Parts without results, and the commands that produce them.",
        ),
        Section("Settings", _settings(findings), brief="All settings, and the software versions."),
    ]
    return [section for section in sections if section.blocks]


def _parts(findings: Findings, prefix: str) -> Iterator[Part]:
    """The experiments in order, each followed by its diagnostics; the remaining diagnostics last."""
    left = dict(DIAGNOSTICS)
    for shown in findings.experiments:
        yield _experiment(findings, shown, prefix)
        for name in [name for name, one in left.items() if one.after == shown.name]:
            yield _diagnostic(findings, name, left.pop(name), prefix)
    yield from (_diagnostic(findings, name, one, prefix) for name, one in left.items())


def _experiment(findings: Findings, shown: Experiment, prefix: str) -> Part:
    draw = EXPERIMENT_FIGURES.get(shown.figure or "", lambda *_: None)
    file = prefix + re.sub(r"[^\w-]+", "-", shown.name)  # a name from a file is no path
    blocks = [*experiment_blocks(findings, shown), *_figure(file, shown.caption, draw(findings, shown.name))]
    brief, _, more = shown.varies.partition(". ")
    if blocks and more:
        brief, blocks = f"{brief}.", [Paragraph(more), *blocks]
    return Part(shown.title, brief, f"python -m benchmarks.paper tables {shown.name}", blocks)


def _diagnostic(findings: Findings, name: str, one: Diagnostic, prefix: str) -> Part:
    found = getattr(findings, name)
    drawn = one.draw(findings) if found else None
    blocks = [*one.blocks(findings, found), *_figure(prefix + name, one.caption, drawn)] if found else []
    return Part(one.title, one.brief, one.command, blocks)


def _figure(name: str, caption: str, picture: Picture | None, narrow: Picture | None = None) -> list[Block]:
    return [] if picture is None else [Figure(name.replace("_", "-"), caption, picture, narrow)]


def _missing(parts: Sequence[Part]) -> list[Block]:
    return [
        Paragraph("The run's folder has no results for these parts."),
        Items([(f"{part.title}: run ", Span(part.command, "code")) for part in parts]),
    ]


def _overview(findings: Findings) -> list[Block]:
    facts, pair, policy, selection = [], findings.pair, findings.policy, findings.selection
    if pair:
        for which, model, count in (("SLM", pair.slm, pair.slm_parameters), ("LLM", pair.llm, pair.llm_parameters)):
            facts.append((which, f"{model}, {number(count)} parameters" if count else model))
    if policy:
        source = f"the {policy.quantile:g} quantile on validation problems"
        softmax = f"softmax over the {policy.top_k} largest logits"
        facts.append(("the LLM is asked", f"above an entropy of {policy.threshold:.3f} nats ({source}; {softmax})"))
    if selection:
        facts.append(
            ("reranker", f"horizon {selection.horizon}, epoch {selection.epoch}, chosen on validation problems")
        )
    if findings.seeds:
        facts.append(("seeds", ", ".join(map(str, findings.seeds))))
    facts += [(name, text) for name, text in (("machine", findings.machine), ("commit", findings.commit)) if text]
    return [Table("The run", ("", ""), facts, align="ll")] if facts else []


def _settings(findings: Findings) -> list[Block]:
    settings = [(name, Span(value, "code")) for name, value in _flat(findings.settings)]
    made = [(name, str(version)) for name, version in findings.made.items()]
    blocks: list[Block] = [Table("All settings", ("setting", "value"), settings, align="ll")] if settings else []
    return [*blocks, *([Table("Software", ("", "version"), made, align="ll")] if made else [])]


def _flat(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", str(value)

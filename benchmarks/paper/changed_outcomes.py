"""Problems on which a method's verdict differs from greedy decoding's, and the pages that explain them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from benchmarks.paper.comparison import CompareStage
from benchmarks.paper.report.findings import DEPLOYED, OURS, Change, Findings, Turned, listed
from benchmarks.paper.results import finished
from benchmarks.paper.settings import PaperSettings
from benchmarks.paper.tables import Plan
from benchmarks.paper.variants import plan_of, settings_of_variant
from fb_core import explain
from fb_core.stages.artefacts import digest
from fb_core.stages.decode import Row
from fb_core.stages.inputs import models_of
from fb_core.stages.rollouts import token_kind

Place = tuple[str, str]  # benchmark, id of a problem
COMPARED = ("greedy", OURS, DEPLOYED)


def turned(plan: Plan) -> Turned | None:
    """The changed problems of FutureBridge, as published and as deployed; None if it or greedy decoding was not run."""
    rows = {key: _rows(plan, key) for key in COMPARED}
    made = [key for key in COMPARED[1:] if rows[key]]
    if not rows["greedy"] or not made:
        return None
    decode, changes = models_of(plan.settings.models).tokenizer.decode, []
    for key in made:
        label = plan.method(key).label
        for place, own in rows[key].items():
            (greedy,) = rows["greedy"][place]
            for row in (row for row in own if row.correct != greedy.correct):
                step = _parting_event(greedy, row)
                changes.append(
                    Change(
                        benchmark=row.benchmark,
                        problem=row.problem,
                        key=key,
                        label=label,
                        seed=row.seed,
                        gained=row.correct,
                        kind=None if step is None else token_kind(decode([greedy.tokens[step]])),
                        step=step,
                    )
                )
    shown, digests = {id(one) for one in listed(changes)}, _digests(plan)
    for number, one in enumerate(changes):
        if id(one) in shown:
            page = f"problems/{digest([digests, (one.benchmark, one.problem)])[:16]}.html"
            changes[number] = one.model_copy(update={"page": page})
    return Turned(methods=tuple(plan.method(key).label for key in made), changes=tuple(changes))


def _parting_event(greedy: Row, row: Row) -> int | None:
    """The step of the event at which a text departs from greedy decoding's; None if it departs elsewhere or never."""
    steps = enumerate(zip_longest(greedy.tokens, row.tokens))
    parting = next((step for step, (one, other) in steps if one != other), len(row.tokens))
    at_event = any(event.step == parting for event in row.events)
    return parting if at_event and parting < len(greedy.tokens) else None


def problem_pages(settings: PaperSettings, run: Path, findings: Findings) -> dict[str, bytes]:
    """The pages that a report's list of changed problems links to, by `Change.page`.

    Args:
        settings: of the run.
        run: its folder.
        findings: gathered from it.

    Raises:
        ValueError: the run is damaged.
    """
    plan, pages = plan_of(settings, run), dict[str, bytes]()
    if findings.turned is None:
        return pages
    rows = [_rows(plan, key) for key in COMPARED]
    tokenizer = models_of(settings.models).tokenizer
    for one in listed(findings.turned.changes):
        if one.page is not None and one.page not in pages:
            own = [row for by_place in rows for row in by_place.get((one.benchmark, one.problem), ())]
            pages[one.page] = explain.html_page(own, tokenizer).encode()
    return pages


def _rows(plan: Plan, key: str) -> dict[Place, list[Row]]:
    """A method's rows on the benchmarks, by problem; empty if it was not run."""
    found: dict[Place, list[Row]] = {}
    for row in _decoded(plan, key):
        found.setdefault((row.benchmark, row.problem), []).append(row)
    return found


def _decoded(plan: Plan, key: str) -> Iterator[Row]:
    variant = plan.method(key)
    if finished(plan.run / variant.path, CompareStage.name) is not None:
        yield from CompareStage(settings_of_variant(plan.settings, variant), plan.run / variant.path).rows()


def _digests(plan: Plan) -> list[str]:
    """Digests of the rows of all compared methods, so that two runs share a page only if their rows are the same."""
    found = (finished(plan.run / plan.method(key).path, CompareStage.name) for key in COMPARED)
    return [manifest["digest"] for manifest in found if manifest is not None]

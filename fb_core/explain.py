"""`futurebridge explain`: how a problem of a run's evaluation was solved, event by event."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fb_core import hf
from fb_core.chat import EVENT_STYLE
from fb_core.config import RunSettings
from fb_core.experiment.results import finished
from fb_core.experiment.variants import plan_of
from fb_core.files import write_file
from fb_core.pool import SLM, Event, Pool
from fb_core.report.page import Table as HtmlTable
from fb_core.report.page import page
from fb_core.stages.artefacts import MANIFEST, Artefact
from fb_core.stages.benchmark_states import benchmark_runs
from fb_core.stages.decode import Row, read_rows
from fb_core.stages.examples import Examples
from fb_core.stages.inputs import models_of
from fb_core.stages.inside import FOLDER as VARIANTS
from fb_core.stages.rollouts import RolloutStage
from fb_core.terminal import IN_TEXT, IN_TOKEN, escaped

Value = TypeVar("Value")

LABELS = {"futurebridge": "FutureBridge", "deployed": "FutureBridge, as deployed"}
LISTED = 10  # ids in an error
COLUMNS = ("", "token", "id", "source", "log p_S", "log p_T", "score")
SOURCES = {1: "S", 2: "L", 3: "SL"}
CHOSEN, GREEDY = "→", "g"
LEGEND = f"{CHOSEN} is the chosen token, {GREEDY} the SLM's own (greedy); source S is the SLM, L the LLM."
UNKNOWN = "–"
HALF = "\N{REPLACEMENT CHARACTER}"
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
VERDICT_STYLES = {"correct": "green", "wrong": "red"}
VERDICT_LOOKS = {"correct": "good", "wrong": "bad"}  # classes of the page


class Judged(NamedTuple):
    """What a run knows of a state: the output so far, and B_H and the rollout's outcome by each candidate's ids."""

    output: list[int]
    compatibility: dict[tuple[int, ...], float]
    right: dict[tuple[int, ...], bool]


@dataclass(frozen=True)
class Known:
    """What a run knows of the states along the SLM's own texts, by (benchmark, problem, step).

    Attributes:
        horizon: H of B_H, as the run chose it.
        states: the states that were scored or rolled out.
    """

    horizon: int
    states: Mapping[tuple[str, str, int], Judged]

    def of(self, row: Row, event: Event) -> Judged | None:
        """What is known of an event, if its output so far is that of one of these states; else None."""
        found = self.states.get((row.benchmark, row.problem, event.step))
        return found if found is not None and found.output == row.tokens[: event.step] else None


NOTHING = Known(0, {})


def known_of(settings: RunSettings, run: Path) -> Known:
    """The results of `futurebridge rollouts` at the states of benchmark problems.

    Args:
        settings: of the run.
        run: its folder.

    Raises:
        ValueError: the run is damaged.
    """
    states: dict[tuple[str, str, int], Judged] = {}
    places = benchmark_runs(settings, run)
    if not places:
        return NOTHING
    horizon = plan_of(settings, run).horizon
    for benchmark, (_, folder) in places.items():
        if finished(folder, RolloutStage.name) is None:
            continue
        for shard in Artefact(folder, RolloutStage.name).shards("validation"):
            examples = Examples(folder, shard)
            for state in examples.states.values():
                group, rolled = examples.groups.get(state.id), examples.rollouts.get(state.id)
                scores = None if group is None else group.compatibility(horizon)
                states[benchmark, state.trajectory.problem.id, len(state.output)] = Judged(
                    state.output.tolist(),
                    {} if group is None or scores is None else _by_ids(group.state.pool, scores.tolist()),
                    {} if rolled is None else _by_ids(rolled.state.pool, rolled.correct.tolist()),
                )
    return Known(horizon, states)


def _by_ids(pool: Pool, found: Sequence[Value]) -> dict[tuple[int, ...], Value]:
    tails = pool.tails or ((),) * len(pool)
    ids = [(token, *tail) for token, tail in zip(pool.ids.tolist(), tails, strict=True)]
    return dict(zip(ids, found, strict=True))


def explain(
    settings: RunSettings, run: Path, problem: str, console: Console, html: Path | None = None, row: str | None = None
) -> None:
    """Print how a problem was solved: the texts with their events, and the events' candidates and scores.

    Args:
        settings: of the run; they name its tokenizer.
        run: its folder.
        problem: an id, or a part of only one id.
        console: where to print.
        html: a file to write the same to.
        row: as in `find_rows`.

    Raises:
        ValueError: no problem or several match, a file is damaged, or the settings are those of another run.
        OSError: the tokenizer is missing, or the file cannot be written.
    """
    rows, tokenizer = find_rows(run, problem, row), models_of(settings.models).tokenizer
    folder = _folder(run, row)
    if manifest := folder.manifest():
        models = {**manifest["identity"].get("models", {}), "tokenizer": hf.tokenizer_hash(tokenizer)}
        folder.check(manifest, {"models": models})
    known = known_of(settings, run)
    if html is not None:
        write_file(html, html_page(rows, tokenizer, known).encode())
    print_rows(rows, tokenizer, console, known)


def find_rows(run: Path, problem: str, row: str | None = None) -> list[Row]:
    """The rows of one problem in the finished shards of a complete or partial evaluation; greedy first, then by seed.

    Args:
        run: the run's folder.
        problem: an id, or a part of only one id.
        row: folder name of a row of the tables of `futurebridge experiment`; None for the run's own evaluation.

    Raises:
        ValueError: no problem or several match, there is no such row, or a file is damaged.
    """
    folder = _folder(run, row)
    found: dict[str, list[Row]] = {}
    for receipt in sorted(folder.path.glob("*.json")):
        if receipt.name != MANIFEST:
            for one in read_rows(folder, receipt.stem):
                found.setdefault(one.problem, []).append(one)
    if not found:
        remedy = "run `futurebridge evaluate`"
        if row is not None:
            made = sorted(path.parent.name for path in (run / VARIANTS).glob("*/comparison"))
            remedy = f"name one of {_listed(made)}" if made else "run `futurebridge experiment`"
        raise ValueError(f"{folder.path}: expected shards of decoded problems, got none; {remedy}")
    names = [problem] if problem in found else [name for name in found if problem in name]
    if not names:
        raise ValueError(
            f'problem: expected an id in {folder.path} or a part of one, got {problem!r}; ids are the "problem" of '
            f"the rows in its .jsonl files: {_listed(list(found))}"
        )
    if len(names) > 1:
        raise ValueError(f"problem: expected a part of only one id, got {problem!r}; name one of {_listed(names)}")
    return sorted(found[names[0]], key=lambda one: (one.benchmark, one.method != "greedy", one.seed or 0))


def _folder(run: Path, row: str | None) -> Artefact:
    if row is None:
        return Artefact(run, "evaluation")
    if not re.fullmatch(r"[\w.-]+", row) or row.startswith("."):
        raise ValueError(f"row: expected the name of a folder in {run / VARIANTS}, got {row!r}; name one of them")
    return Artefact(run / VARIANTS / row, "comparison")


def _listed(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - LISTED} more" if len(ids) > LISTED else ""
    return ", ".join(map(repr, ids[:LISTED])) + more


def token_text(token: int, tokenizer: hf.Tokenizer) -> str:
    """One token with white space visible; U+FFFD for a partial character, <id> if it has no text."""
    once, twice = _decode([token], tokenizer), _decode([token, token], tokenizer)
    return escaped(twice[len(once) :], IN_TOKEN) or f"<{token}>"  # decoding may drop a text's leading space


def _decode(tokens: list[int], tokenizer: hf.Tokenizer) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _pieces(row: Row, tokenizer: hf.Tokenizer) -> Iterator[tuple[str, int | None]]:
    """The row's text as (piece, number of its event or None)."""
    tokens = row.tokens
    if not tokens:  # a method that keeps only a text
        yield escaped(row.text, IN_TEXT), None
        return
    text, shown = _decode(tokens, tokenizer), 0

    def end(step: int) -> int:
        """The number of complete characters in the first `step` tokens."""
        return len(text) if step == len(tokens) else len(_decode(tokens[:step], tokenizer).rstrip(HALF))

    for number, event in enumerate(row.events, 1):
        start, after = end(event.step), end(min(event.step + len(event.tokens), len(tokens)))
        yield escaped(text[shown:start], IN_TEXT), None
        piece, shown = text[start:after], after
        yield escaped(piece, IN_TOKEN) or token_text(tokens[event.step], tokenizer), number
        yield "\n" * piece.count("\n"), None
    yield escaped(text[shown:], IN_TEXT), None


def _method(row: Row) -> str:
    label = LABELS.get(row.method, escaped(row.method))
    return label if row.seed is None else f"{label}, seed {row.seed}"


def _facts(row: Row) -> str:
    counts = f"{len(row.tokens)} tokens, {len(row.events)} event(s), {row.calls} LLM call(s)"
    return f"gold answer {escaped(row.gold)}, {counts}" + ("" if row.seconds is None else f", {row.seconds:.2f} s")


def _heading(number: int, event: Event) -> str:
    failed = "" if event.error is None else f", the LLM failed: {escaped(event.error)}"
    return f"Event {number}: step {event.step}, entropy {event.entropy:.3f}{failed}"


def _columns(rows: Sequence[Row], known: Known) -> tuple[str, ...]:
    """The column heads of the events' tables, including B_H and rollouts if they are known for any event."""
    judged = any(known.of(row, event) for row in rows for event in row.events)
    return (*COLUMNS, f"B_{known.horizon}", "rollout") if judged else COLUMNS


def _note(rows: Sequence[Row], known: Known) -> str:
    """The explanation of the marks, and of where B_H and rollouts are known."""
    events = [known.of(row, event) for row in rows for event in row.events]
    judged = [one for one in events if one is not None]
    if not judged:
        return (
            f"{LEGEND} The run has neither B_H (the compatibility score) nor rollouts of these candidates. "
            "`futurebridge rollouts` makes both for some problems of every benchmark (rollouts.benchmark_problems), "
            "along the SLM's own text."
        )
    return (
        f"{LEGEND} B_{known.horizon} is a candidate's compatibility score in nats; rollout says whether the SLM alone "
        f"reaches the right answer after it. Both are known at {len(judged)} of {len(events)} events, where the text "
        "is still the SLM's own."
    )


def _cells(row: Row, event: Event, tokenizer: hf.Tokenizer, known: Known, width: int) -> Iterator[tuple[str, ...]]:
    """The first `width` cells of every candidate of the pool; a span is shown whole."""
    greedy = next((index for index, source in enumerate(event.sources) if source & SLM), None)
    judged = known.of(row, event) or Judged([], {}, {})
    for index, token in enumerate(event.pool):
        ids = (token, *(event.tails[index] if event.tails else ()))
        tail = _decode(list(ids), tokenizer)[len(_decode([token], tokenizer)) :]
        columns = (event.slm_logprob, event.llm_logprob, event.scores)
        scores = [column[index] if column else math.nan for column in columns]
        compatibility, right = judged.compatibility.get(ids), judged.right.get(ids)
        marks = (CHOSEN * (index == event.choice), GREEDY * (index == greedy))
        cells = (
            " ".join(filter(None, marks)),
            token_text(token, tokenizer) + escaped(tail, IN_TOKEN),
            " ".join(map(str, ids)),
            SOURCES[event.sources[index]],
            *(UNKNOWN if math.isnan(score) else f"{score:.4f}" for score in scores),
            UNKNOWN if compatibility is None else f"{compatibility:.3f}",
            UNKNOWN if right is None else "right" if right else "wrong",
        )
        yield cells[:width]


def print_rows(rows: Sequence[Row], tokenizer: hf.Tokenizer, console: Console, known: Known = NOTHING) -> None:
    """Print all rows of a problem, with ⟦event⟧¹ in the text and one table per event.

    Args:
        rows: as from `find_rows`.
        tokenizer: of the run.
        console: where to print.
        known: as from `known_of`.
    """
    columns = _columns(rows, known)
    if any(row.events for row in rows):
        console.print(Text(_note(rows, known), "italic"), soft_wrap=True)
    for row in rows:
        title = f"{escaped(row.benchmark)}, {escaped(row.problem)}: {_method(row)}, "
        verdict = (escaped(row.verdict), VERDICT_STYLES.get(row.verdict, "yellow"))
        console.print(Text.assemble((title, "bold"), verdict, f", {_facts(row)}"), soft_wrap=True)
        text = Text("\n")
        for piece, number in _pieces(row, tokenizer):
            if number is None:
                text.append(piece)
            else:
                text.append(f"⟦{piece}⟧{str(number).translate(RAISED)}", EVENT_STYLE)
        console.print(text.append("\n"), soft_wrap=True)
        for number, event in enumerate(row.events, 1):
            console.print(Text(_heading(number, event), "bold"), soft_wrap=True)
            table = Table(box=box.SIMPLE_HEAD)
            for column in columns:
                words = column in ("", "token", "source", "rollout")
                table.add_column(column, justify="left" if words else "right", overflow="fold")
            for place, cells in enumerate(_cells(row, event, tokenizer, known, len(columns))):
                table.add_row(*map(Text, cells), style="bold" if place == event.choice else "")
            console.print(table)


def html_page(rows: Sequence[Row], tokenizer: hf.Tokenizer, known: Known = NOTHING) -> str:
    """The same as one self-contained HTML page: hovering over an event shows its table, a click goes to it.

    Args:
        rows: as from `find_rows`.
        tokenizer: of the run.
        known: as from `known_of`.
    """
    columns = _columns(rows, known)

    def table(row: Row, number: int, event: Event) -> HtmlTable:
        cells = list(_cells(row, event, tokenizer, known, len(columns)))
        return HtmlTable(
            _heading(number, event), columns, cells, align="llrlrrrrl"[: len(columns)], marked=event.choice
        )

    runs = [
        {
            "method": _method(row),
            "verdict": row.verdict,
            "look": VERDICT_LOOKS.get(row.verdict, "faint"),
            "facts": f"{row.benchmark}, {_facts(row)}",
            "pieces": list(_pieces(row, tokenizer)),
            "events": [table(row, number, event) for number, event in enumerate(row.events, 1)],
        }
        for row in rows
    ]
    note = _note(rows, known) if any(row.events for row in rows) else ""
    return page("explain.html", title=rows[0].problem, note=note, runs=runs)

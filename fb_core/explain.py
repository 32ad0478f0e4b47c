"""How a problem was solved, event by event: `futurebridge explain` on a run's evaluation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fb_core import hf
from fb_core.chat import EVENT_STYLE
from fb_core.config import RunSettings
from fb_core.files import write_file
from fb_core.pool import Event
from fb_core.report.page import Table as HtmlTable
from fb_core.report.page import page
from fb_core.stages.artefacts import MANIFEST, Artefact
from fb_core.stages.decode import Row, read_rows
from fb_core.stages.inputs import models_of
from fb_core.stages.inside import FOLDER as VARIANTS
from fb_core.terminal import IN_TEXT, IN_TOKEN, escaped

LABELS = {"futurebridge": "FutureBridge"}
LISTED = 10  # ids in an error
COLUMNS = ("", "token", "id", "source", "log p_S", "log p_T", "score")
SOURCES = {1: "S", 2: "L", 3: "SL"}
CHOSEN = "→"
HALF = "\N{REPLACEMENT CHARACTER}"
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
VERDICT_STYLES = {"correct": "green", "wrong": "red"}
VERDICT_LOOKS = {"correct": "good", "wrong": "bad"}  # classes of the page


def explain(
    settings: RunSettings, run: Path, problem: str, console: Console, html: Path | None = None, row: str | None = None
) -> None:
    """Show what was made of a problem: the texts with their events, those with their candidates and scores.

    Args:
        settings: of the run, for its tokenizer.
        run: its folder.
        problem: an id, or a part that no other id has.
        console: where to print.
        html: a file to write the same to.
        row: as in `find_rows`.

    Raises:
        ValueError: no such problem, several, a damaged file, or the settings of another run.
        OSError: no tokenizer, or the file cannot be written.
    """
    rows, tokenizer = find_rows(run, problem, row), models_of(settings.models).tokenizer
    folder = _folder(run, row)
    if manifest := folder.manifest():
        known = {**manifest["identity"].get("models", {}), "tokenizer": hf.tokenizer_hash(tokenizer)}
        folder.check(manifest, {"models": known})
    if html is not None:
        write_file(html, html_page(rows, tokenizer).encode())
    print_rows(rows, tokenizer, console)


def find_rows(run: Path, problem: str, row: str | None = None) -> list[Row]:
    """What finished shards hold of one problem, be the evaluation complete or not; greedy first, then by seed.

    Args:
        run: the run's folder.
        problem: an id, or a part that no other id has.
        row: of the tables of `futurebridge experiment`, by its folder; None for the run's own evaluation.

    Raises:
        ValueError: no such problem, several, no such row, or a damaged file.
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
            f'problem: expected a part of an id in {folder.path}, got {problem!r}; they are the rows\' "problem" in '
            f"its .jsonl files: {_listed(list(found))}"
        )
    if len(names) > 1:
        raise ValueError(f"problem: expected a part of one id, got {problem!r}; say which of {_listed(names)}")
    return sorted(found[names[0]], key=lambda one: (one.benchmark, one.method != "greedy", one.seed or 0))


def _folder(run: Path, row: str | None) -> Artefact:
    if row is None:
        return Artefact(run, "evaluation")
    if not re.fullmatch(r"[\w.-]+", row) or row.startswith("."):
        raise ValueError(f"row: expected the name of a folder in {run / VARIANTS}, got {row!r}; look there")
    return Artefact(run / VARIANTS / row, "comparison")


def _listed(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - LISTED} more" if len(ids) > LISTED else ""
    return ", ".join(map(repr, ids[:LISTED])) + more


def token_text(token: int, tokenizer: hf.Tokenizer) -> str:
    """One token with its white space visible; U+FFFD for half a character, <id> where it has no text."""
    once, twice = _decode([token], tokenizer), _decode([token, token], tokenizer)
    return escaped(twice[len(once) :], IN_TOKEN) or f"<{token}>"  # the first in a text may lose a space


def _decode(tokens: list[int], tokenizer: hf.Tokenizer) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _pieces(row: Row, tokenizer: hf.Tokenizer) -> Iterator[tuple[str, int | None]]:
    """(text, number of the event or None) that together are the row's text."""
    tokens = row.tokens
    if not tokens:  # of a method that keeps a text alone
        yield escaped(row.text, IN_TEXT), None
        return
    text, shown = _decode(tokens, tokenizer), 0

    def end(step: int) -> int:
        """Characters that are whole once so many tokens are there."""
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


def _cells(event: Event, tokenizer: hf.Tokenizer) -> Iterator[tuple[str, ...]]:
    """What stands under `COLUMNS` for every candidate of the pool, a span whole."""
    for index, token in enumerate(event.pool):
        tail = event.tails[index] if event.tails else []
        behind = _decode([token, *tail], tokenizer)[len(_decode([token], tokenizer)) :]
        columns = (event.slm_logprob, event.llm_logprob, event.scores)
        scores = [column[index] if column else math.nan for column in columns]
        yield (
            CHOSEN if index == event.choice else "",
            token_text(token, tokenizer) + escaped(behind, IN_TOKEN),
            " ".join(map(str, [token, *tail])),
            SOURCES[event.sources[index]],
            *("–" if math.isnan(score) else f"{score:.4f}" for score in scores),
        )


def print_rows(rows: Sequence[Row], tokenizer: hf.Tokenizer, console: Console) -> None:
    """Print runs of a problem, as ⟦event⟧¹ in the text and a table an event.

    Args:
        rows: as from `find_rows`.
        tokenizer: of the run.
        console: where to.
    """
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
            for column in COLUMNS:
                words = column in ("", "token", "source")
                table.add_column(column, justify="left" if words else "right", overflow="fold")
            for cells in _cells(event, tokenizer):
                table.add_row(*map(Text, cells), style="bold" if cells[0] else "")
            console.print(table)


def html_page(rows: Sequence[Row], tokenizer: hf.Tokenizer) -> str:
    """The same as one HTML file that needs nothing else: hovering over an event shows its table, a click leads to it.

    Args:
        rows: as from `find_rows`.
        tokenizer: of the run.
    """
    runs = [
        {
            "method": _method(row),
            "verdict": row.verdict,
            "look": VERDICT_LOOKS.get(row.verdict, "faint"),
            "facts": f"{row.benchmark}, {_facts(row)}",
            "pieces": list(_pieces(row, tokenizer)),
            "events": [_table(number, event, tokenizer) for number, event in enumerate(row.events, 1)],
        }
        for row in rows
    ]
    return page("explain.html", title=rows[0].problem, runs=runs)


def _table(number: int, event: Event, tokenizer: hf.Tokenizer) -> HtmlTable:
    cells = list(_cells(event, tokenizer))
    return HtmlTable(_heading(number, event), COLUMNS, cells, align="llrlrrr", marked=event.choice)

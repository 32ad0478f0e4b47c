"""How a problem was solved, event by event: `futurebridge explain` on a run's evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fb_core import hf
from fb_core.chat import EVENT_STYLE
from fb_core.config import RunSettings
from fb_core.files import write_file
from fb_core.report.page import Table as HtmlTable
from fb_core.report.page import page
from fb_core.stages.artefacts import MANIFEST, Artefact
from fb_core.stages.inputs import models_of
from fb_core.terminal import IN_TEXT, IN_TOKEN, escaped

STAGE = "evaluation"
LISTED = 10  # ids in an error
COLUMNS = ("", "token", "id", "source", "log p_S", "log p_T", "score")
SOURCES = {1: "S", 2: "L", 3: "SL"}
CHOSEN = "→"
HALF = "\N{REPLACEMENT CHARACTER}"
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
VERDICT_STYLES = {"correct": "green", "wrong": "red"}
VERDICT_LOOKS = {"correct": "good", "wrong": "bad"}  # classes of the page

Id = Annotated[int, Field(ge=0, lt=1 << 31)]


class _Event(BaseModel):
    model_config = ConfigDict(strict=True)

    step: int = Field(ge=0)
    entropy: float
    pool: list[Id]
    sources: list[Literal[1, 2, 3]]
    slm_logprob: list[float]
    llm_logprob: list[float]
    scores: list[float] | None
    choice: int = Field(ge=0)
    error: str | None


class _Row(BaseModel):
    model_config = ConfigDict(strict=True)

    benchmark: str
    problem: str
    seed: int | None
    tokens: list[Id]
    events: list[_Event]
    text: str
    gold: str
    seconds: float
    verdict: str

    @model_validator(mode="after")
    def _agrees(self) -> _Row:
        for number, event in enumerate(self.events, 1):
            columns: list[list[Any]] = [event.sources, event.slm_logprob, event.llm_logprob]
            columns += [] if event.scores is None else [event.scores]
            if any(len(column) != len(event.pool) for column in columns):
                raise ValueError(f"event {number} with columns of several lengths")
            if (
                event.pool[event.choice : event.choice + 1] != self.tokens[event.step : event.step + 1]
                or not event.pool
            ):
                raise ValueError(f"event {number} whose choice is not the token of its step")
        steps = [event.step for event in self.events]
        if steps != sorted(set(steps)):
            raise ValueError("events out of order")
        return self


def explain(settings: RunSettings, run: Path, problem: str, console: Console, html: Path | None = None) -> None:
    """Show every run of a problem: the text with its events, their candidates and scores.

    Args:
        settings: of the run, for its tokenizer.
        run: its folder.
        problem: an id, or a part that no other id has.
        console: where to print.
        html: a file to write the same to.

    Raises:
        ValueError: no such problem, several, a damaged file, or the settings of another run.
        OSError: no tokenizer, or the file cannot be written.
    """
    rows, tokenizer = find_rows(run, problem), models_of(settings.models).tokenizer
    folder = Artefact(run, STAGE)
    if manifest := folder.manifest():
        known = {**manifest["identity"].get("models", {}), "tokenizer": hf.tokenizer_hash(tokenizer)}
        folder.check(manifest, {"models": known})
    if html is not None:
        write_file(html, html_page(rows, tokenizer).encode())
    print_rows(rows, tokenizer, console)


def find_rows(run: Path, problem: str) -> list[dict[str, Any]]:
    """The rows of one problem in the finished shards of an evaluation, complete or not; greedy first, then by seed.

    Args:
        run: the run's folder.
        problem: an id, or a part that no other id has.

    Raises:
        ValueError: no such problem, several, or a damaged file.
    """
    folder = Artefact(run, STAGE)
    lines: dict[str, list[tuple[Path, int, bytes]]] = {}
    for receipt in sorted(folder.path.glob("*.json")):
        if receipt.name != MANIFEST:
            for number, line in enumerate(folder.read(receipt.stem, "jsonl").splitlines(), 1):
                place = receipt.with_suffix(".jsonl"), number, line
                lines.setdefault(_row(*place)["problem"], []).append(place)
    found = [problem] if problem in lines else [name for name in lines if problem in name]
    if not lines:
        raise ValueError(f"{folder.path}: expected shards of an evaluation, got none; run `futurebridge evaluate`")
    if not found:
        raise ValueError(
            f'problem: expected a part of an id in {folder.path}, got {problem!r}; they are the rows\' "problem" in '
            f"its .jsonl files: {_listed(list(lines))}"
        )
    if len(found) > 1:
        raise ValueError(f"problem: expected a part of one id, got {problem!r}; say which of {_listed(found)}")
    rows = [_row(*place) for place in lines[found[0]]]
    return sorted(rows, key=lambda row: (row["benchmark"], row["seed"] is not None, row["seed"] or 0))


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
        _Row.model_validate(row)
    except ValidationError as problem:
        first = problem.errors()[0]
        got = ".".join(map(str, first["loc"])) + ": " * bool(first["loc"]) + first["msg"].removeprefix("Value error, ")
    except (ValueError, RecursionError) as problem:
        got = str(problem)
    else:
        return row
    raise ValueError(f"{path}, line {number}: expected a row of an evaluation, got {got}; run `futurebridge evaluate`")


def _listed(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - LISTED} more" if len(ids) > LISTED else ""
    return ", ".join(map(repr, ids[:LISTED])) + more


def token_text(token: int, tokenizer: hf.Tokenizer) -> str:
    """One token with its white space visible; U+FFFD for half a character, <id> where it has no text."""
    once, twice = _decode([token], tokenizer), _decode([token, token], tokenizer)
    return escaped(twice[len(once) :], IN_TOKEN) or f"<{token}>"  # the first in a text may lose a space


def _decode(tokens: list[int], tokenizer: hf.Tokenizer) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _pieces(row: Mapping[str, Any], tokenizer: hf.Tokenizer) -> Iterator[tuple[str, int | None]]:
    """(text, number of the event or None) that together are the row's text."""
    tokens = row["tokens"]
    text, shown = _decode(tokens, tokenizer), 0

    def end(step: int) -> int:
        """Characters that are whole once so many tokens are there."""
        return len(text) if step == len(tokens) else len(_decode(tokens[:step], tokenizer).rstrip(HALF))

    for number, event in enumerate(row["events"], 1):
        start, after = end(event["step"]), end(event["step"] + 1)
        yield escaped(text[shown:start], IN_TEXT), None
        piece, shown = text[start:after], after
        yield escaped(piece, IN_TOKEN) or token_text(tokens[event["step"]], tokenizer), number
        yield "\n" * piece.count("\n"), None
    yield escaped(text[shown:], IN_TEXT), None


def _method(row: Mapping[str, Any]) -> str:
    return "greedy" if row["seed"] is None else f"FutureBridge, seed {row['seed']}"


def _facts(row: Mapping[str, Any]) -> str:
    counts = f"{len(row['tokens'])} tokens, {len(row['events'])} event(s), {row['seconds']:.2f} s"
    return f"gold answer {escaped(row['gold'])}, {counts}"


def _heading(number: int, event: Mapping[str, Any]) -> str:
    failed = "" if event["error"] is None else f", the LLM failed: {escaped(event['error'])}"
    return f"Event {number}: step {event['step']}, entropy {event['entropy']:.3f}{failed}"


def _cells(event: Mapping[str, Any], tokenizer: hf.Tokenizer) -> Iterator[tuple[str, ...]]:
    """What stands under `COLUMNS` for every token of the pool."""
    for index, token in enumerate(event["pool"]):
        scores = [event[name][index] if event[name] else math.nan for name in ("slm_logprob", "llm_logprob", "scores")]
        yield (
            CHOSEN if index == event["choice"] else "",
            token_text(token, tokenizer),
            str(token),
            SOURCES[event["sources"][index]],
            *("–" if math.isnan(score) else f"{score:.4f}" for score in scores),
        )


def print_rows(rows: Sequence[Mapping[str, Any]], tokenizer: hf.Tokenizer, console: Console) -> None:
    """Print runs of a problem, as ⟦event⟧¹ in the text and a table an event.

    Args:
        rows: as from `find_rows`.
        tokenizer: of the run.
        console: where to.
    """
    for row in rows:
        title = f"{escaped(row['benchmark'])}, {escaped(row['problem'])}: {_method(row)}, "
        verdict = (escaped(row["verdict"]), VERDICT_STYLES.get(row["verdict"], "yellow"))
        console.print(Text.assemble((title, "bold"), verdict, f", {_facts(row)}"), soft_wrap=True)
        text = Text("\n")
        for piece, number in _pieces(row, tokenizer):
            if number is None:
                text.append(piece)
            else:
                text.append(f"⟦{piece}⟧{str(number).translate(RAISED)}", EVENT_STYLE)
        console.print(text.append("\n"), soft_wrap=True)
        for number, event in enumerate(row["events"], 1):
            console.print(Text(_heading(number, event), "bold"), soft_wrap=True)
            table = Table(box=box.SIMPLE_HEAD)
            for column in COLUMNS:
                words = column in ("", "token", "source")
                table.add_column(column, justify="left" if words else "right", overflow="fold")
            for cells in _cells(event, tokenizer):
                table.add_row(*map(Text, cells), style="bold" if cells[0] else "")
            console.print(table)


def html_page(rows: Sequence[Mapping[str, Any]], tokenizer: hf.Tokenizer) -> str:
    """The same as one HTML file that needs nothing else: hovering over an event shows its table, a click leads to it.

    Args:
        rows: as from `find_rows`.
        tokenizer: of the run.
    """
    runs = [
        {
            "method": _method(row),
            "verdict": row["verdict"],
            "look": VERDICT_LOOKS.get(row["verdict"], "faint"),
            "facts": f"{row['benchmark']}, {_facts(row)}",
            "pieces": list(_pieces(row, tokenizer)),
            "events": [_table(number, event, tokenizer) for number, event in enumerate(row["events"], 1)],
        }
        for row in rows
    ]
    return page("explain.html", title=rows[0]["problem"], runs=runs)


def _table(number: int, event: Mapping[str, Any], tokenizer: hf.Tokenizer) -> HtmlTable:
    cells = list(_cells(event, tokenizer))
    return HtmlTable(_heading(number, event), COLUMNS, cells, align="llrlrrr", marked=event["choice"])

"""`futurebridge explain`: how a problem of a run's evaluation was solved, event by event."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fb_core._util import IN_TEXT, IN_TOKEN, escaped
from fb_core.apps.cli.chat import EVENT_STYLE
from fb_core.apps.demo import DEMO
from fb_core.apps.pipeline.decode import Row, read_rows
from fb_core.apps.pipeline.files import MANIFEST, Artefact
from fb_core.apps.pipeline.models import LABELS, models_of
from fb_core.apps.settings.run import RunSettings
from fb_core.events import SLM, Event
from fb_core.models.checkpoints import tokenizer_hash
from fb_core.models.facts import Tokenizer

EVALUATION = "evaluation"  # the stage whose rows are shown
LISTED = 10  # ids in an error
COLUMNS = ("", "token", "id", "source", "log p_S", "log p_T", "score")
SOURCES = {1: "S", 2: "L", 3: "SL"}
CHOSEN, GREEDY = "→", "g"
LEGEND = f"{CHOSEN} is the chosen token, {GREEDY} the SLM's own (greedy); source S is the SLM, L the LLM."
UNKNOWN = "–"
HALF = "\N{REPLACEMENT CHARACTER}"
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
VERDICT_STYLES = {"correct": "green", "wrong": "red"}


def explain(settings: RunSettings, run: Path, problem: str, console: Console) -> None:
    """Print how a problem was solved: the texts with their events, and the events' candidates and scores.

    The settings name the run's tokenizer; `problem` is an id, or a part of only one. ValueError if no or several
    problems match, a file is damaged, or the settings are those of another run; OSError if the tokenizer is missing.
    """
    rows, tokenizer = find_rows(run, problem), models_of(settings.models).tokenizer
    folder = Artefact(run, EVALUATION)
    if manifest := folder.manifest():
        models = {**manifest["identity"].get("models", {}), "tokenizer": tokenizer_hash(tokenizer)}
        folder.check(manifest, {"models": models})
    print_rows(rows, tokenizer, console)


def find_rows(run: Path, problem: str) -> list[Row]:
    """The rows of one problem in the finished shards of a complete or partial evaluation, by method and seed.

    Raises as `explain`.
    """
    folder = Artefact(run, EVALUATION)
    by_problem: dict[str, list[Row]] = {}
    for receipt in sorted(folder.path.glob("*.json")):
        if receipt.name != MANIFEST:
            for row in read_rows(folder, receipt.stem):
                by_problem.setdefault(row.problem, []).append(row)
    if not by_problem:
        raise ValueError(f"{folder.path}: expected shards of decoded problems, got none; run `futurebridge evaluate`")
    names = [problem] if problem in by_problem else [name for name in by_problem if problem in name]
    if not names:
        raise ValueError(
            f'problem: expected an id in {folder.path} or a part of one, got {problem!r}; ids are the "problem" of '
            f"the rows in its .jsonl files: {_list(list(by_problem))}"
        )
    if len(names) > 1:
        raise ValueError(f"problem: expected a part of only one id, got {problem!r}; name one of {_list(names)}")
    rows, order = by_problem[names[0]], {method: index for index, method in enumerate(LABELS)}
    return sorted(rows, key=lambda row: (row.benchmark, order.get(row.method, len(order)), row.seed or 0))


def _list(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - LISTED} more" if len(ids) > LISTED else ""
    return ", ".join(map(repr, ids[:LISTED])) + more


def token_text(token: int, tokenizer: Tokenizer) -> str:
    """One token with white space visible; U+FFFD for a partial character, <id> if it has no text."""
    once, twice = _decode([token], tokenizer), _decode([token, token], tokenizer)
    return escaped(twice[len(once) :], IN_TOKEN) or f"<{token}>"  # decoding may drop a text's leading space


def _decode(tokens: list[int], tokenizer: Tokenizer) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _pieces(row: Row, tokenizer: Tokenizer) -> Iterator[tuple[str, int | None]]:
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
        start, after = end(event.step), end(event.step + 1)
        yield escaped(text[shown:start], IN_TEXT), None
        piece, shown = text[start:after], after
        yield escaped(piece, IN_TOKEN) or token_text(tokens[event.step], tokenizer), number
        yield "\n" * piece.count("\n"), None
    yield escaped(text[shown:], IN_TEXT), None


def _cells(event: Event, tokenizer: Tokenizer) -> Iterator[tuple[str, ...]]:
    """The cells of every candidate of the pool."""
    greedy = next((index for index, source in enumerate(event.sources) if source & SLM), None)
    for index, token in enumerate(event.pool):
        marks = ([CHOSEN] if index == event.choice else []) + ([GREEDY] if index == greedy else [])
        columns = (event.slm_logprob, event.llm_logprob, event.scores)
        scores = [column[index] if column else math.nan for column in columns]
        numbers = (UNKNOWN if math.isnan(score) else f"{score:.4f}" for score in scores)
        yield " ".join(marks), token_text(token, tokenizer), str(token), SOURCES[event.sources[index]], *numbers


def print_rows(rows: Sequence[Row], tokenizer: Tokenizer, console: Console) -> None:
    """Print a problem and all its rows, with ⟦event⟧¹ in the text and one table per event."""
    if rows[0].question:
        console.print(Text(f"Question: {escaped(rows[0].question, IN_TEXT)}"), soft_wrap=True)
    if any(row.events for row in rows):
        console.print(Text(LEGEND, "italic"), soft_wrap=True)
    for row in rows:
        method = LABELS.get(row.method, escaped(row.method)) + ("" if row.seed is None else f", seed {row.seed}")
        title = f"{escaped(row.benchmark.removeprefix(DEMO))}, {escaped(row.problem)}: {method}, "
        verdict = (escaped(row.verdict), VERDICT_STYLES.get(row.verdict, "yellow"))
        facts = f", gold answer {escaped(row.gold)}, {len(row.tokens)} tokens, {len(row.events)} event(s)"
        facts += f", {row.calls} LLM call(s)" + ("" if row.seconds is None else f", {row.seconds:.2f} s")
        console.print(Text.assemble((title, "bold"), verdict, facts), soft_wrap=True)
        text = Text("\n")
        for piece, number in _pieces(row, tokenizer):
            if number is None:
                text.append(piece)
            else:
                text.append(f"⟦{piece}⟧{str(number).translate(RAISED)}", EVENT_STYLE)
        console.print(text.append("\n"), soft_wrap=True)
        for number, event in enumerate(row.events, 1):
            failed = "" if event.error is None else f", the LLM failed: {escaped(event.error)}"
            heading = f"Event {number}: step {event.step}, entropy {event.entropy:.3f}{failed}"
            console.print(Text(heading, "bold"), soft_wrap=True)
            table = Table(box=box.SIMPLE_HEAD)
            for column in COLUMNS:
                words = column in ("", "token", "source")
                table.add_column(column, justify="left" if words else "right", overflow="fold")
            for index, cells in enumerate(_cells(event, tokenizer)):
                table.add_row(*map(Text, cells), style="bold" if index == event.choice else "")
            console.print(table)

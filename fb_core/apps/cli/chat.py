"""A pair, an adapter and a terminal: `futurebridge generate` and `futurebridge chat`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.segment import Segment, Segments

from fb_core._util import IN_TEXT, escaped
from fb_core.apps.settings.loading import load
from fb_core.apps.settings.pair import PairSettings
from fb_core.decode.decoder import Generation, LowLatencyDecoder
from fb_core.decode.selectors import LLMPreference
from fb_core.events import Event
from fb_core.models.facts import Tokenizer, max_positions
from fb_core.models.tokens import chat_ids
from fb_core.runtime.detokenizer import Text

EVENT_STYLE = "bold black on bright_yellow"
HELP = "/help shows this; /new begins a new conversation; Ctrl-C stops an answer; /quit or an empty line ends the chat."


class Chat:
    """A pair of models that answers in a terminal; raises as `load`."""

    def __init__(self, settings: PairSettings) -> None:
        self.settings = settings
        pair, self.tokenizer, selector, policy, options, self.thinking = load(settings)
        options |= {"max_length": settings.max_length, "tokenizer": self.tokenizer}
        self.decoder = LowLatencyDecoder(pair.slm, pair.llm, selector, policy, **options)

    def greeting(self) -> str:
        """Who answers, and what can be typed."""
        settings, selector = self.settings, self.decoder.intervention.selector
        direct = isinstance(selector, LLMPreference)
        chooser = "the large model's own choice" if direct else f"the reranker in {settings.adapter}"
        how = f"; where it is uncertain {settings.llm or settings.server} is asked, and {chooser} decides"
        how = " by itself" if selector is None else how
        return escaped(f"{settings.slm} answers{how}. {HELP}", IN_TEXT)

    def answer(self, messages: list[dict[str, str]], console: Console) -> Generation:
        """Generate an answer and print it as it comes, with the tokens of events highlighted.

        The oldest turns of the messages are dropped, with a notice, if prompt and answer would be too long together.
        ValueError for a last turn that is too long by itself, or NaN logits; OSError if the LLM does not answer.
        """
        prompt = torch.tensor(self._prompt(messages, console), device=self.decoder.slm.device)
        printer, sampling = Printer(self.tokenizer, console), self.settings.sampling()
        try:
            return self.decoder.generate(prompt, self.settings.max_new_tokens, on_token=printer, sampling=sampling)
        finally:
            printer.end()

    def _prompt(self, messages: list[dict[str, str]], console: Console) -> list[int]:
        """The ids of the messages, after the oldest ones were dropped if there is no room."""
        settings, positions = self.settings, max_positions(self.decoder.slm) or math.inf
        room, new, turns = min(settings.max_length, positions), settings.max_new_tokens, len(messages)
        while len(ids := chat_ids(self.tokenizer, messages, self.thinking)) + new > room and len(messages) > 1:
            del messages[:2]  # a question and its answer
        if len(messages) < turns:
            limit = "max_length" if room == settings.max_length else "the model's positions"
            dropped = f"{(turns - len(messages)) // 2} oldest turn(s) dropped"
            line = f"{dropped}: the conversation and {new} new tokens exceeded the {room} tokens of {limit}"
            console.print(line, style="dim", highlight=False, soft_wrap=True)
        if not ids:
            raise ValueError("prompt: expected at least one token, got none; give a text")
        if len(ids) >= positions:
            raise ValueError(
                f"prompt: expected at most {positions - 1} tokens for a model of {positions} positions, got "
                f"{len(ids)}; shorten it"
            )
        if min(len(ids) + new, positions) > settings.max_length:
            raise ValueError(
                f"max_length: expected room for {len(ids)} tokens of the prompt and {new} of max_new_tokens, "
                f"got {settings.max_length}; raise it, lower max_new_tokens or shorten the prompt"
            )
        return ids


class Printer:
    """Prints each token's text, escaped, as soon as it is certain; printed text never changes."""

    def __init__(self, tokenizer: Tokenizer, console: Console) -> None:
        self.console, self._text = console, Text(tokenizer, ())

    def __call__(self, token: int, event: Event | None) -> None:
        """Take one token, with its event if it is the token of one."""
        self._print(self._text.add(token), "" if event is None else EVENT_STYLE)

    def end(self) -> None:
        """Print what is left, even if it is not whole characters."""
        self._print(self._text.end(), "")
        self.console.print()

    def _print(self, text: str, style: str) -> None:
        piece = Segment(escaped(text, IN_TEXT), self.console.get_style(style))
        self.console.print(Segments([piece]), end="", soft_wrap=True)


def summary(generation: Generation, seconds: float) -> str:
    """One line on what was generated."""
    tokens, events, pool = len(generation.token_ids), len(generation.events), generation.usage.pool
    counts = f"{events} event(s), mean pool {pool:.1f}" if events else "no event"
    return f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.1f} a second), {counts}"


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt, given as text or as a file in UTF-8; a byte-order mark and the last line's end are no part of it.

    ValueError if neither or both are given or the file is not UTF-8, OSError if it cannot be read.
    """
    if (prompt is None) == (file is None):
        raise ValueError(f"prompt: expected a PROMPT or --file, got {'both' if file else 'neither'}; give one of them")
    if file is None:
        return cast(str, prompt)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as problem:
        raise ValueError(f"{file}: expected UTF-8, got {problem.reason}; save it as UTF-8") from None
    return text.removesuffix("\n")

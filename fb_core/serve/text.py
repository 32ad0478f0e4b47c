"""Tokens as text, as they come: whole characters, and nothing after a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from fb_core import hf

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Text:
    """The text of an answer, piece by piece.

    Args:
        tokenizer: of the ids.
        stops: strings that end the answer and are not part of it.

    Attributes:
        stopped: whether a stop string has come.
        decoded: number of characters so far, a stop string included.
    """

    def __init__(self, tokenizer: hf.Tokenizer, stops: Sequence[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.stopped = False
        self.decoded = 0
        self._ids: list[int] = []  # the last decoded token and all after it: its text may depend on the token before
        self._known = ""  # text of the ids that are decoded
        self._held = ""  # decoded, but may be the beginning of a stop string

    def add(self, token: int) -> str:
        """Take a token, and return the text that has become certain."""
        if self.stopped:
            return ""
        self._ids.append(token)
        text = str(self.tokenizer.decode(self._ids, skip_special_tokens=True))
        if text.endswith(INCOMPLETE):
            return ""
        return self._decoded(text)

    def name(self, token: int) -> str:
        """The text of one token by itself."""
        return str(self.tokenizer.decode([token]))

    def end(self) -> str:
        """Return the text that is left, even if it is not whole characters."""
        if self.stopped:
            return ""
        rest = self._decoded(str(self.tokenizer.decode(self._ids, skip_special_tokens=True)))
        rest, self._held = rest + self._held, ""
        return rest

    def _decoded(self, text: str) -> str:
        new, self._ids = text[len(self._known) :], self._ids[-1:]
        self.decoded += len(new)
        self._known = str(self.tokenizer.decode(self._ids, skip_special_tokens=True))
        whole = self._held + new
        found = min((place for stop in self.stops if (place := whole.find(stop)) >= 0), default=None)
        if found is not None:
            self.stopped, self._held = True, ""
            return whole[:found]
        kept = max((_overlap(whole, stop) for stop in self.stops), default=0)
        self._held = whole[len(whole) - kept :]
        return whole[: len(whole) - kept]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that is a beginning of the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

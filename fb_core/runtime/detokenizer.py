"""Tokens as text, as they come: whole characters, and nothing after a stop string.

`tokenizers.decoders.DecodeStream` will not do: it fails on bytes that are no UTF-8, drops an unfinished character at
the end, takes quadratic time over such bytes, knows no clean-up, and forgets special tokens that are left out.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Sequence
from functools import cache
from typing import NamedTuple

from fb_core.models.facts import Tokenizer

WORD = "a"  # a piece before others makes their text that of the middle of a text
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # the piece of one byte, where a vocabulary falls back to bytes
PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # byte-level pieces hold these as Latin-1
OTHERS = [byte for byte in range(0x100) if byte not in PRINTED]
BYTE_OF = {chr(byte): byte for byte in PRINTED} | {chr(0x100 + index): byte for index, byte in enumerate(OTHERS)}
CLEANED = re.compile(".*(?:[^ ]{8}|(?<! n)(?<=\\w)(?= ))", re.DOTALL)  # of this, a clean-up does not depend on the rest
NO_TEXT = "\ufffd"  # the character of a byte that is no text


class Name(NamedTuple):
    r"""One token by itself: its text, or `bytes:\xe4` if it is no whole characters, and its bytes."""

    text: str
    bytes: bytes


class TextPart(NamedTuple):
    """A part of an answer; a special token that is left out is a part that is not shown."""

    text: str
    shown: bool = True


class Text:
    """The text of an answer, piece by piece: together the tokenizer's own text of all its ids, up to a stop.

    Args:
        stops: strings that end the answer and are not part of it; special tokens may be in them.
        stop_ids: ids that end the answer and are not part of it.
        skip_special: whether special tokens are left out of the text.
        after_text: whether the answer goes on a text, so that it may begin with a space.
        pieces: of tokens seen so far, shared by texts of one tokenizer and skip_special.

    Attributes:
        stopped: whether a stop has come.
        decoded: number of characters so far, a stop string included.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        stop_ids: Collection[int] = (),
        *,
        skip_special: bool = True,
        after_text: bool = False,
        pieces: dict[int, TextPart] | None = None,
    ) -> None:
        self.tokenizer, self.stops, self.stop_ids, self.skip_special = tokenizer, stops, stop_ids, skip_special
        self.stopped = False
        self.decoded = 0
        self._byte_level, self._falls_back = self._joined(["Ã©"]) == "é", self._joined(["<0x41>"]) == "A"
        self._before = [WORD] if after_text else []  # pieces that the text of the next one depends on
        self._characters = codecs.getincrementaldecoder("utf-8")("replace" if self._byte_level else "strict")
        self._run: list[TextPart] = []  # of a fallback's bytes, which are text only if all of them together are
        self._run_is_text = True
        self._tail = ""  # the end of the text so far, the open run included
        bpe = type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__ == "BPE"
        forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
        self._cleaned = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)) and (forced or not bpe)
        self._unclean = ""  # certain text before its clean-up
        self._held: list[TextPart] = []  # certain text that may be the beginning of a stop string
        self._named, self._pieces = cache(self._name), {} if pieces is None else pieces

    def add(self, token: int) -> str:
        """Take a token, and return the text that has become certain."""
        if self.stopped:
            return ""
        if token in self.stop_ids:
            rest, self.stopped = self.end(), True
            return rest
        piece = self._pieces.get(token) or self._piece(token)
        if piece is None:
            return ""
        text = self._released(self._taken(piece))
        if self.stops and self._run and self._run_stops():
            text += self._released(self._run_ended(), last=True)
        return text

    def name(self, token: int) -> Name:
        """A token by itself, as it would come next."""
        return self._named(token, bool(self._before))

    def end(self) -> str:
        """Return the text that is left, even if it is not whole characters."""
        if self.stopped:
            return ""
        rest = self._released(self._run_ended(), last=True)
        held, self._held = self._held, []
        return rest + _shown(held)

    def _piece(self, token: int) -> TextPart | None:
        """A token's piece, and whether its text is shown; None for an id past the vocabulary."""
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return None
        left_out = self.skip_special and not self.tokenizer.decode([token], skip_special_tokens=True)
        return self._pieces.setdefault(token, TextPart(piece, not (left_out and self.tokenizer.decode([token]))))

    def _name(self, token: int, inside: bool) -> Name:
        piece, shown = self._piece(token) or TextPart("", False)
        data = self._bytes_of(piece) if shown else piece.encode()
        if data is None:
            data = self._text(piece, [WORD] if inside else []).encode()
        try:
            return Name(data.decode(), data)
        except UnicodeDecodeError:
            return Name("bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data)

    def _taken(self, part: TextPart) -> list[TextPart]:
        """Take the next piece, and return the text that has become certain, its clean-up and stops aside."""
        piece, shown = part
        data = self._bytes_of(piece) if shown else b""
        if data is None:
            text, parts = self._text(piece, self._before), self._run_ended()
            # At the beginning a text may be empty, as that of a space that is dropped there.
            self._before = [WORD, piece] if text or WORD in self._before else [*self._before, piece]
            return [*parts, TextPart(text)]
        if shown:
            part = TextPart(self._decoded(data))
            if data == b" " and not self._before:  # which may be dropped there
                part = TextPart(self._text(piece, []))
            self._before = [WORD, piece]
        if self._byte_level:
            return [part]
        self._run.append(part)
        return []

    def _run_as_it_is(self) -> list[TextPart]:
        """The text of the run if it ended here; each byte is one character if together they are no text."""
        if self._run_is_text and not self._characters.getstate()[0]:
            return self._run
        return [TextPart(NO_TEXT) if part.shown else part for part in self._run]

    def _run_ended(self) -> list[TextPart]:
        """End the open run of bytes, and return its text."""
        parts = [TextPart(self._decoded(b"", last=True))] if self._byte_level else self._run_as_it_is()
        self._characters.reset()
        self._run, self._run_is_text = [], True
        return parts

    def _run_stops(self) -> bool:
        """Whether the last part of the open run completes a stop string."""
        *before, last = self._run
        longest = max(map(len, self.stops))
        self._tail = (self._tail[-longest:] if before else _whole(self._held)) + last.text
        if not any(stop in self._tail for stop in self.stops):
            return False
        whole = _whole([*self._held, *self._run_as_it_is()])
        return any(stop in whole for stop in self.stops)

    def _released(self, new: Sequence[TextPart], last: bool = False) -> str:
        """Take certain text, and return what is neither a stop string nor the beginning of one."""
        if self._cleaned:
            new = self._clean(new, last)
        text = _shown(new)
        self.decoded += len(text)
        if not self.stops:  # then nothing is held
            return text
        whole = _whole(parts := [*self._held, *new])
        starts = [start for stop in self.stops if (start := whole.find(stop)) >= 0]
        self.stopped = bool(starts)
        kept = max((_overlap(whole, stop) for stop in self.stops), default=0)
        before, self._held = _split(parts, min(starts, default=len(whole) - kept))
        return _shown(before)

    def _clean(self, parts: Sequence[TextPart], last: bool) -> list[TextPart]:
        """The parts after the clean-up that some tokenizers make of a whole text, as far as it is certain."""
        self._unclean += _shown(parts)
        certain = CLEANED.match(self._unclean)
        end = len(self._unclean) if last else certain.end() if certain else 0
        text, self._unclean = self.tokenizer.clean_up_tokenization(self._unclean[:end]), self._unclean[end:]
        return [TextPart(text), *(part for part in parts if not part.shown)]

    def _decoded(self, data: bytes, last: bool = False) -> str:
        """The characters that the next bytes complete."""
        try:
            return self._characters.decode(data, last)
        except UnicodeDecodeError:
            self._run_is_text = False
            return NO_TEXT

    def _bytes_of(self, piece: str) -> bytes | None:
        """The bytes that a piece stands for; None if it stands for characters."""
        if self._byte_level:
            return bytes(BYTE_OF[char] for char in piece) if BYTE_OF.keys() >= set(piece) else piece.encode()
        match = BYTE.fullmatch(piece) if self._falls_back else None
        return bytes.fromhex(match[1]) if match else None

    def _text(self, piece: str, before: Sequence[str]) -> str:
        """The text of a piece that follows others."""
        return self._joined([*before, piece])[len(self._joined(before)) :]

    def _joined(self, pieces: Sequence[str]) -> str:
        return str(self.tokenizer.convert_tokens_to_string(list(pieces))) if pieces else ""


def _whole(parts: Sequence[TextPart]) -> str:
    return "".join(part.text for part in parts)


def _shown(parts: Sequence[TextPart]) -> str:
    return "".join(part.text for part in parts if part.shown)


def _split(parts: Sequence[TextPart], at: int) -> tuple[list[TextPart], list[TextPart]]:
    """The parts before and after a place in their text."""
    before, after = list[TextPart](), list[TextPart]()
    for text, shown in parts:
        before.append(TextPart(text[:at], shown))
        after.append(TextPart(text[at:], shown))
        at = max(0, at - len(text))
    return before, [part for part in after if part.text]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that is a beginning of the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

"""Tokens as text, as they come: whole characters, and nothing after a stop string."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from fb_core import hf

WORD = "a"  # a piece before others makes their text that of the middle of a text
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # the piece of one byte, where a vocabulary falls back to bytes
PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # byte-level pieces hold these as Latin-1
OTHERS = [byte for byte in range(0x100) if byte not in PRINTED]
BYTE_OF = {chr(byte): byte for byte in PRINTED} | {chr(0x100 + index): byte for index, byte in enumerate(OTHERS)}
CLEANED = re.compile(".*(?:[^ ]{8}|(?<! n)(?<=\\w)(?= ))", re.DOTALL)  # of this, a clean-up does not depend on the rest


class Name(NamedTuple):
    r"""One token by itself: its text, or `bytes:\xe4` if it is no whole characters, and its bytes."""

    text: str
    bytes: bytes


class Part(NamedTuple):
    """A part of an answer; a special token that is left out is a part that is not shown."""

    text: str
    shown: bool = True


class Text:
    """The text of an answer, piece by piece: together the tokenizer's own text of all its ids, up to a stop.

    Args:
        tokenizer: of the ids.
        stops: strings that end the answer and are not part of it; special tokens may be in them.
        stop_ids: ids that end the answer and are not part of it.
        skip_special: whether special tokens are left out of the text.
        after_text: whether the answer goes on a text, so that it may begin with a space.

    Attributes:
        stopped: whether a stop has come.
        decoded: number of characters so far, a stop string included.
    """

    def __init__(
        self,
        tokenizer: hf.Tokenizer,
        stops: Sequence[str],
        stop_ids: Collection[int] = (),
        *,
        skip_special: bool = True,
        after_text: bool = False,
    ) -> None:
        self.stops, self.stop_ids, self.skip_special = stops, stop_ids, skip_special
        self.stopped = False
        self.decoded = 0
        self._pieces = _Pieces(tokenizer)
        self._before = [WORD] if after_text else []  # known pieces that the text of the open ones depends on
        self._open: list[Part] = []  # pieces whose text may still change
        self._guess = ""  # the end of the text so far, open pieces included
        self._unclean = ""  # certain text before its clean-up
        self._held: list[Part] = []  # certain text that may be the beginning of a stop string
        self._names: dict[tuple[int, bool], Name] = {}

    def add(self, token: int) -> str:
        """Take a token, and return the text that has become certain."""
        if self.stopped:
            return ""
        if token in self.stop_ids:
            rest, self.stopped = self.end(), True
            return rest
        piece = self._pieces.of(token)
        if piece is None:
            return ""
        shown = not (self.skip_special and self._pieces.special(token))
        if not self._open:
            self._guess = "".join(part.text for part in self._held)
        self._open.append(Part(piece, shown))
        text = self._pieces.take(piece) if shown else piece
        if self._pieces.whole:
            return self._released(self._settled())
        longest = max(map(len, self.stops), default=0)
        self._guess = self._guess[-longest:] + text
        if any(stop in self._guess for stop in self.stops) and self._stop_at([*self._held, *self._parts()]) is not None:
            return self._released(self._settled(last=True))
        return ""

    def name(self, token: int) -> Name:
        """A token by itself, as it would come next."""
        key = (token, bool(self._before or self._open))
        if key not in self._names:
            self._names[key] = self._name(*key)
        return self._names[key]

    def _name(self, token: int, inside: bool) -> Name:
        piece = self._pieces.of(token)
        if piece is None:
            return Name("", b"")
        if self.skip_special and self._pieces.special(token):
            return Name(piece, piece.encode())
        data = self._pieces.bytes_of(piece)
        if data is not None:
            with suppress(UnicodeDecodeError):
                return Name(data.decode(), data)
            return Name("bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data)
        text = self._pieces.text([piece], [WORD] if inside else [])
        return Name(text, text.encode())

    def end(self) -> str:
        """Return the text that is left, even if it is not whole characters."""
        if self.stopped:
            return ""
        rest = self._released(self._settled(last=True))
        held, self._held = self._held, []
        return rest + _shown(held)

    def _settled(self, last: bool = False) -> list[Part]:
        """The open pieces' text, which is certain; if it is not the last, what depends on the next piece stays open."""
        parts = self._parts()
        if not (last or self._before or any(part.text for part in parts)):
            return []  # an empty beginning, such as a space that is dropped there
        shown = [piece for piece, shown in self._open if shown]
        if shown:
            self._before = [WORD, shown[-1]]
        self._open = []
        if self._pieces.cleaned:
            parts = self._clean(parts, last)
        self.decoded += len(_shown(parts))
        return parts

    def _parts(self) -> list[Part]:
        """The text of the open pieces."""
        shown = [piece for piece, shown in self._open if shown]
        whole, parts, start, end = self._pieces.text(shown, self._before), list[Part](), 0, 0
        lengths = self._pieces.lengths(shown, self._before)
        for piece, shown_one in self._open:
            if shown_one:
                end = max(end, next(lengths))
                continue
            parts += [Part(whole[start:end]), Part(piece, False)]
            start = end
        return [*parts, Part(whole[start:])]

    def _clean(self, parts: Sequence[Part], last: bool) -> list[Part]:
        """The parts after the clean-up that some tokenizers make of a whole text, as far as it is certain."""
        self._unclean += _shown(parts)
        certain = CLEANED.match(self._unclean)
        end = len(self._unclean) if last else certain.end() if certain else 0
        text, self._unclean = self._pieces.clean(self._unclean[:end]), self._unclean[end:]
        return [Part(text), *(part for part in parts if not part.shown)]

    def _released(self, new: Sequence[Part]) -> str:
        """The text that is neither a stop string nor the beginning of one."""
        parts = [*self._held, *new]
        start, whole = self._stop_at(parts), "".join(part.text for part in parts)
        self.stopped = start is not None
        kept = max((_overlap(whole, stop) for stop in self.stops), default=0)
        before, self._held = _split(parts, len(whole) - kept if start is None else start)
        return _shown(before)

    def _stop_at(self, parts: Sequence[Part]) -> int | None:
        """Where the first stop string begins."""
        whole = "".join(part.text for part in parts)
        return min((start for stop in self.stops if (start := whole.find(stop)) >= 0), default=None)


class _Pieces:
    """The strings of a vocabulary, and the text that a tokenizer makes of them."""

    def __init__(self, tokenizer: hf.Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.byte_level, self.falls_back = self._joined(["Ã©"]) == "é", self._joined(["<0x41>"]) == "A"
        bpe = type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__ == "BPE"
        forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
        self.cleaned = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)) and (forced or not bpe)
        self.whole = True  # whether no later piece changes the text of those that were taken
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, token: int) -> str | None:
        """A token's piece; None for an id past the vocabulary."""
        return self.tokenizer.convert_ids_to_tokens(token)

    def special(self, token: int) -> bool:
        """Whether a text without special tokens leaves it out."""
        return not self.tokenizer.decode([token], skip_special_tokens=True) and bool(self.tokenizer.decode([token]))

    def bytes_of(self, piece: str) -> bytes | None:
        """The bytes that a piece stands for; None if it stands for characters."""
        if self.falls_back:
            return bytes.fromhex(match[1]) if (match := BYTE.fullmatch(piece)) else None
        if not self.byte_level:
            return None
        try:
            return bytes(BYTE_OF[char] for char in piece)
        except KeyError:
            return piece.encode()

    def take(self, piece: str) -> str:
        """Take the next piece and return the characters that its bytes complete."""
        data = self.bytes_of(piece)
        text = self._characters.decode(data or b"", final=data is None)
        self.whole = data is None or (self.byte_level and not self._characters.getstate()[0])
        return text

    def text(self, pieces: Sequence[str], before: Sequence[str]) -> str:
        """The text of pieces that follow others."""
        return self._joined([*before, *pieces])[len(self._joined(before)) :]

    def lengths(self, pieces: Sequence[str], before: Sequence[str]) -> Iterator[int]:
        """The length of the text of the first piece, of the first two, and so on; bytes take linear time."""
        characters = codecs.getincrementaldecoder("utf-8")("strict" if self.falls_back else "replace")
        base = count = size = 0
        broken = False  # whether each byte is a character of its own, as in a fallback's run of bytes that is no text
        for n, piece in enumerate(pieces, 1):
            if (data := self.bytes_of(piece)) is None:
                characters.reset()
                count, size, broken = 0, 0, False
            else:
                size += len(data)
                try:
                    count += len(characters.decode(data))
                except UnicodeDecodeError:
                    broken = True
            pending = bool(characters.getstate()[0])
            own = size if broken or (pending and self.falls_back) else count + pending
            if data is None or n == 1:
                base = len(self.text(pieces[:n], before)) - own
            yield base + own

    def clean(self, text: str) -> str:
        """The text after the tokenizer's clean-up."""
        return str(self.tokenizer.clean_up_tokenization(text))

    def _joined(self, pieces: Sequence[str]) -> str:
        return str(self.tokenizer.convert_tokens_to_string(list(pieces))) if pieces else ""


def _shown(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if part.shown)


def _split(parts: Sequence[Part], at: int) -> tuple[list[Part], list[Part]]:
    """The parts before and after a place in their text."""
    before, after = list[Part](), list[Part]()
    for text, shown in parts:
        before.append(Part(text[:at], shown))
        after.append(Part(text[at:], shown))
        at = max(0, at - len(text))
    return before, [part for part in after if part.text]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that is a beginning of the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

"""What models and servers write, made harmless for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

IN_TOKEN = {" ": "␣", "\n": "↵", "\t": "⇥"}
IN_TEXT = {"\n": "\n", "\t": "\t"}


def escaped(text: str, shown: Mapping[str, str] = {}) -> str:
    """Text without terminal control: characters in `shown` are replaced by it, other unprintable ones escaped."""
    return "".join(
        shown.get(char) or (char if char.isprintable() else char.encode("unicode_escape").decode()) for char in text
    )

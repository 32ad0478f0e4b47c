"""A small document: sections of text, tables and figures, as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from benchmarks.theme import Picture
from fb_core.apps.pipeline.page import Table, page


@dataclass(frozen=True)
class Span:
    """Text set off from the rest: code (a token, a command) or a coloured verdict."""

    text: str
    kind: Literal["code", "good", "bad", "faint"]


Piece = str | Span
Text = Piece | tuple[Piece, ...]


@dataclass(frozen=True)
class Paragraph:
    """Running text."""

    text: Text


@dataclass(frozen=True)
class Items:
    """A bulleted list."""

    texts: Sequence[Text]


@dataclass(frozen=True)
class Figure:
    """A picture with its file name (without suffix) and its caption."""

    name: str
    caption: str
    picture: Picture


Block = Paragraph | Items | Table | Figure


@dataclass(frozen=True)
class Section:
    """Blocks and subsections under a title; the HTML page folds them under the title and the brief description."""

    title: str
    blocks: Sequence[Block] = ()
    sections: Sequence[Section] = ()
    brief: str = ""


@dataclass(frozen=True)
class Document:
    """A whole report: blocks that are always shown, then folded sections."""

    title: str
    blocks: Sequence[Block]
    sections: Sequence[Section]

    def figures(self) -> Iterator[Figure]:
        """All figures, in order."""

        def inside(sections: Sequence[Section]) -> Iterator[Block]:
            for section in sections:
                yield from section.blocks
                yield from inside(section.sections)

        return (block for block in chain(self.blocks, inside(self.sections)) if isinstance(block, Figure))

    def html(self) -> str:
        """One self-contained HTML file; its only script sorts the tables."""
        return page("report.html", __package__, title=self.title, blocks=self.blocks, sections=self.sections)

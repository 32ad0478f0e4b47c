"""A small document: sections of text, tables and figures, as one HTML file that needs nothing else, and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from benchmarks.theme import Picture
from fb_core.page import Table, markdown_table, page
from fb_core.terminal import escaped


@dataclass(frozen=True)
class Span:
    """Text set off from the rest: code (a token, a command) or a coloured verdict."""

    text: str
    kind: Literal["code", "good", "bad", "faint"]


@dataclass(frozen=True)
class Link:
    """A link to another file in the report's folder, or to a place in the same file.

    Raises:
        ValueError: an address outside the report's folder.
    """

    text: str
    to: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(?!/)[\w/-]*(?:\w\.html)?(?:#[\w-]+)?", self.to):
            raise ValueError(f"to: expected a page beside the report, got {self.to!r}; write it there")


Piece = str | Span | Link
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
    """A picture with its file name (without suffix) and its caption.

    Attributes:
        narrow: the version for narrow screens; without one, `picture` scrolls sideways there.
    """

    name: str
    caption: str
    picture: Picture
    narrow: Picture | None = None


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

    def markdown(self, figures: str) -> str:
        """The same as Markdown with pipe tables; `figures` is the folder of the pictures, relative to the file."""
        parts = [f"# {_markdown(self.title)}", *(_markdown_block(block, figures) for block in self.blocks)]
        return "\n\n".join([*parts, *_markdown_sections(self.sections, figures)]) + "\n"


def _pieces(text: Text) -> tuple[Piece, ...]:
    return text if isinstance(text, tuple) else (text,)


# Characters that would be markup: links, images, code, emphasis (not inside a word), the end of a cell, mathematics.
_MARKUP = re.compile(r"[\\`*~$|]|(?<![^\W_])_|_(?![^\W_])|(?<=\])[(:\[]|&|<")
_IN_LINK = re.compile(rf"[\[\]]|{_MARKUP.pattern}")
_ENTITIES = {"&": "&amp;", "<": "&lt;"}
_BLOCK_START = re.compile(r"\A(\d*)(?=[#>+=-]|[.)](?:\s|\Z))")


def _markdown(text: Text) -> str:
    return "".join(map(_markdown_piece, _pieces(text)))


def _markdown_piece(piece: Piece) -> str:
    text = piece if isinstance(piece, str) else piece.text
    markup = _IN_LINK if isinstance(piece, Link) else _MARKUP
    marked = markup.sub(lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), escaped(text))
    if isinstance(piece, Link):
        return f"[{marked}]({piece.to})"
    return f"<code>{marked}</code>" if isinstance(piece, Span) and piece.kind == "code" else marked


def _line(text: Text) -> str:
    """Text at the start of a line, escaped so that it starts no list, heading or quotation."""
    return _BLOCK_START.sub(r"\1\\", _markdown(text).lstrip())


def _markdown_sections(sections: Sequence[Section], figures: str, level: int = 2) -> Iterator[str]:
    for section in sections:
        yield f"{'#' * level} {_markdown(section.title)}"
        if section.brief:
            yield _line(section.brief)
        yield from (_markdown_block(block, figures) for block in section.blocks)
        yield from _markdown_sections(section.sections, figures, level + 1)


def _markdown_block(block: Block, figures: str) -> str:
    if isinstance(block, Paragraph):
        return _line(block.text)
    if isinstance(block, Items):
        return "\n".join(f"- {_line(text)}" for text in block.texts)
    if isinstance(block, Figure):
        return f"![{block.name}]({figures}/{block.name}.svg)\n\n{_line(block.caption)}"
    rows = [[_markdown(cell) for cell in row] for row in block.rows]
    lines = markdown_table([_markdown(head) for head in block.head], rows, block.sides)
    note = f"\n\n{_line(block.note)}" if block.note else ""
    return f"**{_markdown(block.caption)}**\n\n" + "\n".join(lines) + note

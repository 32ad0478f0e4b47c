"""A small document: sections of text, tables and figures, as one HTML file that needs nothing else, and as Markdown."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from typing import Literal, NamedTuple

from fb_core.terminal import IN_TEXT, escaped


@dataclass(frozen=True)
class Span:
    """Text with a meaning: something as it is written elsewhere (a token, a command), or a verdict."""

    text: str
    kind: Literal["code", "good", "bad", "faint"]


Text = str | Span | tuple[str | Span, ...]


class Picture(NamedTuple):
    """A figure as SVG, for a light and for a dark ground."""

    light: str
    dark: str


@dataclass(frozen=True)
class Paragraph:
    """Running text."""

    text: Text


@dataclass(frozen=True)
class Items:
    """Points of equal weight."""

    texts: Sequence[Text]


@dataclass(frozen=True)
class Verbatim:
    """A text as it is, line by line, under a label."""

    label: str
    text: str


@dataclass(frozen=True)
class Table:
    """Cells under column heads.

    Attributes:
        caption: what it shows.
        rows: cells of every row, as many as `head` has.
        note: the settings that its numbers were made with.
        align: "l" or "r" for each column; the first left and the others right if left out.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Text]]
    note: str = ""
    align: str = ""

    @property
    def sides(self) -> str:
        """`align`, given or not."""
        return self.align or "l" + "r" * (len(self.head) - 1)


@dataclass(frozen=True)
class Figure:
    """A picture under its file name (without suffix), with the caption that says in words what it shows."""

    name: str
    caption: str
    picture: Picture


Block = Paragraph | Items | Verbatim | Table | Figure


@dataclass(frozen=True)
class Section:
    """Blocks under a title, then smaller sections."""

    title: str
    blocks: Sequence[Block] = ()
    sections: Sequence[Section] = ()


@dataclass(frozen=True)
class Document:
    """What a reader gets."""

    title: str
    blocks: Sequence[Block]
    sections: Sequence[Section]

    def figures(self) -> Iterator[Figure]:
        """All figures, in their order."""

        def inside(sections: Sequence[Section]) -> Iterator[Block]:
            for section in sections:
                yield from section.blocks
                yield from inside(section.sections)

        return (block for block in chain(self.blocks, inside(self.sections)) if isinstance(block, Figure))

    def html(self) -> str:
        """One file with its figures inside; it loads nothing and runs nothing."""
        title = _html(self.title)
        style = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
        policy = f"default-src 'none'; img-src data:; style-src 'sha256-{style}'; base-uri 'none'; form-action 'none'"
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
            f"{''.join(map(_html_block, self.blocks))}"
            f"<nav><details open><summary>Contents</summary>\n{_contents(self.sections)}</details></nav>\n<main>\n"
            f"{_html_sections(self.sections)}</main>\n</body>\n</html>\n"
        )

    def markdown(self, figures: str) -> str:
        """The same with pipe tables; `figures` is the folder of the pictures, seen from the file."""
        parts = [f"# {_markdown(self.title)}", *(_markdown_block(block, figures) for block in self.blocks)]
        return "\n\n".join([*parts, *_markdown_sections(self.sections, figures)]) + "\n"


def _pieces(text: Text) -> tuple[str | Span, ...]:
    return text if isinstance(text, tuple) else (text,)


def _html(text: Text) -> str:
    return "".join(map(_html_piece, _pieces(text)))


def _html_piece(piece: str | Span) -> str:
    if isinstance(piece, str):
        return escape(escaped(piece))
    inside = escape(escaped(piece.text))
    return f"<code>{inside}</code>" if piece.kind == "code" else f'<span class="{piece.kind}">{inside}</span>'


def _numbered(sections: Sequence[Section], above: str = "s") -> Iterator[tuple[str, Section]]:
    return ((f"{above}-{number}", section) for number, section in enumerate(sections, 1))


def _contents(sections: Sequence[Section], above: str = "s") -> str:
    entries = "".join(
        f'<li><a href="#{name}">{_html(section.title)}</a>{_contents(section.sections, name)}</li>\n'
        for name, section in _numbered(sections, above)
    )
    return f"<ol>\n{entries}</ol>\n" if entries else ""


def _html_sections(sections: Sequence[Section], above: str = "s", level: int = 2) -> str:
    return "".join(
        f'<section id="{name}">\n<h{level}>{_html(section.title)}</h{level}>\n'
        f"{''.join(map(_html_block, section.blocks))}"
        f"{_html_sections(section.sections, name, level + 1)}</section>\n"
        for name, section in _numbered(sections, above)
    )


def _html_block(block: Block) -> str:
    if isinstance(block, Paragraph):
        return f"<p>{_html(block.text)}</p>\n"
    if isinstance(block, Items):
        return f"<ul>\n{''.join(f'<li>{_html(text)}</li>' for text in block.texts)}\n</ul>\n"
    if isinstance(block, Verbatim):
        label, text = _html(block.label), escape(escaped(block.text, IN_TEXT))
        return f'<p class="label">{label}</p>\n<pre tabindex="0">\n{text}</pre>\n'
    if isinstance(block, Table):
        return _html_table(block)
    caption = _html(block.caption)
    images = "".join(  # a <picture> would keep its dark one on paper
        f'<img class="{ground}" src="{_data_uri(svg)}" alt="{caption}">'
        for ground, svg in block.picture._asdict().items()
    )
    return f"<figure>{images}<figcaption>{caption}</figcaption></figure>\n"


def _html_table(table: Table) -> str:
    caption = _html(table.caption)
    head = "".join(
        f'<th scope="col" class="{side}">{_html(text)}</th>' for text, side in zip(table.head, table.sides, strict=True)
    )
    body = "".join(f"<tr>{_html_row(row, table.sides)}</tr>\n" for row in table.rows)
    note = f'<p class="note">{_html(table.note)}</p>\n' if table.note else ""
    return (
        f'<figure class="table"><figcaption>{caption}</figcaption>\n'
        f'<div class="wide" role="region" tabindex="0" aria-label="{caption}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n{note}</figure>\n"
    )


def _html_row(row: Sequence[Text], sides: str) -> str:
    """The first cell names the row."""
    name, *cells = (f' class="{side}">{_html(text)}</' for text, side in zip(row, sides, strict=True))
    return f'<th scope="row"{name}th>' + "".join(f"<td{cell}td>" for cell in cells)


def _data_uri(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


# What would be markup: a link or image, its target, code, emphasis (not inside a word), a cell's end, mathematics.
_MARKUP = re.compile(r"[\\`*~$|]|(?<![^\W_])_|_(?![^\W_])|(?<=\])[(:\[]|&|<")
_ENTITIES = {"&": "&amp;", "<": "&lt;"}
_BLOCK_START = re.compile(r"\A(\d*)(?=[#>+=-]|[.)](?:\s|\Z))")


def _markdown(text: Text) -> str:
    return "".join(map(_markdown_piece, _pieces(text)))


def _markdown_piece(piece: str | Span) -> str:
    text = piece if isinstance(piece, str) else piece.text
    marked = _MARKUP.sub(lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), escaped(text))
    return f"<code>{marked}</code>" if isinstance(piece, Span) and piece.kind == "code" else marked


def _line(text: Text) -> str:
    """Text that opens a line: no list, heading or quotation begins there by accident."""
    return _BLOCK_START.sub(r"\1\\", _markdown(text).lstrip())


def _markdown_sections(sections: Sequence[Section], figures: str, level: int = 2) -> Iterator[str]:
    for section in sections:
        yield f"{'#' * level} {_markdown(section.title)}"
        yield from (_markdown_block(block, figures) for block in section.blocks)
        yield from _markdown_sections(section.sections, figures, level + 1)


def _markdown_block(block: Block, figures: str) -> str:
    if isinstance(block, Paragraph):
        return _line(block.text)
    if isinstance(block, Items):
        return "\n".join(f"- {_line(text)}" for text in block.texts)
    if isinstance(block, Verbatim):
        text = escaped(block.text, IN_TEXT)
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
        return f"{_line(block.label)}\n\n{fence}text\n{text}\n{fence}"
    if isinstance(block, Figure):
        return f"![{block.name}]({figures}/{block.name}.svg)\n\n{_line(block.caption)}"
    rows = [
        f"| {' | '.join(map(_markdown, block.head))} |",
        f"|{'|'.join('---:' if side == 'r' else '---' for side in block.sides)}|",
        *(f"| {' | '.join(map(_markdown, row))} |" for row in block.rows),
    ]
    note = f"\n\n{_line(block.note)}" if block.note else ""
    return f"**{_markdown(block.caption)}**\n\n" + "\n".join(rows) + note


STYLE = """
img { max-width: 100%; height: auto; }
img.dark { display: none; }
:root { color-scheme: light dark; --ground: #fff; --panel: #f5f6f8; --ink: #1b1f24; --faint: #5d6670; --line: #d8dce1;
  --good: #1a7f37; --bad: #c62828; --link: #0b57d0; }
@media screen and (prefers-color-scheme: dark) { :root { --ground: #14171b; --panel: #1e2227; --ink: #e4e7eb;
  --faint: #9aa4af; --line: #363c44; --good: #5fd07f; --bad: #ff8a80; --link: #8ab4f8; }
  img.light { display: none; } img.dark { display: inline; } }
body { max-width: 76rem; margin: 0 auto; padding: 1.5rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0 0 1rem; }
h2 { font-size: 1.3rem; margin: 0 0 .75rem; }
h3 { font-size: 1.1rem; margin: 0 0 .5rem; }
h2, h3, .table figcaption { break-after: avoid; }
section { border-top: 1px solid var(--line); margin-top: 2rem; padding-top: 1.25rem; }
section section { border-top: 0; margin-top: 1rem; padding-top: .5rem; }
:is(body, section) > :is(p, ul) { max-width: 50rem; }
p { margin: 0 0 .75rem; }
ul { margin: 0 0 .75rem; padding-left: 1.25rem; }
a { color: var(--link); }
nav { background: var(--panel); border-radius: .5rem; padding: .75rem 1rem; font-size: .9rem; }
summary { color: var(--faint); cursor: pointer; }
nav ol { list-style: none; margin: 0; padding: 0; }
details > ol { columns: 16rem; }
nav li { break-inside: avoid; }
nav ol ol { padding-left: 1rem; margin-bottom: .5rem; }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
code { background: var(--panel); border-radius: .2rem; padding: .05rem .25rem; white-space: pre-wrap; }
pre { background: var(--panel); border-radius: .5rem; padding: .6rem .9rem; margin: 0 0 .9rem; white-space: pre-wrap;
  max-height: 24rem; overflow-y: auto; }
.label { margin: 0 0 .2rem; color: var(--faint); font-size: .875rem; }
figure { margin: 1.25rem 0; }
figcaption { color: var(--faint); font-size: .875rem; margin-top: .4rem; max-width: 50rem; }
.table figcaption { color: var(--ink); font-weight: 600; margin: 0 0 .3rem; max-width: none; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; overflow-wrap: break-word; }
th, td { padding: .2rem .5rem; text-align: right; vertical-align: top; }
:is(th, td).l { text-align: left; }
:is(th, td):first-child { padding-left: .25rem; }
thead th { color: var(--faint); font-weight: 500; border-bottom: 1px solid var(--line); vertical-align: bottom;
  min-width: 3.5rem; }
thead th:first-child { min-width: 0; }
tbody th { font-weight: 400; }
tbody th.l { min-width: 8rem; }
tbody tr:nth-child(even) { background: var(--panel); }
td.r { white-space: nowrap; }
td.l { min-width: 5rem; max-width: 40rem; }
.note { color: var(--faint); font-size: .8rem; margin: .35rem 0 0; max-width: 60rem; }
.good { color: var(--good); } .bad { color: var(--bad); } .faint { color: var(--faint); }
td span { white-space: nowrap; }
@media print { :root { color-scheme: light; } body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; } .wide { overflow: visible; } table { font-size: 7.5pt; } pre { max-height: none; }
  figure:not(.table), tr { break-inside: avoid; } }
"""

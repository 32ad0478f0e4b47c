"""The HTML page of an evaluation, one file that needs nothing else, and tables in Markdown."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fb_core._util import escaped


@dataclass(frozen=True)
class Table:
    """Cells under column heads."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str  # such as the settings that the numbers were made with
    sides: str  # "l" or "r" per column: how it is aligned


def page(template: str, **values: Any) -> str:
    """A template, rendered in the common style with the values that it shows, such as the page's `title`.

    Values are escaped, so they can be neither markup nor invisible.
    """
    for name, file in (("style", "style.css"), ("script", "sort.js")):
        text = _templates().get_template(file).render()
        hashed = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        values |= {name: Markup(text), f"{name}_hash": hashed}
    return _templates().get_template(template).render(values)


@cache
def _templates() -> Environment:
    def shown(value: Any) -> Any:
        return escaped(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    return Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def markdown_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], sides: str = "", bold: int | None = None
) -> list[str]:
    """Lines of a pipe table of Markdown cells; side "r" aligns a column right, the row number `bold` is bold."""
    rule = "|".join("---:" if side == "r" else "---" for side in sides or "l" * len(head))
    rows = [[f"**{cell}**" for cell in row] if number == bold else row for number, row in enumerate(rows)]
    return [f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)]

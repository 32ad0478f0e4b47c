"""HTML pages in one style, each one file that needs nothing else, and tables in Markdown."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fb_core.terminal import escaped


@dataclass(frozen=True)
class Table:
    """Cells under column heads."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]  # of cells: text, or a tuple of the pieces that cells.html knows
    note: str = ""  # such as the settings that the numbers were made with
    align: str = ""  # "l" or "r" per column; if empty, the first is left-aligned and the others right-aligned

    @property
    def sides(self) -> str:
        """`align` with its default filled in."""
        return self.align or "l" + "r" * (len(self.head) - 1)


def page(template: str, package: str = __package__, **values: Any) -> str:
    """A template of a package, rendered in the common style with the values that it shows, such as the page's `title`.

    Values are escaped, so they can be neither markup nor invisible.
    """
    for name, file in (("style", "style.css"), ("script", "sort.js")):
        text = _templates(package).get_template(file).render()
        hashed = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        values |= {name: Markup(text), f"{name}_hash": hashed}
    return _templates(package).get_template(template).render(values)


@cache
def _templates(package: str) -> Environment:
    def shown(value: Any) -> Any:
        return escaped(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    made = Environment(
        loader=ChoiceLoader([PackageLoader(__package__), PackageLoader(package)]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["pieces"] = lambda text: text if isinstance(text, tuple) else (text,)
    made.filters["kind"] = lambda block: type(block).__name__
    made.filters["svg"] = lambda svg: Markup("data:image/svg+xml;base64,") + base64.b64encode(svg.encode()).decode()
    return made


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], sides: str = "") -> list[str]:
    """Lines of a pipe table whose cells are already Markdown; columns with side "r" are right-aligned."""
    rule = "|".join("---:" if side == "r" else "---" for side in sides or "l" * len(head))
    return [f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)]

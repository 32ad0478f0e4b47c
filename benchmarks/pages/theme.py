"""How figures look: colours for a light and a dark page, and SVG with the same bytes every time."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure

NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True)
class Theme:
    """Colours for one background, safe for colour-blind readers; markers and dashes repeat what they say."""

    ground: str
    ink: str
    faint: str
    line: str
    ours: str
    others: str


LIGHT = Theme(
    ground="#ffffff",
    ink="#1b1f24",
    faint="#5d6670",
    line="#d8dce1",
    ours="#d55e00",
    others="#0072b2",
)
DARK = Theme(
    ground="#14171b",
    ink="#e4e7eb",
    faint="#9aa4af",
    line="#363c44",
    ours="#ff8c42",
    others="#56b4e9",
)


def alone(svg: str) -> str:
    """A picture in light colours with its own background, in the reader's scheme where a program shows that."""
    dark = {getattr(LIGHT, part.name): getattr(DARK, part.name) for part in fields(Theme)}
    rules = "".join(
        f'[style*="{property}: {light}"]{{{property}:{colour}!important}}'
        for light, colour in dark.items()
        for property in ("fill", "stroke")
    )
    night = f"@media(prefers-color-scheme:dark){{svg{{background:{DARK.ground}}}{rules}}}"
    end = svg.index(">") + 1
    return f"{svg[:end]}<style>svg{{background:{LIGHT.ground}}}{night}</style>{svg[end:]}"


def pictured(draw: Callable[..., Figure | None]) -> Callable[..., str | None]:
    """Make a drawing function (data, theme, ...) return SVG, in light colours unless asked; its bytes repeat."""

    @wraps(draw)
    def svg(data: Any, *more: Any, theme: Theme = LIGHT) -> str | None:
        with style.context(["default", _style(theme)]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # such a character is drawn as a box
            figure = draw(data, theme, *more)
            if figure is None:
                return None
            file = io.BytesIO()
            figure.savefig(file, format="svg", transparent=True, metadata=NO_METADATA)
        saved = file.getvalue()
        return saved[saved.index(b"<svg") :].decode()  # without a document type's address

    return svg


def _style(theme: Theme) -> dict[str, Any]:
    return {
        "svg.fonttype": "path",  # an SVG image cannot load fonts
        "svg.hashsalt": "futurebridge",
        "text.parse_math": False,  # a token may hold dollar signs
        "font.size": 9,
        "text.color": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.faint,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.line,
        "grid.linewidth": 0.6,
        "xtick.color": theme.faint,
        "ytick.color": theme.faint,
        "xtick.labelcolor": theme.ink,
        "ytick.labelcolor": theme.ink,
        "hatch.color": theme.ground,
        "legend.frameon": False,
    }

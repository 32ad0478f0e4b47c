"""How figures look: colours for a light and a dark page, and SVG with the same bytes every time."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, NamedTuple

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
    good: str
    bad: str
    series: tuple[str, ...]


LIGHT = Theme(
    ground="#ffffff",
    ink="#1b1f24",
    faint="#5d6670",
    line="#d8dce1",
    ours="#d55e00",
    others="#0072b2",
    good="#0072b2",
    bad="#d55e00",
    series=("#d55e00", "#0072b2", "#009e73", "#a8457f", "#b07d00", "#3a3f46", "#2f8fc4"),
)
DARK = Theme(
    ground="#14171b",
    ink="#e4e7eb",
    faint="#9aa4af",
    line="#363c44",
    ours="#ff8c42",
    others="#56b4e9",
    good="#56b4e9",
    bad="#ff8c42",
    series=("#ff8c42", "#56b4e9", "#2fc79a", "#e493c1", "#f0c04a", "#c9d0d8", "#8fa8ff"),
)


class Picture(NamedTuple):
    """A figure as SVG, for a light and for a dark background."""

    light: str
    dark: str

    @property
    def alone(self) -> str:
        """One file with its own background, in the colours of the reader's scheme where that shows it."""
        dark = {getattr(LIGHT, part.name): getattr(DARK, part.name) for part in fields(Theme) if part.name != "series"}
        dark = dict(zip(LIGHT.series, DARK.series, strict=True)) | dark
        rules = "".join(
            f'[style*="{property}: {light}"]{{{property}:{colour}!important}}'
            for light, colour in dark.items()
            for property in ("fill", "stroke")
        )
        night = f"@media(prefers-color-scheme:dark){{svg{{background:{DARK.ground}}}{rules}}}"
        style = f"svg{{background:{LIGHT.ground}}}{night}"
        end = self.light.index(">") + 1
        return f"{self.light[:end]}<style>{style}</style>{self.light[end:]}"


def pictured(draw: Callable[..., Figure | None]) -> Callable[..., Picture | None]:
    """Make a drawing function (data, theme, ...) return its drawing in both themes; its bytes repeat."""

    def svg(data: Any, theme: Theme, *more: Any) -> str | None:
        with style.context(["default", _style(theme)]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # such a character is drawn as a box
            figure = draw(data, theme, *more)
            if figure is None:
                return None
            file = io.BytesIO()
            figure.savefig(file, format="svg", transparent=True, metadata=NO_METADATA)
        saved = file.getvalue()
        return saved[saved.index(b"<svg") :].decode()  # without a document type's address

    @wraps(draw)
    def both(data: Any, *more: Any) -> Picture | None:
        light, dark = (svg(data, theme, *more) for theme in (LIGHT, DARK))
        return None if light is None or dark is None else Picture(light, dark)

    return both


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

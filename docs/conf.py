"""The site: `make docs` builds it with Sphinx, every warning an error, so that no link and no anchor is broken."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent

project = "FutureBridge"
author = "The FutureBridge developers"
copyright = author
version = release = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]

sys.path.append(str(ROOT / "docs"))
extensions = ["myst_parser", "sphinx_copybutton", "signatures"]
myst_enable_extensions = ["fieldlist"]
myst_heading_anchors = 3
myst_url_schemes = ("http", "https")
suppress_warnings = ["myst.header"]

html_theme = "furo"
html_title = f"FutureBridge {release}"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "static/favicon.svg"
python_maximum_signature_line_length = 80
nitpick_ignore_regex = [("py:.*", ".*")]  # types of torch and transformers have no page here
html_theme_options = {"footer_icons": []}
highlight_language = "none"

CHANGELOG = "changelog"  # the page that is the repository's file
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def link_files(_: Sphinx, name: str, source: list[str]) -> None:
    """Markdown that is no page of the site is linked as a file, as what lies outside docs/ is anyway."""
    pages = ROOT / "docs"
    here = (pages / name).parent
    if name == CHANGELOG:
        source[0] = LINK.sub(r"](../\1", (ROOT / "CHANGELOG.md").read_text())

    def target(found: re.Match) -> str:
        path = (here / found[1]).resolve()
        if path.is_relative_to(pages) and path.suffix == ".md":
            return f"]({path.relative_to(here).as_posix()}" if name == CHANGELOG else found[0]
        return f"](path:{found[1]}" if path.suffix == ".md" else found[0]

    source[0] = LINK.sub(target, source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", link_files)

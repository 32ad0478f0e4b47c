"""The page of an evaluation: one file that loads nothing, in which no text gets at the reader."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from pages import ESCAPED, Tree

from fb_core.apps.pipeline.page import Table, page


def shown(text: str) -> str:
    table = Table(text, ("method", text), [(text, "1"), ("b", text)], text, "lr")
    return page("evaluation.html", title=text, table=table)


def test_its_policy_names_its_style_and_script_alone():
    html = shown("text")
    rules = re.search('content="(default-src [^"]*)"', html)[1]
    for tag in ("style", "script"):
        text = html.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        assert f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in rules
        assert not re.search(r"url\(|@import|fetch|http|innerHTML", text)
    assert rules.startswith("default-src 'none'; ")


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", '" onload="alert(1)', "</td>&amp;<!-- x", "\x1b[31m\u202e"]
)
def test_no_text_becomes_markup(text):
    made, harmless = Tree(shown(text)), Tree(shown("text"))
    assert (made.tags, made.other) == (harmless.tags, harmless.other)
    assert made.entities <= ESCAPED
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", shown(text))

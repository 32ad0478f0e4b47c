"""The page: one file that is safe to open, in which no text gets at the reader."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
import subprocess
import sys

import pytest
from pages import ESCAPED, Tree
from report_runs import (
    HOSTILE,
    ROOT,
    Page,
    everywhere,
    read,
    render,
    row_of,
    several,
    small,
    tiny,
)

from benchmarks.paper import figures
from benchmarks.paper.page import Document, Figure, Paragraph, Section, Span
from benchmarks.paper.report import write_report
from benchmarks.paper.rows import tables_bytes
from benchmarks.paper.tables import Table as Experiment
from benchmarks.theme import Picture
from fb_core.terminal import escaped


@pytest.fixture(scope="module")
def single() -> Document:
    return render(tiny())


@pytest.fixture(scope="module")
def runs() -> Document:
    return several()


@pytest.fixture
def undrawn(monkeypatch):
    """Without figures, which take a second each."""
    for name in ("forest", "agreement", "curve", "frontier"):
        monkeypatch.setattr(figures, name, lambda *_: None)


def test_the_page_is_one_file_that_loads_nothing_and_runs_what_its_policy_names(single):
    html = single.html()
    page = Page(html)
    assert not {"link", "iframe", "object", "svg", "base", "form"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "style"]
    places = [value for name, value in page.attributes if name in ("src", "srcset", "action", "poster")]
    assert places
    assert all(value.startswith("data:image/svg+xml;base64,") for value in places)
    assert "http" not in html.split("</style>")[0].replace("http-equiv", "")
    (policy,) = [value for name, value in page.attributes if value and "default-src" in value]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for tag in ("style", "script"):
        assert page.tags.count(tag) == 1
        text = html.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        hashed = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules.pop(f"{tag}-src") == f"'sha256-{hashed}'"
        assert not re.search(r"url\(|@import|fetch|http|innerHTML", text)
    assert rules == {"default-src": "'none'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}


TITLES = ["The run", "The paper's orderings", "Methods", "Accuracy against the LLM's work"]
TITLES += [
    "Problems with changed outcomes",
    "Deployed recipe",
    "Data filter",
    "Costs",
    "Candidate pools",
    "Pool coverage",
    "Horizon",
]
TITLES += ["Futures", "Future quality", "Hybrid targets", "Adapter scope", "Target temperature"]
TITLES += ["Router threshold", "Request quantiles"]
TITLES += ["Agreement with rollouts", "Settings", "How to read the numbers"]


def test_all_but_the_first_screen_is_folded_under_its_title(single):
    html = single.html()
    page = Page(html)
    assert page.titles == TITLES
    assert page.tags.count("details") == page.tags.count("summary") == len(TITLES)
    assert "open" not in {name for name, _ in page.attributes}
    first = Page(html.split("<details>")[0].replace("<main>", "") + "</body></html>")
    assert (first.tags.count("li"), first.tags.count("figure"), first.tags.count("table")) == (3, 1, 0)
    assert all(section.brief for section in single.sections if section.title != "How to read the numbers")


def test_every_figure_is_shown_on_light_and_dark_pages(single, runs):
    for document in (single, runs):
        drawn = list(document.figures())
        assert Page(document.html()).tags.count("img") == 2 * len(drawn)


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.usefixtures("undrawn")
def test_no_text_gets_at_the_reader(text):
    document, harmless = (render(everywhere(tiny(), one)) for one in (text, "text"))
    html = document.html()
    made, tree = Page(html), Tree(html)
    assert tree.tags == Tree(harmless.html()).tags
    assert tree.entities <= ESCAPED
    assert tree.other == []
    assert escaped(text) in {row[0] for cells in made.tables for row in cells}  # once read, it is what was written
    assert all(len(row) == len(cells[0]) for cells in made.tables for row in cells)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", made.text)


def test_pictures_and_titles_cannot_become_markup():
    for text in HOSTILE:
        picture = Figure(text, text, Picture("<svg/>", "<svg/>"))
        document = Document(text, [Paragraph((text, Span(text, "code")))], [Section(text, [picture])])
        tree = Tree(document.html())
        assert tree.tags == Tree(Document("t", document.blocks, [Section("t", [picture])]).html()).tags
        assert tree.entities <= ESCAPED


@pytest.mark.usefixtures("undrawn")
def test_the_name_of_an_experiment_is_no_path(monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "forest", lambda *_: Picture("<svg/>", "<svg/>"))
    entry = Experiment("../../../owned", "Owned", "It.", lambda plan: [], "accuracy")
    rows = [row_of(entry.name, "b", "x", "x", 0.9, {})]
    write_report([read({"name": "n", "results": rows})], tmp_path / "a" / "report", tables={entry.name: entry})
    assert [path.parent.name for path in tmp_path.rglob("*owned*")] == ["figures"]


def test_written_files_repeat_byte_for_byte(tmp_path):
    found = [read(small())]
    written = write_report(found, tmp_path / "a" / "b")
    names = [path.relative_to(tmp_path / "a" / "b").as_posix() for path in written]
    assert (names[0], names[-1]) == ("tables.json", "report.html")
    again = write_report(found, tmp_path / "c")
    assert [path.read_bytes() for path in written] == [path.read_bytes() for path in again]
    assert any(name.startswith("figures/") for name in names)
    with pytest.raises(ValueError):
        write_report(
            [read({"name": "n", "policy": {"threshold": math.nan, "quantile": 0.9, "top_k": 64}})], tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


def test_a_report_without_room_leaves_the_one_before(tmp_path):
    (tmp_path / "tables.json").write_bytes(tables_bytes([read(small())]))
    code = (
        "import resource, signal; from pathlib import Path; from benchmarks.paper.rows import read_tables; "
        "from benchmarks.paper.report import write_report; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "runs = read_tables(Path('tables.json')); write_report(runs, Path('out')); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)); write_report(runs, Path('out'))"
    )
    found = os.environ | {"PYTHONPATH": str(ROOT)}  # where a process of its own finds the benchmarks
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=found, capture_output=True, text=True)
    assert "expected to write" in done.stderr
    assert len((tmp_path / "out" / "report.html").read_bytes()) > 4000
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name.endswith(".part")]

"""The README's figures are those of the committed result files."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import figures
from fb_core.demo import report

ROOT = Path(__file__).parent.parent


def test_tables_are_generated_from_the_result_files():
    readme = (ROOT / "README.md").read_text()
    assert figures.render(readme) == readme


def test_the_stage_table_is_generated_from_its_result_file():
    scale = (ROOT / "docs" / "scale.md").read_text()
    assert figures.render_scale(scale) == scale


def test_demo_report_is_the_one_of_its_results():
    folder = ROOT / "docs" / "demo"
    assert (folder / "report.md").read_text() == report.markdown(json.loads((folder / "results.json").read_text()))

"""Every figure of docs/worlds.md, docs/choice.md and docs/pretrained_pair is a cell of a committed file.

Generated blocks are, since they are written from such files, and so is what `train` prints. Each figure outside them, a
number with decimals or in percent, has its cell in `TRACED`, in the page's order; or it is a setting or the paper's; or
its section says that the rows of its run were not kept.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper.published import averages
from fb_core.apps.pipeline.choose import choice_table
from fb_core.decode.deployment import LABELS, Evidence

ROOT = Path(__file__).resolve().parent.parent
UNTRACED = re.compile(
    r"<!-- ([\w -]+): written .*?<!-- end of \1 -->|^```.*?^```|^> [^\n]*|`[^`]*`|\]\([^)]*\)", re.S | re.M
)
FIGURE = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+%?|%)")
SETTING, PAPER, NOT_KEPT, MADE = "setting", "paper", "not kept", "as made"
PAIRS = "pretrained_pair/pairs.json"  # what make_pair.py found of each model
SMALL, CONTROL = "0", "1"  # the pretrained pairs
TABLES = {"worlds.md": "experiments/tables.json", "pretrained_pair/README.md": "pretrained_pair/tables.json"}
TRACED: dict[str, list[tuple[str, ...]]] = {  # figures, and where: table, row, column, parts of the mean and its ends
    "worlds.md": [
        ("0.9 0.94 0.92 0.92", SETTING),
        ("95.8% 97.5% 97.1%", "0 1 2", "methods deployed accuracy"),
        ("95.6% 96.9% 19.4%", "0 1 2", "methods published accuracy"),
        ("98.5 100%", "1 0", "methods takeover accuracy"),
        ("48.4%", PAPER, "takeover"),
        ("95.8% 97.2% 17.2%", "0 1 2", "pools pool-slm-wide accuracy"),
        ("96.9%", "1", "futures future-cross-state accuracy"),
        ("19.4%", "2", "methods published accuracy"),
        ("48.0%", "2", "futures own accuracy"),
        ("95.6%", "0", "methods published accuracy"),
        ("74.1%", "0", "futures own accuracy"),
        ("95%", SETTING),
        ("23.7 45.4 42.0", "0 1 2", "methods deployed above_line"),
        ("22.9 10.8 43.8", "0 1 2", "methods r2r above_line"),
        ("41.7 70.7 38.0", "0 1 2", "methods takeover llm_tokens"),
        ("9.1 13.5 -2.1", "0 1 2", "methods deployed above_read_line"),
        ("28.8 60.1 54.6", "0 1 2", "methods deployed read"),
        ("53.1 85.7 53.0", "0 1 2", "methods takeover read"),
        ("46.2", "0", "methods glimp-router read"),
        ("100%", "0", "methods glimp-router accuracy"),
        ("74.1", "1", "methods glimp-router read"),
        ("61.3%", "1", "methods glimp-router accuracy"),
    ],
    "choice.md": [("5% 5% 95% 30% 20%", SETTING)],
    "pretrained_pair/README.md": [
        ("89% 36%", MADE, "large.accuracy small.accuracy"),
        ("25% 96%", MADE, "small.terse_right small.careful_right"),
        ("18%", MADE, "control.accuracy"),
        ("2% 21%", NOT_KEPT),
        ("0.94", SETTING),
        ("35.6%", SMALL, "methods slm-preference accuracy"),
        ("36.0%", SMALL, "methods greedy accuracy"),
        ("35.0 28.8 41.5", SMALL, "methods published minus greedy", "0 1 2"),
        ("29.4 23.5 35.7", SMALL, "methods published minus direct", "0 1 2"),
        ("1.5", SMALL, "methods published llm_tokens"),
        ("6.2 2.8 9.7", SMALL, "methods deployed minus published", "0 1 2"),
        ("39.9 33.6 46.4", SMALL, "methods deployed above_line", "0 1 2"),
        ("16.6 11.5 21.7", SMALL, "methods deployed above_read_line", "0 1 2"),
        ("7.8 3.0 12.6", CONTROL, "below greedy published", "0 2 1"),
        ("0.6 -0.1 2.2", CONTROL, "below greedy deployed", "0 2 1"),
        ("93%", SMALL, "agreement word reranker pairwise"),
        ("66%", SMALL, "agreement word LLM pairwise"),
        ("23%", SMALL, "agreement word SLM pairwise"),
        ("40%", CONTROL, "agreement word reranker pairwise"),
        ("40%", SMALL, "agreement digit reranker pairwise"),
        ("5%", SMALL, "agreement digit reranker top1"),
        ("16%", SMALL, "agreement digit SLM top1"),
        ("2.0", PAPER, "published takeover"),
        ("38.1%", CONTROL, "methods majority accuracy"),
    ],
}


def cell(run: dict[str, Any], where: str, part: int) -> float:
    """A value of a run's tables; shares and their differences in percent."""
    table, key, *columns = where.split()
    if table == "agreement":  # on validation states: of a kind of events, by a score
        rows = {(row["where"], row["kind"], row["score"]): row for row in run["parts"]["agreement"]}
        value = rows["validation", key, columns[0]][columns[1]]
        return 100 * value[part]
    if table == "below":  # a difference, as points below
        return -cell(run, f"methods {columns[0]} minus {key}", part)
    (value,) = (row for row in run["results"] if (row["table"], row["key"]) == (table, key))
    for column in columns:
        value = value[column]
    return value[part] * (1 if columns[0] in ("read", "llm_tokens") else 100)


def values(page: str, kind: str, where: str = "", parts: str = "0") -> list[float]:
    """The values that figures of a page are said to be."""
    if kind == PAPER:
        first, *second = where.split()
        return [averages()[first] - sum(averages()[name] for name in second)]
    if kind == MADE:
        made = json.loads((ROOT / "docs" / PAIRS).read_text(encoding="utf-8"))
        return [100 * made[model][column] for model, column in (each.split(".") for each in where.split())]
    runs = json.loads((ROOT / "docs" / TABLES[page]).read_text(encoding="utf-8"))
    return [cell(runs[int(run)], where, int(part)) for run in kind.split() for part in parts.split()]


@pytest.mark.parametrize("page", TRACED)
def test_every_figure_is_a_cell_of_a_committed_file(page: str) -> None:
    sections = (ROOT / "docs" / page).read_text(encoding="utf-8").split("\n## ")
    found = [(figure, text) for text in sections for figure in FIGURE.findall(UNTRACED.sub("", text))]
    assert [figure for figure, _ in found] == [figure for figures, *_ in TRACED[page] for figure in figures.split()]
    texts = iter(found)
    for figures, kind, *where in TRACED[page]:
        own = [next(texts) for _ in figures.split()]
        if kind == NOT_KEPT:
            assert all("were not kept" in text for _, text in own)
        elif kind != SETTING:
            for (figure, _), value in zip(own, values(page, kind, *where), strict=True):
                decimals = len(figure.strip("%").partition(".")[2])
                assert f"{value:.{decimals}f}" == figure.strip("%"), (figure, where)


def test_what_train_prints_is_of_a_committed_file() -> None:
    made = json.loads((ROOT / "docs" / "evidence" / "choice.json").read_text(encoding="utf-8"))
    names = {label: name for name, label in LABELS.items()}
    tested = [(names[row.pop("label")], Evidence.model_validate(row)) for row in made["tested"]]
    page = (ROOT / "docs" / "choice.md").read_text(encoding="utf-8")
    quoted = " ".join(line.removeprefix(">") for line in page.splitlines() if line.startswith(">"))
    assert quoted.split() == choice_table(made["recipe"], tested, 0).split()
    assert not any("\n> " in (ROOT / "docs" / other).read_text(encoding="utf-8") for other in TABLES)

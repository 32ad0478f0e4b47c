"""The report: every number comes from the findings, nothing is hidden, and no text gets at the reader."""

from __future__ import annotations

import base64
import functools
import hashlib
import inspect
import itertools
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import yaml
from markdown_it import MarkdownIt
from matplotlib import style
from matplotlib.text import Text
from pages import ESCAPED, Tree

from benchmarks.paper import gather
from benchmarks.paper.gather import published
from benchmarks.paper.report import figures, report, theme
from benchmarks.paper.report.diagnostics import DIAGNOSTICS
from benchmarks.paper.report.findings import LISTED, Findings, findings_bytes, read_findings, rows_bytes
from benchmarks.paper.report.orderings import ordering_blocks, orderings
from benchmarks.paper.report.page import (
    Document,
    Figure,
    Items,
    Link,
    Paragraph,
    Picture,
    Section,
    Span,
    Table,
    Verbatim,
)
from benchmarks.paper.report.report import write_report
from benchmarks.paper.settings import PaperSettings
from benchmarks.paper.tables import TABLES
from fb_core.config import AVERAGE, ModelSettings
from fb_core.terminal import escaped

HOSTILE = [
    "<script>alert(1)</script>",
    '" onload="alert(1)',
    "a | b || c \\| d",
    "`code` ``` $x$ *b* _i_ ~s~",
    "![x](https://evil.example/x.png)",
    "[x]: https://evil.example",
    "line\n# heading\n- item",
    "\x1b[31m\u202egnorw\x00",
    "$\\frac{1",
    "</pre></td>&amp;",
    "--><b onclick=x>--",
]
METHODS = {  # label, accuracy, events, tokens
    "greedy": ("Greedy", 0.712, 0.0, 34.5),
    "majority": ("Maj@8", 0.735, None, None),
    "random": ("Random choice", 0.64, 2.17, 34.1),
    "s2t": ("S2T", 0.69, 2.12, 35.6),
    "direct": ("Direct LLM score", 0.87, 1.92, 39.5),
    "r2r": ("R2R", 0.901, 3.3, 40.2),
    "futurebridge": ("FutureBridge", 0.958, 1.91, 41.8),
    "takeover": ("Takeover", 0.992, 1.0, 41.8),
}
LLM_TOKENS = {"greedy": 0.0, "majority": 0.0, "takeover": 40.2}  # all others: one an event
VARIANTS = {
    "pools": [("pool-slm", "SLM pool", 0.898, None), ("pool-llm", "LLM pool", 0.952, None)],
    "horizons": [
        ("futurebridge", "H = 16", 0.958, 16),
        ("horizon-4", "H = 4", 0.592, 4),
        ("horizon-8", "H = 8", 0.83, 8),
    ],
    "futures": [
        ("future-verified", "Verified, common states", 0.949, None),
        ("future-cross-state", "Cross-state", 0.772, None),
        ("future-shuffled", "Shuffled", 0.55, None),
        ("future-incorrect", "Incorrect", 0.93, None),
    ],
    "alpha": [("alpha-0.5", "α = 0.5", 0.94, 0.5), ("alpha-0.25", "α = 0.25", 0.91, 0.25)],
    "temperature": [("tau-1", "τ = 1", 0.956, 1.0)],
    "scope": [("sequence", "Whole sequence", 0.962, None)],
}
SWEPT = {
    0.9: (0.81, 0.63, 0.69, 0.992),
    0.92: (0.81, 0.868, 0.7, 0.99),
    0.94: (0.87, 0.958, 0.69, 0.992),
    0.96: (0.812, 0.81, 0.71, 0.97),
}

ROOT = Path(__file__).parents[2]
FOUND = os.environ | {"PYTHONPATH": str(ROOT)}  # where a process of its own finds the benchmarks


EXPERIMENTS = [table.shown.model_dump() for table in TABLES.values()]


def read(found: dict) -> Findings:
    return Findings.model_validate({"experiments": EXPERIMENTS} | found)


def render(found: list[dict]) -> Document:
    return report.render([read(one) for one in found])


def around(mean: float, half: float = 0.03) -> list[float]:
    return [mean, max(mean - half, -1.0), min(mean + half, 1.0)]


def table_row(table: str, key: str, label: str, accuracy: float, references: dict[str, float], **more) -> dict:
    row = {"table": table, "benchmark": "demo:plans", "key": key, "label": label, "seeds": [0, 1], "problems": 400}
    row |= {"accuracy": around(accuracy), "events": 1.93, "tokens": 40.1, "note": None, "x": None}
    row["minus"] = {other: around(accuracy - value, 0.037) for other, value in references.items() if key != other}
    return row | {"quantile": None, "threshold": None} | more


ENDS = ("greedy", "takeover")  # of the line


def written(tokens: float, accuracy: float | None) -> dict:
    """The LLM's tokens and calls of a row, and how far it is above the line."""
    calls = 1.0 if tokens > 10 else tokens
    found = {"llm_tokens": [tokens, max(tokens - 0.1, 0.0), tokens + 0.1], "calls": [calls, 0.9 * calls, 1.1 * calls]}
    if accuracy is not None:
        (low, high), share = (METHODS[end][1] for end in ENDS), tokens / LLM_TOKENS["takeover"]
        found["above_line"] = around(accuracy - low - share * (high - low))
    return found


def tiny(name: str = "tiny", shift: float = 0.0, benchmarks: tuple[str, ...] = ("demo:plans",)) -> dict:
    """A run in which everything was measured; `shift` lowers what is FutureBridge's."""

    def lowered(key: str, accuracy: float) -> float:
        return (
            accuracy - shift if key not in ("greedy", "majority", "random", "s2t", "direct", "takeover") else accuracy
        )

    base = {key: lowered(key, METHODS[key][1]) for key in ("greedy", "direct", "futurebridge")}
    rows = []
    for benchmark in benchmarks:
        for key, (label, accuracy, events, tokens) in METHODS.items():
            more = {"events": events, "tokens": tokens, "benchmark": benchmark}
            more |= {"seeds": [0, 1] if key in ("futurebridge", "majority", "random") else []}
            more |= written(LLM_TOKENS.get(key, events), lowered(key, accuracy) if key not in ENDS else None)
            more["ours"] = key == "futurebridge"
            rows.append(table_row("methods", key, label, lowered(key, accuracy), base, **more))
        rows.append(
            {
                "table": "methods",
                "benchmark": benchmark,
                "key": "external:grpo",
                "label": "GRPO",
                "seeds": [],
                "problems": 400,
                "accuracy": None,
                "note": "no checkpoint given: compare.external",
            }
        )
        for table, variants in VARIANTS.items():
            for key, label, accuracy, x in variants:
                more = {"benchmark": benchmark, "x": x}
                more |= written(1.93, lowered("x", accuracy))
                rows.append(table_row(table, key, label, lowered("x", accuracy), base, **more))
        for quantile, accuracies in SWEPT.items():
            there = dict(zip(("direct", "futurebridge", "s2t", "takeover"), accuracies, strict=True))
            there = {key: lowered(key, value) for key, value in there.items()}
            references = {"greedy": base["greedy"], "direct": there["direct"], "futurebridge": there["futurebridge"]}
            for key, accuracy in there.items():
                more = {"benchmark": benchmark, "quantile": quantile, "threshold": round(10 * quantile - 8, 3)}
                rows.append(table_row("quantiles", key, METHODS[key][0], accuracy, references, **more))
    kinds = {"all": 1.0, "word": 0.8, "digit": 0.15, "mark": 0.05}
    scores = {"SLM": 0.52, "LLM": 0.685, "Direct-B_4": 0.475, "Direct-B_16": 0.895, "FutureBridge": 0.824 - shift}
    draw = np.random.default_rng(0)
    entropy = [round(float(value), 3) for value in draw.gamma(0.4, 0.35, 41)]
    entropy[0], entropy[17], entropy[21] = 1.961, 1.84, 1.712
    text = "as 27*9+4~18,67,6>47. because 47*9+3=26. \\boxed{26}"
    tokens = re.findall(r"\\boxed\{|[a-z]+ |\. |.", text)
    words = [("since ", "SLM", 0.2161, 0.0211, -0.015, 3.704, "47", False)]
    words += [("hence ", "SLM", 0.117, 0.0452, -0.012, 3.688, "26", True)]
    words += [("note ", "LLM", 0.0263, 0.474, -0.014, 3.662, "26", True)]
    words += [("because ", "both", 0.2804, 0.2162, -0.682, -1.175, "26", True)]
    words += [("| ", "LLM", 0.0004, 0.0162, None, -2.875, "13", False)]
    return {
        "name": name,
        "experiments": EXPERIMENTS,
        "settings": {"models": {"slm": "demo:plans", "llm": "demo:plans"}, "train": {"horizons": [4, 8, 16]}},
        "pair": {"slm": "demo:plans", "llm": "demo:plans", "slm_parameters": 162000, "llm_parameters": 363000},
        "policy": {"threshold": 1.695, "quantile": 0.94, "top_k": 64},
        "selection": {
            "horizon": 16,
            "epoch": 3,
            "problems": 150,
            "table": [
                {
                    "epoch": epoch,
                    "horizon": horizon,
                    "accuracy": 0.5 + 0.02 * horizon + 0.03 * epoch,
                    "cross_entropy": 1.4 - 0.01 * horizon,
                    "pairwise_accuracy": None if horizon == 4 else 0.81,
                    "seeds": [{"seed": 0, "accuracy": 0.51 + 0.02 * horizon}, {"seed": 1, "accuracy": 0.55}],
                }
                for epoch in (2, 3)
                for horizon in (4, 8, 16)
            ],
        },
        "filters": {"admitted": 2393, "candidates": 9021, "long_enough": 2007, "train groups": 1748, "verified": 2009},
        "seeds": [0, 1],
        "rows": rows,
        "agreement": [
            {
                "score": score,
                "kind": kind,
                "states": int(318 * part),
                "mixed_states": int(132 * part),
                "pairs": int(1069 * part),
                "problems": 149,
                "pairwise": None if (score, kind) == ("Direct-B_4", "mark") else around(mean, 0.03 / part**0.5),
                "top1": around(mean, 0.04),
                "top1_minus_llm": None if score == "LLM" else around(mean - 0.685, 0.05),
                "top1_mixed": None if kind == "mark" else around(mean - 0.03, 0.06),
            }
            for kind, part in kinds.items()
            for score, mean in scores.items()
        ],
        "choices": [
            {
                "label": label,
                "kind": kind,
                "quantile": quantile,
                "states": {0.9: 99, 0.94: 60}[quantile],
                "problems": 150,
                "top1": around(mean),
                "top1_minus_slm": None if key == "greedy" else around(mean - 0.6),
                "top1_minus_llm": None if key == "direct" else around(mean - 0.7),
            }
            for kind in ("all", "digit")
            for quantile in (0.9, 0.94)
            for key, label, mean in (
                ("greedy", "the SLM's choice", 0.6),
                ("direct", "the LLM's choice", 0.7),
                ("futurebridge", "FutureBridge", 0.5 if (kind, quantile) == ("digit", 0.9) else 0.8),
            )
        ],
        "coverage": [
            {
                "pool": pool,
                "mean_size": size,
                "states": 318,
                "mixed_states": 132,
                "coverage": around(share),
                "coverage_mixed": around(share + 0.1),
            }
            for pool, size, share in (("SLM", 4.0, 0.836), ("LLM", 4.0, 0.827), ("joint", 6.07, 0.862))
        ],
        "turned": {
            "methods": ["FutureBridge"],
            "changes": [
                {
                    "benchmark": "demo:plans",
                    "problem": f"plans/test/{number}",
                    "key": "futurebridge",
                    "label": "FutureBridge",
                    "seed": 0,
                    "gained": number > 2,
                    "kind": "digit" if number % 2 else "word",
                    "step": 17,
                    "page": f"problems/{number}.html",
                }
                for number in range(30)
            ],
        },
        "future_quality": {
            "states": 214,
            "horizons": [4, 8, 16],
            "qualities": ["verified", "unverified", "incorrect", "cross-state", "shuffled"],
            "pairwise": [
                [0.475, 0.871, 0.895],
                [0.468, 0.84, 0.861],
                [0.471, 0.823, 0.842],
                [0.489, 0.531, 0.527],
                [0.502, 0.493, None],
            ],
        },
        "trajectory": {
            "problem": "27*9+4*9+3;",
            "tokens": (tokens + ["."] * 41)[:41],
            "entropy": entropy,
            "threshold": 1.695,
            "events": [
                {"step": 0, "chosen": "as ", "slm": "because "},
                {"step": 17, "chosen": "because ", "slm": "so "},
                {"step": 21, "chosen": "7", "slm": "1"},
            ],
        },
        "worked_event": {
            "problem": "plans/test/17",
            "prompt": "27*9+4*9+3;",
            "prefix": "",
            "gold": "26",
            "entropy": 1.961,
            "future": "27*9+4~18,67,6>4",
            "candidates": [
                {
                    "token": token,
                    "source": source,
                    "p_slm": slm,
                    "p_llm": llm,
                    "compatibility": b,
                    "score": score,
                    "rollout": f"{token}27*9+4~18,67,6>47. because 47*9+3={end}. \\boxed{{{end}}}",
                    "correct": correct,
                }
                for token, source, slm, llm, b, score, end, correct in words
            ],
        },
        "deployed": [
            {
                "seed": 0,
                "label": "value",
                "words": "value: the best of 1 of 1 tested recipes.",
                "problems": 300,
                "delta": 0.02,
                "level": 0.95,
                "tested": [
                    {
                        "label": label,
                        "accuracy": accuracy,
                        "minus_greedy": [accuracy - 0.5, accuracy - 0.55],
                        "minus_direct": [accuracy - 0.8, accuracy - 0.85],
                        "calls": calls,
                        "llm_tokens": calls,
                    }
                    for label, accuracy, calls in (
                        ("SLM greedy", 0.5, 0.0),
                        ("direct LLM score", 0.8, 2.5),
                        ("value", 0.9, 2.25),
                    )
                ],
            }
        ],
        "costs": {
            "offline": [
                {
                    "stage": "trajectories",
                    "units": 1150,
                    "unit": "problems",
                    "seconds": 4.5,
                    "gpu_hours": 0.0,
                    "devices": ["cpu"],
                    "published": None,
                }
            ],
            "deployment": [
                {
                    "method": METHODS[key][0],
                    "key": key,
                    "loop": "plain" if key == "majority" else "fast",
                    "problems": 50,
                    "calls": calls,
                    "pool": 6.07 if calls else None,
                    "appended": calls,
                    "suffix": 33.2 if key == "takeover" else 0.0,
                    "seconds": 0.031 * times,
                    "relative": [times, times - 0.05, times + 0.06],
                    "peak_bytes": None,
                    "published": None,
                }
                for key, calls, times in (
                    ("greedy", 0.0, 1.0),
                    ("majority", 0.0, 2.6),
                    ("s2t", 2.12, 1.41),
                    ("direct", 1.92, 1.46),
                    ("r2r", 3.3, 1.98),
                    ("futurebridge", 1.91, 1.55),
                    ("takeover", 1.0, 1.87),
                )
            ],
        },
        "machine": "2 CPU cores, AMD EPYC, torch 2.13.0",
        "commit": "0123456789",
        "made": {"futurebridge": "0.1.0", "torch": "2.13.0"},
    }


class Page(HTMLParser):
    """Checks that tags are closed in their order and collects what a page holds."""

    VOID = ("meta", "img")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tables: list[list[list[str]]] = []
        self.titles: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag in ("h2", "h3"):
            self.titles.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.text += data
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data
        if {"h2", "h3"} & set(self.open):
            self.titles[-1] += data


def of_markdown(text: str) -> Page:
    html = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text)
    return Page(re.sub(r"<(img[^>]*?) /?>", r"<\1>", html))


def stripped(tables):
    return [[[cell.strip() for cell in row] for row in table] for table in tables]


@pytest.fixture(scope="module")
def single() -> Document:
    return render([tiny()])


@pytest.fixture(scope="module")
def page(single) -> Page:
    return Page(single.html())


@pytest.fixture(scope="module")
def runs() -> Document:
    several = tiny("several", benchmarks=("gsm8k", "math-500"))
    for name in ("agreement", "choices", "trajectory", "worked_event", "costs", "future_quality"):
        several[name] = None
    control = tiny("control", 0.6)
    return render([tiny(), {name: control[name] for name in ("name", "pair", "policy", "rows", "selection")}, several])


def table(document: Document, caption: str) -> Table:
    def inside(sections):
        for section in sections:
            yield from section.blocks
            yield from inside(section.sections)

    (found,) = [b for b in inside(document.sections) if isinstance(b, Table) and b.caption == caption]
    return found


def plain(text) -> str:
    pieces = text if isinstance(text, tuple) else (text,)
    return "".join(piece if isinstance(piece, str) else piece.text for piece in pieces)


def rows_of(found: Table) -> dict[str, list[str]]:
    return {plain(name): [plain(cell) for cell in cells] for name, *cells in found.rows}


def strings(value) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.items() for text in strings(list(item))]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


def numbers(value) -> list[float]:
    if isinstance(value, dict):
        return numbers(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def everywhere(value, text: str):
    """The same findings with this text in place of every one that a model, a person or a file may have written."""
    free = {"label", "note", "token", "source", "rollout", "problem", "prompt", "prefix", "gold", "future", "chosen"}
    free |= {"slm", "llm", "machine", "commit", "name", "score", "kind", "pool", "method", "stage", "unit", "torch"}
    if isinstance(value, dict):
        return {
            key: text if key in free and isinstance(item, str) else everywhere(item, text)
            for key, item in value.items()
        }
    return [everywhere(item, text) for item in value] if isinstance(value, list) else value


def test_the_page_is_one_file_that_loads_nothing_and_runs_what_its_policy_names(single, page):
    html = single.html()
    assert not {"link", "iframe", "object", "svg", "base", "form"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "style"]
    places = [value for name, value in page.attributes if name in ("src", "srcset", "href", "action", "poster")]
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


TITLES = [
    *(
        "The run",
        "The paper's orderings",
        "Methods",
        "Accuracy against the LLM's work",
        "Problems with changed outcomes",
    ),
    *("Deployed recipe", "Costs", "Candidate pools", "Pool coverage", "Horizon", "Futures", "Future quality"),
    *("Hybrid targets", "Adapter scope", "Target temperature", "Agreement with rollouts"),
    *("Request quantiles", "Choices by kind of event", "One trajectory", "One event in full"),
    *("Reranker selection", "States", "Settings", "How to read the numbers"),
]


def test_all_but_the_first_screen_is_folded_under_its_title(single, page):
    assert page.titles == TITLES
    html = single.html()
    assert page.tags.count("details") == page.tags.count("summary") == len(TITLES)
    assert "open" not in {name for name, _ in page.attributes}
    first = Page(html.split("<details>")[0].replace("<main>", "") + "</body></html>")
    assert (first.tags.count("li"), first.tags.count("figure"), first.tags.count("table")) == (3, 1, 0)
    assert all(section.brief for section in single.sections if section.title != "How to read the numbers")


def first_screen(*found: dict) -> list[str]:
    (items,) = [block for block in render(list(found)).blocks if isinstance(block, Items)]
    return [plain(text) for text in items.texts]


@pytest.mark.usefixtures("pictureless")
def test_three_sentences_say_what_was_compared_what_won_and_what_is_lost():
    compared, won, lost = first_screen(tiny())
    assert compared == "8 methods were compared on demo:plans (400 problems), SLM demo:plans, LLM demo:plans."
    assert won.endswith(
        ": FutureBridge on demo:plans, 95.8% with 1.9 LLM tokens per problem "
        "(greedy 71.2% with 0.0, takeover 99.2% with 40.2)."
    )
    assert lost == (
        "FutureBridge: nowhere significantly worse than greedy decoding or the direct LLM score or takeover."
    )
    *_, won, lost = first_screen(tiny("good"), tiny("bad", 0.5))
    assert "FutureBridge on good, demo:plans, 95.8%" in won
    assert "Direct LLM score on bad, demo:plans, 87.0%" in won
    assert (
        "FutureBridge: significantly worse than greedy decoding on bad, demo:plans (-25.4 [-29.1, -21.7] pp), than the "
        "direct"
    ) in lost
    assert "good, demo:plans" not in lost
    found = tiny()
    for row in found["rows"]:
        if row["key"] == "takeover":
            row["minus"]["futurebridge"] = [0.034, 0.02, 0.05]  # known from its side alone
    assert first_screen(found)[2] == (
        "FutureBridge: significantly worse than takeover on demo:plans (-3.4 [-5.0, -2.0] pp)."
    )


@pytest.mark.usefixtures("pictureless")
def test_of_equals_the_cheapest_wins_and_prices_may_be_unknown():
    found = tiny()
    found["rows"] = [row for row in found["rows"] if row["table"] == "methods"]
    by_key = {row["key"]: row for row in found["rows"]}
    by_key["direct"] |= {"accuracy": by_key["futurebridge"]["accuracy"]}
    by_key["direct"]["llm_tokens"] = [1.5, 1.4, 1.6]
    assert ": Direct LLM score on demo:plans, 95.8% with 1.5 LLM tokens per problem (" in first_screen(found)[1]
    for row in found["rows"]:
        row.pop("llm_tokens", None)
    assert first_screen(found)[1].endswith("(greedy 71.2%, takeover 99.2%).")


def test_one_order_of_methods_in_every_table_and_figure(single):
    shuffled = tiny()
    shuffled["rows"] = shuffled["rows"][::-1]
    document = render([shuffled])
    order = ["Greedy", "Maj@8", "Random choice", "S2T", "Direct LLM score", "R2R", "FutureBridge", "Takeover"]
    for caption in ("Methods on demo:plans", "Accuracy and the LLM's work on demo:plans"):
        assert [name for name in rows_of(table(document, caption)) if name in order] == order
    figure = drawn("forest", [read(shuffled)])
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == order
    swept = drawn("sweep", read(shuffled))
    legend = [text.get_text() for text in swept.legends[0].get_texts()]
    assert legend[:4] == ["S2T", "Direct LLM score", "FutureBridge", "Takeover"]
    colours = [handle.get_color() for handle in swept.legends[0].get_lines()[1:3]]
    assert colours == [theme.LIGHT.others, theme.LIGHT.ours]  # as in all other figures


def test_turned_problems_are_counted_and_lead_to_their_pages():
    found = tiny()
    document = report.render([read(found)], ["problems/0.html", "problems/3.html"])
    counts = table(document, "Changed outcomes by kind of event")
    assert [plain(cell) for cell in counts.head] == ["", "greedy → method", "digit", "word", "all"]
    assert [[plain(cell) for cell in row[1:]] for row in counts.rows] == [
        ["right → wrong", "1", "2", "3"],
        ["wrong → right", "14", "13", "27"],
    ]
    shown = table(document, "Changed problems")
    assert [plain(row[0]) for row in shown.rows[:4]] == [f"plans/test/{number}" for number in (1, 0, 2, 3)]
    assert len(shown.rows) == 1 + 2 + 2 * LISTED
    links = [row[0] for row in shown.rows if isinstance(row[0], Link)]
    assert links == [Link("plans/test/0", "problems/0.html"), Link("plans/test/3", "problems/3.html")]
    html = document.html()
    assert {value for name, value in Page(html).attributes if name == "href"} == {link.to for link in links}
    assert "[plans/test/0](problems/0.html)" in document.markdown("figures")
    found["turned"]["changes"] = []
    (section,) = [one for one in render([found]).sections if one.title == "Problems with changed outcomes"]
    assert [row[-1] for row in section.blocks[0].rows] == ["0", "0"]


@pytest.mark.parametrize(
    "address",
    ["https://evil.example", "//evil.example/x.html", "javascript:alert(1)", "/x.html", "../x.html", "a b.html"],
)
def test_a_link_leads_nowhere_but_beside_the_report(address):
    with pytest.raises(ValueError, match="to: expected a page beside the report, got "):
        Link("text", address)


@pytest.mark.parametrize("text", ["a](https://evil.example)", "[x](y)", "]", "\\](z"])
def test_the_text_of_a_link_cannot_end_it(text):
    document = Document("t", [Paragraph(Link(text, "problems/1.html"))], [])
    for made in (of_markdown(document.markdown("figures")), Page(document.html())):
        assert [value for name, value in made.attributes if name == "href"] == ["problems/1.html"]
        assert text in made.text


def test_both_renderings_hold_the_same(single, page, runs):
    for document, made in ((single, page), (runs, Page(runs.html()))):
        markdown = of_markdown(document.markdown("figures"))
        assert stripped(markdown.tables) == stripped(made.tables)
        assert [title.strip() for title in markdown.titles] == made.titles
        figures = list(document.figures())
        assert markdown.tags.count("img") == len(figures)
        assert made.tags.count("img") == 2 * len(figures) + 2  # the first for a narrow screen too


def test_every_number_of_a_table_is_in_the_findings(page):
    findings = tiny()
    allowed = {word for text in strings(findings) for word in re.findall(r"\d+(?:\.\d+)?", text)}
    for number in numbers(findings):
        for value in (abs(number), abs(100 * number)):
            allowed |= {f"{value:.{digits}f}" for digits in range(5)} | {f"{value:g}"}
    for one in orderings(read(findings).rows):  # the paper's, and differences that are not paired: tests of their own
        allowed |= set(re.findall(r"\d+\.\d+", one.published + one.shown * (not one.paired)))
    counts = re.compile(r"\d+ of \d+")  # of cells, which have a test of their own
    words = [word for cells in page.tables for row in cells for cell in row for word in cell.split()]
    found = {number.replace(",", "") for word in words for number in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", word)} - {
        "95"
    }
    tallies = {
        n for cells in page.tables for row in cells for cell in row if counts.fullmatch(cell) for n in cell.split()
    }
    assert len(found) > 300
    assert found - tallies <= allowed


def test_rows_of_methods_are_as_found(single):
    found = table(single, "Methods on demo:plans")
    assert rows_of(found)["FutureBridge"] == [
        *("95.8 [92.8, 98.8]", "+24.6 [+20.9, +28.3]", "+8.8 [+5.1, +12.5]", "", "1.91", "1.91", "41.8")
    ]
    assert rows_of(found)["GRPO"] == ["see below", *[""] * 6]
    (methods,) = [section for section in single.sections if section.title == "Methods"]
    assert Items(["GRPO: no checkpoint given: compare.external."]) in methods.blocks
    labels = [label for label, *_ in METHODS.values()]
    assert [row[0] for row in found.rows] == [*labels[:6], "GRPO", *labels[6:]]
    for words in ("SLM demo:plans, LLM demo:plans", "400 problems", "seeds 0, 1", "greedy decoding between events"):
        assert words in found.note
    for words in ("quantile 0.94", "1.695 nats", "95% bootstrap over problems, differences paired"):
        assert words in found.note


@pytest.mark.usefixtures("pictureless")
def test_unequal_problem_counts_are_shown():
    findings = tiny()
    findings["rows"] = findings["rows"][:2]
    findings["rows"][0] |= {"problems": 1319}
    found = table(render([findings]), "Methods on demo:plans")
    assert found.head[-1] == "problems"
    assert rows_of(found)["Greedy"][-1] == "1,319"
    assert rows_of(found)["Maj@8"][-1] == "400"
    assert "400 to 1,319 problems" in found.note


@pytest.mark.usefixtures("pictureless")
def test_the_frontier_tells_what_is_worth_more_than_taking_over(single):
    found = table(single, "Accuracy and the LLM's work on demo:plans")
    rows = rows_of(found)
    assert found.head[-2:] == ["seconds per problem [95%], loop", "above the line to takeover, pp [95%]"]
    distance = 95.8 - 71.2 - 1.91 / 40.2 * 28
    ours = rows["FutureBridge"]
    assert ours[:3] == ["95.8 [92.8, 98.8]", "1.9 [1.8, 2.0]", "1.91 [1.72, 2.10]"]
    assert ours[3] == "0.048, 1.55 [1.50, 1.61] × greedy, fast"
    assert ours[-1] == f"{distance:+.1f} [{distance - 3:+.1f}, {distance + 3:+.1f}]"
    assert (rows["Greedy"][-1], rows["Takeover"][-1]) == ("", "")
    (section,) = [one for one in single.sections if one.title == "Accuracy against the LLM's work"]
    (items,) = [block for block in section.blocks if isinstance(block, Items)]
    takeover, worth = map(plain, items.texts)
    assert takeover.startswith("Takeover is right on 99.2 [96.2, 100.0]% of the problems with 40.2 [40.1, 40.3] LLM ")
    assert "; FutureBridge is right on 95.8 [92.8, 98.8]% of the problems with 1.9 [1.8, 2.0] LLM tokens " in takeover
    more, less = worth.split("Significantly worse: ")
    assert more.startswith(
        "Significantly better than takeover on a share of the problems with the same number of LLM tokens: "
    )
    assert more.endswith("R2R; FutureBridge. ")
    assert less == "Random choice; S2T. Not significantly different: Maj@8."
    lost = render([tiny(shift=0.5)])
    (section,) = [one for one in lost.sections if one.title == "Accuracy against the LLM's work"]
    (items,) = [block for block in section.blocks if isinstance(block, Items)]
    assert "FutureBridge" in plain(items.texts[1]).split("Significantly worse: ")[1]


@pytest.mark.usefixtures("pictureless")
def test_without_tokens_or_takeover_nothing_is_promised():
    found = tiny()
    for row in found["rows"]:
        row.pop("llm_tokens", None)
    document = render([found])
    assert "Accuracy against the LLM's work" not in [section.title for section in document.sections]
    found = tiny()
    found["rows"] = [row for row in found["rows"] if row["key"] != "takeover"]
    for row in found["rows"]:
        row.pop("above_line", None)
    (section,) = [one for one in render([found]).sections if one.title == "Accuracy against the LLM's work"]
    assert not [block for block in section.blocks if isinstance(block, Items)]


def test_the_frontier_is_that_of_the_average_where_there_is_one():
    found = read(tiny(benchmarks=("one", "other", "average")))
    axes = drawn("frontier", found).axes
    assert [axis.get_xlabel().partition(" per")[0] for axis in axes] == ["LLM tokens", "LLM calls"]
    for axis in axes:
        assert axis.get_ylabel() == "accuracy on average, %"
        assert len(axis.containers) == len(METHODS)


def test_the_line_of_the_frontier_ends_at_greedy_and_takeover():
    figure = drawn("frontier", read(tiny()))
    axis, calls = figure.axes
    (of_calls,) = [one for one in calls.lines if one.get_linestyle() == "--"]
    assert of_calls.get_xdata()[-1] == pytest.approx(1.0)
    (line,) = [one for one in axis.lines if one.get_linestyle() == "--"]
    xs, ys = line.get_data()
    assert (xs[0], xs[-1]) == (0.0, pytest.approx(40.2))
    assert (ys[0], ys[-1]) == (pytest.approx(71.2), pytest.approx(99.2))
    assert np.allclose(np.diff(ys) / np.diff(xs), (99.2 - 71.2) / 40.2)  # straight, though the axis is not
    colours = {text.get_text(): text.get_color() for text in axis.texts}
    assert colours["FutureBridge"] == theme.LIGHT.ours
    assert {colours[name] for name in ("Direct LLM score", "R2R", "Maj@8")} == {theme.LIGHT.others}
    assert len(axis.texts) == len(axis.containers)
    at = sorted(axis.transData.transform(text.xyann)[1] for text in axis.texts)  # of the labels, in pixels
    assert all(other - one >= 8 * figure.dpi / 72 for one, other in itertools.pairwise(at))


PAPER = PaperSettings(models=ModelSettings(slm="Qwen/Qwen3-1.7B", llm="Qwen/Qwen3-32B"))
OFFLINE, DEPLOYMENT = (
    {"states": 5.8, "futures": 29.4, "scores": 8.6, "training": 7.2},
    {"futurebridge": 3.3, "s2t": 3.18},
)


def test_the_papers_figures_are_data_of_the_package():
    """Its deployment is of a benchmark that is not known here, its accuracies are averages: they stand beside none."""
    text = (resources.files("benchmarks.paper") / "published.yaml").read_text()
    known = {name: one["rows"] for name, one in yaml.safe_load(text).items()}
    assert (known["offline"], known["deployment"]) == (OFFLINE, DEPLOYMENT)
    assert published(PAPER) == {"offline": OFFLINE}
    assert published(PaperSettings.of_config("tiny")) == {}


@pytest.mark.parametrize("name", ["gsm8k", "math-500"])
def test_a_figure_of_a_benchmark_stands_beside_that_benchmark_alone(name, tmp_path, monkeypatch):
    rows = {"deployment": {"table": 9, "benchmark": name, "rows": DEPLOYMENT}}
    (tmp_path / "published.yaml").write_text(yaml.safe_dump(rows))
    monkeypatch.setattr(gather, "resources", SimpleNamespace(files=lambda package: tmp_path))
    assert published(PAPER) == ({"deployment": DEPLOYMENT} if name == "gsm8k" else {})  # which is timed


@pytest.mark.usefixtures("pictureless")
def test_a_column_of_published_figures_is_there_where_there_are_some():
    findings = tiny()
    for caption in ("Offline stages", "Deployment", "Methods on demo:plans"):
        assert not [head for head in table(render([findings]), caption).head if "published" in head]
    findings["costs"]["offline"] += [{**findings["costs"]["offline"][0], "stage": "scores", "published": 8.6}]
    found = table(render([findings]), "Offline stages")
    assert found.head[-1] == "published, GPU hours"
    assert rows_of(found)["scores"][-1] == "8.6"
    assert rows_of(found)["trajectories"][-1] == ""


def test_verdicts_follow_the_intervals(single):
    (methods,) = [section for section in single.sections if section.title == "Methods"]
    said = next(block for block in methods.blocks if isinstance(block, Items))
    assert said.texts[0] == (
        "Significantly above greedy: Direct LLM score; R2R; FutureBridge; Takeover. Significantly below greedy: Random "
        "choice. Not significantly different from greedy: Maj@8; S2T."
    )
    assert len(said.texts) == 3
    (swept,) = [section for section in single.sections if section.title == "Request quantiles"]
    said = next(block for block in swept.blocks if isinstance(block, Items))
    assert "Significantly below greedy: FutureBridge at quantile 0.9. Not significantly different" in said.texts[0]


def ordering_paragraphs(run: Section) -> list[str]:
    (section,) = [one for one in run.sections if one.title == "The paper's orderings"]
    return [block.text for block in section.blocks if isinstance(block, Paragraph)]


def test_a_loss_is_told_where_a_win_would_be(runs):
    (_, won, lost, *_) = runs.sections
    told = ordering_paragraphs(lost)
    assert told[0].startswith("Reversed: FutureBridge > takeover (paper +2.0, here -63.4 [")  # before the counts
    assert "FutureBridge > direct LLM score (paper +3.2, here -" in told[0]
    assert told[1].startswith("Verdicts on the paper's orderings: reversed ")
    assert "FutureBridge > direct LLM score" not in ordering_paragraphs(won)[0]
    lost_to = next(plain(text) for text in runs.blocks[0].texts if "significantly worse" in plain(text))
    assert "FutureBridge: significantly worse than greedy decoding on control, demo:plans (-35.4 " in lost_to


def test_orderings_are_the_papers_and_none_is_against_its_averages():
    """Its table of all methods, its ablations, horizons and futures, in percent."""
    text = (resources.files("benchmarks.paper") / "published.yaml").read_text()
    paper = yaml.safe_load(text)["accuracy"]["rows"]
    main = ["futurebridge", "s2t", "takeover", "r2r", "s2t-local", "majority", "greedy"]
    assert [paper[key] for key in main] == [50.38, 49.14, 48.40, 47.70, 40.20, 38.40, 37.30]
    pools = ["pool-slm", "pool-llm", "pool-slm-wide", "direct", "distilled"]
    assert [paper[key] for key in pools] == [47.9, 48.3, 48.0, 47.2, 46.7]
    assert [paper[f"horizon-{length}"] for length in (16, 32, 64, 128)] == [47.7, 48.7, 50.38, 50.5]
    futures = ["verified", "unverified", "incorrect", "cross-state", "shuffled"]
    assert [paper[f"future-{kind}"] for kind in futures] == [50.38, 48.2, 46.1, 44.3, 43.2]
    lengths = [
        {"table": "horizons", "benchmark": "b", "key": key, "label": key, "x": x}
        for key, x in (("h16", 16), ("h32", 32), ("futurebridge", 64), ("h128", 128))
    ]
    found = {one.words: one.paper for one in orderings(read({"name": "n", "rows": lengths}).rows)}
    assert all(difference > 0 for difference in found.values())
    wanted = {
        "FutureBridge > takeover": 1.98,
        "FutureBridge > R2R": 2.68,
        "FutureBridge > S2T": 1.24,
        "S2T > takeover": 0.74,
        "S2T > direct LLM score": 1.94,
        "takeover > R2R": 0.7,
        "takeover > direct LLM score": 1.2,
        "joint pool > SLM pool as large as both": 2.38,
        "LLM pool > SLM pool": 0.4,
        "incorrect sample > cross-state future": 1.8,
        "horizon 64 > horizon 32": 1.68,
        "horizon 128 ≥ horizon 64": 0.12,
    }
    assert {words: found[words] for words in wanted} == pytest.approx(wanted)
    assert not [words for words in found if words.startswith(("takeover > F", "takeover > S2T", "direct LLM score >"))]


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [([0.1, 0.01, 0.2], "holds"), ([-0.1, -0.2, -0.01], "reversed"), ([0.1, 0.0, 0.2], "not decided")],
)
def test_an_ordering_holds_where_its_interval_says_so(difference, verdict):
    row = {"table": "methods", "benchmark": "b", "key": "futurebridge", "label": "o", "minus": {"direct": difference}}
    found = {ordering.words: ordering for ordering in orderings(read({"name": "n", "rows": [row]}).rows)}
    assert found["FutureBridge > direct LLM score"].verdict() == verdict
    assert {o.verdict() for words, o in found.items() if words != "FutureBridge > direct LLM score"} == {"not measured"}
    assert "horizon > shorter horizons" in found
    assert "joint pool > LLM pool" in found


def test_orderings_are_turned_the_right_way_round():
    def row(table, key, difference, x=None, **minus):
        minus |= {"futurebridge": difference} if difference else {}
        return {"table": table, "benchmark": "b", "key": key, "label": key, "x": x, "minus": minus}

    rows = [
        row("pools", "futurebridge", None),
        row("pools", "pool-slm", [-0.2, -0.3, -0.1]),
        row("futures", "future-shuffled", [-0.2, -0.3, -0.1], verified=[0.2, 0.1, 0.4]),
        row("horizons", "h8", [-0.2, -0.3, 0.0], x=8),
        row("horizons", "h32", [-0.2, -0.3, -0.1], x=32),
        row("horizons", "h64", [0.1, 0.0, 0.2], x=64),
        row("horizons", "futurebridge", None, x=16),
        row("methods", "takeover", [0.2, 0.1, 0.3]),
        row("methods", "s2t", None, direct=[-0.2, -0.3, -0.1]),
    ]
    rows = read({"name": "n", "rows": rows}).rows
    found = {o.words: (o.difference, o.verdict()) for o in orderings(rows) if o.difference}
    assert found == {
        "FutureBridge > takeover": ((-0.2, -0.3, -0.1), "reversed"),
        "S2T > direct LLM score": ((-0.2, -0.3, -0.1), "reversed"),
        "joint pool > SLM pool": ((0.2, 0.1, 0.3), "holds"),
        "verified future > shuffled future": ((-0.2, -0.4, -0.1), "reversed"),
        "horizon 16 > horizon 8": ((0.2, 0.0, 0.3), "not decided"),
        "horizon 32 ≥ horizon 16": ((-0.2, -0.3, -0.1), "reversed"),
        "horizon 64 ≥ horizon 16": ((0.1, 0.0, 0.2), "holds"),
    }


def test_rows_that_were_not_paired_are_compared_by_both_intervals():
    """Whatever the correlation, the two half-widths together are wide enough."""
    rows = [
        {"table": "methods", "benchmark": "b", "key": key, "label": key, "accuracy": accuracy}
        for key, accuracy in (("s2t", [0.7, 0.6, 0.75]), ("takeover", [0.9, 0.85, 0.99]))
    ]
    (found,) = [one for one in orderings(read({"name": "n", "rows": rows}).rows) if one.difference]
    assert (found.words, found.paired, found.verdict()) == ("S2T > takeover", False, "reversed")
    assert found.difference == pytest.approx((-0.2, -0.39, -0.1))
    assert found.shown == "-20.0 [-39.0, -10.0]†"


def test_a_wrong_sample_is_held_against_a_right_one():
    """A greedy future against a wrong sample would differ in how it was decoded too."""
    minus = {"verified": [0.1, 0.05, 0.2], "first correct sample": [-0.1, -0.2, -0.05]}
    rows = [
        {"table": "futures", "benchmark": "b", "key": "future-sampled", "label": "first correct sample"},
        {"table": "futures", "benchmark": "b", "key": "future-incorrect", "label": "first wrong one", "minus": minus},
    ]
    findings = {"name": "n", "rows": [{**row, "accuracy": [0.5] * 3} for row in rows]}
    found = {ordering.words: ordering for ordering in orderings(read(findings).rows)}
    assert found["first correct sample > incorrect sample"].difference == (0.1, 0.05, 0.2)
    assert found["first correct sample > incorrect sample"].paper == pytest.approx(50.38 - 46.1)
    assert "verified future > incorrect sample" not in found
    assert "minus first correct sample, pp [95%]" in table(render([findings]), "Futures on b").head


def of_page(text: str) -> Findings:
    """The findings of the methods that a page in Markdown shows, as it rounds them, with what its note says of them."""

    def interval(cell: str) -> list[float]:
        return [round(float(part) / 100, 3) for part in re.findall(r"[+-]?[\d.]+", cell)]

    name = re.search(r"^\*\*Methods on (.*)\*\*$", text, re.MULTILINE)
    _, lines, note, *_ = text[name.end() :].split("\n\n")
    about = r"SLM (.*), LLM (.*); (\d+) problems; seeds (.*); greedy.*; request quantile (.*), (.*) nats; .*"
    slm, llm, problems, seeds, quantile, nats = re.fullmatch(about, note).groups()
    keys = {label: key for key, (label, *_) in METHODS.items()}
    rows = []
    for line in lines.splitlines()[2:]:
        label, accuracy, greedy, direct, ours, *_ = [cell.strip() for cell in line.strip("|").split("|")]
        minus = {"greedy": interval(greedy), "direct": interval(direct), "futurebridge": interval(ours)}
        row = {"table": "methods", "benchmark": name[1], "key": PAGE_KEYS.get(label) or keys.get(label, label)}
        row |= {"minus": {key: found for key, found in minus.items() if found}, "label": label}
        row |= {"problems": problems, "seeds": seeds.split(", ")}
        rows.append(row | {"accuracy": interval(accuracy) if "[" in accuracy else None})
    policy = {"quantile": quantile, "threshold": nats, "top_k": 64}
    return read({"name": "page", "rows": rows, "pair": {"slm": slm, "llm": llm}, "policy": policy})


PAGE_KEYS = {"Distilled LLM preference": "distilled", "S2T-Local, matched": "s2t-local"}


def test_the_pretrained_pairs_page_has_the_papers_orderings():
    """It is what the renderer makes of the page's own table of methods."""
    text = (Path(__file__).parents[2] / "docs" / "pretrained_pair" / "report.md").read_text()
    blocks = ordering_blocks(of_page(text))
    wanted = Document("", blocks, []).markdown("").removeprefix("# \n\n").rstrip()
    (shown,) = re.findall(r"^## The paper's orderings\n\n[^\n]*\n\n(.*?)\n\n## ", text, re.MULTILINE | re.DOTALL)
    assert shown == wanted
    assert wanted.startswith("Reversed: FutureBridge > takeover (paper +2.0, here -15.8 [-21.0, -10.4] pp); S2T > ")
    assert "reversed 3, holds 7, not decided 1, not measured 15" in wanted


WITH_FIGURES = dict(DIAGNOSTICS)


@pytest.fixture
def pictureless(monkeypatch):
    """Without figures, which take a second each."""
    monkeypatch.setattr(report, "EXPERIMENT_FIGURES", {})
    monkeypatch.setattr(figures, "forest", lambda *_: None)
    for name, one in DIAGNOSTICS.items():
        monkeypatch.setitem(DIAGNOSTICS, name, one._replace(draw=lambda findings: None))


@pytest.fixture
def undrawn(pictureless, monkeypatch):
    """Without figures but for two that show what models wrote."""
    for name in ("trajectory", "worked_event"):
        monkeypatch.setitem(DIAGNOSTICS, name, WITH_FIGURES[name])


SHOWN = [(name, table.title, f"python -m benchmarks.paper tables {name}") for name, table in TABLES.items()]
SHOWN += [(name, one.title, one.command) for name, one in DIAGNOSTICS.items()]


@pytest.mark.usefixtures("pictureless")
def test_what_was_not_run_is_named_with_its_command():
    whole = tiny()
    for name, title, command in SHOWN:
        without = {**whole, "rows": [row for row in whole["rows"] if row["table"] != name]}
        if name == "frontier":  # is of the rows
            without["rows"] = [{**row, "llm_tokens": None, "calls": None} for row in whole["rows"]]
        elif name in DIAGNOSTICS:
            without[name] = None
        sections = {section.title: section for section in render([without]).sections}
        assert title not in sections
        (items,) = [block for block in sections["Not run"].blocks if isinstance(block, Items)]
        missing = [f"{title}: run {command}"]
        missing += [f"Accuracy against the LLM's work: run {command}"] if name == "methods" else []  # is of its rows
        assert [plain(text) for text in items.texts] == missing


def test_of_an_empty_run_nothing_is_invented():
    document = render([{"name": "bare"}])
    assert [section.title for section in document.sections] == ["Not run", "How to read the numbers"]
    text = Page(document.html()).text
    assert all(title in text for _, title, _ in SHOWN)
    assert not list(document.figures())
    assert not re.search(r"\d", text.replace("95%", "").replace("excludes 0", "").replace("FutureBridge", ""))
    bare = report.render([Findings(name="bare")])
    assert [section.title for section in bare.sections] == ["Not run", "How to read the numbers"]


def test_an_experiment_is_shown_as_its_entry_says(single):
    """Nothing but the findings says which experiments there are."""
    entry = {"name": "widths", "title": "Widths", "varies": "How wide it is.", "figure": "accuracy", "caption": "Dots."}
    row = table_row("widths", "wide", "twice as wide", 0.9, {"greedy": 0.7}, benchmark="b")
    row["minus"]["the narrow one"] = around(0.2)
    methods = [row for row in tiny()["rows"] if row["table"] == "methods"]
    document = render([{"name": "n", "experiments": [entry], "rows": [row, *methods]}])
    (section,) = [section for section in document.sections if section.title == "Widths"]
    assert section.brief == "How wide it is."
    assert "minus the narrow one, pp [95%]" in table(document, "Widths on b").head
    assert isinstance(section.blocks[-1], Figure)
    assert section.blocks[-1].caption == "Dots."
    assert "Methods" not in [section.title for section in document.sections]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.usefixtures("undrawn")
def test_no_text_gets_at_the_reader(text):
    document = render([everywhere(tiny(), text)])
    made, markdown = Page(document.html()), of_markdown(document.markdown("figures"))
    assert not {"svg", "b", "i", "em", "s", "del"} & set(made.tags)
    assert made.tags.count("script") == 1
    assert not [name for name, _ in made.attributes if name.startswith("on")]
    tags = {"h1", "h2", "h3", "p", "ul", "li", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    assert set(markdown.tags) <= {*tags, "code", "pre", "img"}
    assert [value for name, value in markdown.attributes if name == "src"] == [
        "figures/trajectory.svg",
        "figures/worked-event.svg",
    ]
    shown = escaped(text)
    for seen in (made, markdown):
        assert seen.titles[0] == "The run"
        assert shown in {row[0] for cells in seen.tables for row in cells}
        assert all(len(row) == len(cells[0]) for cells in seen.tables for row in cells)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", seen.text)
    assert stripped(markdown.tables) == stripped(made.tables)


@pytest.mark.parametrize("text", ["1. x", "# x", "- x", "+ x", "> x", "=== x", "    x", "* x", "```", "~~~ x", "7) x"])
def test_no_text_begins_a_block_of_markdown(text):
    blocks = [Paragraph(text), Items([text]), Verbatim(text, text), Table("c", ("a",), [[text]], text)]
    page = of_markdown(Document("t", [], [Section(text, blocks)]).markdown("figures"))
    assert page.tags.count("ul") == page.tags.count("li") == page.tags.count("pre") == page.tags.count("h2") == 1
    assert not {"ol", "h3", "blockquote", "hr", "em", "del"} & set(page.tags)
    assert page.text.count(text.strip()) == 7


@pytest.mark.parametrize("text", ["a\nb", "a ``` b", "````\n# x\n```", "<pre>", "\ttab"])
def test_a_text_as_it_is_stays_so(text):
    document = Document("t", [Verbatim("label", text)], [])
    assert text in Page(document.html()).text
    assert text in of_markdown(document.markdown("figures")).text


@pytest.mark.usefixtures("pictureless")
def test_long_rollouts_are_shortened():
    findings = tiny()
    findings["worked_event"]["candidates"][0]["rollout"] = "a" * 5000 + "z"
    found = table(render([findings]), "Candidates, best score first")
    assert plain(found.rows[0][-1]) == "a" * 200 + " […] " + "a" * 199 + "z"


def test_several_runs_are_compared(runs):
    assert [section.title for section in runs.sections] == [
        "All runs",
        "tiny",
        "control",
        "several",
        "How to read the numbers",
    ]
    found = table(runs, "Accuracy, % [95%], by run")
    assert list(found.head) == ["", "tiny: demo:plans", "control: demo:plans", "several: gsm8k", "several: math-500"]
    assert rows_of(found)["FutureBridge"][:2] == ["95.8 [92.8, 98.8]", "35.8 [32.8, 38.8] ▼▽"]
    assert rows_of(found)["Greedy"][0] == "71.2 [68.2, 74.2] ▽"
    assert [row[0] for row in found.rows] == [label for label, *_ in METHODS.values()]
    names = [figure.name for figure in runs.figures()]
    assert len(set(names)) == len(names)
    assert "run-1-frontier" in names
    assert "run-3-quantiles" in names


def test_runs_of_one_name_are_told_apart():
    assert [s.title for s in render([{"name": "a"}, {"name": "a"}]).sections] == [
        "All runs",
        "a (1)",
        "a (2)",
        "How to read the numbers",
    ]


@pytest.mark.usefixtures("pictureless")
def test_several_benchmarks_have_an_average_where_all_are_known():
    findings = {"name": "n", "rows": [row for row in tiny(benchmarks=("x", "y"))["rows"] if row["table"] == "methods"]}
    findings["rows"] = [r for r in findings["rows"] if (r["benchmark"], r["key"]) != ("y", "s2t")]
    findings["rows"][0]["accuracy"] = around(0.6)
    greedy, ours = (next(row for row in findings["rows"] if row["key"] == key) for key in ("greedy", "futurebridge"))
    findings["rows"] += [{**greedy, "benchmark": AVERAGE, "accuracy": around(0.656, 0.02), "problems": 800}]
    average = {"benchmark": AVERAGE, "minus": ours["minus"] | {"greedy": around(0.31, 0.02)}, "problems": 800}
    findings["rows"] += [{**ours, **average}]
    found = table(render([findings]), "Methods: accuracy, %")
    assert list(found.head) == ["", "x", "y", "average"]
    assert rows_of(found)["Greedy"] == ["60.0 ▽", "71.2 ▽", "65.6 [63.6, 67.6] ▽"]
    assert rows_of(found)["S2T"] == ["69.0 ▽", "", ""]
    assert rows_of(found)["GRPO"] == ["", "", ""]
    assert rows_of(table(render([findings]), "Methods on average"))["FutureBridge"][1] == "+31.0 [+29.0, +33.0]"
    assert ": FutureBridge on average, 95.8%" in first_screen(findings)[1]  # the primary one alone
    assert figures.accuracy(read(findings), "methods") is not None


DRAWN = [
    *("accuracy", "forest", "agreement", "horizon", "quality", "trajectory", "event", "cost", "sweep", "frontier"),
]


def shown_by(name, found):
    """What a figure is made of: several runs, or one."""
    return [found] if name == "forest" else found


OF_TABLE = {"accuracy": ["methods"], "horizon": ["horizons"], "sweep": ["quantiles"]}


@pytest.mark.parametrize("name", DRAWN)
def test_figures_are_svg_by_themselves_in_two_themes(name):
    draw, findings = getattr(figures, name), shown_by(name, read(tiny()))
    table = OF_TABLE.get(name, [])
    settings = dict(matplotlib.rcParams)
    picture = draw(findings, *table)
    assert draw(findings, *table) == picture
    assert dict(matplotlib.rcParams) == settings
    assert picture.light != picture.dark
    assert draw(shown_by(name, read({"name": "bare"})), *table) is None
    for svg in picture:
        root = ElementTree.fromstring(svg)
        assert root.tag.endswith("svg")
        assert not {"script", "image", "text"} & {e.tag.split("}")[1] for e in root.iter()}
        links = [value for e in root.iter() for key, value in e.attrib.items() if key.split("}")[-1] == "href"]
        assert all(link.startswith("#") for link in links)
        assert "dc:date" not in svg
    assert theme.LIGHT.ink in picture.light
    assert theme.DARK.ink in picture.dark
    assert theme.LIGHT.ink not in picture.dark


@pytest.mark.parametrize("name", DRAWN)
def test_figures_take_hostile_text_and_many_benchmarks(name, recwarn):
    for text in ("$\\frac{1", "--><b>", "\x1b[31m\u202e\n", "漢字 \U0001f600", "", "x" * 500):
        found = read(everywhere(tiny(benchmarks=("$a", "b^{", "c", "d")), text))
        for svg in getattr(figures, name)(shown_by(name, found), *OF_TABLE.get(name, [])):
            ElementTree.fromstring(svg)
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_labels_that_would_overlap_are_moved_apart():
    placed = figures._spread([1.0, 1.0, 1.1, 5.0], 1.0)
    assert all(b - a >= 0.99 for a, b in itertools.pairwise(placed))
    assert placed[-1] == 5.0


def drawn(name, found, *more):
    """A figure by itself, laid out."""
    with style.context(["default", theme._style(theme.LIGHT)]):
        figure = inspect.unwrap(getattr(figures, name))(found, theme.LIGHT, *OF_TABLE.get(name, []), *more)
        figure.draw_without_rendering()
    return figure


def intervals(axis):
    """(low, high) in percent by the place of each dot, from the top."""
    lines = (container.lines[2][0].get_segments()[0] for container in axis.containers)
    return {round(float(line[0, 1])): tuple(line[:, 0].round(6).tolist()) for line in lines}


def test_methods_stand_in_one_order_in_all_panels():
    found = tiny(benchmarks=("one", "other"))
    found["rows"] = [row for row in found["rows"] if (row["benchmark"], row["key"]) != ("other", "majority")]
    axes = drawn("accuracy", read(found)).axes
    labels = [text.get_text() for text in axes[0].get_yticklabels()]
    assert labels == [label for label, *_ in METHODS.values()]
    assert axes[0].get_shared_y_axes().joined(*axes)
    assert all(axis.yaxis_inverted() for axis in axes)
    first, second = map(intervals, axes)
    ends = (around(mean)[1:] for _, mean, *_ in METHODS.values())
    assert first == {place: (round(100 * low, 6), round(100 * high, 6)) for place, (low, high) in enumerate(ends)}
    assert second == {place: ends for place, ends in first.items() if labels[place] != METHODS["majority"][0]}


def written_in(figure):
    """Every text of a figure with its place."""
    texts = [text for legend in figure.legends for text in legend.get_texts()]
    for axis in figure.axes:
        ticks = [*axis.get_xticklabels(), *axis.get_yticklabels()]
        ends = {"x": axis.get_xlim(), "y": axis.get_ylim()}
        inside = [*(t for t in axis.get_xticklabels() if min(ends["x"]) <= t.get_position()[0] <= max(ends["x"]))]
        inside += [t for t in axis.get_yticklabels() if min(ends["y"]) <= t.get_position()[1] <= max(ends["y"])]
        titles = [axis._left_title, axis.title, axis.xaxis.label, axis.yaxis.label]
        legend = axis.get_legend()
        texts += [*inside, *titles, *axis.texts, *(legend.get_texts() if legend else ())]
        assert all(text.get_fontsize() >= 8 for text in ticks)
    shown = [text for text in texts if text.get_text() and text.get_visible()]
    return [(text, Text.get_window_extent(text)) for text in shown]  # an annotation's own has its arrow too


@pytest.mark.parametrize(("name", "screen"), [*((name, "wide") for name in DRAWN), ("forest", "narrow")])
def test_labels_can_be_read_and_do_not_overlap(name, screen):
    more = [screen] if name == "forest" else []
    found = read(tiny(benchmarks=("one", "other")))
    figure = drawn(name, [found, read(tiny("second", 0.3))] if name == "forest" else found, *more)
    texts = written_in(figure)
    assert len(texts) > 5
    assert all(text.get_fontsize() >= 8 for text, _ in texts)
    width = figures.NARROW if screen == "narrow" else figures.WIDTH
    assert figure.get_figwidth() <= width  # shown at that size
    for (one, its), (other, others) in itertools.combinations(texts, 2):
        across, down = min(its.x1, others.x1) - max(its.x0, others.x0), min(its.y1, others.y1) - max(its.y0, others.y0)
        assert min(across, down) < 1.5, (one.get_text(), other.get_text())
    edges = [box for _, box in texts]
    assert min(box.x0 for box in edges) >= -1
    assert max(box.x1 for box in edges) <= figure.bbox.x1 + 1


def test_shape_stands_beside_colour():
    """Each family of methods has a marker of its own, and colours that colour-blind readers tell apart."""
    looks = {figures._look(theme.LIGHT, key, ours) for key, ours in (("greedy", False), ("s2t", False), ("x", True))}
    assert len({marker for marker, _ in looks}) == len({colour for _, colour in looks}) == 3
    assert figures._look(theme.LIGHT, "futurebridge", False) == figures._look(theme.LIGHT, "x", True)


def test_agreement_has_its_intervals():
    axes = drawn("agreement", read(tiny())).axes
    assert [text.get_text() for text in axes[0].get_yticklabels()][:2] == ["SLM", "LLM"]
    assert intervals(axes[0])[0] == (49, 55)
    assert 2 not in intervals(axes[3])  # known nowhere


def test_labels_of_the_sweep_do_not_overlap():
    figure = drawn("sweep", read(tiny(benchmarks=("one", "other"))))
    for axis in figure.axes:
        labels = [text for text in axis.get_xticklabels() if text.get_text()]
        assert [text.get_text() for text in labels] == ["0.9", "0.92", "0.94", "0.96"]
        boxes = [text.get_window_extent() for text in labels]
        assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))


def test_a_figure_is_a_png_too():
    found = theme.png(figures.accuracy, read(tiny()), "methods")
    assert found.startswith(b"\x89PNG")
    assert theme.png(figures.accuracy, read(tiny()), "methods") == found
    assert theme.png(figures.agreement, read({"name": "bare"})) is None


def test_written_files_repeat_byte_for_byte(tmp_path):
    findings = [read(tiny())]
    written = write_report(findings, tmp_path / "a" / "b")
    names = [path.relative_to(tmp_path / "a" / "b").as_posix() for path in written]
    assert names[:2] == ["findings.json", "rows.json"]
    assert names[-2:] == ["report.md", "report.html"]
    assert "figures/forest.svg" in names
    again = write_report(findings, tmp_path / "c")
    assert [path.read_bytes() for path in written] == [path.read_bytes() for path in again]
    shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", written[-2].read_text())
    assert shown
    assert all((written[-2].parent / name).is_file() for name in shown)


def test_bad_findings_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="expected those of one run or more, got none"):
        write_report([], tmp_path / "out")
    with pytest.raises(ValueError):
        write_report([read({"name": "n", "settings": {"x": math.nan}})], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_findings_are_read_back_as_they_were_written(tmp_path):
    findings = (read(tiny()), read(tiny("other", benchmarks=("x", "y"))), read({"name": "bare"}))
    (tmp_path / "findings.json").write_bytes(findings_bytes(findings))
    assert read_findings(tmp_path / "findings.json") == findings
    (tmp_path / "rows.json").write_bytes(rows_bytes(findings))
    brief = read_findings(tmp_path / "rows.json")
    assert rows_bytes(brief) == rows_bytes(findings)
    for row, kept in zip(findings[0].rows, brief[0].rows, strict=True):
        assert (kept.table, kept.label, kept.minus.keys()) == (row.table, row.label, row.minus.keys())
        assert kept.accuracy == (row.accuracy and pytest.approx(row.accuracy, abs=1e-6))
    assert [one.policy for one in brief] == [one.policy for one in findings]
    assert [one.key for one in brief[0].costs.deployment] == [one.key for one in findings[0].costs.deployment]
    assert (brief[0].worked_event, brief[0].settings, brief[0].costs.offline) == (None, {}, ())
    lines = (tmp_path / "rows.json").read_text().splitlines()
    assert len(lines) < 12 + sum(len(one.rows) for one in findings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Invalid JSON"),
        ("[" * 10_000, "Invalid JSON"),
        ("{}", "valid"),
        ('[{"rows": []}]', "0.name: Field required"),
        ('[{"name": "n", "rows": [{"table": 3}]}]', "0.rows.0.table: Input should be a valid string"),
        ('[{"name": "n", "seeds": [NaN]}]', "0.seeds.0: "),
        ('[{"name": "n", "colour": "red"}]', "0.colour: Extra inputs are not permitted"),
        ('[{"name": "n", "policy": {"threshold": Infinity, "quantile": 0.9, "top_k": 64}}]', "0.policy.threshold: "),
    ],
)
def test_files_that_are_no_findings_are_named(text, words, tmp_path):
    path = tmp_path / "findings.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="expected findings of a report, got ") as wrong:
        read_findings(path)
    assert str(path) in str(wrong.value)
    assert words in str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_a_figure_is_of_the_table_that_it_stands_with():
    findings = read(tiny())
    methods, pools = (figures.accuracy(findings, table) for table in ("methods", "pools"))
    assert methods is not None
    assert pools is not None
    assert methods != pools
    assert figures.accuracy(findings, "nothing") is None


@pytest.mark.usefixtures("undrawn")
def test_the_name_of_an_experiment_is_no_path(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "EXPERIMENT_FIGURES", {"accuracy": lambda *_: Picture("<svg/>", "<svg/>")})
    whole = read(tiny())
    (first, *_) = (one for one in whole.experiments if one.figure == "accuracy")
    hostile = first.model_copy(update={"name": "../../../owned"})
    rows = tuple(row.model_copy(update={"table": hostile.name}) for row in whole.of(first.name))
    write_report([whole.model_copy(update={"experiments": (hostile,), "rows": rows})], tmp_path / "a" / "report")
    assert [path.parent.name for path in tmp_path.rglob("*owned*")] == ["figures"]


def test_a_report_without_room_leaves_the_one_before(tmp_path):
    (tmp_path / "findings.json").write_bytes(findings_bytes([read(tiny())]))
    code = (
        "import resource, signal; from pathlib import Path; "
        "from benchmarks.paper.report.findings import read_findings; "
        "from benchmarks.paper.report.report import write_report; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); findings = read_findings(Path('findings.json')); "
        "write_report(findings, Path('out')); resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)); "
        "write_report(findings, Path('out'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=FOUND, capture_output=True, text=True)
    assert "expected to write" in done.stderr
    assert len((tmp_path / "out" / "report.html").read_bytes()) > 4000
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name.endswith(".part")]


def test_a_report_is_made_without_any_model_code(tmp_path):
    (tmp_path / "findings.json").write_bytes(findings_bytes([read(tiny())]))
    code = (
        "import sys; from pathlib import Path; import benchmarks.paper.report; "
        "from benchmarks.paper.report.findings import read_findings; "
        "from benchmarks.paper.report.report import write_report; "
        "write_report(read_findings(Path('findings.json')), Path('out')); "
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'transformers', 'peft') "
        "or name.startswith(('fb_core.stages', 'benchmarks.paper.run', 'fb_core.hf', 'fb_kernels'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=FOUND, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
    assert (tmp_path / "out" / "report.html").is_file()


@functools.cache
def harmless_page() -> Tree:
    return Tree(render([everywhere(tiny(), "text")]).html())


@pytest.mark.parametrize(
    "text", [*HOSTILE, "<!-- x", "<![CDATA[x]]>", "<?php x ?>", "&copy; &#60;b&#62; &lt;i&gt;", "{{ 7 * 7 }}{% raw %}"]
)
@pytest.mark.usefixtures("undrawn")
def test_hostile_text_adds_no_element_attribute_or_entity(text):
    page = render([everywhere(tiny(), text)]).html()
    hostile = Tree(page)
    assert hostile.tags == harmless_page().tags
    assert hostile.entities <= ESCAPED
    assert hostile.other == []
    assert escaped(text) in Page(page).text  # once read, it is what was written


def test_pictures_and_titles_cannot_become_markup():
    for text in HOSTILE:
        picture = Figure(text, text, Picture("<svg/>", "<svg/>"))
        document = Document(text, [Paragraph((text, Span(text, "code")))], [Section(text, [picture])])
        tree = Tree(document.html())
        assert tree.tags == Tree(Document("t", document.blocks, [Section("t", [picture])]).html()).tags
        assert tree.entities <= ESCAPED


def test_the_recipe_deployed_is_shown_with_its_bounds():
    text = render([{"name": "n", "deployed": tiny()["deployed"]}]).markdown("figures")
    assert "Deployed recipe" in text
    assert "Seed 0: value: the best of 1 of 1 tested recipes." in text
    row = next(line for line in text.splitlines() if line.startswith("| value"))
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "value",
        "90.0",
        "+40.0 [+35.0]",
        "+10.0 [+5.0]",
        "2.25",
        "2.25",
    ]


def test_futures_may_be_compared_with_the_verified_one():
    rows = [row for row in tiny()["rows"] if row["table"] == "futures"]
    rows[1]["minus"]["verified"] = around(-0.177)
    found = table(render([{"name": "n", "rows": rows}]), "Futures on demo:plans")
    assert found.head[5] == "minus verified, pp [95%]"
    assert rows_of(found)["Cross-state"][4] == "-17.7 [-20.7, -14.7]"


def test_choices_are_told_by_kind_and_quantile(single):
    digits = table(single, "Choices that lead to success, digit events")
    assert [plain(cell) for cell in digits.head] == ["", "q 0.9, % [95%]", "q 0.94, % [95%]"]
    assert [[plain(cell) for cell in row] for row in digits.rows] == [
        ["the SLM's choice", "60.0 [57.0, 63.0] ▽", "60.0 [57.0, 63.0] ▽"],
        ["the LLM's choice", "70.0 [67.0, 73.0]", "70.0 [67.0, 73.0]"],
        ["FutureBridge", "50.0 [47.0, 53.0] ▼ ▽", "80.0 [77.0, 83.0]"],
    ]
    assert plain(digits.note).startswith("States at each quantile: 99 at 0.9, 60 at 0.94.")
    assert "; 150 problems; request quantile 0.94, 1.695 nats unless the row has its own; 95% score" in digits.note
    text = single.markdown("figures")
    assert "Better than the LLM's choice at digit events: FutureBridge at quantile 0.94." in text
    assert "Worse: the SLM's choice at quantile 0.9, 0.94; FutureBridge at quantile 0.9." in text
    assert "Better than the LLM's choice at all events: FutureBridge at quantile 0.9, 0.94." in text


def test_costs_without_deployment_name_its_command():
    findings = {"name": "n", "costs": tiny()["costs"] | {"deployment": None}}
    text = Page(render([findings]).html()).text
    assert "Deployment was not timed. To time it, run python -m benchmarks.paper tables costs." in text


def test_filters_stand_in_the_order_in_which_they_are_applied(single):
    found = table(single, "States left after each filter")
    assert [row[0] for row in found.rows] == ["admitted", "verified", "long enough", "train groups", "candidates"]

"""Made-up runs for the report, and what is read from a page that shows them."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from benchmarks.paper import figures, report
from benchmarks.paper.page import Document, Items, Table
from benchmarks.paper.rows import Run
from benchmarks.paper.tables import TABLES
from benchmarks.theme import Picture

ROOT = Path(__file__).parents[2]
HOSTILE = [
    "<script>alert(1)</script>",
    '" onload="alert(1)',
    "a | b || c \\| d",
    "`code` ``` $x$ *b* _i_ ~s~",
    "![x](https://evil.example/x.png)",
    "[x]: https://evil.example",
    "line\n# heading\n- item",
    "\x1b[31m\u202egnorw\x00",
    "</pre></td>&amp;",
    "<!-- x",
    "{{ 7 * 7 }}{% raw %}",
]
METHODS = {  # label, accuracy, events, tokens
    "greedy": ("Greedy", 0.712, 0.0, 34.5),
    "majority": ("Maj@8", 0.735, 0.0, None),
    "random": ("Random choice", 0.64, 2.17, 34.1),
    "s2t": ("S2T", 0.69, 2.12, 35.6),
    "direct": ("Direct LLM score", 0.87, 1.92, 39.5),
    "r2r": ("R2R", 0.901, 3.3, 40.2),
    "published": ("Published recipe", 0.958, 1.91, 41.8),
    "takeover": ("Takeover", 0.992, 1.0, 41.8),
}
ENDS = ("greedy", "takeover")  # of the line
VARIANTS = {
    "pools": [("pool-slm", "SLM pool", 0.898, None), ("pool-llm", "LLM pool", 0.952, None)],
    "horizons": [("published", "H = 16", 0.958, 16.0), ("horizon-4", "H = 4", 0.592, 4.0)],
    "futures": [("future-verified", "Verified", 0.949, None), ("future-shuffled", "Shuffled", 0.55, None)],
    "alpha": [("alpha-0.5", "alpha = 0.5", 0.94, 0.5)],
    "temperature": [("temperature-1", "temperature 1", 0.956, 1.0)],
    "scope": [("scope-sequence", "Whole sequence", 0.962, None)],
}
SWEPT = {0.9: (0.81, 0.63, 0.992), 0.92: (0.81, 0.868, 0.99), 0.94: (0.87, 0.958, 0.992)}


def read(found: dict) -> Run:
    return TypeAdapter(Run).validate_python(found)


def render(*found: dict, tables=TABLES) -> Document:
    return report.render([read(one) for one in found], tables)


def around(mean: float, half: float = 0.03) -> list[float]:
    return [mean, max(mean - half, -1.0), min(mean + half, 1.0)]


def row_of(table: str, benchmark: str, key: str, label: str, accuracy: float, base: dict, **more) -> dict:
    events, tokens = more.pop("events", 1.91), more.pop("tokens", 40.1)
    asked = {"greedy": 0.0, "majority": 0.0, "takeover": 40.2}.get(key, events)
    row = {"table": table, "benchmark": benchmark, "key": key, "label": label, "problems": 400, "seeds": [0, 1]}
    row |= {"accuracy": around(accuracy), "events": events, "tokens": tokens, "llm_tokens": around(asked, 0.1)}
    row["llm_tokens"] = [asked, max(asked - 0.1, 0.0), asked + 0.1]
    row["calls"] = [events, 0.9 * events, 1.1 * events]
    row["read"] = [30 + asked] * 3
    row["minus"] = {other: around(accuracy - value, 0.037) for other, value in base.items() if key != other}
    if key not in ENDS:
        row["above_line"] = around(accuracy - 0.712 - asked / 40.2 * 0.28)
        row["above_read_line"] = around(accuracy - 0.712 - 0.2)
    return row | more


def tiny(name: str = "tiny", shift: float = 0.0, benchmarks: tuple[str, ...] = ("demo:plans",)) -> dict:
    """A run in which everything was measured; `shift` lowers what is the published recipe's."""
    ours = ("published", *(key for variants in VARIANTS.values() for key, *_ in variants))
    base = {key: METHODS[key][1] - shift * (key in ours) for key in ("greedy", "direct", "published")}
    rows = []
    for benchmark in benchmarks:
        for key, (label, accuracy, events, tokens) in METHODS.items():
            seeds = [0, 1] if key in ("published", "majority", "random") else []
            more = {"events": events, "tokens": tokens, "seeds": seeds}
            rows.append(row_of("methods", benchmark, key, label, accuracy - shift * (key in ours), base, **more))
        unseen = {"table": "methods", "benchmark": benchmark, "key": "external-grpo", "label": "GRPO"}
        rows.append(unseen | {"note": "no checkpoint given: compare.external"})
        for table, variants in VARIANTS.items():
            for key, label, accuracy, x in variants:
                rows.append(row_of(table, benchmark, key, label, accuracy - shift, base, x=x))
        for recall, accuracy in ((0.5, 0.9), (0.95, 0.995)):
            rows.append(
                row_of("recalls", benchmark, f"r2r-{recall}", f"R2R, recall {recall}", accuracy, base, x=recall)
            )
        for quantile, accuracies in SWEPT.items():
            there = dict(zip(("direct", "published", "takeover"), accuracies, strict=True))
            there["published"] -= shift
            beside = {"greedy": base["greedy"]} | {key: there[key] for key in ("direct", "published")}
            more = {"x": quantile, "quantile": quantile, "threshold": round(10 * quantile - 8, 3)}
            for key, accuracy in there.items():
                rows.append(row_of("quantiles", benchmark, key, METHODS[key][0], accuracy, beside, **more))
    scores = {"SLM": 0.52, "LLM": 0.685, "Direct-B_16": 0.895, "reranker": 0.824 - shift}
    states = {"where": "validation", "states": 318, "mixed_states": 132}
    agreement = [
        states
        | {"score": score, "kind": kind, "pairs": 1069, "problems": 149}
        | {"pairwise": None if (score, kind) == ("SLM", "mark") else around(mean), "top1": around(mean, 0.04)}
        | {"top1_mixed": around(mean - 0.03, 0.06), "top1_minus_slm": around(mean - 0.52) if score != "SLM" else None}
        | {"top1_minus_llm": around(mean - 0.685) if score != "LLM" else None}
        for kind in ("all", "word", "mark")
        for score, mean in scores.items()
    ]
    tested = {"seed": 0, "words": "value: the best of 1 of 1 tested recipes.", "problems": 300, "delta": 0.02}
    costs = {"units": 1150, "unit": "problems", "seconds": 4.5, "gpu_hours": 0.0, "devices": ["cpu"], "published": None}
    return {
        "name": name,
        "settings": {"models": {"slm": "demo:plans", "llm": "demo:plans"}, "train": {"horizons": [4, 8, 16]}},
        "pair": {"slm": "demo:plans", "llm": "demo:plans", "slm_parameters": 162000, "llm_parameters": 363000},
        "policy": {"threshold": 1.695, "quantile": 0.94, "top_k": 64},
        "seeds": [0, 1],
        "results": rows,
        "timed": [
            {"method": METHODS[key][0], "key": key, "loop": loop, "problems": 50, "calls": 1.5, "pool": 6.07}
            | {"llm_tokens": 33.2, "seconds": 0.031 * times, "relative": [times, times - 0.05, times + 0.06]}
            for key, loop, times in (
                ("greedy", "fast", 1.0),
                ("majority", "plain", 2.6),
                ("published", "fast", 1.55),
                ("takeover", "plain", 1.87),
                ("published", "plain", 1.7),
            )
        ],
        "parts": {
            "agreement": agreement,
            "filter": [
                {"condition": condition, "states": states, "published": None}
                for condition, states in (("admitted states", 318), ("valid group", 214))
            ],
            "coverage": [
                states | {"pool": pool, "mean_size": size, "coverage": around(share), "coverage_mixed": around(share)}
                for pool, size, share in (("SLM", 4.0, 0.836), ("joint", 6.07, 0.862))
            ],
            "changes": [
                {
                    "benchmark": "demo:plans",
                    "problem": f"plans/test/{n}",
                    "method": "Published recipe",
                    "seed": 0,
                    "step": 17,
                }
                | {"gained": n > 2, "kind": "digit" if n % 2 else None}
                for n in range(30)
            ],
            "future_quality": [
                {"future": "verified", "states": 214, "4": 0.475, "16": 0.895},
                {"future": "shuffled", "states": 214, "4": 0.502, "16": None},
            ],
            "certification": [
                tested
                | {"label": label, "accuracy": accuracy, "calls": calls, "llm_tokens": calls, "level": 0.95}
                | {"minus_greedy": {"mean": accuracy - 0.5, "low": accuracy - 0.55}}
                | {"minus_direct": {"mean": accuracy - 0.8, "low": accuracy - 0.85}}
                for label, accuracy, calls in (("SLM greedy", 0.5, 0.0), ("direct", 0.8, 2.5), ("value", 0.9, 2.25))
            ],
            "offline": [{"stage": "trajectories", **costs}],
        },
        "about": {"machine": "2 CPU cores, torch 2.13.0", "commit": "0123456789"},
    }


def small() -> dict:
    """A run of which the methods alone were measured: it has few figures."""
    return {"name": "small", "results": [row for row in tiny()["results"] if row["table"] == "methods"]}


def several() -> Document:
    """Three runs whose figures are not drawn, which takes a second each."""
    more = tiny("several", benchmarks=("gsm8k", "math-500")) | {"parts": {}, "timed": []}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("forest", "agreement", "curve", "frontier"):
            patch.setattr(figures, name, lambda *_: Picture("<svg/>", "<svg/>"))
        return render(tiny(), tiny("control", 0.6), more)


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


FREE = {"label", "note", "problem", "future", "slm", "llm", "machine", "commit", "name", "score", "kind", "pool"}
FREE |= {"method", "stage", "unit", "words", "loop"}


def everywhere(value, text: str):
    """The same with this text in place of every one that a model, a person or a file may have written."""
    if isinstance(value, dict):
        hostile = {key: text for key, item in value.items() if key in FREE and isinstance(item, str)}
        return {key: everywhere(item, text) for key, item in value.items()} | hostile
    return [everywhere(item, text) for item in value] if isinstance(value, list) else value


class Page(HTMLParser):
    """Checks that tags are closed in their order and collects what a page holds."""

    VOID = ("meta", "img")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.tags, self.attributes = list[str](), list[str](), list[tuple[str, str | None]]()
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


def blocks_of(document: Document) -> list:
    def inside(sections):
        for section in sections:
            yield from section.blocks
            yield from inside(section.sections)

    return list(inside(document.sections))


def table(document: Document, caption: str) -> Table:
    (found,) = [block for block in blocks_of(document) if isinstance(block, Table) and block.caption == caption]
    return found


def plain(text) -> str:
    pieces = text if isinstance(text, tuple) else (text,)
    return "".join(piece if isinstance(piece, str) else piece.text for piece in pieces)


def rows_of(found: Table) -> dict[str, list[str]]:
    return {plain(name): [plain(cell) for cell in cells] for name, *cells in found.rows}


def items(document: Document, title: str) -> list[str]:
    """The list items of a section; of the first screen without a title."""
    (section,) = [one for one in document.sections if one.title == title] if title else [document]
    return [plain(text) for block in section.blocks if isinstance(block, Items) for text in block.texts]

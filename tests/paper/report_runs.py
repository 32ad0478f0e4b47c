"""Made-up runs for the report, and what is read from a page that shows them."""

from __future__ import annotations

import re

from pydantic import TypeAdapter

from benchmarks.paper import report
from benchmarks.paper.rows import Run
from benchmarks.paper.tables import TABLES
from fb_core.apps.pipeline.statistics import Interval

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
    "recalls": [("r2r-0.5", "R2R, recall 0.5", 0.9, 0.5), ("r2r-0.95", "R2R, recall 0.95", 0.995, 0.95)],
}


def read(found: dict) -> Run:
    return TypeAdapter(Run).validate_python(found)


def render(*found: dict, tables=TABLES) -> str:
    return report.render([read(one) for one in found], {}, tables)


def around(mean: float, half: float = 0.03) -> Interval:
    return Interval(mean, max(mean - half, -1.0), min(mean + half, 1.0))


def row_of(table: str, benchmark: str, key: str, label: str, accuracy: float, base: dict, **more) -> dict:
    events = more.pop("events", 1.91)
    asked = {"greedy": 0.0, "majority": 0.0, "takeover": 40.2}.get(key, events)
    row = {"table": table, "benchmark": benchmark, "key": key, "label": label, "problems": 400, "seeds": [0, 1]}
    row |= {"accuracy": around(accuracy), "events": events, "tokens": 40.1, "read": [30 + asked] * 3}
    row |= {"llm_tokens": [asked, max(asked - 0.1, 0.0), asked + 0.1], "calls": [events, 0.9 * events, 1.1 * events]}
    row["minus"] = {other: around(accuracy - value, 0.037) for other, value in base.items() if key != other}
    if key not in ENDS:
        row["above_line"] = around(accuracy - 0.712 - asked / 40.2 * 0.28)
        row["above_read_line"] = around(accuracy - 0.712 - 0.2)
    return row | more


def tiny(name: str = "tiny", shift: float = 0.0, benchmarks: tuple[str, ...] = ("demo:plans",)) -> dict:
    """A run in which everything was measured; `shift` lowers what is the published recipe's."""
    base = {key: METHODS[key][1] - shift * (key == "published") for key in ("greedy", "direct", "published")}
    rows = []
    for benchmark in benchmarks:
        for key, (label, accuracy, events, tokens) in METHODS.items():
            more = {"events": events, "tokens": tokens}
            rows.append(row_of("methods", benchmark, key, label, base.get(key, accuracy), base, **more))
        unseen = {"table": "methods", "benchmark": benchmark, "key": "external-grpo", "label": "GRPO"}
        rows.append(unseen | {"note": "no checkpoint given: compare.external"})
        for table, variants in VARIANTS.items():
            rows += [row_of(table, benchmark, key, label, mean - shift, base, x=x) for key, label, mean, x in variants]
        for quantile in (0.9, 0.94):
            more = {"x": quantile, "quantile": quantile, "threshold": round(10 * quantile - 8, 3)}
            rows.append(row_of("quantiles", benchmark, "published", "Published recipe", quantile - 0.27, base, **more))
    states = {"where": "validation", "states": 318, "mixed_states": 132}
    agreement = [
        states
        | {"score": score, "kind": kind, "pairs": 1069, "problems": 149}
        | {"pairwise": None if (score, kind) == ("SLM", "mark") else around(mean), "top1": around(mean, 0.04)}
        | {"top1_minus_llm": around(mean - 0.685) if score != "LLM" else None}
        for kind in ("all", "mark")
        for score, mean in (("SLM", 0.52), ("LLM", 0.685), ("reranker", 0.324))
    ]
    tested = {"seed": 0, "words": "value: the best of 1 of 1 tested recipes.", "problems": 300, "label": "value"}
    costs = {"units": 1150, "unit": "problems", "seconds": 4.5, "gpu_hours": 0.0, "devices": ["cpu"], "published": None}
    timed = {"problems": 50, "calls": 1.5, "pool": 6.07, "llm_tokens": 33.2}
    return {
        "name": name,
        "settings": {"models": {"slm": "demo:plans", "llm": "demo:plans"}, "train": {"horizons": [4, 8, 16]}},
        "pair": {"slm": "demo:plans", "llm": "demo:plans", "slm_parameters": 162000, "llm_parameters": 363000},
        "policy": {"threshold": 1.695, "quantile": 0.94, "top_k": 64},
        "seeds": [0, 1],
        "results": rows,
        "timed": [
            timed
            | {"method": METHODS[key][0], "key": key, "loop": loop, "seconds": 0.031 * times}
            | {"relative": Interval(times, times - 0.05, times + 0.06)}
            for key, loop, times in (("greedy", "fast", 1.0), ("published", "fast", 1.55), ("takeover", "plain", 1.87))
        ],
        "parts": {
            "agreement": agreement,
            "filter": [{"condition": "admitted states", "states": 318, "share": 1.0, "published": None}],
            "coverage": [states | {"pool": "joint", "mean_size": 6.07, "coverage": around(0.862)}],
            "changes": [
                {"method": "Published recipe", "change": "wrong → right", "kind of event": "digit", "answers": 27}
            ],
            "future_quality": [{"future": "verified", "states": 214, "4": 0.475, "16": None}],
            "certification": [tested | {"accuracy": 0.9, "minus_greedy": {"mean": 0.4, "low": 0.35}, "level": 0.95}],
            "offline": [{"stage": "trajectories", **costs}],
        },
        "about": {"machine": "2 CPU cores, torch 2.13.0", "commit": "0123456789"},
    }


FREE = {
    "label",
    "note",
    "words",
    "future",
    "slm",
    "llm",
    "machine",
    "commit",
    "name",
    "score",
    "kind",
    "pool",
    "method",
}
FREE |= {"method", "benchmark", "where", "condition", "stage", "unit", "loop"}


def everywhere(value, text: str):
    """The same with this text in place of every one that a model, a person or a file may have written."""
    if isinstance(value, dict):
        hostile = {key: text for key, item in value.items() if key in FREE and isinstance(item, str)}
        return {key: everywhere(item, text) for key, item in value.items()} | hostile
    return [everywhere(item, text) for item in value] if isinstance(value, list) else value


def section(page: str, title: str) -> str:
    """What stands under the first heading with this title."""
    return re.split(r"^#+ ", page.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.M)[0]


def rows_of(text: str) -> list[dict[str, str]]:
    """The rows of all tables in a text, by the heads of their columns."""
    rows = []
    for lines in re.findall(r"(?:^\|.*\n?)+", text, re.M):
        head, _, *body = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines.splitlines())
        rows += [dict(zip(head, cells, strict=True)) for cells in body]
    return rows


def items(text: str) -> list[str]:
    """The items of all lists in a text."""
    return re.findall(r"^- (.*)$", text, re.M)

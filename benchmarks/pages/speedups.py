"""What a shared prefix saves, and alternatives beside ours: the tables and plots of docs/scoring.md and README."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.gpu.roofline import COLOURS, GREY, MARKERS, STYLE, save
from benchmarks.harness import OURS
from benchmarks.pages.theme import Theme, pictured
from fb_core.apps.pipeline.page import markdown_table

Result = Mapping[str, Any]
Sizes = tuple[int, int, int]  # G, P, R
PRETRAINED = "SmolLM2-135M"
SERVED = {  # op: what is timed, with the first number of its shape
    "first_token": "first token, prompt of {}",
    "generate_many": "prompts at once: {}",
    "score_group": "groups scored: {}",
}
PASSES = {"grpo_no_grad": "no gradients", "grpo_gradient": "gradients"}


def pairs(result: Result, op: str) -> dict[str, tuple[Result, Result]]:
    """{shape: (ours, the fastest peer)} of an op's timed cases."""
    cases = [case for case in result["cases"] if case["op"] == op and case["median_us"]]
    by_shape = {}
    for shape in dict.fromkeys(case["shape"] for case in cases):
        here = [case for case in cases if case["shape"] == shape]
        peers = [case for case in here if not case["impl"].startswith(OURS)]  # nor ours done otherwise
        (ours,) = (case for case in here if case["impl"] == OURS)
        by_shape[shape] = ours, min(peers, key=lambda case: case["median_us"])
    return by_shape


def sizes(shape: str) -> Sizes:
    """The sizes in a shape such as `G=8 P=512 R=128`."""
    group, prompt, completion = map(int, re.findall(r"=(\d+)", shape))
    return group, prompt, completion


def saved(group: int, prompt: int, completion: int) -> float:
    """Tokens of full rows divided by those of a packed forward."""
    return group * (prompt + completion) / (prompt + group * completion)


def grpo_table(result: Result) -> list[str]:
    """Every way at the shapes whose memory was measured, one table per device, then how far the curves differ."""
    rows: dict[str, list[list[str]]] = {}
    for op, label in PASSES.items():
        cases = [case for case in result["cases"] if case["op"] == op and case.get("peak_bytes")]
        for case in cases:
            (ours,) = (other for other in cases if other["impl"] == OURS and other["shape"] == case["shape"])
            time, memory = case["median_us"] / ours["median_us"], ours["peak_bytes"] / case["peak_bytes"]
            name = "**ours**" if case is ours else case["impl"]
            peak = f"{case['peak_bytes'] / 2**20:,.0f}"
            ratios = ["", ""] if case is ours else [f"{time:.2f}x", f"{memory:.2f}x"]
            shape = f"{case['shape']}, {label}" if case is ours else ""
            row = [shape, name, f"{case['median_us'] / 1e6:.2f}", peak, *ratios]
            rows.setdefault(case["device"], []).append(row)
    head = ["pass", "by", "s", "peak MiB", "its time / ours", "our memory / its"]
    tables = [line for device in rows for line in (f"On {device}:", "", *markdown_table(head, rows[device]), "")]
    apart = ", ".join(f"{name} {value:.1e}" for name, value in result["curves"]["largest_difference"].items())
    said = f"The curves of two runs of {result['curves']['steps']} steps differ at most by: {apart}."
    return [*tables, said]


def lm_eval_table(result: Result) -> list[str]:
    """Every task with `hf` at its best batch size, and with ours."""
    rows = []
    for shape, (ours, best) in pairs(result, "lm_eval").items():
        seconds = [f"{case['median_us'] / 1e6:.2f}" for case in (ours, best)]
        rows.append([shape, *seconds, best["impl"], f"{best['median_us'] / ours['median_us']:.2f}x"])
    head = ["task", "ours, s", "hf, s", "best hf setting", "hf / ours"]
    return [f"On {result['device']}:", "", *markdown_table(head, rows)]


def plot(result: Result, path: Path) -> Path:
    """Speed-up over P / R, one line per G and one panel per R; dashed lines are the tokens saved."""
    from matplotlib import pyplot as plt

    points = {sizes(shape): pair for shape, pair in pairs(result, "grpo_no_grad").items()}
    completions = sorted({completion for _, _, completion in points})
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(completions), figsize=(4.2 * len(completions), 3.4), squeeze=False, sharey=True, layout="constrained"
        )
        for axis, completion in zip(axes.flat, completions, strict=True):
            for index, group in enumerate(sorted({group for group, _, _ in points})):
                prompts = sorted(p for g, p, r in points if (g, r) == (group, completion))
                ratios = [p / completion for p in prompts]
                compared = [points[group, p, completion] for p in prompts]
                measured = [trl["median_us"] / ours["median_us"] for ours, trl in compared]
                look = {"color": COLOURS[index], "marker": MARKERS[index]}
                axis.plot(ratios, measured, markersize=4, label=f"G = {group}", **look)
                tokens = [saved(group, p, completion) for p in prompts]
                axis.plot(ratios, tokens, color=COLOURS[index], linestyle="--", linewidth=0.8)
            axis.axhline(1, color=GREY, linewidth=0.8)
            axis.set(title=f"R = {completion}", xlabel="P / R", xscale="log")
            ticks = sorted({p / r for _, p, r in points if r == completion})
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
            axis.minorticks_off()
            axis.grid(color=GREY, alpha=0.25)
        axes[0, 0].set_ylabel("times as fast as TRL")
        axes[0, 0].legend()
        return save(figure, path)


@pictured
def draw_served(results: Mapping[str, Result], theme: Theme) -> Figure | None:
    """How many times ours each alternative takes on a CPU with a pretrained model, a panel per dtype; ours is 1."""
    found: dict[str, dict[str, dict[str, float]]] = {}  # {dtype: {what: {peer: ratio}}}
    for op, label in SERVED.items():
        cases = [case for made in results.values() for case in made["cases"] if case["op"] == op and case["median_us"]]
        cases = [case for case in cases if re.match(rf"{PRETRAINED}( in \w+)?,", case["shape"])]
        for ours in (case for case in cases if case["impl"] == OURS):
            (size,) = re.findall(r"\d+", ours["shape"].partition(", ")[2])[:1]
            row = found.setdefault(ours["dtype"], {}).setdefault(label.format(size), {})
            for case in cases:
                if case["shape"] == ours["shape"] and not case["impl"].startswith(OURS):
                    row[case["impl"].partition(",")[0]] = case["median_us"] / ours["median_us"]
    if not found:
        return None
    names = list(dict.fromkeys(peer for rows in found.values() for row in rows.values() for peer in row))
    labels = list(dict.fromkeys(label for rows in found.values() for label in rows))[::-1]
    figure = Figure(figsize=(8.4, 0.36 * len(labels) + 1.2), layout="constrained")
    axes = figure.subplots(1, len(found), sharex=True, sharey=True, squeeze=False)[0]
    for axis, (dtype, rows) in zip(axes, sorted(found.items()), strict=True):
        axis.axvline(1, color=theme.ours, linewidth=2)
        for name, marker, shade in zip(
            names, MARKERS, (theme.others, theme.ink, theme.faint, theme.faint), strict=False
        ):
            at = [(row[name], labels.index(label)) for label, row in rows.items() if name in row]
            axis.plot(*zip(*at, strict=True), marker, color=shade, label=name, markersize=6)
        axis.set(title=dtype, xscale="log", xlabel="its time / ours", yticks=range(len(labels)), yticklabels=labels)
        axis.set_xticks(ticks := (0.5, 1, 2, 4, 8), [f"{tick:g}x" for tick in ticks])
        axis.minorticks_off()
    axes[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure

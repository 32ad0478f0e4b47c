"""Plots of GPU results: time against a size, each case's share of the ceiling, and the decode loop."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import FLOOR, OURS

GREY = "#808891"  # legible on white and on black
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's; the first is ours
MARKERS = "osD^vP"  # one per colour
STYLE: Mapping[str, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "legend.facecolor", "legend.edgecolor"), "none"),
    "font.size": 9.0,
    "svg.hashsalt": "futurebridge",
    "svg.fonttype": "none",
}
SWEEPS = {  # file: (size on the x axis, what it is, ops)
    "prefix": ("P", "prefix tokens", ("branch_attention", "branch_attention_backward", "score_group")),
    "candidates": ("K", "candidates", ("branch_attention",)),
    "rows": ("N", "rows", ("linear_logprob",)),
}
BOUNDS = (
    FLOOR,
    "the matrix product alone",
    "the weights, read by a sum",
    "engine in process",
    "an empty kernel",
    "an empty graph",
)
YARDSTICKS = ("one greedy step", "greedy")  # other work, for comparison
LOOP = ("decode_step", "rerank_event", "end_to_end")  # ops of the decode loop
Case = Mapping[str, Any]
Curves = dict[str, list[tuple[int, float]]]


def plots(results: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write all plots that these result files allow to `folder` as SVG; returns the paths."""
    from matplotlib import pyplot as plt

    cases = [case for result in results for case in result["cases"] if case["median_us"]]
    paths = []
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for name, (size, label, ops) in SWEEPS.items():
            panels = sweeps([case for case in cases if case["op"] in ops], size)
            if panels:
                paths.append(save(_lines(panels, f"{label} {size}"), folder / f"{name}.svg"))
        reached = [case for case in cases if case["impl"] == OURS and case["fraction_of_ceiling"] is not None]
        if reached:
            paths.append(save(_bars(reached, best_peers(cases)), folder / "roofline.svg"))
        loop = [case for op in LOOP for case in cases if case["op"] == op and case["impl"] != FLOOR]
        if loop:
            paths.append(save(_loop(loop), folder / "decode.svg"))
    return paths


def sweeps(cases: Sequence[Case], size: str) -> dict[str, Curves]:
    """{the other sizes: {implementation: [(size, microseconds)]}}, where the size takes several values."""
    by_title: dict[str, Curves] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        value = re.search(rf"\b{size}=(\d+) ?", case["shape"])
        if value:
            rest = case["shape"][: value.start()] + case["shape"][value.end() :]
            by_title[f"{case['op']}\n{rest.strip()}"][case["impl"]].append((int(value.group(1)), case["median_us"]))
    return {
        title: {impl: sorted(points) for impl, points in curves.items()}
        for title, curves in by_title.items()
        if len({x for points in curves.values() for x, _ in points}) > 1
    }


def best_peers(cases: Sequence[Case]) -> dict[tuple[str, str], Case]:
    """The fastest peer that was timed, by (op, shape)."""
    best: dict[tuple[str, str], Case] = {}
    for case in cases:
        key = case["op"], case["shape"]
        if is_peer(case) and (key not in best or case["median_us"] < best[key]["median_us"]):
            best[key] = case
    return best


def is_peer(case: Case) -> bool:
    """Whether the case was timed, does the same work and is not ours."""
    impl = case["impl"]
    return bool(case["median_us"]) and impl.partition(",")[0] != OURS and impl not in (*BOUNDS, *YARDSTICKS)


def against_best(cases: Sequence[Case]) -> list[tuple[float, Case, Case]]:
    """(the fastest peer's time / ours, ours, that peer) wherever both were timed."""
    best = best_peers(cases)
    ours = [(case, best.get((case["op"], case["shape"]))) for case in cases if case["impl"] == OURS]
    return [(peer["median_us"] / case["median_us"], case, peer) for case, peer in ours if peer and case["median_us"]]


def grid(count: int, columns: int, width: float, height: float, more: float = 0.0) -> tuple[Any, Any]:
    """(figure, axes) of so many panels in rows of at most so many columns, with room for a legend."""
    from matplotlib import pyplot as plt

    columns = min(columns, count)
    size = (width * columns, height * -(-count // columns) + more)
    figure, axes = plt.subplots(-(-count // columns), columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    return figure, axes.flat[:count]


def _lines(panels: Mapping[str, Curves], label: str) -> Any:
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    names = list(dict.fromkeys(impl for curves in panels.values() for impl in curves))
    looks: dict[str, dict[str, Any]] = {OURS: {"color": COLOURS[0], "marker": MARKERS[0], "linewidth": 2.5}}
    looks[FLOOR] = {"color": GREY, "linestyle": "--"}
    for index, name in enumerate(name for name in names if name not in (OURS, FLOOR)):
        at = 1 + index % (len(COLOURS) - 1)
        looks[name] = {"color": COLOURS[at], "marker": MARKERS[at], "linewidth": 1.0}
    figure, axes = grid(len(panels), 3, 4.2, 3.2, 0.2 * len(names))
    handles: dict[str, Any] = {}
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for impl, points in curves.items():
            axis.plot(*zip(*points, strict=True), markersize=4, label=impl, **looks[impl])
        ticks = sorted({x for points in curves.values() for x, _ in points})
        axis.set(title=title, xlabel=label, ylabel="microseconds", xscale="log", yscale="log")
        axis.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axis.minorticks_off()
        axis.grid(color=GREY, alpha=0.25)
        lines, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    figure.legend([handles[name] for name in names], names, loc="outside lower center", ncols=2)
    return figure


def _bars(reached: Sequence[Case], best: Mapping[tuple[str, str], Case]) -> Any:
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8.5, 0.28 * len(reached) + 1.2), layout="constrained")
    ys = range(len(reached))
    axis.barh(ys, [case["fraction_of_ceiling"] for case in reached], height=0.65, color=COLOURS[0], label=OURS)
    theirs = [best.get((case["op"], case["shape"])) for case in reached]
    marked = [(case["fraction_of_ceiling"], y) for case, y in zip(theirs, ys, strict=True) if case]
    if marked:
        axis.scatter(*zip(*marked, strict=True), color=COLOURS[1], marker="|", s=90, label="best peer", zorder=3)
    axis.set_yticks(ys, [f"{case['op']}  {case['shape']}" for case in reached])
    axis.invert_yaxis()
    axis.set(xlabel="fraction of the measured ceiling", xlim=(0, 1))
    axis.grid(color=GREY, alpha=0.25, axis="x")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _loop(cases: Sequence[Case]) -> Any:
    """A panel per case, a bar per implementation, in milliseconds."""
    panels: dict[str, dict[str, float]] = defaultdict(dict)
    for case in cases:
        panels[f"{case['op']}\n{case['shape']}"][case["impl"]] = case["median_us"] / 1e3
    figure, axes = grid(len(panels), 2, 5.5, 2.1)
    for axis, (title, times) in zip(axes, panels.items(), strict=True):
        colours = [COLOURS[0] if impl == OURS else GREY for impl in times]
        bars = axis.barh(list(times), list(times.values()), height=0.65, color=colours)
        axis.bar_label(bars, fmt="{:,.2f}", padding=3, color=GREY)
        axis.set(title=title, xlabel="milliseconds", xlim=(0, 1.35 * max(times.values())))
        axis.invert_yaxis()
        axis.grid(color=GREY, alpha=0.25, axis="x")
    return figure


def save(figure: Any, path: Path) -> Path:
    """The figure as SVG, the same bytes every time."""
    from matplotlib import pyplot as plt

    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)
    return path

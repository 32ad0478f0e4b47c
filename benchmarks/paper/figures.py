"""The report's figures: each takes rows and returns SVG, None without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator
from numpy.typing import NDArray

from benchmarks.pages.theme import Theme, pictured
from benchmarks.paper.rows import DEPLOYED, Result, Run, Timed, in_order
from benchmarks.paper.tables import PUBLISHED
from fb_core._util import escaped
from fb_core.apps.pipeline.statistics import Interval
from fb_core.apps.settings.run import AVERAGE

WIDTH = 8.4  # inches, the width of the text on a desktop page
LONGEST_LABEL, LONGEST_METHOD = 50, 36  # characters
TIME = "time as a multiple of greedy decoding's in the same loop"
COSTS = ("LLM tokens", "LLM calls", "LLM positions", TIME)

Panels = Mapping[str, Sequence[Result]]  # by the panel's title
Label = tuple[float, float, str, str]  # of a point: x, y, text, colour


def by_benchmark(rows: Sequence[Result]) -> dict[str, list[Result]]:
    """Rows by benchmark, in their order."""
    groups: dict[str, list[Result]] = {}
    for row in rows:
        groups.setdefault(row.benchmark, []).append(row)
    return groups


def primary(rows: Sequence[Result]) -> list[Result]:
    """The rows of the primary benchmark: the average if there is one, else the first."""
    groups = by_benchmark(rows)
    return groups.get(AVERAGE) or next(iter(groups.values()), [])


def panels(runs: Sequence[Run], table: str) -> dict[str, list[Result]]:
    """The rows of a table that have an accuracy, by benchmark, and by run where several have that benchmark."""
    groups = [(run.name, name, rows) for run in runs for name, rows in by_benchmark(run.of(table)).items()]
    names = [name for _, name, rows in groups if any(row.accuracy for row in rows)]
    return {
        name if names.count(name) == 1 else f"{run}, {name}": [row for row in rows if row.accuracy]
        for run, name, rows in groups
        if name in names and any(row.accuracy for row in rows)
    }


def _panels(count: int, columns: int, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """`count` panels in rows of at most `columns`, each row `height` inches high."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH, rows * height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))
    axes = figure.subplots(rows, columns, squeeze=False, **options).flatten().tolist()
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def _shown(text: str, longest: int = LONGEST_LABEL) -> str:
    """A label with invisible characters escaped, cut to `longest` characters."""
    label = escaped(text)
    return label if len(label) <= longest else f"{label[: longest - 1]}…"


def _percent(interval: Interval) -> tuple[float, list[list[float]]]:
    """The mean in percent, and the lengths of the interval's two arms as matplotlib's error bars take them."""
    mean, low, high = (100 * value for value in interval)
    return mean, [[max(0.0, mean - low)], [max(0.0, high - mean)]]


def _look(theme: Theme, key: str) -> tuple[str, str]:
    """(marker, colour) of a method in all figures: circles for ours, diamonds for greedy decoding and takeover."""
    if key in ("greedy", "takeover"):
        return "D", theme.ink
    return ("o", theme.ours) if key in (DEPLOYED, PUBLISHED) else ("s", theme.others)


@pictured
def forest(rows_by_head: Panels, theme: Theme) -> Figure | None:
    """Accuracy of every row with its interval, one panel per head, greedy decoding as a dashed line."""
    if not rows_by_head:
        return None
    labels = list(dict.fromkeys(row.label for row in in_order(row for rows in rows_by_head.values() for row in rows)))
    shown = [_shown(label, LONGEST_METHOD) for label in labels]
    figure, axes = _panels(len(rows_by_head), 3, 0.21 * len(labels) + 0.75, sharey=True)
    for axis, (head, rows) in zip(axes, rows_by_head.items(), strict=True):
        for row in rows:
            assert row.accuracy
            (mean, reach), (marker, colour) = _percent(row.accuracy), _look(theme, row.key)
            y = labels.index(row.label)
            axis.errorbar(mean, y, xerr=reach, fmt=marker, color=colour, markersize=4.5, capsize=2)
            if row.key == "greedy":
                axis.axvline(100 * row.accuracy.mean, color=theme.faint, linestyle="--", linewidth=1, zorder=1)
        axis.set_title(_shown(head), fontsize=9, loc="left")
        axis.set_xlabel("accuracy, %")
        axis.set_yticks(range(len(labels)), shown)
        axis.set_ylim(len(labels) - 0.5, -0.5)
        axis.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    return figure


@pictured
def frontier(run: Run, theme: Theme) -> Figure | None:
    """Accuracy of all methods on the primary benchmark against the LLM's tokens, its calls and the time, where known.

    The dashed line in each panel joins greedy decoding and takeover, the dotted one R2R's thresholds.
    """
    rows = sorted((row for row in primary(run.of("methods")) if row.accuracy), key=lambda row: row.accuracy or ())
    by_cost: dict[str, list[tuple[Interval, Result, str]]] = {name: [] for name in COSTS}
    for row in rows:
        for cost, x in (("LLM tokens", row.llm_tokens), ("LLM calls", row.calls), ("LLM positions", row.read)):
            by_cost[cost] += [(x, row, _shown(row.label))] if x else []
        if (timing := times(run).get(row.key)) and timing.relative:
            by_cost[TIME].append((timing.relative, row, _shown(f"{row.label}, {timing.loop} loop")))
    by_cost = {cost: points for cost, points in by_cost.items() if points}
    if not by_cost:
        return None
    swept = [row for row in primary(run.of("recalls")) if row.accuracy]
    costs_swept = {"LLM tokens": "llm_tokens", "LLM calls": "calls", "LLM positions": "read"}
    height = max(3.6, 0.24 * max(map(len, by_cost.values())) + 1.0)
    figure, axes = _panels(len(by_cost), 1, height)
    for axis, (cost, points) in zip(axes, by_cost.items(), strict=True):
        _frontier(axis, points, theme, height)
        if cost in costs_swept and len(swept) > 1:
            line = [(getattr(row, costs_swept[cost]).mean, 100 * row.accuracy.mean) for row in swept if row.accuracy]
            axis.plot(*zip(*line, strict=True), color=theme.others, linestyle=":", marker=".", linewidth=1, zorder=1)
        axis.set_xlabel(f"{cost}, per problem (square-root scale)")
        axis.set_ylabel(f"accuracy on {_shown(rows[0].benchmark)}, %")
    key = [
        Line2D([], [], color=theme.ours, marker="o", linestyle="none", label="FutureBridge, published recipe"),
        Line2D([], [], color=theme.others, marker="s", linestyle="none", label="other methods"),
        Line2D([], [], color=theme.faint, marker="D", linestyle="--", label="takeover on a share of the problems"),
        *([Line2D([], [], color=theme.others, marker=".", linestyle=":", label="R2R by threshold")] if swept else []),
    ]
    figure.legend(handles=key, loc="outside upper left", ncols=4, fontsize=8)
    return figure


def times(run: Run) -> dict[str, Timed]:
    """The time of every method by key, of the fast loop if there are both."""
    timings: dict[str, Timed] = {}
    for timing in run.timed:
        timings.setdefault(timing.key, timing)
    return timings


def _frontier(axis: Axes, points: Sequence[tuple[Interval, Result, str]], theme: Theme, height: float) -> None:
    """Points with both intervals, sorted by accuracy, labelled at the right, and the line to takeover."""
    axis.set_xscale("function", functions=(_root, _square))  # most cost far less than takeover
    ends: dict[str, tuple[float, float]] = {}
    labels: list[Label] = []
    for x, row, label in points:
        assert row.accuracy
        (y, reach), (marker, colour) = _percent(row.accuracy), _look(theme, row.key)
        across = [[max(0.0, x.mean - x.low)], [max(0.0, x.high - x.mean)]]
        axis.errorbar(x.mean, y, reach, across, fmt=marker, color=colour, markersize=5, capsize=2)
        ends[row.key] = x.mean, y
        labels.append((x.mean, y, label, colour))
    lows, highs = ([100 * row.accuracy[part] for _, row, _ in points if row.accuracy] for part in (1, 2))
    axis.set_ylim(max(0.0, min(lows) - 5), min(104.0, max(highs) + 5))
    if "greedy" in ends and "takeover" in ends:
        share = np.linspace(0, 1, 100)[:, None] ** 2
        line = (1 - share) * np.array(ends["greedy"]) + share * np.array(ends["takeover"])
        axis.plot(*line.T, color=theme.faint, linestyle="--", linewidth=1, zorder=1)
    low, high = axis.get_ylim()
    groups = together(labels, (0.03 * max(x for x, *_ in labels) ** 0.5, 0.02 * (high - low)))
    text_ys = iter(spread([y for y, members in groups for _ in members], (high - low) * 12 / (0.8 * height * 72)))
    beside = axis.get_yaxis_transform()
    for y, members in groups:  # one line leads to the names of all the points that lie together
        heights = [next(text_ys) for _ in members]
        axis.plot(
            [1.02, 1.02], [heights[0], heights[-1]], color=theme.faint, linewidth=0.8, transform=beside, clip_on=False
        )
        line = {"arrowstyle": "-", "color": theme.faint, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 4}
        look: dict[str, Any] = {"textcoords": beside, "annotation_clip": False, "arrowprops": line}
        axis.annotate("", (members[0][0], y), (1.02, (heights[0] + heights[-1]) / 2), **look)
        for (_, _, text, colour), text_y in zip(members, heights, strict=True):
            axis.text(1.035, text_y, text, va="center", fontsize=8, color=colour, transform=beside)
    most, ticks = max(x.high for x, *_ in points), [0.0]
    for tick in (step * 10.0**power for power in range(-2, 7) for step in (1, 2, 4)):
        if tick <= most and tick**0.5 - ticks[-1] ** 0.5 > 0.05 * most**0.5:
            ticks.append(tick)
    axis.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())


def _root(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The signed square root, so that an axis may start below 0."""
    return np.sign(x) * np.sqrt(np.abs(x))


def _square(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sign(x) * np.square(x)


def together(labels: Sequence[Label], near: tuple[float, float]) -> list[tuple[float, list[Label]]]:
    """Labels of points at most `near` apart on the axes, with their mean height; from the lowest on."""
    groups: list[list[Label]] = []
    for label in labels:  # sorted by height
        for group in groups:
            x, y, *_ = group[0]
            if abs(x**0.5 - label[0] ** 0.5) <= near[0] and label[1] - y <= near[1]:
                group.append(label)
                break
        else:
            groups.append([label])
    return sorted((sum(y for _, y, *_ in group) / len(group), group) for group in groups)


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending positions moved apart until neighbours are at least `gap` apart."""
    placed = list(wanted)
    for _ in range(len(placed) * 20):
        for index in range(len(placed) - 1):
            if (lacking := gap - (placed[index + 1] - placed[index])) > 0:
                placed[index] -= lacking / 2
                placed[index + 1] += lacking / 2
    return placed

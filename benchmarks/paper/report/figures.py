"""The report's figures: each takes a run's findings and returns SVG for a light and a dark page, None without data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from benchmarks.paper.report.columns import Panels, benchmarks, panels, primary
from benchmarks.paper.report.findings import OURS, Agreement, Findings, Result, in_order, place_of
from benchmarks.paper.report.theme import Theme, pictured
from fb_core.statistics import Interval
from fb_core.terminal import IN_TOKEN, escaped

WIDTH = 8.4  # inches, the width of the text on a desktop page
NARROW = 3.5  # inches, on a phone
LONGEST_LABEL, LONGEST_METHOD, LONGEST_TOKEN = 50, 36, 14  # characters
COST_HEIGHT = 3.6  # inches
LONGEST_SPELLED_OUT = 64  # longest trajectory whose tokens are written along the axis
MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")


def _panels(count: int, columns: int, height: float, width: float = WIDTH, **options: Any) -> tuple[Figure, list[Axes]]:
    """`count` panels in rows of at most `columns`, each row `height` inches high."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(width, rows * height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))
    axes = figure.subplots(rows, columns, squeeze=False, **options).flatten().tolist()
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def _shown(text: str, longest: int = LONGEST_LABEL) -> str:
    """A label with invisible characters escaped, cut to `longest` characters."""
    return _cut(escaped(text), longest)


def _token(text: str) -> str:
    """A token's text as a label, with white space visible."""
    return _cut(escaped(text, IN_TOKEN), LONGEST_TOKEN)


def _cut(label: str, longest: int) -> str:
    return label if len(label) <= longest else f"{label[: longest - 1]}…"


def _percent(interval: Interval) -> tuple[float, list[list[float]]]:
    """The mean in percent, and the lengths of the interval's two arms as matplotlib's error bars take them."""
    mean, low, high = (100 * value for value in interval)
    return mean, [[max(0.0, mean - low)], [max(0.0, high - mean)]]


def _spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending positions moved apart until neighbours are at least `gap` apart."""
    placed = list(wanted)
    for _ in range(len(placed) * 20):
        for index in range(len(placed) - 1):
            if (lacking := gap - (placed[index + 1] - placed[index])) > 0:
                placed[index] -= lacking / 2
                placed[index + 1] += lacking / 2
    return placed


def _rows(findings: Findings, table: str) -> list[tuple[Result, Interval]]:
    """The rows of a table that have an accuracy, each with it."""
    return [(row, row.accuracy) for row in findings.of(table) if row.accuracy]


def _look(theme: Theme, key: str, ours: bool) -> tuple[str, str]:
    """(marker, colour) of a method in all figures: circles for ours, diamonds for greedy decoding and takeover."""
    if key in ("greedy", "takeover"):
        return "D", theme.ink
    return ("o", theme.ours) if ours or key == OURS else ("s", theme.others)


@pictured
def accuracy(findings: Findings, theme: Theme, table: str) -> Figure | None:
    """Accuracy of every row of a table with its interval, one panel per benchmark, greedy decoding as a line."""
    return _forest(panels([findings], table), theme)


@pictured
def forest(findings: Sequence[Findings], theme: Theme, screen: str = "wide") -> Figure | None:
    """Accuracy of the methods of several runs, one panel per run and benchmark.

    Args:
        findings: of the runs.
        theme: of the page.
        screen: "narrow" puts panels one below the other and labels above their rows.
    """
    return _forest(panels(findings, "methods"), theme, narrow=screen == "narrow")


def _forest(found: Panels, theme: Theme, narrow: bool = False) -> Figure | None:
    """One panel per head, methods from top to bottom, greedy decoding as a dashed line."""
    if not found:
        return None
    labels = list(dict.fromkeys(row.label for row in in_order(row for rows in found.values() for row in rows)))
    shown = [_shown(label, LONGEST_METHOD) for label in labels]
    height = (0.34 if narrow else 0.21) * len(labels) + 0.75
    figure, axes = _panels(len(found), 1 if narrow else 3, height, NARROW if narrow else WIDTH, sharey=True)
    for axis, (head, rows) in zip(axes, found.items(), strict=True):
        for row in rows:
            assert row.accuracy
            place = labels.index(row.label)
            _dot(axis, row.accuracy, place, *_look(theme, row.key, row.ours))
            if row.key == "greedy":
                axis.axvline(100 * row.accuracy.mean, color=theme.faint, linestyle="--", linewidth=1, zorder=1)
            if narrow:
                above = axis.get_yaxis_transform()
                box = {"facecolor": theme.ground, "linewidth": 0, "pad": 0.5}
                axis.text(0.01, place - 0.45, shown[place], transform=above, va="center", fontsize=8, bbox=box)
        axis.set_title(_shown(head), fontsize=9, loc="left")
        axis.set_xlabel("accuracy, %")
        axis.set_yticks(range(len(labels)), [] if narrow else shown)
        axis.set_ylim(len(labels) - 0.5, -0.8 if narrow else -0.5)
        axis.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    return figure


def _dot(axis: Axes, interval: Interval, place: int, marker: str, colour: str) -> None:
    mean, reach = _percent(interval)
    axis.errorbar(mean, place, xerr=reach, fmt=marker, color=colour, markersize=4.5, capsize=2)


def _on_validation(findings: Findings) -> list[Agreement]:
    """The agreement on the states of validation problems; figures show no other."""
    return [row for row in findings.agreement or () if row.benchmark is None]


@pictured
def agreement(findings: Findings, theme: Theme) -> Figure | None:
    """Pairwise accuracy of each score against rollouts, one panel per kind of event."""
    rows = [(row, row.pairwise) for row in _on_validation(findings) if row.pairwise]
    if not rows:
        return None
    scores = list(dict.fromkeys(row.score for row, _ in rows))
    kinds = list(dict.fromkeys(row.kind for row, _ in rows))
    figure, axes = _panels(len(kinds), 4, 0.3 * len(scores) + 0.9, sharey=True)
    for axis, kind in zip(axes, kinds, strict=True):
        for row, interval in rows:
            if row.kind == kind:
                look = _look(theme, row.score, row.score.startswith("FutureBridge"))
                _dot(axis, interval, scores.index(row.score), *look)
        axis.axvline(50, color=theme.faint, linestyle=":", linewidth=1.2, zorder=1)
        axis.set(xlim=(-3, 103), xticks=(0, 50, 100), ylim=(len(scores) - 0.5, -0.5))
        axis.set_xlabel(f"pairwise accuracy, %\n({_shown(kind)} events)")
        axis.set_yticks(range(len(scores)), [_shown(score) for score in scores])
    return figure


@pictured
def horizon(findings: Findings, theme: Theme, table: str) -> Figure | None:
    """Accuracy of rerankers by horizon of their target, and pairwise accuracy of the target itself against rollouts."""
    rows = [(row, interval) for row, interval in _rows(findings, table) if row.x is not None]
    targets = {
        int(found[1]): row.pairwise
        for row in _on_validation(findings)
        if row.kind == "all" and row.pairwise and (found := re.fullmatch(r"Direct-B_(\d+)", row.score))
    }
    curves: list[tuple[str, str, dict[Any, Interval]]] = [
        ("accuracy, %", name, {row.x: interval for row, interval in rows if row.benchmark == name})
        for name in benchmarks([row for row, _ in rows])
    ]
    curves += [("target's pairwise accuracy, %", "Direct-B against rollouts", targets)] if targets else []
    heads = list(dict.fromkeys(head for head, _, _ in curves))
    if not curves:
        return None
    figure, axes = _panels(len(heads), 2, 3.0)
    for axis, head in zip(axes, heads, strict=True):
        inside = [(name, points) for title, name, points in curves if title == head]
        for (name, points), colour, marker in zip(inside, cycle(theme.series), cycle(MARKERS)):
            _curve(axis, points, colour, marker, _shown(name))
        ticks = sorted({x for _, points in inside for x in points})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set(xlabel="horizon, future tokens", ylabel=head)
        if len(inside) > 1:
            axis.legend(fontsize=8)
    return figure


def _curve(
    axis: Axes, points: Mapping[float, Interval], colour: str, marker: str, label: str, dashes: str = "-"
) -> None:
    """Means by x with their intervals as a band."""
    xs = sorted(points)
    mean, low, high = ([100 * points[x][part] for x in xs] for part in range(3))
    axis.plot(xs, mean, color=colour, marker=marker, markersize=5, linestyle=dashes, label=label)
    axis.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)


@pictured
def quality(findings: Findings, theme: Theme) -> Figure | None:
    """The target's pairwise accuracy against rollouts, by kind of future and horizon."""
    found = findings.future_quality
    if found is None:
        return None
    colours, shares = colormaps["cividis"], found.pairwise
    figure, (axis,) = _panels(1, 1, 0.42 * len(shares) + 0.8)
    figure.set_figwidth(min(WIDTH, 2.4 + 1.1 * len(found.horizons)))
    for row, values in enumerate(shares):
        for column, share in enumerate(values):
            colour = theme.line if share is None else colours(share)
            axis.fill_between([column - 0.48, column + 0.48], row - 0.46, row + 0.46, color=colour, linewidth=0)
            text = "–" if share is None else f"{100 * share:.0f}"
            dark = share is not None and share < 0.55
            ink = theme.ink if share is None else "#ffffff" if dark else "#000000"
            axis.text(column, row, text, ha="center", va="center", color=ink)
    axis.set_xticks(range(len(found.horizons)), [str(h) for h in found.horizons])
    axis.set_yticks(range(len(shares)), [_shown(name) for name in found.qualities])
    axis.set(ylim=(len(shares) - 0.5, -0.5), xlabel="horizon, future tokens", ylabel="future")
    axis.grid(False)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    return figure


@pictured
def trajectory(findings: Findings, theme: Theme) -> Figure | None:
    """The SLM's entropy at every step, the threshold, and the tokens chosen at events."""
    found = findings.trajectory
    if found is None:
        return None
    entropy, steps = found.entropy, range(len(found.entropy))
    figure, (axis,) = _panels(1, 1, 4.0)
    axis.plot(steps, entropy, color=theme.others, linewidth=1.2, marker="." if len(entropy) < 200 else "")
    axis.axhline(found.threshold, color=theme.faint, linestyle="--", linewidth=1)
    events = sorted(found.events, key=lambda event: event.step)
    at = [event.step for event in events]
    axis.plot(at, [entropy[step] for step in at], "D", color=theme.ours, markersize=6, linestyle="none")
    top = max([*entropy, found.threshold, 0.1])
    room = 0.028 * len(entropy)
    for event, x in zip(events, _spread(at, room), strict=True):
        text = f"{_token(event.slm)} → {_token(event.chosen)}"
        arrow = {"arrowstyle": "-", "color": theme.line, "linewidth": 0.8}
        place = (event.step, entropy[event.step])
        axis.annotate(text, place, (x, 1.1 * top), rotation=90, ha="center", va="bottom", fontsize=8, arrowprops=arrow)
    label = f"threshold {found.threshold:.3f} nats"
    axis.annotate(
        label,
        (1, found.threshold),
        (0, 3),
        xycoords=axis.get_yaxis_transform(),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=8,
    )
    axis.set(xlim=(-1, len(entropy)), ylim=(0, 1.08 * top), xlabel="step", ylabel="entropy, nats")
    axis.set_yticks([tick for tick in axis.get_yticks() if tick <= 1.08 * top])
    if len(entropy) <= LONGEST_SPELLED_OUT:
        axis.set_xticks(steps, [_token(token) for token in found.tokens], rotation=90, fontsize=8)
        axis.grid(False, axis="x")
        axis.set_xlabel("token of the text")
    return figure


@pictured
def event(findings: Findings, theme: Theme) -> Figure | None:
    """One event: the score of every candidate, coloured by whether the SLM's rollout after it is right."""
    found = findings.worked_event
    if found is None:
        return None
    candidates = sorted(found.candidates, key=lambda row: -row.score)
    figure, (axis,) = _panels(1, 1, 0.28 * len(candidates) + 1.0)
    figure.set_figwidth(0.8 * WIDTH)
    for place, row in enumerate(candidates):
        colour, hatch = (theme.good, "") if row.correct else (theme.bad, "///")
        axis.barh(place, row.score, 0.7, color=colour, hatch=hatch)
        axis.annotate(
            f"{row.score:.2f}",
            (row.score, place),
            (4 if row.score >= 0 else -4, 0),
            textcoords="offset points",
            ha="left" if row.score >= 0 else "right",
            va="center",
            fontsize=8,
        )
    axis.axvline(0, color=theme.faint, linewidth=0.8)
    axis.margins(x=0.1)
    axis.set_yticks(range(len(candidates)), [f"{_token(row.token)} ({_shown(row.source)})" for row in candidates])
    axis.set(ylim=(len(candidates) - 0.5, -0.5), xlabel="reranker score", ylabel="candidate (source)")
    axis.grid(False, axis="y")
    key = [
        Patch(color=theme.good, label="rollout right"),
        Patch(facecolor=theme.bad, hatch="///", label="rollout wrong"),
    ]
    figure.legend(handles=key, loc="outside upper right", ncols=2, fontsize=8)
    return figure


@pictured
def cost(findings: Findings, theme: Theme) -> Figure | None:
    """Accuracy on the first benchmark against time per problem, relative to greedy decoding."""
    measured = (findings.costs and findings.costs.deployment) or ()
    rows = _rows(findings, "methods")
    first = {row.label: (row, interval) for row, interval in rows if row.benchmark == rows[0][0].benchmark}
    known = [(one, one.relative) for one in measured if one.relative and one.method in first]
    several = len({one.loop for one, _ in known}) > 1
    points = sorted(
        ((relative, *first[one.method], f", {one.loop} loop" * several) for one, relative in known),
        key=lambda point: point[2].mean,
    )
    if not points:
        return None
    figure, (axis,) = _panels(1, 1, COST_HEIGHT)
    _limit(axis, [interval for _, _, interval, _ in points])
    labels = []
    for relative, row, interval, loop in points:
        marker, colour = _look(theme, row.key, row.ours)
        _cross(axis, relative, interval, fmt=marker, color=colour)
        labels.append((relative.mean, 100 * interval.mean, _shown(row.label) + loop, colour))
    _beside(axis, labels, COST_HEIGHT, theme)
    xs = [relative.mean for relative, *_ in points]
    if min(xs) > 0 and max(xs) > 8 * min(xs):
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_locator(NullLocator())
    axis.set(xlabel="time per problem, × greedy", ylabel=f"accuracy on {_shown(rows[0][0].benchmark)}, %")
    return figure


@pictured
def frontier(findings: Findings, theme: Theme) -> Figure | None:
    """Accuracy of all methods against the LLM's tokens, and against its calls, on the primary benchmark."""
    return _against(primary(findings.frontier), theme, {"llm_tokens": "LLM tokens", "calls": "LLM calls"})


def _against(rows: Sequence[Result], theme: Theme, costs: Mapping[str, str]) -> Figure | None:
    """Accuracy against costs per problem, a panel each, with the line from greedy decoding to takeover.

    Args:
        rows: of one benchmark; those without an accuracy or a cost are left out, and costs that no row has.
        theme: of the page.
        costs: field of `Result` and its name.
    """
    costs = {cost: name for cost, name in costs.items() if any(getattr(row, cost) for row in rows)}
    shown = [row for row in rows if costs and row.accuracy and all(getattr(row, cost) for cost in costs)]
    known = sorted(shown, key=_mean)
    if not known:
        return None
    height = max(COST_HEIGHT, 0.24 * len(known) + 1.0)
    figure, axes = _panels(len(costs), 1, height)
    for axis, (cost, name) in zip(axes, costs.items(), strict=True):
        points = [(getattr(row, cost), row.accuracy, row) for row in known if row.accuracy]
        axis.set_xscale("function", functions=(_root, _square))  # most cost far less than takeover
        _limit(axis, [interval for _, interval, _ in points])
        ends = {row.key: (x.mean, 100 * interval.mean) for x, interval, row in points}
        if "greedy" in ends and "takeover" in ends:
            share = np.linspace(0, 1, 100)[:, None] ** 2
            line = (1 - share) * np.array(ends["greedy"]) + share * np.array(ends["takeover"])
            axis.plot(*line.T, color=theme.faint, linestyle="--", linewidth=1, zorder=1)
        labels = []
        for x, interval, row in points:
            marker, colour = _look(theme, row.key, row.ours)
            _cross(axis, x, interval, fmt=marker, color=colour)
            labels.append((x.mean, 100 * interval.mean, _shown(row.label), colour))
        _beside(axis, labels, height, theme)
        _root_ticks(axis, max(x.high for x, *_ in points))
        axis.set(
            xlabel=f"{name} per problem (square-root scale)", ylabel=f"accuracy on {_shown(known[0].benchmark)}, %"
        )
    key = [
        Line2D([], [], color=theme.ours, marker="o", linestyle="none", label="FutureBridge"),
        Line2D([], [], color=theme.others, marker="s", linestyle="none", label="other methods"),
        Line2D([], [], color=theme.faint, marker="D", linestyle="--", label="takeover on a share of the problems"),
    ]
    figure.legend(handles=key, loc="outside upper left", ncols=3, fontsize=8)
    return figure


def _mean(row: Result) -> float:
    return row.accuracy.mean if row.accuracy else 0.0


def _root_ticks(axis: Axes, most: float) -> None:
    """Round numbers up to `most`, with room for each on a square-root scale."""
    ticks = [0.0]
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


def _limit(axis: Axes, accuracies: Sequence[Interval]) -> None:
    """Set the y axis to the range of the accuracies, in percent."""
    low, high = (100 * choose(one[end] for one in accuracies) for end, choose in ((1, min), (2, max)))
    axis.set_ylim(max(0.0, low - 5), min(104.0, high + 5))


def _cross(axis: Axes, x: Interval, accuracy: Interval, **look: Any) -> None:
    """A point with its intervals in both directions."""
    mean, reach = _percent(accuracy)
    across = [[max(0.0, x.mean - x.low)], [max(0.0, x.high - x.mean)]]
    axis.errorbar(x.mean, mean, reach, across, markersize=5, capsize=2, **look)


def _beside(axis: Axes, points: Sequence[tuple[float, float, str, str]], height: float, theme: Theme) -> None:
    """Label points (x, y, text, colour), sorted by y, at the right of the axis, one label above the other."""
    low, high = axis.get_ylim()
    gap = (high - low) * 12 / (0.8 * height * 72)
    places = _spread([y for _, y, _, _ in points], gap)
    for (x, y, text, colour), place in zip(points, places, strict=True):
        axis.annotate(
            text,
            (x, y),
            (1.02, place),
            textcoords=axis.get_yaxis_transform(),
            va="center",
            fontsize=8,
            color=colour,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": theme.line, "linewidth": 0.8, "shrinkB": 4, "relpos": (0, 0.5)},
        )


@pictured
def sweep(findings: Findings, theme: Theme, table: str) -> Figure | None:
    """Accuracy by request quantile of every method tried at more than one, and greedy decoding as a line."""
    rows_at = [(row, row.quantile) for row, _ in _rows(findings, table) if row.quantile is not None]
    cells = {(row.key, row.benchmark, at): row for row, at in rows_at}
    places = [cell[:2] for cell in cells]
    found = {cell: row for cell, row in cells.items() if places.count(cell[:2]) > 1}
    names = benchmarks(list(found.values()))
    if not names:
        return None
    figure, axes = _panels(len(names), 2, 3.6, sharey=True)
    rows = {key: row for (key, _, _), row in found.items()}
    order = sorted(rows, key=lambda key: place_of(rows[key]))
    drawn = sorted(order, key=lambda key: (key != OURS, key != "direct"))  # these two look the same in all figures
    colours = len(theme.series)
    for axis, name in zip(axes, names, strict=True):
        for key in order:
            number = drawn.index(key)
            points = {
                at: row.accuracy
                for (recipe, where, at), row in found.items()
                if (recipe, where) == (key, name) and row.accuracy
            }
            if points:
                look = theme.series[number % colours], MARKERS[number % len(MARKERS)]
                _curve(axis, points, *look, _shown(rows[key].label), DASHES[number // colours % len(DASHES)])
        for row, interval in _rows(findings, "methods"):
            if row.key == "greedy" and row.benchmark == name:
                level = 100 * interval.mean
                axis.axhline(level, color=theme.faint, linestyle="--", linewidth=1, label=_shown(row.label))
        ticks = sorted({at for _, where, at in found if where == name})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set(xlabel="request quantile", ylabel=f"accuracy on {_shown(name)}, %")
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    return figure

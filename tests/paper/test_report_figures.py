"""The report's figures: drawn from the rows, in two themes, with labels that can be read."""

from __future__ import annotations

import inspect
import itertools
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib import style
from matplotlib.text import Text
from report_runs import METHODS, around, everywhere, read, tiny

from benchmarks.pages import theme
from benchmarks.paper import figures
from benchmarks.paper.rows import Run


def drawn_with(name: str, found: Run):
    """What a figure is made of."""
    return figures.panels([found], "methods") if name == "forest" else found


DRAWN = ("forest", "frontier")


def drawn(name: str, found: Run):
    """A figure by itself, laid out."""
    with style.context(["default", theme._style(theme.LIGHT)]):
        figure = inspect.unwrap(getattr(figures, name))(drawn_with(name, found), theme.LIGHT)
        figure.draw_without_rendering()
    return figure


@pytest.mark.parametrize("name", DRAWN)
def test_figures_are_svg_by_themselves_for_light_and_dark_pages(name):
    draw, found = getattr(figures, name), read(tiny())
    before = dict(matplotlib.rcParams)
    picture = draw(drawn_with(name, found))
    assert draw(drawn_with(name, found)) == picture
    assert dict(matplotlib.rcParams) == before
    assert draw(drawn_with(name, read({"name": "bare"}))) is None
    root = ElementTree.fromstring(theme.alone(picture))
    assert root.tag.endswith("svg")
    assert not {"script", "image", "text"} & {e.tag.split("}")[1] for e in root.iter()}
    links = [value for e in root.iter() for key, value in e.attrib.items() if key.split("}")[-1] == "href"]
    assert all(link.startswith("#") for link in links)
    assert "dc:date" not in picture
    assert theme.LIGHT.ink in picture
    assert theme.DARK.ink in theme.alone(picture)


@pytest.mark.parametrize("name", DRAWN)
def test_figures_take_hostile_text_and_many_benchmarks(name, recwarn):
    hostile = ("$\\frac{1", "--><b>", "\x1b[31m\u202e\n", "漢字 \U0001f600", "", "x" * 500)
    found = tiny(benchmarks=("$a", "b^{", "c"))
    for rows in (found["results"], *found["parts"].values()):
        rows[:] = [everywhere(row, text) for row, text in zip(rows, itertools.cycle(hostile), strict=False)]
    ElementTree.fromstring(getattr(figures, name)(drawn_with(name, read(found))))
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def dots(axis):
    """(low, high) in percent by the place of each dot, from the top."""
    lines = (container.lines[2][0].get_segments()[0] for container in axis.containers)
    return {round(float(line[0, 1])): tuple(line[:, 0].round(6).tolist()) for line in lines}


def test_dots_are_the_rows_intervals_in_one_order():
    found = tiny(benchmarks=("one", "other"))
    found["results"] = [row for row in found["results"] if (row["benchmark"], row["key"]) != ("other", "majority")][
        ::-1
    ]
    axes = drawn("forest", read(found)).axes
    assert [text.get_text() for text in axes[0].get_yticklabels()] == [label for label, *_ in METHODS.values()]
    ends = (around(mean)[1:] for _, mean, *_ in METHODS.values())
    wanted = {place: (round(100 * low, 6), round(100 * high, 6)) for place, (low, high) in enumerate(ends)}
    by_title = {axis.get_title(loc="left"): dots(axis) for axis in axes}
    assert by_title["one"] == wanted
    assert by_title["other"] == {place: ends for place, ends in wanted.items() if place != 1}


def test_the_line_of_the_frontier_ends_at_greedy_and_takeover():
    tokens, calls, positions, time = drawn("frontier", read(tiny(benchmarks=("one", "other", "average")))).axes
    assert tokens.get_ylabel() == "accuracy on average, %"
    for axis, ends in ((tokens, (0.0, 40.2)), (calls, (0.0, 1.0)), (positions, (30.0, 70.2)), (time, (1.0, 1.87))):
        (line,) = [one for one in axis.lines if one.get_linestyle() == "--"]
        xs, ys = line.get_data()
        assert (xs[0], xs[-1]) == pytest.approx(ends)
        assert (ys[0], ys[-1]) == pytest.approx((71.2, 99.2))
        assert np.allclose(np.diff(ys) / np.diff(xs), (99.2 - 71.2) / (ends[1] - ends[0]))  # straight; the axis is not
        swept = [one for one in axis.lines if one.get_linestyle() == ":"]
        assert [len(one.get_xdata()) for one in swept] == [2] * (axis is not time)  # R2R's thresholds have no times
    assert (len(tokens.containers), len(time.containers)) == (len(METHODS), 3)
    assert [text.get_text() for text in time.texts][-1] == "Takeover, plain loop"
    colours = {text.get_text(): text.get_color() for text in tokens.texts}
    assert colours["Published recipe"] == theme.LIGHT.ours
    assert {colours[name] for name in ("Direct LLM score", "R2R", "Maj@8")} == {theme.LIGHT.others}
    looks = {figures._look(theme.LIGHT, key) for key in ("greedy", "s2t", "deployed")}
    assert len({marker for marker, _ in looks}) == len({colour for _, colour in looks}) == 3


def test_points_that_lie_together_share_one_line_to_their_names():
    labels = [(0.0, 70.0, "greedy", ""), (4.0, 90.0, "a", ""), (9.0, 90.2, "apart", ""), (4.1, 90.6, "b", "")]
    groups = figures.together(labels, (0.1, 1.0))
    assert [[text for _, _, text, _ in members] for _, members in groups] == [["greedy"], ["apart"], ["a", "b"]]
    assert [height for height, _ in groups] == pytest.approx([70.0, 90.2, 90.3])


def written_in(figure):
    """Every text of a figure with its place."""
    texts = [text for legend in figure.legends for text in legend.get_texts()]
    for axis in figure.axes:
        xs, ys = sorted(axis.get_xlim()), sorted(axis.get_ylim())
        texts += [text for text in axis.get_xticklabels() if xs[0] <= text.get_position()[0] <= xs[1]]
        texts += [text for text in axis.get_yticklabels() if ys[0] <= text.get_position()[1] <= ys[1]]
        texts += [axis._left_title, axis.title, axis.xaxis.label, axis.yaxis.label, *axis.texts]
    shown = [text for text in texts if text.get_text() and text.get_visible()]
    return [(text, Text.get_window_extent(text)) for text in shown]  # an annotation's own has its arrow too


@pytest.mark.parametrize("name", DRAWN)
def test_labels_can_be_read_and_do_not_overlap(name):
    figure = drawn(name, read(tiny(benchmarks=("one", "other"))))
    texts = written_in(figure)
    assert len(texts) > 5
    assert all(text.get_fontsize() >= 8 for text, _ in texts)
    assert figure.get_figwidth() <= figures.WIDTH  # shown at that size
    for (one, its), (other, others) in itertools.combinations(texts, 2):
        across, down = min(its.x1, others.x1) - max(its.x0, others.x0), min(its.y1, others.y1) - max(its.y0, others.y0)
        assert min(across, down) < 1.5, (one.get_text(), other.get_text())
    assert min(box.x0 for _, box in texts) >= -1
    assert max(box.x1 for _, box in texts) <= figure.bbox.x1 + 1

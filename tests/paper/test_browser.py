"""The pages of `report` in a real browser: on a desk and on a telephone, in light and dark."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from matplotlib.image import imread
from report_runs import everywhere, read, tiny

from benchmarks.paper.report import write_report

pytestmark = pytest.mark.skipif(not (browser.DRIVER and browser.BROWSER), reason="neither chromium nor its driver here")
SCREENS = {"desk": (1280, 900), "telephone": (390, 844)}
OPEN = "document.querySelectorAll('details').forEach(one => one.open = true)"
LONGEST = "long" * 40


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    with browser.browser() as made:
        yield made


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """A report of one run and of several, and one of hostile text."""
    folder = tmp_path_factory.mktemp("pages")
    several = [tiny(), tiny("a run with a name that is long", 0.6, benchmarks=("gsm8k", "math-500", "average"))]
    found = {
        "single": [tiny()],
        "several": several,
        "hostile": [everywhere(tiny(), f"<script>alert(1)</script>{LONGEST}")],
    }
    for name, runs in found.items():
        write_report([read(one) for one in runs], folder / name)
    return {name: folder / name / "report.html" for name in found}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", ["single", "several", "hostile"])
def test_a_page_fits_its_screen_and_breaks_no_rule(chromium, pages, name, screen, scheme, tmp_path):
    width, height = SCREENS[screen]
    chromium.open(pages[name], width, height, scheme)
    shots = {"first": chromium.screenshot()}
    chromium.run(OPEN)
    shots["opened"] = chromium.screenshot()
    for part, shot in shots.items():
        (tmp_path / f"{name}-{screen}-{scheme}-{part}.png").write_bytes(shot)
    assert chromium.console() == []
    assert chromium.run("return document.documentElement.scrollWidth") == width
    corner = imread(io.BytesIO(shots["first"]))
    assert corner.shape[:2] == (height, width)
    assert (corner[-1, 0, :3].mean() < 0.5) == (scheme == "dark")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
def test_the_first_screen_shows_the_forest_plot_as_large_as_it_was_drawn(chromium, pages, screen, scheme):
    chromium.open(pages["several"], *SCREENS[screen], scheme)
    shown = "[...document.images].filter(one => one.offsetParent && !one.closest('details'))"
    assert chromium.run(f"return {shown}.map(one => one.className)") == [scheme]
    assert chromium.run("return document.querySelectorAll('details[open]').length") == 0
    if screen == "desk":  # elsewhere it scrolls sideways
        assert chromium.run(f"return {shown}[0].getBoundingClientRect().right") <= SCREENS[screen][0]
    chromium.run(OPEN)
    shrunk = "[...document.images].filter(one => one.offsetParent && one.width < one.naturalWidth - 1).length"
    assert chromium.run(f"return {shrunk}") == 0


TABLE = '[aria-label="Methods on demo:plans"]'


def column(chromium: browser.Browser, at: int) -> list[str]:
    """What stands in a column of the table, from the top."""
    cells = f"document.querySelectorAll('{TABLE} tbody tr > :nth-child({at})')"
    return chromium.run(f"return [...{cells}].map(cell => cell.textContent)")


def test_a_table_is_sorted_by_the_mouse_and_by_the_keyboard(chromium, pages):
    chromium.open(pages["single"])
    chromium.run(OPEN)
    names, shares = column(chromium, 1), column(chromium, 2)
    assert shares.count("see below") == 1

    def numbers() -> list[float]:
        return [float(cell.split()[0]) for cell in column(chromium, 2) if cell != "see below"]

    def sorts() -> list[str | None]:
        return chromium.run(f"return [...document.querySelectorAll('{TABLE} th[scope=col]')].map(one => one.ariaSort)")

    assert set(sorts()) == {None}
    named = f"document.querySelectorAll('{TABLE} th button')"
    assert chromium.run(f"return [...{named}].filter(one => one.textContent && one.ariaLabel).length") == 0
    chromium.click(f"{TABLE} th:nth-child(2) button")
    assert numbers() == sorted(numbers(), reverse=True)
    assert column(chromium, 2)[-1] == "see below"
    assert sorts()[:3] == [None, "descending", None]
    chromium.run(f"document.querySelector('{TABLE} th:nth-child(2) button').focus()")
    chromium.press("Enter", 13, "\r")
    assert numbers() == sorted(numbers())
    assert column(chromium, 2)[-1] == "see below"
    assert sorts()[:3] == [None, "ascending", None]
    chromium.press("Tab", 9)
    chromium.press(" ", 32, " ")
    assert sorts()[:3] == [None, None, "descending"]
    chromium.click(f"{TABLE} th:nth-child(1) button")
    assert column(chromium, 1) == sorted(names, key=str.lower) != names
    assert chromium.console() == []


def test_without_its_script_a_page_shows_the_same(chromium, pages, tmp_path):
    html = pages["single"].read_text()
    assert "<button" not in html
    without = tmp_path / "page.html"
    without.write_text(html.split("<script>")[0] + html.split("</script>")[1])
    shown = []
    for page in (pages["single"], without):
        chromium.open(page)
        chromium.run(OPEN)
        shown.append(chromium.run("return document.querySelector('main').textContent"))
    assert shown[0] == shown[1]


def test_what_the_policy_forbids_is_not_done_and_said(chromium, pages, tmp_path):
    """So that the other tests would see it."""
    for number, (forbidden, words) in enumerate(
        {
            "<script>document.title = 'owned'</script>": "script-src",
            "<b onclick='1'>x</b>": "script-src",
            "<img src='https://evil.example/x.png'>": "img-src",
            "<p style='color: red'>x</p>": "style-src",
            "<form action='https://evil.example'><input></form><script src='x.js'></script>": "script-src",
        }.items()
    ):
        page = tmp_path / f"{number}.html"
        page.write_text(pages["single"].read_text().replace("</main>", f"{forbidden}</main>"))
        chromium.open(page)
        found = chromium.console()
        assert len(found) == 1, found
        assert words in found[0]
        assert chromium.run("return document.title") == "FutureBridge report: tiny"

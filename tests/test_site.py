"""The built site in a real browser: on a desk and on a telephone, in light and dark. `make docs` builds it."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest

SITE = Path(__file__).resolve().parent.parent / "build" / "site"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (browser.DRIVER and browser.BROWSER), reason="neither chromium nor its driver here"),
    pytest.mark.skipif(not PAGES, reason="`make docs` has not built the site"),
]
FOUND = "return [...document.querySelectorAll('#search-results li > a')].map(link => link.getAttribute('href'))"
HIDDEN = """return [...document.querySelectorAll('table')].filter(table =>
    table.getBoundingClientRect().right > table.closest('.content').getBoundingClientRect().right + 1).length"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    with browser.browser() as made:
        yield made


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the site is served; a search asks for pages, which a browser does not read from files."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
@pytest.mark.sweep(3)
def test_every_page_fits_its_screen(chromium, address, width, height, scheme, tmp_path):
    for page in PAGES:
        chromium.open(f"{address}/{page}", width, height, scheme)
        (tmp_path / f"{page.replace('/', '-')}-{width}-{scheme}.png").write_bytes(chromium.screenshot())
        assert chromium.run("return document.documentElement.scrollWidth") <= width, page
        assert chromium.run("return [...document.images].every(image => image.complete && image.naturalWidth)"), page
        assert chromium.console() == [], page


def test_the_table_of_ops_shows_its_last_column(chromium, address):
    chromium.open(f"{address}/ops.html", 1280, 900)
    assert chromium.run(HIDDEN) == 0


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("branch_attention", "api.html#fb_kernels.branch_attention"),
        ("CompatibilityScorer", "api.html#fb_core.CompatibilityScorer"),
    ],
)
def test_a_search_for_a_public_name_finds_it_first(chromium, address, words, first):
    chromium.open(f"{address}/search.html?q={words}")
    assert chromium.wait(FOUND)[0] == first


def test_code_has_a_button_that_copies_it(chromium, address):
    chromium.open(f"{address}/ops.html")
    assert chromium.run("return document.querySelectorAll('button.copybtn').length") > 2

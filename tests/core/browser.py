"""A real browser without a window: chromium, driven by its chromedriver over the WebDriver protocol."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]


class Browser:
    """An open session; `call` is a command of the protocol."""

    def __init__(self, session: httpx.Client) -> None:
        self._session = session

    def call(self, path: str, **values: Any) -> Any:
        answer = self._session.post(path, json=values).json()["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(f"{path}: {answer['message'].splitlines()[0]}")
        return answer

    def cdp(self, command: str, **values: Any) -> Any:
        """A command of the browser's own."""
        return self.call("goog/cdp/execute", cmd=command, params=values)

    def run(self, script: str) -> Any:
        """What a script returns; it runs beside the page, whose policy does not bind it."""
        return self.call("execute/sync", script=script, args=[])

    def open(self, page: Path | str, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """A page, a file or a URL, on a screen of so many CSS pixels, in a light or a dark scheme."""
        self.cdp(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("url", url=page if isinstance(page, str) else page.resolve().as_uri())

    def console(self) -> list[str]:
        """What went wrong since it was last asked, violations of a page's policy among it."""
        return [entry["message"] for entry in self.call("se/log", type="browser")]

    def screenshot(self) -> bytes:
        """A PNG of the screen."""
        return base64.b64decode(self.cdp("Page.captureScreenshot")["data"])

    def wait(self, script: str, seconds: float = 60.0) -> Any:
        """What a script returns once that is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > end:
                raise TimeoutError(script)
            time.sleep(0.05)
        return value

    def click(self, selector: str) -> None:
        """The mouse on the middle of an element."""
        place = f"const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}}); "
        box = self.run(place + "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]")
        for kind in ("mousePressed", "mouseReleased"):
            at = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
            self.cdp("Input.dispatchMouseEvent", type=kind, **at)

    def press(self, key: str, code: int, text: str = "") -> None:
        """A key of the keyboard, on what has the focus."""
        for kind in ("keyDown", "keyUp"):
            self.cdp("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with its own profile; it is closed afterwards."""
    assert DRIVER is not None
    assert BROWSER is not None
    with (
        tempfile.TemporaryDirectory() as profile,
        subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True) as driver,
    ):
        try:
            assert driver.stdout
            port = next(
                found[1] for line in driver.stdout if (found := re.search(r"started successfully on port (\d+)", line))
            )
            options = {"binary": BROWSER, "args": [*FLAGS, f"--user-data-dir={profile}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            sessions = f"http://localhost:{port}/session"
            made = httpx.post(sessions, json={"capabilities": {"alwaysMatch": wanted}}, timeout=60).json()["value"]
            with httpx.Client(base_url=f"{sessions}/{made['sessionId']}", timeout=60) as client:
                try:
                    yield Browser(client)
                finally:
                    client.delete("window")  # the last one: the browser ends with it
        finally:
            driver.terminate()

"""HTTP to one server: requests from many threads, each with a time limit, JSON and retries."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from http.cookiejar import DefaultCookiePolicy
from typing import Any
from urllib.parse import urlsplit

import httpx

from fb_core.llm.local import GONE

MAX_BODY = 64 << 20  # bytes of one answer
ANSWER, EACH = 1 << 20, 256  # bytes of an answer, and for each token that it may name
FIRST_DELAY, LONGEST_DELAY = 0.25, 8.0  # seconds before a retry; doubled each time, times 0.5 to 1.5
PART = 8  # so many characters of a key are too many to show


@cache
def _trusted() -> ssl.SSLContext:
    """The system's certificates, read once: 50 ms."""
    return ssl.create_default_context()


class ServerError(OSError):
    """The server did not answer, or its answer lacks what was asked for."""


class Connections:
    """Connections to one server, on their own event loop; proxies are not used, redirects are not followed.

    `httpx.Client` will not do: it limits each read but not the whole request, and no other thread can end one.

    Args:
        url: of the server, put before every path.
        headers: of every request.
        timeout: seconds for one request, from connecting to the complete answer.
        kept: maximum number of idle connections that are kept open.
    """

    def __init__(self, url: str, headers: dict[str, str], timeout: float, kept: int) -> None:
        self._url = url
        self._timeout = timeout
        self._client = httpx.AsyncClient(
            headers=headers | {"Accept-Encoding": "identity"} | ({} if kept else {"Connection": "close"}),
            timeout=None,  # `post` has one for the whole request
            limits=httpx.Limits(max_keepalive_connections=kept, keepalive_expiry=None),
            verify=_trusted(),
            trust_env=False,
        )
        self._client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))  # no cookie is kept
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run, args=(self._loop,), name="fb-http", daemon=True).start()

    def post(self, path: str, body: bytes, most: int, gone: Future[None] | None = None) -> tuple[int, bytes]:
        """Status and body of the answer to a POST, which is given up when `gone` is cancelled.

        Raises:
            CancelledError: it was given up.
            ServerError: an answer of more than `most` bytes, or above `MAX_BODY`.
            TimeoutError: no complete answer in time.
            OSError: no connection, or a broken one.
        """
        running = asyncio.run_coroutine_threadsafe(self._post(path, body, min(most, MAX_BODY)), self._loop)
        if gone is not None:
            gone.add_done_callback(lambda _: running.cancel())
        return running.result()

    async def _post(self, path: str, body: bytes, most: int) -> tuple[int, bytes]:
        answer = bytearray()
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._client.stream("POST", f"{self._url}{path}", content=body) as response,
            ):
                async for chunk in response.aiter_raw():
                    answer += chunk
                    if len(answer) > most:
                        raise ServerError(
                            f"{self._url}: expected at most {most} bytes from {path}, got more; check what "
                            "listens there"
                        )
                return response.status_code, bytes(answer)
        except TimeoutError:
            raise TimeoutError("timed out") from None
        except (httpx.HTTPError, httpx.InvalidURL) as problem:
            cause: BaseException = problem
            while inner := cause.__cause__ or cause.__context__:
                cause = inner
            raise cause if isinstance(cause, OSError) else ConnectionError(str(problem)) from None

    def close(self) -> None:
        """Close all connections soon: a garbage collector may call this on the loop's own thread, so nothing waits."""
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._end()))

    async def _end(self) -> None:
        try:
            await self._client.aclose()
        finally:
            self._loop.stop()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


class JSONClient:
    """JSON requests to one server, sent again where that may help; a key is never shown.

    Args:
        url: of the server, as errors name it.
        connections: to it.
        model: its name in requests; None leaves it out.
        retries: how often a failed request is sent again.
        key: what no error may hold.
    """

    def __init__(self, url: str, connections: Connections, *, model: str | None, retries: int, key: str | None) -> None:
        self.url = url
        self.connections = connections
        self.model = model
        self.retries = retries
        self._key = key or ""
        self._random = random.Random()

    def post(self, path: str, fields: dict[str, Any], named: int) -> Any:
        """The JSON answer to a JSON request, which may name so many tokens.

        Raises:
            CancelledError: nobody waits for it any more.
            ServerError: no answer, or one with another status than 200.
        """
        body, gone = self._body(fields), GONE.get() or Future()
        for attempt in range(self.retries + 1):
            if attempt:
                delay = min(FIRST_DELAY * 2 ** (attempt - 1), LONGEST_DELAY) * self._random.uniform(0.5, 1.5)
                with suppress(TimeoutError):
                    gone.result(delay)
            try:
                status, answer = self.connections.post(path, body, ANSWER + EACH * named, gone)
            except ServerError:
                raise
            except OSError as problem:
                came = f"{type(problem).__name__}: {self._quoted(str(problem))}"
                continue
            if status == 200:
                return self._parsed(path, answer)
            came = f"status {status}: {self._quoted(answer.decode(errors='replace'))}"
            if status != 429 and status < 500:
                raise ServerError(
                    f"{self.url}: expected an answer from {path}, got {came}; check the flavour, the api_key and what "
                    "the server allows"
                )
        raise ServerError(
            f"{self.url}: expected an answer from {path}, got {came}, {self.retries + 1} times; check that the server "
            "runs there, or raise timeout or retries"
        )

    def post_once(self, path: str, fields: dict[str, Any], named: int) -> Any:
        """As `post`, without retries; a status other than 200 is a LookupError."""
        status, answer = self.connections.post(path, self._body(fields), ANSWER + EACH * named)
        if status != 200:
            raise LookupError(f"status {status}")
        return self._parsed(path, answer)

    def _body(self, fields: dict[str, Any]) -> bytes:
        return json.dumps(fields if self.model is None else {"model": self.model, **fields}).encode()

    def _parsed(self, path: str, answer: bytes) -> Any:
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as problem:
            raise ServerError(
                f"{self.url}: expected JSON from {path}, got {self._quoted(answer.decode(errors='replace'))} "
                f"({problem}); check the flavour and what listens there"
            ) from problem

    def _quoted(self, text: str) -> str:
        """The beginning of a server's answer, with the key removed."""
        return repr(self.keyless(text)[:300])

    def keyless(self, text: str) -> str:
        """Text with the key removed; "***" alone if it still contains a part of the key."""
        key = self._key
        text = text.replace(key, "***") if key else text
        return "***" if any(key[start : start + PART] in text for start in range(len(key) - PART + 1)) else text


def checked_url(url: str) -> str:
    """A server's URL, without a slash at its end.

    Raises:
        TypeError: not a str.
        ValueError: another scheme, no host, a bad port, or user, query or fragment, which are not repeated.
    """
    if not isinstance(url, str):
        raise TypeError(f"url: expected a str, got {type(url).__name__}; pass one such as 'http://localhost:8000'")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # a bad port raises here
    except ValueError:
        parts, host = urlsplit(""), None
    extra = parts.query or parts.fragment or "@" in parts.netloc
    if parts.scheme not in ("http", "https") or not host or extra or not url.isprintable() or " " in url:
        secret = any(mark in url for mark in "@?#%")
        got = "one with a user, a query, a fragment or an escape, which may hold a secret" if secret else repr(url)
        raise ValueError(
            f"url: expected http or https, a host, perhaps a port and a path, got {got}; pass one such as "
            "'http://localhost:8000', a key by api_key"
        )
    return parts._replace(path=parts.path.rstrip("/")).geturl()

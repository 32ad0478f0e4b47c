"""HTTP to one server: requests from many threads, each with a time limit."""

from __future__ import annotations

import asyncio
import ssl
import threading
from concurrent.futures import Future
from http.cookiejar import DefaultCookiePolicy
from urllib.parse import urlsplit

import httpx

MAX_BODY = 64 << 20  # bytes of one answer


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
            verify=ssl.create_default_context(),
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

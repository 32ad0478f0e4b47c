"""A server from a command's settings, which runs until it is told to end."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from typing import Any

import uvicorn

from fb_core.apps.serve.app import LAST, LOG, Application
from fb_core.apps.serve.connection import Connection, Crowd
from fb_core.apps.serve.service import Service
from fb_core.apps.settings.loading import load
from fb_core.apps.settings.pair import ServeSettings
from fb_core.decode.engine import Engine
from fb_core.llm.remote import key_in
from fb_core.runtime.kv_pages import SIZE

FILES = 8192  # open files that a server uses at most


def load_server(settings: ServeSettings, *, loopback: bool, page: bool = True) -> Application:
    """Load the pair and make its engine and the routes; the access log goes to stderr, one line per request.

    `loopback` and `page` are as for `Application`.
    """
    key = key_in(settings.key_variable, "key_variable")
    if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
        words = "expected a key of letters, digits and signs of ASCII in it, as a header can hold"
        raise ValueError(f"key_variable: {words}, got none or another, such as one with a line's end; export another")
    loaded = load(settings)
    engine = Engine(
        loaded.pair,
        loaded.selector,
        loaded.policy,
        **settings.model_dump(include={"max_batch", "max_length", "kv_memory", "prefill_tokens", "on_llm_error"}),
        **loaded.options,
    )
    engine.warm()
    if not LOG.handlers:
        LOG.addHandler(logging.StreamHandler())
        LOG.setLevel(logging.INFO)
    service = Service(engine, loaded.tokenizer, settings, thinking=loaded.thinking)
    return Application(service, key=key, loopback=loopback, page=page)


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """A listening socket and its URL; OSError for an address that this process cannot listen on.

    TCP_NODELAY is set, so that no piece of a stream waits for an acknowledgement.
    """
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as problem:
        option = "--port" if problem.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        words, why = "expected a free address to listen on", (problem.strerror or "unknown").lower()
        raise OSError(f"{option}: {words}, got {host}:{port} ({why}); name another") from None
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # its connections inherit this
    name = f"[{host}]" if ":" in host else host
    return listening, f"http://{name}:{listening.getsockname()[1]}"


def on_loopback(listening: socket.socket, key_variable: str | None) -> bool:
    """Whether only this machine reaches the socket; warns if others do and need no key."""
    loopback = ip_address(listening.getsockname()[0]).is_loopback
    if not loopback and key_variable is None:
        words = "whoever reaches this address can use the server; export a key and name it as key_variable"
        print(f"futurebridge: warning: {words}", file=sys.stderr, flush=True)
    return loopback


def serve(settings: ServeSettings, *, host: str, port: int, drain: int, page: bool = True) -> None:
    """Load the pair and serve it; after SIGTERM or Ctrl-C, requests under way have `drain` seconds to end.

    Port 0 takes a free one; with `page`, prompts can be tried at `/`.
    """
    listening, url = listen(host, port)
    app = load_server(settings, loopback=on_loopback(listening, settings.key_variable), page=page)
    engine = app.service.engine
    holds = f"{settings.max_batch} sequences, {engine.load.all_pages * SIZE} tokens of keys and values"
    print(f"futurebridge: {settings.name} at {url}/v1: {holds}", flush=True)
    # As SIGTERM's: uvicorn raises it again when all is closed, and no thread that waits for an LLM keeps the process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        Server(app, drain).run(sockets=[listening])
    finally:
        engine.close()


def _raise_file_limit() -> int:
    """Let this process open up to `FILES` files, if the system allows that; returns how many it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # infinity is -1
    wanted = min(FILES, hard) if hard >= 0 else FILES
    if 0 <= soft < wanted:
        with suppress(OSError, ValueError):  # the system may have a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return min(FILES, soft) if soft >= 0 else FILES


class Server(uvicorn.Server):
    """Ends open answers with an error once `drain` seconds are over, so that their clients learn of it."""

    def __init__(self, app: Application, drain: int) -> None:
        self.end, self.drain, files = app.end, drain, _raise_file_limit()
        crowd = Crowd(files // 2)  # half: some connections come before others have gone
        protocol: Any = partial(Connection, crowd=crowd, log=app.log)
        options: dict[str, Any] = {"ws": "none", "log_level": "error", "access_log": False, "backlog": files // 16}
        super().__init__(uvicorn.Config(app, http=protocol, timeout_graceful_shutdown=drain + int(LAST), **options))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and end the answers that are still open after `drain` seconds."""
        ending = asyncio.get_running_loop().call_later(self.drain, self.end)
        await super().shutdown(sockets)
        ending.cancel()

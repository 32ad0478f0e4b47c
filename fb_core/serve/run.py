"""A server from a command's settings, until it is told to end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette

from fb_core.config import PairSettings
from fb_core.engine.engine import Engine
from fb_core.engine.pages import SIZE
from fb_core.intervention import OnError
from fb_core.loading import load
from fb_core.serve.app import LAST, LOG, application
from fb_core.serve.service import Service
from fb_core.spans import Span


class Room(NamedTuple):
    """A loaded pair at work, and its routes."""

    engine: Engine
    service: Service
    app: Starlette

    @property
    def tokens(self) -> int:
        """Those whose keys and values there is memory for."""
        return self.engine.load.all_pages * SIZE


def room(
    settings: PairSettings,
    *,
    key: str | None,
    max_batch: int,
    kv_memory: int | None,
    prefill_tokens: int,
    queue: int,
    body_limit: int,
    on_llm_error: OnError,
) -> Room:
    """Load the pair and what answers with it; lines of the access log go to the error stream.

    Args:
        settings: of the pair.
        key: what clients must send, not empty; None for nothing.
        max_batch: sequences that run together.
        kv_memory: bytes for keys and values, None for half of the free memory at most.
        prefill_tokens: as for `CollaborativeDecoder`.
        queue: sequences that may be waiting or under way.
        body_limit: bytes of a request.
        on_llm_error: as for `CollaborativeDecoder`.
    """
    loaded = load(settings)
    engine = Engine(
        loaded.pair,
        loaded.selector,
        loaded.policy,
        max_batch=max_batch,
        max_length=settings.max_length,
        kv_memory=kv_memory,
        prefill_tokens=prefill_tokens,
        max_events=settings.max_events,
        on_llm_error=on_llm_error,
        span=Span(settings.span or None),
    )
    show_log()
    service = Service(engine, loaded.tokenizer, settings.slm, queue, settings.max_new_tokens, settings.max_length)
    return Room(engine, service, application(service, key=key, body_limit=body_limit))


def show_log() -> None:
    """Each request's line goes to the error stream, as it is."""
    if not LOG.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        LOG.addHandler(handler)
        LOG.setLevel(logging.INFO)


def check_key(key: str | None) -> None:
    """Refuse an empty one."""
    if key == "":
        raise ValueError("--key-variable: expected a key in it, got an empty one; export one or leave the option out")


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """A socket that listens, and its URL; no piece of an answer waits until the client has acknowledged the last."""
    listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # which its connections inherit
    name = f"[{host}]" if ":" in host else host
    return listening, f"http://{name}:{listening.getsockname()[1]}"


def serve(
    settings: PairSettings, *, host: str, port: int, key: str | None, max_batch: int, drain: int, **others: Any
) -> None:
    """Load the pair and serve it; SIGTERM and Ctrl-C let what is under way end, for `drain` seconds at most.

    Args:
        settings: as for `room`.
        host: to listen at.
        port: likewise; 0 takes a free one.
        key: as for `room`.
        max_batch: likewise.
        drain: seconds.
        others: of `room`'s.
    """
    check_key(key)
    listening, url = listen(host, port)
    made = room(settings, key=key, max_batch=max_batch, **others)
    holds = f"{max_batch} sequences, {made.tokens} tokens of keys and values"
    print(f"futurebridge: {settings.slm} at {url}/v1: {holds}", flush=True)
    config = uvicorn.Config(
        made.app, log_level="warning", access_log=False, timeout_graceful_shutdown=drain + int(LAST)
    )
    try:
        Server(config, made.service.end, drain).run(sockets=[listening])
    except KeyboardInterrupt:  # as SIGTERM: at once, since threads that wait for a large model would hold the process
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    finally:
        made.engine.close()


class Server(uvicorn.Server):
    """Ends answers some seconds after it was told to end, so that their clients hear of it.

    Args:
        config: of uvicorn.
        end: ends all answers.
        drain: seconds.
    """

    def __init__(self, config: uvicorn.Config, end: Callable[[], None], drain: int) -> None:
        super().__init__(config)
        self.end, self.drain = end, drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        ending = asyncio.get_running_loop().call_later(self.drain, self.end)
        await super().shutdown(sockets)
        ending.cancel()

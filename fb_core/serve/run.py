"""A server from a command's settings, until it is told to end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket

import uvicorn

from fb_core.config import PairSettings
from fb_core.engine.engine import Engine
from fb_core.engine.pages import SIZE
from fb_core.loading import load
from fb_core.serve.app import LAST, LOG, application
from fb_core.serve.service import Service


def serve(
    settings: PairSettings,
    *,
    host: str,
    port: int,
    key: str | None,
    max_batch: int,
    kv_memory: int | None,
    queue: int,
    body_limit: int,
    drain: int,
    on_llm_error: str,
) -> None:
    """Load the pair and serve it; SIGTERM and Ctrl-C let what is under way end, for `drain` seconds at most.

    Args:
        settings: of the pair.
        host: to listen at.
        port: likewise; 0 takes a free one.
        key: what clients must send, not empty; None for nothing.
        max_batch: sequences that run together.
        kv_memory: bytes for keys and values, None for half of the free memory at most.
        queue: requests that may be waiting or under way.
        body_limit: bytes of a request.
        drain: seconds.
        on_llm_error: as for `CollaborativeDecoder`.
    """
    if key == "":
        raise ValueError("--key-variable: expected a key in it, got an empty one; export one or leave the option out")
    listening = listen(host, port)
    loaded = load(settings)
    engine = Engine(
        loaded.pair,
        loaded.selector,
        loaded.policy,
        max_batch=max_batch,
        max_length=settings.max_length,
        kv_memory=kv_memory,
        max_events=settings.max_events,
        on_llm_error=on_llm_error,
    )
    if not LOG.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        LOG.addHandler(handler)
        LOG.setLevel(logging.INFO)
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listening.getsockname()[1]}/v1"
    room = f"{max_batch} sequences, {engine.load.all_pages * SIZE} tokens of keys and values"
    print(f"futurebridge: {settings.slm} at {address}: {room}", flush=True)
    service = Service(engine, loaded.tokenizer, settings.slm, queue, settings.max_new_tokens, settings.max_length)
    app = application(service, key=key, body_limit=body_limit)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=drain + int(LAST))
    try:
        _Server(config, service, drain).run(sockets=[listening])
    except KeyboardInterrupt:  # as SIGTERM: at once, since threads that wait for a large model would hold the process
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    finally:
        engine.close()


class _Server(uvicorn.Server):
    """Ends answers some seconds after it was told to end, so that their clients hear of it."""

    def __init__(self, config: uvicorn.Config, service: Service, drain: int) -> None:
        super().__init__(config)
        self.service, self.drain = service, drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        ending = asyncio.get_running_loop().call_later(self.drain, self.service.end)
        await super().shutdown(sockets)
        ending.cancel()


def listen(host: str, port: int) -> socket.socket:
    """A socket for clients to connect to; no piece of an answer waits until the client has acknowledged the last."""
    listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # which its connections inherit
    return listening

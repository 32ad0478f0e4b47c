"""Several replicas of a pair behind one address: Ray Serve keeps them alive, a front hands them the requests."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import uvicorn
from starlette.types import Message, Scope

from fb_core.config import PairSettings
from fb_core.serve.app import LAST
from fb_core.serve.run import Room, Server, check_key, listen, room, show_log
from fb_core.stages.cluster import LOOPBACK, connect

SPARE = 16  # requests that a replica takes besides those of its queue: for health and models, or of a dead one's
PERIOD = 1  # seconds between two looks at a replica


class Asked(NamedTuple):
    """A request, read whole."""

    scope: Scope
    body: bytes


class Replica:
    """A process with a pair of its own, on a GPU of its own where there is one, and the server's routes.

    Args:
        make: loads the pair.
    """

    def __init__(self, make: Callable[[], Room]) -> None:
        from ray import serve

        _keep_port_here()
        self.room = make()
        self.name = serve.get_replica_context().replica_id.unique_id

    def check_health(self) -> None:
        """Ray calls it again and again, and replaces a replica where it raises."""
        if self.room.engine.closed:
            raise RuntimeError("engine: expected an open one, got a closed one; another replica takes its place")

    def tokens(self) -> int:
        """Those whose keys and values there is memory for."""
        return self.room.tokens

    async def answer(self, asked: Asked) -> AsyncIterator[list[Message]]:
        """What the routes send, piece by piece; first nothing, which says that the request is here."""
        yield []
        unread: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]
        sent, gone = asyncio.Queue[Message | None](), asyncio.Event()

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        # A stream listens for a client that goes away by this version of the protocol alone.
        version = {"version": "3.0", "spec_version": "2.3"}
        scope = {**asked.scope, "type": "http", "asgi": version}
        answering = asyncio.ensure_future(self.room.app(scope, receive, sent.put))
        answering.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while not (answering.done() and sent.empty()):
                messages = [await sent.get()]
                while not sent.empty():
                    messages.append(sent.get_nowait())
                yield [message for message in messages if message is not None]
            await answering
        finally:
            gone.set()

    async def whole(self, asked: Asked) -> tuple[str, list[Message]]:
        """The replica's name, and all that the routes send."""
        return self.name, [message async for messages in self.answer(asked) for message in messages]


def _keep_port_here() -> None:
    """Where Ray is on loopback, so is the port at which Ray Serve unpickles calls, which it opens to all otherwise."""
    import ray
    from ray.serve._private import replica

    if ray.util.get_node_ip_address() == LOOPBACK:
        add = replica.add_port_to_grpc_server
        replica.add_port_to_grpc_server = lambda server, address: add(server, address.replace("[::]", LOOPBACK))


def serve_replicas(
    settings: PairSettings,
    replicas: int,
    *,
    host: str,
    port: int,
    key: str | None,
    max_batch: int,
    queue: int,
    body_limit: int,
    drain: int,
    **others: Any,
) -> None:
    """As `fb_core.serve.run.serve`, by so many replicas on a Ray cluster; limits are a replica's.

    Raises:
        ValueError: more replicas than the cluster has room for.
        OSError: replicas that do not start, and why.
    """
    check_key(key)
    if settings.device not in ("auto", "cpu", "cuda"):
        raise ValueError(
            f"device: expected auto, cpu or cuda with --engine ray, got {settings.device}; Ray says which GPU is whose"
        )
    listening, url = listen(host, port)
    connect()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    import ray

    from fb_core.serve.front import Front

    name = f"futurebridge-{ray.util.get_node_ip_address()}-{listening.getsockname()[1]}"
    limit = queue + 2 * SPARE  # sequences: requests alone never reach it, lists of prompts may
    make = partial(room, settings, key=key, max_batch=max_batch, queue=limit, body_limit=body_limit, **others)
    try:
        gpus = _gpus(settings.device, replicas)
        with _application(name):
            handle = _deployed(name, make, replicas, gpus, queue)
            tokens = handle.tokens.remote().result()
            holds = f"{replicas} replicas, each of {max_batch} sequences, {tokens} tokens of keys and values"
            show_log()
            print(f"futurebridge: {settings.slm} at {url}/v1: {holds}", flush=True)
            front = Front(handle, replicas * queue, body_limit)
            config = uvicorn.Config(
                front,
                lifespan="off",
                ws="none",
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=drain + int(LAST),
            )
            Server(config, front.end, drain).run(sockets=[listening])
    finally:
        ray.shutdown()


def _gpus(device: str, replicas: int) -> int:
    """GPUs of a replica: one, where the cluster has any and the device is not the CPU."""
    import ray

    has = ray.cluster_resources()
    gpus = int(has.get("GPU", 0)) if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise ValueError("device: expected a GPU in the cluster, got none; see `ray status`")
    kind, places = ("GPUs", gpus) if gpus else ("cores", int(has.get("CPU", 0)))
    if replicas > places:
        raise ValueError(
            f"replicas: expected at most the cluster's {places} {kind}, got {replicas}; add nodes or ask for fewer"
        )
    return int(gpus > 0)


@contextmanager
def _application(name: str) -> Iterator[None]:
    """Ray Serve runs; at the end the application is taken down, and Ray Serve where it has no other."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled")
    try:
        yield
    finally:
        if "RAY_ADDRESS" in os.environ:  # else all of Ray ends with this process
            serve.delete(name)
            if not serve.status().applications:
                serve.shutdown()


def _deployed(name: str, make: Callable[[], Room], replicas: int, gpus: int, queue: int) -> Any:
    """The handle of so many replicas that are ready."""
    from ray import serve

    deployment = serve.deployment(
        Replica,
        name="replica",
        num_replicas=replicas,
        max_ongoing_requests=queue + SPARE,
        max_constructor_retry_count=1,
        health_check_period_s=PERIOD,
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
        logging_config={"enable_access_log": False},
    )
    try:
        return serve.run(deployment.bind(make), name=name, route_prefix=None)
    except RuntimeError:
        *_, reason = serve.status().applications[name].deployments["replica"].message.splitlines()
        raise OSError(f"replicas: expected them to start, got {reason}") from None

"""Several replicas of a pair behind one address: Ray Serve keeps them alive, and a front passes them the requests."""

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

from starlette.types import Message, Scope

from fb_core.config import PairSettings
from fb_core.serve.app import LAST
from fb_core.serve.connection import configured
from fb_core.serve.run import Room, Server, check_key, listen, on_loopback, room, show_log
from fb_core.stages.cluster import LOOPBACK, connect

SPARE = 16  # requests that a replica takes above its queue: health checks, model lists, those of a dead replica
PERIOD = 1  # seconds between two health checks of a replica


class Asked(NamedTuple):
    """A request with its whole body."""

    scope: Scope
    body: bytes


class Replica:
    """A process with its own pair, on its own GPU if there is one, and the server's routes.

    Args:
        make: loads the pair.
    """

    def __init__(self, make: Callable[[], Room]) -> None:
        from ray import serve

        _keep_port_here()
        self.room = make()
        self.name = serve.get_replica_context().replica_id.unique_id

    def check_health(self) -> None:
        """Ray calls this periodically, and replaces a replica for which it raises."""
        if self.room.engine.closed:
            raise RuntimeError("engine: expected an open one, got a closed one; another replica takes its place")

    def tokens(self) -> int:
        """The number of tokens that the KV cache has room for."""
        return self.room.tokens

    async def answer(self, asked: Asked) -> AsyncIterator[list[Message]]:
        """The messages that the routes send, as they come; a first, empty list says that the request has arrived."""
        yield []
        unread: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]
        sent, gone = asyncio.Queue[Message | None](), asyncio.Event()

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        # Starlette notices that the client of a stream has disconnected only at this version of the protocol.
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
        """The replica's name, and all messages that the routes send."""
        return self.name, [message async for messages in self.answer(asked) for message in messages]


def _keep_port_here() -> None:
    """If Ray is on loopback, bind the port at which Ray Serve unpickles calls there too; it would be open to all."""
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
    """As `fb_core.serve.run.serve`, with replicas on a Ray cluster; the limits are those of each replica.

    Raises:
        ValueError: more replicas than the cluster has room for.
        OSError: replicas that do not start; the message says why.
    """
    check_key(key)
    if settings.device not in ("auto", "cpu", "cuda"):
        raise ValueError(
            f"device: expected auto, cpu or cuda with --engine ray, got {settings.device}; Ray assigns the GPUs"
        )
    listening, url = listen(host, port)
    connect()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    import ray

    from fb_core.serve.front import Front

    name = f"futurebridge-{ray.util.get_node_ip_address()}-{listening.getsockname()[1]}"
    loopback = on_loopback(listening, key)
    limit = queue + 2 * SPARE  # sequences: single prompts never reach this, lists of prompts may
    make = partial(
        room, settings, key=key, max_batch=max_batch, queue=limit, body_limit=body_limit, loopback=loopback, **others
    )
    try:
        gpus = _gpus(settings.device, replicas)
        with _application(name):
            handle = _deployed(name, make, replicas, gpus, queue)
            tokens = handle.tokens.remote().result()
            holds = f"{replicas} replicas, each of {max_batch} sequences, {tokens} tokens of keys and values"
            show_log()
            print(f"futurebridge: {settings.slm} at {url}/v1: {holds}", flush=True)
            front = Front(handle, replicas * queue, body_limit)
            config = configured(front, drain + int(LAST), lifespan="off")
            Server(config, front.end, drain).run(sockets=[listening])
    finally:
        ray.shutdown()


def _gpus(device: str, replicas: int) -> int:
    """GPUs per replica: 1 if the cluster has any and the device is not the CPU, else 0."""
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
    """Ray Serve runs inside the context; at its end the application is removed, and Ray Serve if it has no other."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled")
    try:
        yield
    finally:
        if "RAY_ADDRESS" in os.environ:  # otherwise Ray ends with this process
            serve.delete(name)
            if not serve.status().applications:
                serve.shutdown()


def _deployed(name: str, make: Callable[[], Room], replicas: int, gpus: int, queue: int) -> Any:
    """Deploy the replicas, and return their handle once they are ready."""
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

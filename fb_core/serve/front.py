"""The front of several replicas: passes each request to one of them, and its answer back to the client."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from fb_core.serve.app import GONE, LOG, RETRY_AFTER, _gone
from fb_core.serve.protocol import problem_fields
from fb_core.serve.replicas import Asked

ERRORS = logging.getLogger("futurebridge.errors")
PASSED = ("method", "path", "raw_path", "query_string", "root_path", "scheme", "headers", "http_version", "client")
TRIES = 2  # attempts for a request whose replica died: a request that kills replicas kills no more than these
PATIENCE = 60  # seconds for a replica to take a request
SCRAPE = 10  # seconds for all replicas to send their metrics


class Front:
    """Passes each request to one replica, and the replica's answer to the client.

    If a replica dies before the client has got anything, another one answers. If part of a stream was sent, the stream
    ends with an error.

    Args:
        handle: of the Ray Serve deployment.
        most: maximum number of POST requests under way.
        body_limit: maximum bytes of a request.
    """

    def __init__(self, handle: Any, most: int, body_limit: int) -> None:
        self.handle, self.most, self.body_limit = handle, most, body_limit
        self.replicas = handle.options(method_name="answer", stream=True)
        self.under_way = 0
        self.ending = asyncio.Event()

    def end(self) -> None:
        """End all answers with an error."""
        self.ending.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, until it is answered or its client has disconnected."""
        began, client = time.perf_counter(), _Client(send)
        asked = await self._read(scope, receive)
        counts = scope["method"] == "POST"
        self.under_way += counts
        try:
            if counts and self.under_way > self.most:
                await client.refuse(429, f"queue: expected at most {self.most} requests under way; try again")
            elif asked is not None:
                await self._until_end(self._answered(asked, client), client, Request(scope, receive))
        finally:
            self.under_way -= counts
            seconds = round(time.perf_counter() - began, 4)
            line = {"method": scope["method"], "path": scope["path"], "status": client.status, "seconds": seconds}
            LOG.info(json.dumps(line))

    async def _until_end(self, answering: Coroutine[Any, Any, None], client: _Client, request: Request) -> None:
        """Answer, unless the client disconnects or the server ends."""
        answer, gone, end = map(asyncio.ensure_future, (answering, _gone(request), self.ending.wait()))
        try:
            await asyncio.wait((answer, gone, end), return_when=asyncio.FIRST_COMPLETED)
            if end.done() and not answer.done():
                answer.cancel()
                await client.refuse(503, "server: expected to finish the answer, but it is being ended")
        finally:
            for task in (gone, end, answer):
                task.cancel()  # not awaited: a task that waits for a dead replica may ignore it
        if answer.done() and not answer.cancelled():
            answer.result()

    async def _read(self, scope: Scope, receive: Receive) -> Asked | None:
        """The request, its body cut 1 byte past the limit, which a replica refuses; None if the client disconnected."""
        body, more = bytearray(), True
        while more and len(body) <= self.body_limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return Asked({name: scope[name] for name in PASSED if name in scope}, bytes(body[: self.body_limit + 1]))

    async def _answered(self, asked: Asked, client: _Client) -> None:
        try:
            if asked.scope["path"] == "/metrics":
                await self._metrics(asked, client)
            else:
                await self._relayed(asked, client)
        except TimeoutError:
            await client.refuse(503, "replicas: expected one that takes the request in time, got none; try again")
        except RayTaskError as problem:
            _note(problem, "the client is told")
            await client.refuse(500, "replica: expected to finish the answer, got an error; see Ray's log")
        except (RayError, RayServeException) as problem:
            _note(problem, "the client is told")
            await client.refuse(503, "replica: expected to finish the answer, its process died; try again")

    async def _relayed(self, asked: Asked, client: _Client) -> None:
        for left in reversed(range(TRIES)):
            try:
                await self._tried(asked, client)
                return
            except RayTaskError:
                raise
            except (RayError, RayServeException) as problem:
                if client.begun or not left:
                    raise
                _note(problem, "another replica is asked")

    async def _tried(self, asked: Asked, client: _Client) -> None:
        """Send one replica's answer: a stream piece by piece, anything else as a whole."""
        answer, held = self.replicas.remote(asked), list[Message]()
        try:
            await _within(PATIENCE, anext(answer))
            async for messages in answer:
                held += messages
                if client.begun or (_is_stream(held) and len(held) > 1):  # a stream's head is sent with its first piece
                    await client.send(held)
                    held = []
            await client.send(held)
        finally:
            answer.cancel()

    async def _metrics(self, asked: Asked, client: _Client) -> None:
        """Send the metrics of all replicas, or the refusal of one."""
        said = await _within(SCRAPE, self.handle.broadcast("whole", asked).results_async(return_exceptions=True))
        answers = [one for one in said if not isinstance(one, BaseException)]
        refused = [messages for _, messages in answers if messages[0]["status"] != 200]
        if refused:
            await client.send(refused[0])
        elif not answers:
            await client.refuse(503, "replicas: expected metrics from one or more, got none; try again")
        else:
            texts = {name: b"".join(one["body"] for one in rest).decode() for name, (_, *rest) in answers}
            await client.give(Response(_joined(texts), media_type="text/plain; version=0.0.4"))


class _Client:
    """The client of one request: the status sent, whether its answer has begun, and whether that is a stream."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = GONE
        self.begun = self.streams = False

    async def send(self, messages: Sequence[Message]) -> None:
        """Send the next messages of the answer."""
        for message in messages:
            if message["type"] == "http.response.start":
                self.status, self.begun, self.streams = message["status"], True, _is_stream([message])
            await self._send(message)

    async def give(self, response: Response) -> None:
        """Send a whole response."""
        head = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        await self.send([head, {"type": "http.response.body", "body": response.body}])

    async def refuse(self, status: int, message: str) -> None:
        """Send an error in OpenAI's format: as the answer, or as the last piece of a stream that has begun.

        Any other answer that has begun is left incomplete, which its client notices.
        """
        kind, code = ("rate_limit_error", "rate_limit_exceeded") if status == 429 else ("server_error", None)
        fields = problem_fields(message, kind, code=code)
        if not self.begun:
            await self.give(JSONResponse(fields, status, {} if status == 500 else {"Retry-After": RETRY_AFTER}))
        elif self.streams:
            await self.send([{"type": "http.response.body", "body": f"data: {json.dumps(fields)}\n\n".encode()}])
        self.status = status


async def _within(seconds: float, awaited: Coroutine[Any, Any, Any]) -> Any:
    """The result, or TimeoutError after so many seconds, even if the coroutine ignores its cancellation."""
    task = asyncio.ensure_future(awaited)
    try:
        await asyncio.wait((task,), timeout=seconds)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()


def _is_stream(messages: list[Message]) -> bool:
    return any(
        name == b"content-type" and value.startswith(b"text/event-stream")
        for message in messages[:1]
        for name, value in message["headers"]
    )


def _note(problem: Exception, then: str) -> None:
    """Write a line to the error log."""
    message = str(problem).partition("\n")[0]
    ERRORS.error(json.dumps({"error": type(problem).__name__, "message": message, "then": then}))


class _Joined(Collector):
    """Metrics of several replicas, each sample labelled with its replica."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self.texts.items():
            for found in text_string_to_metric_families(text):
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                for sample in found.samples:
                    family.samples.append(sample._replace(labels=sample.labels | {"replica": replica}))
        yield from families.values()


def _joined(texts: dict[str, str]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Joined(texts))
    return generate_latest(registry)

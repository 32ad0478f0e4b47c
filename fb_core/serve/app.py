"""The routes: completions, chat completions, models, health, metrics."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fb_core.pool import Event
from fb_core.serve.metrics import Metrics
from fb_core.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    Shape,
    problem_fields,
    usage_fields,
)
from fb_core.serve.service import Answer, Service

LOG = logging.getLogger("futurebridge.access")
ERRORS = logging.getLogger("futurebridge.errors")
RETRY_AFTER = "1"
GONE = 499  # the client closed the connection
Body = TypeVar("Body", CompletionRequest, ChatRequest)


def application(service: Service, *, key: str | None, body_limit: int) -> Starlette:
    """The server's routes.

    Args:
        service: what answers.
        key: clients send it as `Authorization: Bearer ...`; None for anyone.
        body_limit: bytes of a request.
    """
    return _Application(service, key, body_limit).app


class _Problem(Exception):
    """An answer in OpenAI's form of an error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", parameter: str | None = None):
        super().__init__(message)
        self.response = JSONResponse(problem_fields(message, kind, parameter), status)


class _Application:
    def __init__(self, service: Service, key: str | None, body_limit: int) -> None:
        self.service, self.key, self.body_limit = service, key, body_limit
        self.metrics = Metrics(service.engine)
        routes = [
            Route("/v1/models", self._guarded(self.models)),
            Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/health", self._guarded(self.health, open_to_all=True)),
            Route("/metrics", self._guarded(self.prometheus)),
        ]
        self.app = Starlette(routes=routes, lifespan=self.lifespan)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """What is under way ends before the engine does: the server drains its connections first."""
        yield
        await asyncio.to_thread(self.service.engine.close)

    def _guarded(
        self, answer: Callable[[HTTPRequest], Awaitable[Response]], open_to_all: bool = False
    ) -> Callable[[HTTPRequest], Awaitable[Response]]:
        """With the key checked, errors in one form, and a line of the access log."""

        async def guarded(request: HTTPRequest) -> Response:
            began = time.perf_counter()
            try:
                if not open_to_all:
                    self._check_key(request)
                response = await answer(request)
            except _Problem as problem:
                response = problem.response
            except asyncio.CancelledError:
                self._log(request, GONE, began)
                raise
            if not isinstance(response, StreamingResponse):
                self._log(request, response.status_code, began)
            return response

        return guarded

    def _check_key(self, request: HTTPRequest) -> None:
        given = request.headers.get("authorization", "")
        if self.key is not None and not hmac.compare_digest(given.encode("latin-1"), f"Bearer {self.key}".encode()):
            raise _Problem(401, "authorization: expected the server's key, got none or another", "authentication_error")

    def _log(self, request: HTTPRequest, status: int, began: float, **more: object) -> None:
        seconds = round(time.perf_counter() - began, 4)
        path = request.url.path
        self.metrics.requests.labels(path, str(status)).inc()
        LOG.info(json.dumps({"method": request.method, "path": path, "status": status, "seconds": seconds, **more}))

    # --- routes -------------------------------------------------------------------------------------------------------

    async def health(self, _: HTTPRequest) -> Response:
        """Whether the server is there."""
        return JSONResponse({"status": "ok"})

    async def prometheus(self, _: HTTPRequest) -> Response:
        """Counters and gauges."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, _: HTTPRequest) -> Response:
        """The one model."""
        one = {"id": self.service.name, "object": "model", "created": 0, "owned_by": "futurebridge"}
        return JSONResponse({"object": "list", "data": [one]})

    async def completions(self, request: HTTPRequest) -> Response:
        """A prompt continued."""
        return await self._answered(request, CompletionRequest)

    async def chat(self, request: HTTPRequest) -> Response:
        """A conversation continued."""
        return await self._answered(request, ChatRequest)

    async def _answered(self, request: HTTPRequest, kind: type[Body]) -> Response:
        began = time.perf_counter()
        body = await self._read(request, kind)
        if self.service.requests >= self.service.queue:
            problem = _Problem(429, f"queue: expected fewer than {self.service.queue} requests under way; try again")
            problem.response.headers["Retry-After"] = RETRY_AFTER
            raise problem
        try:
            answer = self.service.begin(body)
        except (ValueError, TypeError) as wrong:
            raise _Problem(400, str(wrong)) from None
        except RuntimeError as wrong:  # the engine is closed
            raise _Problem(503, str(wrong), "server_error") from None
        shape = Shape(self.service.name, isinstance(body, ChatRequest))
        if body.stream:
            return StreamingResponse(self._stream(request, body, answer, shape, began), media_type="text/event-stream")
        return await self._whole(request, body, answer, shape, began)

    async def _read(self, request: HTTPRequest, kind: type[Body]) -> Body:
        """The request's body, no more of it than the limit."""
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > self.body_limit:
                raise _Problem(413, f"body: expected at most {self.body_limit} bytes; shorten the request")
        try:
            return kind.model_validate_json(bytes(data))
        except ValidationError as problem:
            first = problem.errors()[0]
            place = ".".join(map(str, first["loc"]))
            if first["type"] == "extra_forbidden":
                refused = f"{place}: expected a parameter that this server heeds; leave it out"
                raise _Problem(400, refused, parameter=place) from None
            raise _Problem(400, f"{place or 'body'}: {first['msg']}", parameter=place or None) from None

    async def _whole(self, request: HTTPRequest, body: Body, answer: Answer, shape: Shape, began: float) -> Response:
        """The whole answer, unless the client goes away meanwhile."""
        pieces: list[str] = []

        async def read() -> None:
            async for piece in answer.pieces():
                if not pieces:
                    self.metrics.first.observe(time.perf_counter() - began)
                pieces.append(piece.text)

        reading, leaving = asyncio.ensure_future(read()), asyncio.ensure_future(_gone(request))
        await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
            return Response(status_code=GONE)
        leaving.cancel()
        try:
            reading.result()
        except Exception as problem:
            raise self._failed(problem) from None
        text = "".join(pieces)
        return JSONResponse(
            shape.whole([(text, answer.finish, answer.events)] * body.n, self._used(body, answer, began))
        )

    async def _stream(
        self, request: HTTPRequest, body: Body, answer: Answer, shape: Shape, began: float
    ) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        status = 200
        first = True
        try:
            async for piece in answer.pieces():
                if first:
                    self.metrics.first.observe(time.perf_counter() - began)
                for index in range(body.n):
                    yield _sent(shape.piece(index, piece.text, None, piece.events, first))
                first = False
            for index in range(body.n):
                yield _sent(shape.piece(index, "", answer.finish, [], first))
            used = self._used(body, answer, began)
            if body.stream_options is not None and body.stream_options.include_usage:
                yield _sent(shape.used(used))
            yield "data: [DONE]\n\n"
        except Exception as problem:
            failed = self._failed(problem)
            status = failed.response.status_code
            yield f"data: {bytes(failed.response.body).decode()}\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            status = GONE
            raise
        finally:
            self._log(request, status, began, tokens=answer.completion, events=len(answer.events))

    def _failed(self, problem: Exception) -> _Problem:
        """What a client is told of an error that is not its own; the rest goes to the log."""
        ERRORS.error("%s: %s", type(problem).__name__, problem)
        if isinstance(problem, OSError):
            return _Problem(502, "large model: expected an answer, got none; try again later", "server_error")
        return _Problem(
            500, "engine: expected to finish the answer, got an error; see the server's log", "server_error"
        )

    def _used(self, body: Body, answer: Answer, began: float) -> dict[str, Any]:
        self.metrics.whole.observe(time.perf_counter() - began)
        self.metrics.prompt_tokens.inc(answer.prompt)
        self.metrics.tokens.inc(answer.completion)
        self.metrics.events.inc(len(answer.events))
        return usage_fields(answer.prompt, answer.completion * body.n, *_asked(answer.events))


def _asked(events: list[Event]) -> tuple[int, int]:
    """(requests to the large model, tokens chosen with its help)."""
    calls = sum(event.asked for event in events)
    return calls, sum(len(event.pool) > 1 or event.asked for event in events)


async def _gone(request: HTTPRequest) -> None:
    """Until the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _sent(fields: dict[str, Any]) -> str:
    return f"data: {json.dumps(fields)}\n\n"

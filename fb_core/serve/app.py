"""The routes: completions, chat completions, models, health, metrics."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fb_core.decoding import Usage
from fb_core.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    Piece,
    Shape,
    problem_fields,
    usage_fields,
)
from fb_core.serve.service import Answer, Busy, Service, merged

LOG = logging.getLogger("futurebridge.access")
ERRORS = logging.getLogger("futurebridge.errors")
RETRY_AFTER = "1"
LAST = 5.0  # seconds to close the engine, or to tell clients that the server ends
TOGETHER = 64 << 10  # bytes of an answer that are sent at once
SMALL = 16 << 10  # bytes of a request that are read at once
GONE = 499  # the client closed the connection
NAMES = {**{name: f"futurebridge.{name}" for name in ("max_events", "threshold", "recipe")}, "ranking": "logprobs"}
"""What a client calls an argument of the engine."""
Body = TypeVar("Body", CompletionRequest, ChatRequest)
Result = TypeVar("Result")
Handler = Callable[[HTTPRequest], Awaitable[Response]]


def application(service: Service, *, key: str | None, body_limit: int, loopback: bool = False) -> Starlette:
    """The server's routes.

    Args:
        service: answers the requests.
        key: clients must send it as `Authorization: Bearer ...`; None if no key is needed.
        body_limit: maximum bytes of a request.
        loopback: whether it is reached under this machine's own names alone; without a key, others are refused.
    """
    return _Application(service, key, body_limit, loopback).app


class _Problem(Exception):
    """An error, answered in OpenAI's format."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        parameter: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.response = JSONResponse(problem_fields(message, kind, parameter, code), status)


class _Parts(Response):
    """A whole answer in JSON; a large one goes out part by part, as its client takes it."""

    def __init__(self, parts: list[bytes]) -> None:
        size = sum(map(len, parts))
        super().__init__(media_type="application/json", headers={"Content-Length": str(size)})
        self.parts = [b"".join(parts)] if size < TOGETHER else parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, as any Starlette response does."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})


class _Stream(StreamingResponse):
    """A streamed answer; `end` is called after it, whether or not the client read it all."""

    def __init__(self, content: AsyncIterator[str], end: Callable[[], None]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, as any Starlette response does."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.end()


class _Application:
    def __init__(self, service: Service, key: str | None, body_limit: int, loopback: bool) -> None:
        self.service, self.key, self.body_limit, self.loopback = service, key, body_limit, loopback
        self.metrics = service.metrics
        routes = [
            self._route("/v1/models", self.models),
            self._route("/v1/models/{model:path}", self.model),
            self._route("/v1/completions", self.completions, "POST"),
            self._route("/v1/chat/completions", self.chat, "POST"),
            self._route("/health", self.health, open_to_all=True),
            self._route("/metrics", self.prometheus),
        ]
        self.app = Starlette(routes=routes, lifespan=self.lifespan, exception_handlers={HTTPException: self.no_route})
        self.app.router.redirect_slashes = False  # it would redirect to whatever host the client named

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Close the engine at shutdown; the server has drained its connections by then."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1, "fb-json"))  # for what leaves the loop
        yield
        self.service.close()
        closing = threading.Thread(target=self.service.engine.close, daemon=True)  # it may wait for a large model
        closing.start()
        await asyncio.to_thread(closing.join, LAST)

    def _route(self, path: str, answer: Handler, method: str = "GET", *, open_to_all: bool = False) -> Route:
        """A route that checks the key, answers errors in OpenAI's format, and writes a line to the access log."""

        async def guarded(request: HTTPRequest) -> Response:
            request.state.began, request.state.path = time.perf_counter(), path
            try:
                self._check_page(request)
                if not open_to_all:
                    self._check_key(request)
                response = await answer(request)
            except _Problem as problem:
                response = problem.response
            except ClientDisconnect:
                response = Response(status_code=GONE)
            except asyncio.CancelledError:
                self._log(request, GONE)
                raise
            except Exception as problem:
                response = self._failed(problem).response
            if not isinstance(response, StreamingResponse):
                self._log(request, response.status_code)
            return response

        return Route(path, guarded, methods=[method])

    def _check_key(self, request: HTTPRequest) -> None:
        given = request.headers.get("authorization", "")
        if self.key is not None and not hmac.compare_digest(given.encode("latin-1"), f"Bearer {self.key}".encode()):
            raise _Problem(401, "authorization: expected the server's key, got none or another", "authentication_error")

    def _check_page(self, request: HTTPRequest) -> None:
        """Without a key, refuse what a web page sends: by its Origin, or by its name in Host (DNS rebinding)."""
        if self.key is not None:
            return
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self.loopback and host and not _is_local(host):
            words = "expected localhost or a loopback address, got another; use one, or start the server with a key"
            raise _Problem(403, f"Host: {words}", "permission_error")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            words = "expected none or this server's own, got another; start the server with a key to serve web pages"
            raise _Problem(403, f"Origin: {words}", "permission_error")

    def _log(self, request: HTTPRequest, status: int, **more: object) -> None:
        seconds, path = time.perf_counter() - request.state.began, request.state.path
        self.metrics.requests.labels(path, str(status)).inc()
        line = {"method": request.method, "path": path, "status": status, "seconds": round(seconds, 4), **more}
        LOG.info(json.dumps(line))

    # --- routes -------------------------------------------------------------------------------------------------------

    async def no_route(self, request: HTTPRequest, problem: Exception) -> Response:
        """The answer to an unknown path, or to the wrong method for a path."""
        assert isinstance(problem, HTTPException)
        request.state.began, request.state.path = time.perf_counter(), "other"
        self._log(request, problem.status_code)
        path = request.url.path[:100]
        message = f"path: expected one of this server's, got {request.method} {path}; see its documentation"
        failed = _Problem(problem.status_code, message)
        failed.response.headers.update(problem.headers or {})
        return failed.response

    async def health(self, _: HTTPRequest) -> Response:
        """Whether the server is up and its engine is running."""
        if self.service.engine.closed:
            raise _Problem(503, "engine: expected a running one, got a closed one; restart the server", "server_error")
        return JSONResponse({"status": "ok"})

    async def prometheus(self, _: HTTPRequest) -> Response:
        """The metrics, in Prometheus' text format."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, _: HTTPRequest) -> Response:
        """The one model, in a list."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: HTTPRequest) -> Response:
        """The one model."""
        self._check_model(request.path_params["model"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {"id": self.service.name, "object": "model", "created": 0, "owned_by": "futurebridge"}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.service.name):
            message = f"model: expected {self.service.name!r}, got another; /v1/models lists it, or leave it out"
            raise _Problem(404, message, parameter="model", code="model_not_found")

    async def completions(self, request: HTTPRequest) -> Response:
        """Answer a completion request."""
        return await self._answered(request, CompletionRequest, "prompt")

    async def chat(self, request: HTTPRequest) -> Response:
        """Answer a chat completion request."""
        return await self._answered(request, ChatRequest, "messages")

    async def _answered(self, request: HTTPRequest, kind: type[Body], asked: str) -> Response:
        body = await self._read(request, kind)
        self._check_model(body.model)
        try:
            answers = await _while_there(request, self.service.begin(body))
        except Busy as busy:
            problem = _Problem(429, str(busy), "rate_limit_error", code="rate_limit_exceeded")
            problem.response.headers["Retry-After"] = RETRY_AFTER
            raise problem from None
        except (ValueError, TypeError) as wrong:
            raise _refused(str(wrong), asked) from None
        except RuntimeError as wrong:  # the engine is closed
            raise _Problem(503, str(wrong), "server_error") from None
        shape = Shape(self.service.name, isinstance(body, ChatRequest), body.ranking is not None)
        if body.stream:
            return self._stream(request, body, answers, shape)
        return await self._whole(request, body, answers, shape)

    async def _read(self, request: HTTPRequest, kind: type[Body]) -> Body:
        """The request's body, checked; reading stops at `body_limit`."""
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > self.body_limit:
                raise _Problem(413, f"body: expected at most {self.body_limit} bytes; shorten the request")
        try:
            if len(data) <= SMALL:
                return kind.model_validate_json(bytes(data))
            return await asyncio.to_thread(kind.model_validate_json, bytes(data))
        except ValidationError as problem:
            first = problem.errors(include_url=False)[0]
            place, words = ".".join(map(str, first["loc"])), first["msg"]
            if first["type"] == "extra_forbidden":
                words = "expected a parameter that this server supports; leave it out"
            elif isinstance(own := first.get("ctx", {}).get("error"), ValueError):
                words, place = own.args[0], own.args[1] if own.args[1:] else place
            raise _Problem(400, f"{place or 'body'}: {words}", parameter=place or None) from None

    async def _whole(self, request: HTTPRequest, body: Body, answers: Sequence[Answer], shape: Shape) -> Response:
        """The complete answers as one response; they are cancelled if the client disconnects."""
        came: list[list[Piece]] = [[] for _ in answers]

        async def read() -> None:
            async for index, piece in merged(answers):
                if piece is not None:
                    self._heard(request, any(came))
                    came[index].append(piece)

        try:
            await _while_there(request, read())
        except ClientDisconnect:
            raise
        except Exception as problem:
            raise self._failed(problem) from None
        finally:
            _cancel(answers)
        whole = [(Piece.joined(pieces), answer.finish) for pieces, answer in zip(came, answers, strict=True)]
        return _Parts(await asyncio.to_thread(shape.whole, whole, body.n, self._used(request, body, answers)))

    def _stream(self, request: HTTPRequest, body: Body, answers: Sequence[Answer], shape: Shape) -> Response:
        """The answers as server-sent events."""
        status = GONE

        async def events() -> AsyncIterator[str]:
            nonlocal status
            first = [True] * len(answers)
            try:
                async for index, piece in merged(answers):
                    finish = None if piece is not None else answers[index].finish
                    self._heard(request, not all(first))
                    copies = range(index * body.n, (index + 1) * body.n)
                    for each in shape.pieces(copies, piece or Piece(), finish, first[index]):
                        yield f"data: {each}\n\n"
                    first[index] = False
                used = self._used(request, body, answers)
                if body.stream_options is not None and body.stream_options.include_usage:
                    yield f"data: {json.dumps(shape.used(used))}\n\n"
                status = 200  # set before the last line: a client may close as soon as it has read that
                yield "data: [DONE]\n\n"
            except Exception as problem:
                failed = self._failed(problem)
                status = failed.response.status_code
                yield f"data: {bytes(failed.response.body).decode()}\n\n"

        def end() -> None:
            _cancel(answers)
            tokens = sum(answer.completion for answer in answers)
            self._log(request, status, tokens=tokens, events=sum(len(answer.events) for answer in answers))

        return _Stream(events(), end)

    def _heard(self, request: HTTPRequest, before: bool) -> None:
        """Record the time to the first text of a request."""
        if not before:
            self.metrics.first.observe(time.perf_counter() - request.state.began)

    def _failed(self, problem: Exception) -> _Problem:
        """What a client is told of an error on the server's side; the details go to the log."""
        if isinstance(problem, CancelledError):
            return _Problem(503, "server: expected to finish the answer, but it is being ended", "server_error")
        ERRORS.error(json.dumps({"error": type(problem).__name__, "message": str(problem)}))
        if isinstance(problem, OSError):
            return _Problem(502, "large model: expected an answer, got none; try again later", "server_error")
        return _Problem(
            500, "engine: expected to finish the answer, got an error; see the server's log", "server_error"
        )

    def _used(self, request: HTTPRequest, body: Body, answers: Sequence[Answer]) -> dict[str, Any]:
        """The usage of a request's answers; with n above 1, completion tokens count n times."""
        self.metrics.whole.observe(time.perf_counter() - request.state.began)
        prompt, completion = sum(answer.prompt for answer in answers), sum(answer.completion for answer in answers)
        asked = [Usage.of(answer.events) for answer in answers]
        calls, helped = sum(one.calls for one in asked), sum(one.appended for one in asked)
        return usage_fields(prompt, completion * body.n, calls, helped)


def _is_local(host: str) -> bool:
    """Whether a Host header names this machine's loopback."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        return name == "localhost" or name.endswith(".localhost") or ip_address(name).is_loopback
    except ValueError:
        return False


def _refused(message: str, asked: str) -> _Problem:
    """The answer to a request that the engine refuses, with the client's name for the argument."""
    name, _, words = message.partition(":")
    if not name.isidentifier():
        return _Problem(400, message)
    name = asked if name in ("input_ids", "prompt") else NAMES.get(name, name)
    return _Problem(400, f"{name}:{words}", parameter=name)


def _cancel(answers: Sequence[Answer]) -> None:
    """Cancel the answers that have not ended."""
    for answer in answers:
        answer.handle.cancel()


async def _while_there(request: HTTPRequest, doing: Coroutine[Any, Any, Result]) -> Result:
    """The coroutine's result; ClientDisconnect, and its end, as soon as the client has closed the connection."""
    done, leaving = asyncio.ensure_future(doing), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((done, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnect
        return done.result()
    finally:
        done.cancel()
        leaving.cancel()


async def _gone(request: HTTPRequest) -> None:
    """Wait until the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass

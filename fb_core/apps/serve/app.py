"""The routes: completions, chat completions, models, health, metrics, and a page to try them on."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import math
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib import resources
from importlib.metadata import version
from ipaddress import ip_address
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from prometheus_client import generate_latest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from fb_core.apps.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    LabelRequest,
    Piece,
    RerankRequest,
    ScoreRequest,
    Shape,
    label_fields,
    problem_fields,
    rerank_fields,
    score_fields,
)
from fb_core.apps.serve.service import PIECE, Busy, Reply, Scoring, Service, Work
from fb_core.models.tokens import TextGroup

LOG = logging.getLogger("futurebridge.access")
ERRORS = logging.getLogger("futurebridge.errors")
LAST = 5.0  # seconds to close the engine, or to tell clients that the server ends
SMALL = 16 << 10  # bytes of a request that are read at once
GONE = 499  # the client closed the connection
NAMES = {name: f"futurebridge.{name}" for name in ("max_events", "threshold", "recipe")}
NAMES |= {"ranking": "logprobs", "ranking_ids": "logprob_token_ids"}
NAMES |= {"input_ids": "prompt", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
SGLANG_SCORES = "/v1/score"
LABELS, RERANK = (SGLANG_SCORES, "/generative_scoring"), ("/score", "/rerank", "/v1/rerank", "/v2/rerank")
CHAT_NAMES = {"input_ids": "messages", "prompt": "messages"}
"""What a client calls an argument of the engine."""
PAGE_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
Body = TypeVar("Body", CompletionRequest, ChatRequest, ScoreRequest, LabelRequest, RerankRequest)
Begun = TypeVar("Begun", Reply, Scoring)
Result = TypeVar("Result")


class APIError(HTTPException):
    """An error, answered in OpenAI's format."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", *, headers: Any = None, **more: Any
    ) -> None:
        super().__init__(status, message, headers)
        self.fields = problem_fields(message, kind, **more)


class Application(Starlette):
    """The server's routes; errors have OpenAI's format, and each request is a line in the access log.

    Args:
        key: clients must send it as `Authorization: Bearer ...`; None if no key is needed.
        loopback: whether it is reached under this machine's own names alone; without a key, others are refused.
        page: whether `/` is a page on which prompts can be tried.
    """

    def __init__(self, service: Service, *, key: str | None = None, loopback: bool = False, page: bool = True) -> None:
        self.service, self.key, self.loopback = service, key, loopback
        self._tasks: set[asyncio.Task[Any]] = set()  # of requests that are read, begun, or answered whole
        routes = [
            self._route("/v1/models", self._models),
            self._route("/v1/models/{model:path}", self._models),
            self._route("/v1/completions", partial(self._answer, kind=CompletionRequest), "POST"),
            self._route("/v1/chat/completions", partial(self._answer, kind=ChatRequest), "POST"),
            self._route("/v1/continuations", partial(self._answer, kind=ScoreRequest), "POST"),
            *(self._route(path, partial(self._answer, kind=LabelRequest), "POST") for path in LABELS),
            *(self._route(path, partial(self._answer, kind=RerankRequest), "POST") for path in RERANK),
            self._route("/health", self._health),
            self._route("/ping", self._health),
            self._route("/version", self._version),
            self._route("/load", self._load),
            self._route("/metrics", self._metrics),
            *([self._route("/", self._page)] if page else []),
        ]
        handlers: dict[Any, Any] = {HTTPException: self._refuse, ClientDisconnect: self._leave}
        self.origin, middleware = service.settings.allowed_origin, list[Middleware]()
        if self.origin is not None:
            allowed: dict[str, Any] = {"allow_methods": ["POST"], "allow_headers": ["Authorization", "Content-Type"]}
            middleware.append(Middleware(CORSMiddleware, allow_origins=[self.origin], **allowed))
        super().__init__(routes=routes, lifespan=self._lifespan, exception_handlers=handlers, middleware=middleware)
        self.router.redirect_slashes = False  # it would redirect to whatever host the client named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; when it has ended, even by its client, its sequences end too and it is logged."""
        if scope["type"] != "http":
            return await super().__call__(scope, receive, send)
        began, state = time.perf_counter(), scope.setdefault("state", {})
        state |= {"path": "other", "status": None, "reply": None}

        async def send_on(message: Message) -> None:
            last = False
            if message["type"] == "http.response.start":
                state["status"] = state["status"] or message["status"]
            elif last := not message.get("more_body"):
                await send({**message, "more_body": True})
                message = {"type": "http.response.body"}  # which waits until the client has taken the others
            await send(message)
            if last and state["reply"] is not None:
                self.service.end_of(state["reply"])

        try:
            await super().__call__(scope, receive, send_on)
        finally:
            seconds, reply, more = time.perf_counter() - began, state["reply"], {}
            status = state["status"] or GONE
            if reply is not None:
                self.service.end_of(reply)
                if reply.first is not None:
                    self.service.metrics.first.observe(reply.first - began)
                if status == 200:
                    self.service.metrics.whole.observe(seconds)
                more["tokens"] = sum(answer.completion for answer in reply.answers)
                more["events"] = sum(len(answer.events) for answer in reply.answers)
            self.log(state["path"], status, method=scope["method"], seconds=round(seconds, 4), **more)

    def log(self, path: str, status: int, **more: object) -> None:
        """Count a request and write it to the access log."""
        self.service.metrics.requests.labels(path, str(status)).inc()
        LOG.info(json.dumps({"path": path, "status": status, **more}))

    def end(self) -> None:
        """End all requests now, each with an error."""
        self.service.end()
        for task in self._tasks:
            task.cancel()

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Close the engine at shutdown; the server has drained its connections by then."""
        yield
        self.service.close()
        closing = threading.Thread(target=self.service.engine.close, daemon=True)  # it may wait for a large model
        closing.start()
        await asyncio.to_thread(closing.join, LAST)

    def _route(self, path: str, answer: Callable[[Request], Awaitable[Response]], method: str = "GET") -> Route:
        """A route that checks who asks; only /health, /ping and the page need no key."""

        async def check_and_answer(request: Request) -> Response:
            request.state.path = path
            self._check_page(request)
            if path not in ("/health", "/ping", "/"):
                self._check_key(request)
            try:
                return await answer(request)
            except (HTTPException, ClientDisconnect):
                raise
            except (Exception, asyncio.CancelledError) as problem:
                raise _server_error(problem) from None

        return Route(path, check_and_answer, methods=[method])

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if self.key is not None and not hmac.compare_digest(given.encode("latin-1"), f"Bearer {self.key}".encode()):
            raise APIError(401, "authorization: expected the server's key, got none or another", "authentication_error")

    def _check_page(self, request: Request) -> None:
        """Without a key, refuse what a web page sends: by its Origin, or by its name in Host (DNS rebinding)."""
        if self.key is not None:
            return
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self.loopback and host and not _is_local(host):
            words = "expected localhost or a loopback address, got another; use one, or start the server with a key"
            raise APIError(403, f"Host: {words}", "permission_error")
        own = origin is None or origin.partition("://")[2].lower() == host.lower()
        if not own and self.origin not in ("*", origin):
            words = "expected none or this server's own, got another; name it as allowed_origin, or serve with a key"
            raise APIError(403, f"Origin: {words}", "permission_error")

    async def _refuse(self, request: Request, problem: HTTPException) -> Response:
        if not isinstance(problem, APIError):  # Starlette's own, of an unknown path or another method
            path = request.url.path[:100]
            message = f"path: expected one of this server's, got {request.method} {path}; see its documentation"
            problem = APIError(problem.status_code, message, headers=dict(problem.headers or {}))
        return JSONResponse(problem.fields, problem.status_code, problem.headers)

    async def _leave(self, _: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=GONE)

    # --- routes -------------------------------------------------------------------------------------------------------

    async def _health(self, _: Request) -> Response:
        if self.service.engine.closed:
            raise APIError(503, "engine: expected a running one, got a closed one; restart the server", "server_error")
        return JSONResponse({"status": "ok"})

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": version("futurebridge")})

    async def _load(self, _: Request) -> Response:
        """Sequences under way, by vLLM's name."""
        return JSONResponse({"server_load": self.service.requests})

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self.service.metrics.registry), media_type="text/plain; version=0.0.4")

    async def _page(self, _: Request) -> Response:
        text, policy = try_page()
        return Response(text, media_type="text/html", headers={"Content-Security-Policy": policy, **PAGE_HEADERS})

    async def _models(self, request: Request) -> Response:
        """The one model, by its name or in a list, with how its events are made."""
        decoder, chat = self.service.engine.decoder, bool(self.service.tokenizer.chat_template)
        threshold = decoder.policy.threshold if math.isfinite(decoder.policy.threshold) else None
        model = {"id": self.service.settings.name, "object": "model", "created": 0, "owned_by": "futurebridge"}
        model["futurebridge"] = {"threshold": threshold, "max_events": decoder.max_events, "chat": chat}
        if "model" not in request.path_params:
            return JSONResponse({"object": "list", "data": [model]})
        self._check_model(request.path_params["model"])
        return JSONResponse(model)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, own := self.service.settings.name):
            message = f"model: expected {own!r}, got another; /v1/models lists it, or leave it out"
            raise APIError(404, message, parameter="model", code="model_not_found")

    async def _answer(self, request: Request, kind: type[Body]) -> Response:
        self._tasks.add(task := cast("asyncio.Task[Any]", asyncio.current_task()))
        try:
            body = await self._read(request, kind)
            self._check_model(body.model)
            return await _while_there(request, self._reply(request, body))
        finally:
            self._tasks.discard(task)

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        """The request's body, checked; reading stops at the limit."""
        data, limit = bytearray(), self.service.settings.body_limit
        async for chunk in request.stream():
            data += chunk
            if len(data) > limit:
                raise APIError(413, f"body: expected at most {limit} bytes; shorten the request")
        try:
            if len(data) <= SMALL:
                return kind.model_validate_json(bytes(data))
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.service.turns.thread, kind.model_validate_json, bytes(data))
        except ValidationError as problem:
            error: Any = problem.errors(include_url=False)[0]
            words, *inner = getattr(error.get("ctx", {}).get("error"), "args", (error["msg"],))
            name = ".".join(map(str, (*error["loc"], *inner)))
            raise APIError(400, f"{name or 'body'}: {words}", parameter=name or None) from None

    async def _reply(
        self, request: Request, body: CompletionRequest | ChatRequest | ScoreRequest | LabelRequest | RerankRequest
    ) -> Response:
        name, path = self.service.settings.name, request.state.path
        if isinstance(body, LabelRequest | RerankRequest):
            asked = await self._begin(request, body, self.service.labels(body))
            logprobs = [[float(exact) for exact, _ in scores] for scores in await asked.scores()]
            if isinstance(body, RerankRequest) and path != "/score":
                return JSONResponse(rerank_fields(name, body, logprobs, asked.read))
            vllm, softmax = path != SGLANG_SCORES, getattr(body, "apply_softmax", None)
            return JSONResponse(
                label_fields(name, logprobs, asked.read, vllm if softmax is None else softmax, vllm=vllm)
            )
        if isinstance(body, ScoreRequest):
            scoring = await self._begin(request, body, self.service.score(body))
            work = score_fields(name, cast("TextGroup", scoring.group), scoring.read, *await scoring.scores())
            fields = await self.service.turns.run(work)
            return Response(await self.service.turns.run(_encode(fields)), media_type="application/json")
        reply, chat = await self._begin(request, body, self.service.begin(body)), isinstance(body, ChatRequest)
        ids = body.return_token_ids
        shape = Shape(name, chat=chat, stream=body.stream, copies=reply.copies, ids=ids)
        if body.stream:
            request.state.status = GONE  # until it has ended otherwise
            events, headers = self._events(request, body, reply, shape), {"Cache-Control": "no-cache"}
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        pieces: list[list[Piece]] = [[] for _ in reply.answers]
        async for index, piece in reply.pieces():
            pieces[index].append(piece)
        return Response(await self.service.turns.run(_write(shape, reply, pieces)), media_type="application/json")

    async def _begin(self, request: Request, body: object, beginning: Coroutine[Any, Any, Begun]) -> Begun:
        """The reply, once the service has begun it; an APIError for what the service refuses."""
        try:
            reply = request.state.reply = await beginning
            return reply
        except Busy as busy:
            more: dict[str, Any] = {"code": "rate_limit_exceeded", "headers": {"Retry-After": "1"}}
            raise APIError(429, str(busy), "rate_limit_error", **more) from None
        except (ValueError, TypeError) as wrong:
            name, _, words = str(wrong).partition(":")
            if not (parameter := name.partition("[")[0]).isidentifier():
                raise APIError(400, str(wrong)) from None
            names = NAMES | (CHAT_NAMES if isinstance(body, ChatRequest) else {})
            names |= {"prefix": "items"} if isinstance(body, LabelRequest) else {}
            names |= {"prefix": "documents"} if isinstance(body, RerankRequest) else {}
            if name == "max_new_tokens" and getattr(body, "max_completion_tokens", None):
                name = parameter = "max_completion_tokens"
            elif name in names:
                name = parameter = names[name]
            raise APIError(400, f"{name}:{words}", parameter=parameter) from None
        except RuntimeError as wrong:  # the engine is closed
            raise APIError(503, str(wrong), "server_error") from None

    async def _events(
        self, request: Request, body: CompletionRequest | ChatRequest, reply: Reply, shape: Shape
    ) -> AsyncIterator[str]:
        """The answers as server-sent events."""
        begun = set[int]()
        try:
            async for index, piece in reply.pieces():
                first, prompt = index not in begun, reply.answers[index].prompt
                for choice in shape.choices(index, piece, prompt, first):
                    yield f"data: {json.dumps(shape.fields([choice], prompt=prompt if first else None))}\n\n"
                begun.add(index)
            if body.stream_options is not None and body.stream_options.include_usage:
                yield f"data: {json.dumps(shape.fields([], reply.usage()))}\n\n"
            request.state.status = 200  # set before the last line: a client may close as soon as it has read that
            yield "data: [DONE]\n\n"
        except Exception as problem:
            failed = _server_error(problem)
            request.state.status = failed.status_code
            yield f"data: {JSON.encode(failed.fields)}\n\n"


@cache
def try_page() -> tuple[str, str]:
    """The page and its policy: its own style and script alone, and requests to this server alone."""
    text = resources.files("fb_core.apps.serve").joinpath("page.html").read_text()
    inside = (re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[0] for tag in ("style", "script"))
    style, script = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in inside)
    allowed = f"style-src 'sha256-{style}'; script-src 'sha256-{script}'; connect-src 'self'"
    return text, f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def _write(shape: Shape, reply: Reply, pieces: list[list[Piece]]) -> Work[bytes]:
    """A whole response."""
    choices = list[dict[str, Any]]()
    for index, (own, answer) in enumerate(zip(pieces, reply.answers, strict=True)):
        choices += shape.choices(index, Piece.join(own), answer.prompt)
        yield
    return (yield from _encode(shape.fields(choices, reply.usage(), reply.answers[0].prompt)))


def _encode(fields: dict[str, Any]) -> Work[bytes]:
    """JSON, a part at each step."""
    parts = list[str]()
    for part in _parts(fields):
        parts.append(part)
        yield
    return "".join(parts).encode()


def _parts(value: Any) -> Iterator[str]:
    """JSON in parts that take the encoder a short time each: a choice alone, of other lists a few items together."""
    if value and isinstance(value, dict):
        for place, (name, inner) in enumerate(value.items()):
            yield f"{',' if place else '{'}{JSON.encode(name)}:"
            yield from _parts(inner)
        yield "}"
    elif value and isinstance(value, list):
        alone = isinstance(value[0], dict) and "index" in value[0]
        for start in range(0, len(value), 1 if alone else PIECE):
            yield "," if start else "["
            yield from _parts(value[start]) if alone else (JSON.encode(value[start : start + PIECE])[1:-1],)
        yield "]"
    else:
        yield JSON.encode(value)


def _server_error(problem: BaseException) -> APIError:
    """What a client is told of an error on the server's side; the details go to the log."""
    if isinstance(problem, CancelledError | asyncio.CancelledError):
        return APIError(
            503, "server: expected to finish the answer, but it is shutting down; try again later", "server_error"
        )
    ERRORS.error(json.dumps({"error": type(problem).__name__, "message": str(problem)}))
    if isinstance(problem, OSError):
        return APIError(502, "large model: expected an answer, got none; try again later", "server_error")
    return APIError(500, "engine: expected to finish the answer, got an error; see the server's log", "server_error")


def _is_local(host: str) -> bool:
    """Whether a Host header names this machine's loopback."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        return name == "localhost" or name.endswith(".localhost") or ip_address(name).is_loopback
    except ValueError:
        return False


async def _while_there(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The coroutine's result; it is cancelled, with ClientDisconnect, once the client has closed the connection."""

    async def wait_until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(wait_until_gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()

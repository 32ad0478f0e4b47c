"""Clients' connections: what one may send, how long it and its answer may take, and what all may hold together."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fb_core.apps.serve.protocol import problem_fields

HEAD, HEADERS = 16 << 10, 100  # bytes of a request's head, header lines
HEAD_SECONDS, BODY_SECONDS = 10.0, 60.0  # for a request's head, and then for its body
STALL_SECONDS, ANSWER_SECONDS = 60.0, 600.0  # that an answer may wait for its client: with nothing taken, and in all
AHEAD = 64 << 10  # bytes that a client may send before its last request is answered
CHUNKS = 4096  # of a body
HELD = 32 << 20  # bytes that wait for all clients but one, of requests that are not complete and unread answers


class _Head(h11.Connection):
    """Reads requests; one whose head is too large, also where it comes at once, or whose chunks are many is refused."""

    chunks = 0  # of this body

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Data):
            self.chunks += event.chunk_start
            if self.chunks > CHUNKS:
                raise h11.RemoteProtocolError("too many chunks", error_status_hint=413)
        if isinstance(event, h11.Request):
            self.chunks = 0
            size = len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers)
            if size > HEAD or len(event.headers) > HEADERS:
                raise h11.RemoteProtocolError("too large", error_status_hint=431)
        return event


class Crowd:
    """The connections that wait for their clients; if there are more than `most` in all, the longest waiting closes."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self.waiting: dict[Connection, int] = {}  # bytes that each holds, in the order in which they began to wait

    def note(self, connection: Connection, held: int | None) -> None:
        """Note how many bytes a connection holds while it waits, None if it does not; others make room for it."""
        self.held += (held or 0) - self.waiting.get(connection, 0)
        if held is None:
            self.waiting.pop(connection, None)
            return
        self.waiting[connection] = held
        while (full := self._full()) or len(connection.connections) > self.most:
            others = (other for other, size in self.waiting.items() if other is not connection and (size or not full))
            if (oldest := next(others, None)) is None:
                return
            self.note(oldest, None)
            oldest.connections.discard(oldest)
            oldest.transport.abort()

    def _full(self) -> bool:
        return self.held > HELD and self.held - max(self.waiting.values()) > HELD


class Connection(H11Protocol):
    """A connection with limits, one of a crowd.

    `log` is called with the path "other" and the status of each request that does not reach the application.
    """

    def __init__(self, *arguments: Any, crowd: Crowd, log: Callable[[str, int], None], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _Head(h11.SERVER, HEAD)
        self.crowd, self.log = crowd, log
        self._received = 0  # bytes of this request
        self._state: Any = None  # the state of the client that the clock is for
        self._clock: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._paused = self._waited = 0.0  # when the answer began to wait, and seconds that it had waited before

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.crowd.note(self, None)
        for clock in (self._clock, self._stall):
            if clock is not None:
                clock.cancel()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), HEAD):  # a head is measured while it is read
            if not self.transport.is_closing():
                self._received += len(data[start : start + HEAD])
                super().data_received(data[start : start + HEAD])

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is h11.DONE:  # the next request waits; reading goes on, to see that the client leaves
            self.flow.resume_reading()
            if len(self.conn.trailing_data[0]) > AHEAD:
                self.transport.abort()
        self._time()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._received, self._waited = 0, 0.0
        self._time()

    def _time(self) -> None:
        """Start the clock for what the client has to send next, or for the rest of the answer that it has to take."""
        state = h11.CLOSED if self.conn.our_state is h11.CLOSED else self.conn.their_state
        if state is not self._state:
            self._state = state
            if self._clock is not None:
                self._clock.cancel()
            seconds = {h11.IDLE: HEAD_SECONDS, h11.SEND_BODY: BODY_SECONDS, h11.CLOSED: STALL_SECONDS}.get(state)
            self._clock = None if seconds is None else self.loop.call_later(seconds, self._time_out, seconds)
            self.crowd.note(self, None)
        self._note()

    def _note(self) -> None:
        """Tell the crowd whether this connection waits for its client, and what it holds."""
        waits = self in self.connections and (self._clock or self.flow.write_paused or self.transport.is_closing())
        self.crowd.note(self, self._received + self.transport.get_write_buffer_size() if waits else None)

    def _time_out(self, seconds: float) -> None:
        if self._state is h11.IDLE and not self.conn.trailing_data[0]:
            self.transport.close()  # it has sent nothing
        else:
            self._refuse(408, f"request: expected all of it within {seconds:.0f} s, got a part; send it at once")

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request; uvicorn calls this while it handles the parser's error."""
        status = getattr(sys.exception(), "error_status_hint", 400)
        if status == 431:
            words = f"headers: expected at most {HEADERS} of {HEAD} bytes together, got more; send fewer"
        elif status == 413:
            words = f"body: expected at most {CHUNKS} chunks, got more; send it in larger ones, or with its length"
        else:
            words = "request: expected HTTP/1.1, got something else; see the server's documentation"
        self._refuse(status, words)

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error in OpenAI's format, if nothing was answered yet, and close."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = json.dumps(problem_fields(message, "invalid_request_error")).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self.log("other", status)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._paused = self.loop.time()
        self._watch(None)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._waited += self.loop.time() - self._paused
        if self._stall is not None:
            self._stall.cancel()
        self._note()

    def _watch(self, before: int | None) -> None:
        """Close the connection if the client has taken nothing of the `before` bytes, or too little in all."""
        left = self.transport.get_write_buffer_size()
        seconds = min(STALL_SECONDS, ANSWER_SECONDS - self._waited - (self.loop.time() - self._paused))
        if seconds <= 0 or (before is not None and left >= before):
            self.transport.abort()
        else:
            self._stall = self.loop.call_later(seconds, self._watch, left)
            self._note()

"""What a server does with a request: its prompt to the engine, the engine's tokens to text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from fb_core import hf
from fb_core.engine.engine import Engine, Handle, Token
from fb_core.pool import Event
from fb_core.serve.protocol import ChatRequest, CompletionRequest, Finish
from fb_core.serve.text import Text


class Piece(NamedTuple):
    """Some more of an answer."""

    text: str
    events: list[Event]


@dataclass
class Answer:
    """An answer under way; `pieces` yields it, the other fields are known behind the last piece."""

    handle: Handle
    tokens: asyncio.Queue[Token | None]
    text: Text
    prompt: int  # tokens
    ends: frozenset[int]
    completion: int = 0
    events: list[Event] = field(default_factory=list)
    finish: Finish = "length"

    async def pieces(self) -> AsyncIterator[Piece]:
        """Text as it becomes certain, with the events behind it; an answer that nobody reads on is cancelled.

        Raises:
            ValueError: NaN logits, or a selector's error.
            OSError: the large model did not answer.
        """
        try:
            events: list[Event] = []
            while (token := await self.tokens.get()) is not None:
                self.completion += 1
                if token.event is not None:
                    self.events.append(token.event)
                    events.append(token.event)
                piece = self.text.add(token.id)
                if self.text.stopped or token.id in self.ends:
                    self.finish = "stop"
                if piece or events:
                    yield Piece(piece, events)
                    events = []
                if self.text.stopped:
                    return
            self.handle.result()
            rest = self.text.end()
            if self.text.stopped:
                self.finish = "stop"
            if rest:
                yield Piece(rest, [])
        finally:
            self.handle.cancel()


class Service:
    """An engine and its tokenizer.

    Args:
        engine: does the work.
        tokenizer: of prompts and answers.
        name: of the model, as clients see it.
        queue: requests that may be waiting or under way.
        answer: tokens of a chat's answer at most, where the request says nothing.
    """

    def __init__(self, engine: Engine, tokenizer: hf.Tokenizer, name: str, queue: int, answer: int) -> None:
        self.engine, self.tokenizer, self.name, self.queue, self.answer = engine, tokenizer, name, queue, answer
        self.requests = 0  # sequences that have not ended

    def prompt(self, request: CompletionRequest | ChatRequest) -> list[int]:
        """Token ids of what a request asks to be continued."""
        if isinstance(request, ChatRequest):
            return hf.chat_ids(self.tokenizer, [message.model_dump() for message in request.messages])
        return hf.text_ids(self.tokenizer, request.prompt) if isinstance(request.prompt, str) else request.prompt

    def begin(self, request: CompletionRequest | ChatRequest) -> Answer:
        """Hand a request to the engine.

        Raises:
            ValueError: a prompt, limit or override that the engine does not take.
        """
        ids, decoder = self.prompt(request), self.engine.decoder
        loop, tokens = asyncio.get_running_loop(), asyncio.Queue[Token | None]()
        wanted = request.max_tokens
        if isinstance(request, ChatRequest):
            wanted = request.max_completion_tokens or wanted or self.answer
        assert wanted is not None

        def tell(token: Token | None) -> None:
            self.requests -= token is None
            tokens.put_nowait(token)

        handle = self.engine.submit(
            ids,
            wanted,
            threshold=request.futurebridge.threshold,
            max_events=request.futurebridge.max_events,
            listener=lambda token: _soon(loop, partial(tell, token)),
        )
        self.requests += 1  # ahead of whatever the engine says of it: that comes by this thread
        text = Text(self.tokenizer, request.stops)
        return Answer(handle, tokens, text, len(ids), hf.eos_ids(decoder.slm))


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call it in the loop's thread, unless the loop is closed, where nobody listens any more."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)

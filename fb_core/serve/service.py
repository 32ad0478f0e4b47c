"""What a server does with a request: its prompts go to the engine, and the engine's tokens become text."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from jinja2 import TemplateError

from fb_core import hf
from fb_core.engine.engine import Engine, Handle, Token
from fb_core.pool import Event
from fb_core.selectors import LLMPreference
from fb_core.serve.metrics import Metrics
from fb_core.serve.protocol import ChatRequest, CompletionRequest, Finish, Piece, Place
from fb_core.serve.text import Text

BYTES = 16  # of text for a token; a prompt with more for each that there is room for is not tokenized
LOGPROBS = 1 << 18  # in one answer
PIECE = 64  # tokens
DIRECT = LLMPreference()  # one object for all requests, so that their events are served together


class Busy(Exception):
    """The queue is full."""


@dataclass(eq=False)
class Answer:
    """An answer under way; `pieces` yields it, the other fields are known after the last piece."""

    handle: Handle
    tokens: asyncio.Queue[Token | None]
    text: Text
    prompt: int  # tokens
    ends: frozenset[int]
    ranking: int | None  # how many likeliest tokens are returned with each token
    completion: int = 0
    events: list[Event] = field(default_factory=list)
    finish: Finish = "length"
    cut: bool = False  # whether the end of the server cut it off

    async def pieces(self) -> AsyncIterator[Piece]:
        """Text as it becomes certain, with its events; the answer is cancelled if the reader stops.

        Raises:
            ValueError: NaN logits, or a selector's error.
            OSError: the large model did not answer.
            concurrent.futures.CancelledError: the server or its engine ends.
        """
        try:
            held, piece, events, places = 0, "", list[Event](), list[Place]()
            while (token := await self.tokens.get()) is not None:
                self.completion += 1
                if token.event is not None:
                    self.events.append(token.event)
                    events.append(token.event)
                places += self._places(token)
                if token.id not in self.ends:  # the token that ends an answer is no part of its text
                    piece += self.text.add(token.id)
                if self.text.stopped or token.id in self.ends:
                    self.finish = "stop"
                held += 1
                # What has come by now becomes one piece, but not all that a slow reader left lying.
                more = not (self.tokens.empty() or self.text.stopped or held == PIECE)
                if (piece or events or places) and not more:
                    yield Piece(piece, events, places)
                    piece, events, places = "", [], []
                held *= more
                if self.text.stopped:
                    return
            if piece or events or places:
                yield Piece(piece, events, places)
            if self.cut:
                raise CancelledError
            self.handle.result()
            rest = self.text.end()
            if self.text.stopped:
                self.finish = "stop"
            if rest:
                yield Piece(rest)
        finally:
            self.handle.cancel()

    def _places(self, token: Token) -> list[Place]:
        """A token's log-prob and likeliest alternatives; empty if they were not requested."""
        if self.ranking is None or token.ranked is None or token.logprob is None:
            return []
        ids, logprobs = token.ranked.ids[: self.ranking], token.ranked.logprobs[: self.ranking]
        own, *names = [self.text.name(each) for each in (token.id, *ids)]
        logprob = dict(zip(ids, logprobs, strict=True)).get(token.id, token.logprob)
        top = [(name.text, value) for name, value in zip(names, logprobs, strict=True)]
        return [Place(own.text, logprob, top, self.text.decoded, [own.bytes, *(name.bytes for name in names)])]


class Service:
    """An engine and its tokenizer.

    Args:
        engine: decodes.
        tokenizer: of prompts and answers.
        name: of the model, as clients see it.
        queue: maximum number of sequences that wait or run.
        answer: maximum tokens of a chat's answer, if the request sets none.
        length: maximum tokens of a sequence, prompt included.
        thinking: whether a chat's answer begins with thinking.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: hf.Tokenizer,
        name: str,
        queue: int,
        answer: int,
        length: int,
        *,
        thinking: bool = False,
    ) -> None:
        self.thinking = thinking
        self.engine, self.tokenizer, self.name, self.queue, self.answer = engine, tokenizer, name, queue, answer
        self.length = min(length, hf.max_positions(engine.decoder.slm) or length)
        self.metrics = Metrics(engine)
        self.requests = 0  # sequences that have not ended
        self._open: set[Answer] = set()  # answers that the engine is working on
        self._inbox: _Inbox | None = None  # for the event loop of the requests
        self._tokenizing = ThreadPoolExecutor(1, "fb-tokenize")  # in order, while other answers go on
        hf.text_ids(tokenizer, "")  # a fast tokenizer's first call may change it: make that before any thread does

    def prompts(self, request: CompletionRequest | ChatRequest) -> list[list[int]]:
        """Token ids of a request's prompts; ValueError for a text that the tokenizer refuses."""
        if isinstance(request, ChatRequest):
            try:
                messages = [message.model_dump(exclude_none=True) for message in request.messages]
                return [hf.chat_ids(self.tokenizer, messages, self.thinking)]
            except TemplateError as problem:
                raise ValueError(f"messages: expected what the model's chat template takes, got {problem}") from None
        return [hf.text_ids(self.tokenizer, each) if isinstance(each, str) else each for each in request.prompt]

    async def begin(self, request: CompletionRequest | ChatRequest) -> list[Answer]:
        """Submit a request to the engine: one sequence per prompt.

        Raises:
            Busy: the queue is full.
            ValueError: a prompt, limit or override that the engine refuses.
            RuntimeError: a closed engine.
        """
        count = 1 if isinstance(request, ChatRequest) else len(request.prompt)
        if (copies := count * request.n) > self.queue:
            name = "prompt" if count > self.queue else "n"
            raise ValueError(f"{name}: expected at most the queue's {self.queue} answers, got {copies}; ask for fewer")
        self._check_size(request, count)
        if self.requests + count > self.queue:
            raise Busy(f"queue: expected at most {self.queue} sequences under way; try again")
        self.requests += count
        answers: list[Answer] = []
        try:
            loop = asyncio.get_running_loop()
            for ids in await loop.run_in_executor(self._tokenizing, self.prompts, request):
                answers.append(self._submit(ids, request))
        except BaseException:
            for answer in answers:
                answer.handle.cancel()
            raise
        finally:
            self.requests -= count - len(answers)
        self.metrics.prompt_tokens.inc(sum(answer.prompt for answer in answers))
        return answers

    def _check_size(self, request: CompletionRequest | ChatRequest, count: int) -> None:
        """ValueError for texts too long to be worth tokenizing, and for answers with too many log-probs."""
        texts, most = self._texts(request), BYTES * self.length
        if (longest := max((len(text.encode()) for text in texts), default=0)) > most:
            raise ValueError(
                f"prompt: expected at most {most} bytes of text for the {self.length} tokens of a sequence, got "
                f"{longest}; shorten it"
            )
        if request.ranking is None:
            return
        wanted = request.max_tokens
        if isinstance(request, ChatRequest):
            wanted = request.max_completion_tokens or wanted or self.answer
        assert wanted is not None
        known = count * request.n * min(wanted, self.length) * (1 + request.ranking)
        if known > LOGPROBS:
            raise ValueError(
                f"ranking: expected at most {LOGPROBS} log-probs in an answer, its prompts times n times tokens times "
                f"1 + the ranks, got {known}; ask for less"
            )

    def _texts(self, request: CompletionRequest | ChatRequest) -> list[str]:
        """The texts that are to be tokenized, each as a whole."""
        if isinstance(request, ChatRequest):
            return ["".join(message.content for message in request.messages)]
        return [each for each in request.prompt if isinstance(each, str)]

    def end(self) -> None:
        """End all answers now, even if the engine is waiting for the large model."""
        for answer in self._open:
            answer.cut = True
            answer.tokens.put_nowait(None)

    def close(self) -> None:
        """Accept no more requests."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    def _submit(self, ids: list[int], request: CompletionRequest | ChatRequest) -> Answer:
        tokens = asyncio.Queue[Token | None]()
        inbox = self._inbox = self._inbox or _Inbox(asyncio.get_running_loop())
        wanted = request.max_tokens
        if isinstance(request, ChatRequest):
            room = max(1, self.length - len(ids))
            wanted = request.max_completion_tokens or wanted or min(self.answer, room)
        assert wanted is not None

        def tell(token: Token | None) -> None:
            if token is None:
                self.requests -= 1
                self._open.discard(answer)
            else:
                self.metrics.count(token)
            tokens.put_nowait(token)

        own = request.futurebridge
        if own.recipe in ("direct", "futurebridge") and not self.engine.decoder.max_events:
            raise ValueError(f'recipe: expected "greedy", got "{own.recipe}"; this server asks no large model')
        if own.recipe == "futurebridge" and isinstance(self.engine.decoder.selector, LLMPreference):
            raise ValueError('recipe: expected "greedy" or "direct", got "futurebridge"; here the large model decides')
        handle = self.engine.submit(
            ids,
            wanted,
            threshold=own.threshold,
            max_events=0 if own.recipe == "greedy" else own.max_events,
            selector=DIRECT if own.recipe == "direct" else None,
            ranking=request.ranking is not None,
            listener=lambda token: inbox.put(partial(tell, token)),
        )
        text = Text(
            self.tokenizer,
            request.stop,
            request.stop_token_ids,
            skip_special=request.skip_special_tokens,
            after_text=isinstance(request, CompletionRequest)
            and bool(self.tokenizer.decode(ids[-8:], skip_special_tokens=True)),
        )
        answer = Answer(handle, tokens, text, len(ids), self.engine.decoder.pair.ends, request.ranking)
        self._open.add(answer)  # before the engine's first call for it, which runs in this thread
        return answer


async def merged(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Piece | None]]:
    """Pieces of all answers as they come, each with its answer's index; None after an answer's last piece.

    Raises:
        Exception: as `Answer.pieces`; the other answers are then no longer read.
    """
    came: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(1)  # more is joined into one piece

    async def read(index: int, answer: Answer) -> None:
        try:
            async for piece in answer.pieces():
                await came.put((index, piece))
        except Exception as problem:
            await came.put((index, problem))
        else:
            await came.put((index, None))

    reading = [asyncio.ensure_future(read(index, answer)) for index, answer in enumerate(answers)]
    left = len(answers)
    try:
        while left:
            index, piece = await came.get()
            if isinstance(piece, Exception):
                raise piece
            left -= piece is None
            yield index, piece
    finally:
        for task in reading:
            task.cancel()


class _Inbox:
    """Runs calls from another thread in an event loop, with one wake-up for all that have gathered.

    Args:
        loop: runs the calls; they are dropped once it is closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._woken = False

    def put(self, call: Callable[[], None]) -> None:
        """Add a call, from any thread."""
        self._calls.append(call)
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._woken = False  # reset before the calls run: one that is put after the last of them wakes the loop again
        for _ in range(len(self._calls)):
            self._calls.popleft()()

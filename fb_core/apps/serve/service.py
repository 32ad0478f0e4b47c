"""What a server does with a request: its prompts go to the engine, and the engine's tokens become text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar, cast

import torch
from jinja2 import TemplateError
from torch import Tensor

from fb_core.apps.serve.metrics import Metrics
from fb_core.apps.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    Finish,
    LabelRequest,
    Piece,
    RerankRequest,
    ScoreRequest,
    TokenLogprobs,
    event_fields,
    prompt_entry,
)
from fb_core.apps.settings.pair import ServeSettings
from fb_core.decode.decoder import Generation, Usage
from fb_core.decode.engine import Engine, Handle, Scores, Token
from fb_core.decode.selectors import LLMPreference
from fb_core.events import Event
from fb_core.models.facts import Tokenizer, max_positions
from fb_core.models.tokens import TextGroup, chat_ids, many_token_ids, text_group_in_steps, text_ids
from fb_core.runtime.detokenizer import Name, Text, TextPart
from fb_core.runtime.sampling import Sampling, occurrences
from fb_core.runtime.step import Ranked

BYTES = 16  # of text for a token; a prompt with more for each that there is room for is not tokenized
LOGPROBS = 1 << 18  # in one reply
CONTINUATIONS, TEXT = 1 << 12, 1 << 22  # in one request; characters that are tokenized for it
PIECE = 64  # tokens
TURN = 0.01  # seconds
DIRECT = LLMPreference()  # one object for all requests, so that their events are served together
Result = TypeVar("Result")
Work = Generator[None, None, Result]  # it gives way to other requests at each yield


class Busy(Exception):
    """The queue is full."""


class Turns:
    """A thread in which requests take turns with what would hold up the event loop."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "fb-requests")

    async def run(self, work: Work[Result]) -> Result:
        """The result of some work, after as many turns as it takes; it goes no further once the caller is cancelled."""

        def turn() -> tuple[Result] | None:
            """Work for a turn; the result, if it is done."""
            end = time.perf_counter() + TURN
            try:
                while time.perf_counter() < end:
                    next(work)
            except StopIteration as stop:
                return (stop.value,)
            return None

        loop = asyncio.get_running_loop()
        while not (done := await loop.run_in_executor(self.thread, turn)):
            pass
        return done[0]


@dataclass(eq=False)
class Answer:
    """The answer to a prompt; `finish` is known at its end."""

    handle: Handle[Generation]
    request: CompletionRequest | ChatRequest
    text: Text
    before: Text  # of the prompt
    prompt: list[int]
    ends: frozenset[int]
    begun: bool = False  # whether the prompt's own text and log-probs are sent, if they are wanted
    completion: int = 0
    events: list[Event] = field(default_factory=list)
    finish: Finish = "length"
    ended: bool = False

    def beginning(self) -> Work[Piece]:
        """The prompt's text and log-probs, as far as they are wanted, once they are known."""
        self.begun = True
        echo, ranking, count = self.request.echo, self.request.ranking, self.request.prompt_ranking
        text, logprobs, entries = "", list[TokenLogprobs](), list[dict[str, Any] | None]()
        for token, ranked in zip_longest(self.prompt, [None, *self.handle.prompt_ranks]):
            if echo and ranking is not None:
                logprobs.append(self._logprobs(self.before, token, ranked, ranking, self.before.decoded))
            if ranked is None:
                entries.append(None)
            elif count is not None:
                places = {ranked.ids[n]: (ranked.logprobs[n], n + 1) for n in range(min(count, len(ranked.ids)))}
                places = {token: places.get(token, (ranked.taken, ranked.place))} | places
                entries.append(prompt_entry([(own, self.before.name(own), *at) for own, at in places.items()]))
            text += self.before.add(token)
            yield
        text += self.before.end()
        return Piece(text if echo else "", (), logprobs, prompt=None if count is None else entries)

    def pieces(self, tokens: Sequence[Token | None]) -> Iterator[Piece]:
        """What the next tokens add, as far as it is certain; with None, which is their end, also what is left.

        The last piece is empty and says why the answer has ended.
        """
        text, events, logprobs, ids = "", list[dict[str, Any]](), list[TokenLogprobs](), list[int]()
        for token in filter(None, tokens):
            self.completion += 1
            if self.request.return_token_ids:
                ids.append(token.id)
            offset = self.text.decoded + (self.before.decoded if self.request.echo else 0)
            if token.event is not None:
                self.events.append(token.event)
                texts = [self.text.name(candidate).text for candidate in token.event.pool]
                events.append(event_fields(token.event, texts, offset))
            if self.request.ranking is not None and token.ranked is not None:
                top, count = token.ranked, self.request.ranking
                if self.request.given is not None:
                    top, count = Ranked([token.id, *top.ids], [top.taken, *top.logprobs], top.taken), 1 + len(top.ids)
                logprobs.append(self._logprobs(self.text, token.id, top, count, offset))
            if token.id not in self.ends:  # the token that ends an answer is no part of its text
                text += self.text.add(token.id)
            if self.text.stopped or token.id in self.ends:
                self.finish = "stop"
            if self.text.stopped:
                self.handle.cancel()
                break
        self.ended = self.text.stopped or None in tokens
        if text or events or logprobs or ids:
            yield Piece(text, events, logprobs, tokens=ids)
        if self.ended and not self.text.stopped:
            self.handle.result()  # raises what ended the sequence, if it was an error
            text = self.text.end()
            if self.text.stopped:
                self.finish = "stop"
            if text:
                yield Piece(text)
        if self.ended:
            yield Piece(finish=self.finish)

    def _logprobs(self, text: Text, token: int, ranked: Ranked | None, count: int, offset: int) -> TokenLogprobs:
        """A token with its log-prob and likeliest alternatives; without them where nothing is before it."""

        def name(own: int) -> Name:
            named = text.name(own)
            return Name(f"token_id:{own}", named.bytes) if self.request.return_tokens_as_token_ids else named

        if ranked is None:
            return TokenLogprobs(name(token), None, [], offset)
        top = dict(zip(ranked.ids[:count], ranked.logprobs[:count], strict=True))
        return TokenLogprobs(
            name(token), top.get(token, ranked.taken), [(name(own), value) for own, value in top.items()], offset
        )


class Reply:
    """The answers to a request, as they come: `samples` for each prompt, each sent `copies` times."""

    def __init__(self, turns: Turns, places: int = 1, samples: int = 1, copies: int = 1) -> None:
        self.turns, self.places, self.samples, self.copies = turns, places, samples, copies
        self.answers: list[Answer] = []  # in the order of the prompts
        self._handles: list[Handle[Any]] = []
        self._cancelled = False
        self.tokens = asyncio.Queue[tuple[int, Token | None]]()  # with their answers' indices; None ends an answer
        self.first: float | None = None  # when the first piece came, by `time.perf_counter`
        self.cut = False  # whether the end of the server cuts the answers off

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """The parts of the answers, each with its answer's index.

        Raises:
            ValueError: NaN logits, or a selector's error.
            OSError: the large model did not answer.
            concurrent.futures.CancelledError: the server or its engine ends.
        """
        while not all(answer.ended for answer in self.answers):
            arrived: dict[int, list[Token | None]] = {}
            for count in range(PIECE):  # a piece has all tokens that are there, up to a limit for a slow reader
                if count and self.tokens.empty():
                    break
                index, token = await self.tokens.get()
                arrived.setdefault(index, []).append(token)
            if self.cut:
                raise CancelledError
            for index, tokens in arrived.items():
                answer = self.answers[index]
                if not answer.begun and (answer.request.echo or answer.request.prompt_ranking is not None):
                    self.first = self.first or time.perf_counter()
                    yield index, await self.turns.run(answer.beginning())
                if not answer.ended:
                    for piece in answer.pieces(tokens):
                        if piece.finish is None:
                            self.first = self.first or time.perf_counter()
                        yield index, piece
            if not self.tokens.empty():
                await asyncio.sleep(0)  # tokens that are there already hold up no other request

    @property
    def prompt(self) -> int:
        """Tokens of all prompts."""
        return sum(len(answer.prompt) for answer in self.answers) // self.samples

    def usage(self) -> dict[str, Any]:
        """The request's tokens, and what it asked of the large model; completion tokens count once for each copy."""
        prompt, completion = self.prompt, self.copies * sum(answer.completion for answer in self.answers)
        large = Usage.of([event for answer in self.answers for event in answer.events])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "large_model": {"calls": large.calls, "tokens": large.appended},
        }

    def add(self, handle: Handle[Any]) -> None:
        """Take a handle of what was submitted to the engine, from any thread."""
        self._handles.append(handle)
        if self._cancelled:
            handle.cancel()

    def cancel(self) -> None:
        """Cancel the handles, and those that are still added."""
        self._cancelled = True
        for handle in list(self._handles):
            handle.cancel()


class Scoring(Reply):
    """What was asked of the engine's `score`, as one reply."""

    def __init__(self, turns: Turns, places: int = 1) -> None:
        super().__init__(turns, places)
        self.handles: list[Handle[Scores]] = []
        self.group: TextGroup | None = None  # of a `ScoreRequest`
        self.read = 0  # tokens of the prefixes

    async def scores(self) -> list[Scores]:
        """What each handle gives, once all are there; raises as `pieces`."""
        for _ in self.handles:
            await self.tokens.get()
            if self.cut:
                raise CancelledError
        self.first = time.perf_counter()
        return [handle.result() for handle in self.handles]


class Service:
    """An engine and its tokenizer; with `thinking`, a chat's answer begins with it."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, settings: ServeSettings, *, thinking: bool = False
    ) -> None:
        self.engine, self.tokenizer, self.settings, self.thinking = engine, tokenizer, settings, thinking
        self.length = min(settings.max_length, max_positions(engine.decoder.slm) or settings.max_length)
        self.metrics = Metrics(engine)
        self.pieces: dict[bool, dict[int, TextPart]] = {False: {}, True: {}}  # by skip_special_tokens
        self.requests = 0  # sequences whose request is not answered
        self.turns = Turns()
        self._open: set[Reply] = set()
        text_ids(tokenizer, "")  # a fast tokenizer's first call may change it: make that before any thread does

    def prompts(self, request: CompletionRequest | ChatRequest) -> Iterator[list[int]]:
        """Token ids of each of a request's prompts; ValueError for a text that the tokenizer refuses."""
        if isinstance(request, CompletionRequest):
            for prompt in request.prompt:
                yield text_ids(self.tokenizer, prompt) if isinstance(prompt, str) else prompt
            return
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        try:
            check = partial(self._check_texts, "messages")
            yield chat_ids(self.tokenizer, messages, self.thinking, lambda text: check([text]))
        except TemplateError as problem:
            raise ValueError(f"messages: expected what the model's chat template takes, got {problem}") from None

    async def begin(self, request: CompletionRequest | ChatRequest) -> Reply:
        """Submit a request to the engine: one sequence per prompt, or `n` if their tokens are drawn.

        Its places in the queue are kept until `end_of` it.

        Raises:
            Busy: the queue is full.
            ValueError: a prompt, limit or override that the engine refuses.
            RuntimeError: a closed engine.
        """
        sampling = self.settings.sampling(request)
        samples = 1 if sampling is None else request.n
        count, queue = len(request.inputs), self.settings.queue
        if count * request.n > queue:
            name, got = "prompt" if count > queue else "n", count * request.n
            raise ValueError(f"{name}: expected at most the queue's {queue} answers, got {got}; ask for fewer")
        self._check_texts("prompt", request.inputs)
        reply = Reply(self.turns, count * samples, samples, request.n // samples)
        await self._take_places(reply, self._submit(reply, request, sampling, asyncio.get_running_loop()))
        self.metrics.prompt_tokens.inc(reply.prompt)
        return reply

    async def _take_places(self, reply: Reply, work: Work[None]) -> None:
        """Do the work that begins a reply; Busy if there are no places for it."""
        if self.requests + reply.places > self.settings.queue:
            raise Busy(f"queue: expected at most {self.settings.queue} sequences under way; try again")
        self.requests += reply.places
        self._open.add(reply)
        try:
            await self.turns.run(work)
        except BaseException:
            self.end_of(reply)
            raise

    def end_of(self, reply: Reply) -> None:
        """Give back a reply's places: its answer is sent, or nobody waits for it."""
        if reply in self._open:
            self._open.remove(reply)
            self.requests -= reply.places
            reply.cancel()

    def _check_logprobs(self, request: CompletionRequest | ChatRequest, prompts: Sequence[Sequence[int]]) -> None:
        """ValueError for too many log-probs."""
        tokens = self.settings.max_new_tokens if request.max_tokens is None else request.max_tokens
        new, old = (0 if ranks is None else 1 + ranks for ranks in (request.ranking, request.prompt_ranking))
        new = max(new, len(request.given or ()))
        places = sum(map(len, prompts)) * (old + (new if request.echo else 0))
        logprobs = request.n * (len(prompts) * min(tokens, self.length) * new + places)
        if logprobs > LOGPROBS:
            words = f"expected at most {LOGPROBS} log-probs in an answer, its prompts times n times tokens times"
            raise ValueError(f"ranking: {words} 1 + the ranks, got {logprobs}; ask for less")

    def _check_texts(self, name: str, inputs: Sequence[str | list[int]]) -> None:
        """ValueError for a text with more bytes than a sequence can have."""
        sizes = (len(text.encode()) for text in inputs if isinstance(text, str))
        if (longest := max(sizes, default=0)) > (most := BYTES * self.length):
            raise ValueError(
                f"{name}: expected at most {most} bytes of text for the {self.length} tokens of a sequence, got "
                f"{longest}; shorten it"
            )

    async def score(self, request: ScoreRequest) -> Scoring:
        """Submit continuations to the engine; raises as `begin`."""
        reply = Scoring(self.turns)
        await self._take_places(reply, self._submit_continuations(reply, request, asyncio.get_running_loop()))
        group = cast("TextGroup", reply.group)
        self.metrics.prompt_tokens.inc(reply.read)
        self.metrics.scored.inc(len(reply.handles) * sum(len(ids) + len(group.future) for ids in group.candidates))
        return reply

    async def labels(self, request: LabelRequest | RerankRequest) -> Scoring:
        """Submit each item's prompt to the engine, which computes what they have in common once; raises as `begin`."""
        if isinstance(request, LabelRequest):
            prompts, labels, name = request.inputs, request.label_token_ids, "items"
        else:
            prompts, labels, name = request.prompts(self.settings.rerank_prompt), self.rerank_labels(), "documents"
        queue = self.settings.queue
        if (count := len(prompts)) > queue:
            raise ValueError(f"{name}: expected at most the queue's {queue}, got {count}; ask more than once")
        if len(labels) > CONTINUATIONS or count * len(labels) > LOGPROBS:
            raise ValueError(
                f"label_token_ids: expected at most {CONTINUATIONS} and {LOGPROBS} with all items, got {len(labels)}; "
                "ask more than once"
            )
        self._check_texts(name, prompts)
        reply = Scoring(self.turns, count)
        await self._take_places(reply, self._submit_labels(reply, prompts, labels, asyncio.get_running_loop()))
        self.metrics.prompt_tokens.inc(reply.read)
        self.metrics.scored.inc(count * len(labels))
        return reply

    def rerank_labels(self) -> list[int]:
        """The ids of the settings' two labels; ValueError where one is not a token."""
        texts = self.settings.rerank_labels
        ids = [text_ids(self.tokenizer, text, special=False, name="rerank_labels") for text in texts]
        if any(len(each) != 1 for each in ids):
            raise ValueError(
                f"rerank_labels: expected texts of one token each, got {list(texts)} as {ids}; "
                "start the server with others"
            )
        return [token for (token,) in ids]

    def _submit_labels(
        self, reply: Scoring, prompts: Sequence[Any], labels: Sequence[int], loop: asyncio.AbstractEventLoop
    ) -> Work[None]:
        decoder, each = self.engine.decoder, [[label] for label in labels]
        rows = many_token_ids("label_token_ids", each, decoder.slm, decoder.vocabulary)
        for prompt in prompts:
            self._score(reply, text_ids(self.tokenizer, prompt) if isinstance(prompt, str) else prompt, rows, loop)
            yield

    def _score(
        self, reply: Scoring, prefix: list[int], rows: Sequence[Tensor], loop: asyncio.AbstractEventLoop
    ) -> None:
        """Submit continuations of a prefix as a part of a reply."""

        def on_scores(_: object) -> None:
            loop.call_soon_threadsafe(reply.tokens.put_nowait, (0, None))

        reply.handles.append(self.engine.score(prefix, rows, listener=on_scores))
        reply.add(reply.handles[-1])
        reply.read += len(prefix)

    def _submit_continuations(
        self, reply: Scoring, request: ScoreRequest, loop: asyncio.AbstractEventLoop
    ) -> Work[None]:
        """Tokenize and submit what is to be scored; ValueError for what is refused, and for too much."""
        many, future, prior = request.many, request.future, request.prior
        kind = "continuations" if future is None else "candidates"
        if len(many) > CONTINUATIONS:
            raise ValueError(f"{kind}: expected at most {CONTINUATIONS}, got {len(many)}; ask more than once")
        self._check_texts("prefix", request.inputs)
        if isinstance(request.prefix, str):
            around = len(request.prefix) + len(future or "")
            if (size := sum(around + len(text) for text in many)) > TEXT:
                raise ValueError(
                    f"{kind}: expected at most {TEXT} characters, each with the prefix, got {size}; send token ids"
                )
            group = yield from text_group_in_steps(self.tokenizer, request.prefix, many, future)  # type: ignore[arg-type]
        else:
            group = TextGroup(request.prefix, many, future or [])  # type: ignore[arg-type]
        tokens = sum(len(ids) + len(group.future) for ids in group.candidates)
        if (tokens := tokens * (1 if prior is None else 2)) > LOGPROBS:
            raise ValueError(f"{kind}: expected at most {LOGPROBS} tokens together, got {tokens}; ask more than once")
        decoder, rows = self.engine.decoder, list[Tensor]()
        for start in range(0, len(group.candidates), PIECE):
            part = [[*ids, *group.future] for ids in group.candidates[start : start + PIECE]]
            rows += many_token_ids(kind, part, decoder.slm, decoder.vocabulary)
            yield
        reply.group = group
        self._score(reply, list(group.prefix), rows, loop)
        if prior is not None:
            try:
                self._score(reply, text_ids(self.tokenizer, prior) if isinstance(prior, str) else prior, rows, loop)
            except ValueError as wrong:
                raise ValueError(str(wrong).replace("prefix", "prior", 1)) from None

    def end(self) -> None:
        """End all answers now, even if the engine is waiting for the large model."""
        for reply in self._open:
            reply.cut = True
            reply.tokens.put_nowait((0, None))

    def close(self) -> None:
        """Accept no more requests."""
        self.turns.thread.shutdown(wait=False, cancel_futures=True)

    def _submit(
        self,
        reply: Reply,
        request: CompletionRequest | ChatRequest,
        sampling: Sampling | None,
        loop: asyncio.AbstractEventLoop,
    ) -> Work[None]:
        """Tokenize and submit each prompt; its tokens go to the reply."""
        own, decoder = request.futurebridge, self.engine.decoder
        if own.recipe in ("direct", "futurebridge") and not decoder.max_events:
            raise ValueError(f'recipe: expected "greedy", got "{own.recipe}"; this server asks no large model')
        if own.recipe == "futurebridge" and isinstance(decoder.selector, LLMPreference):
            words = 'expected "greedy" or "direct", got "futurebridge"; this server decodes with "direct"'
            raise ValueError(f"recipe: {words}")
        prompts = list[list[int]]()
        for ids in self.prompts(request):
            prompts.append(ids)
            yield
        self._check_logprobs(request, prompts)

        def on_token(index: int, token: Token | None) -> None:
            reply.tokens.put_nowait((index, token))
            if token is not None:
                self.metrics.count(token)

        ranks_prompt = request.prompt_ranking is not None or (request.echo and request.ranking is not None)
        for ids, earlier in zip(prompts, occurrences(prompts), strict=True):
            row, tokens = torch.tensor(ids, dtype=torch.int64, device=decoder.slm.device), request.max_tokens
            if tokens is None:
                tokens = min(self.settings.max_new_tokens, max(1, self.length - len(ids)))
            is_completion = isinstance(request, CompletionRequest)
            after_text = is_completion and bool(self.tokenizer.decode(ids[-8:], skip_special_tokens=True))
            for sample in range(earlier * reply.samples, (earlier + 1) * reply.samples):
                index = len(reply.answers)
                handle = self.engine.submit(
                    row,
                    tokens,
                    threshold=own.threshold,
                    max_events=0 if own.recipe == "greedy" else own.max_events,
                    selector=DIRECT if own.recipe == "direct" else None,
                    ranking=request.ranking is not None if request.given is None else request.given,
                    listener=partial(loop.call_soon_threadsafe, on_token, index),  # type: ignore[arg-type]
                    sampling=sampling,
                    sample=sample,
                    prompt_ranking=ranks_prompt or not tokens,
                    ignore_ends=request.ignore_eos,
                    min_new_tokens=request.min_tokens,
                )
                reply.add(handle)
                self.metrics.scored.inc(len(ids) - 1 if ranks_prompt else 0)
                skip, stops = request.skip_special_tokens, (request.stop, request.stop_token_ids)
                pieces = self.pieces[skip]
                text = Text(self.tokenizer, *stops, skip_special=skip, after_text=after_text, pieces=pieces)
                before = Text(self.tokenizer, (), skip_special=skip, pieces=pieces)
                ends = frozenset[int]() if request.ignore_eos else decoder.pair.ends
                reply.answers.append(Answer(handle, request, text, before, ids, ends))
                yield

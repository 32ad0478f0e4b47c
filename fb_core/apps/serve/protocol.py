"""What clients send and get: the part of OpenAI's completions and chat completions that this library supports.

Parameters that this server does not implement are refused by name, unless their value turns them off.
"""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import from_json

from fb_core.decode.engine import Scores
from fb_core.events import Event
from fb_core.models.tokens import TextGroup
from fb_core.runtime.detokenizer import Name
from fb_core.runtime.step import RANKED

STOPS, STOP_LENGTH, STOP_IDS = 16, 256, 128  # strings, characters of one, token ids
MESSAGES, CALLS = 4096, 128  # of a chat; of tools in a message

OFF: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("add_generation_prompt", "detokenize", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("continue_final_message", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("store", "use_beam_search"), (False,)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "priority"), (0,)),
    **dict.fromkeys(("best_of", "length_penalty", "repetition_penalty"), (1,)),
    **dict.fromkeys(("bad_words", "logits_processors"), ([],)),
    **dict.fromkeys(("chat_template_kwargs", "logit_bias", "mm_processor_kwargs"), ({},)),
    **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
}
"""Values, besides null, that these parameters may have: those that ask for what decoding of text does anyway."""
UNREAD = ("functions", "metadata", "prompt_cache_key", "request_id", "safety_identifier", "tools", "user")
"""Parameters that change no answer: labels, and tools, which `tool_choice` cannot require and the model never calls."""


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _stops(value: Any) -> tuple[str, ...]:
    """The strings that end an answer."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
        raise ValueError(f"expected a string or a list of them, got {_shown(value)}")
    if len(given) > STOPS or max(map(len, given), default=0) > STOP_LENGTH:
        raise ValueError(f"expected at most {STOPS} strings of at most {STOP_LENGTH} characters, got more")
    return tuple(text for text in given if text)


def _stop_ids(value: Any) -> frozenset[int]:
    """The token ids that end an answer."""
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in value):
        raise ValueError(f"expected a list of token ids from 0, got {_shown(value)}")
    if len(value) > STOP_IDS:
        raise ValueError(f"expected at most {STOP_IDS} token ids, got {len(value)}")
    return frozenset(value)


def _given(value: Any) -> tuple[int, ...]:
    """Token ids whose log-probs are asked, each once."""
    _stop_ids(value)
    return tuple(dict.fromkeys(value))


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """Each prompt of a request: texts, or token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(text, str) for text in value):
            return value
        many = value if all(isinstance(ids, list) for ids in value) else [value]
        if all(type(token) is int and 0 <= token < 1 << 31 for ids in many for token in ids):
            return many
    raise ValueError("expected a string, token ids from 0, or a list of such, not empty")


def _continuations(value: Any) -> list[str] | list[list[int]]:
    """Texts, or token ids of each; one id is a continuation of one token."""
    given = [[item] if type(item) is int else item for item in value] if isinstance(value, list) else value
    if not isinstance(given, list) or not given or not all(given):
        raise ValueError("expected a list of texts or of token ids, none of them empty")
    return _prompts(given)


def _text_or_ids(value: Any) -> str | list[int]:
    """One text, or its token ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        return _prompts(value)[0]
    raise ValueError(f"expected a text or a list of token ids, not empty, got {_shown(value)}")


def _content(value: Any) -> str:
    """The text of a message, its parts concatenated."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"expected a string or a list of parts, got {_shown(value)}")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            if kind == "text":
                raise ValueError(f"expected a string as the text of a part, got {_shown(part.get('text'))}")
            raise ValueError(f'expected parts of type "text", got {_shown(kind)}; this server takes only text')
    return "".join(part["text"] for part in value)


def _calls(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls of tools whose arguments, JSON in clients' messages, are objects, as chat templates take them."""
    for index, call in enumerate(calls):
        function = call.get("function")
        if isinstance(function, dict) and (given := function.get("arguments")) is not None:
            if isinstance(given, str):
                with suppress(ValueError):
                    function["arguments"] = from_json(given or "{}")
            if not isinstance(function["arguments"], dict):
                words = f"expected a JSON object, as a string or as it is, got {_shown(given)}"
                raise ValueError(words, f"{index}.function.arguments")
    return calls


class _Strict(BaseModel):
    """A part of a request: a null counts as left out, and an error names the first of several wrong fields."""

    model_config = ConfigDict(extra="forbid", strict=True)
    off: ClassVar[dict[str, tuple[Any, ...]]] = {}
    unread: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _drop_unread(cls, body: Any) -> Any:
        """The fields without nulls, labels and those in `off`; an error's second argument is the name."""
        if not isinstance(body, dict):
            return body
        known = {field.alias or name for name, field in cls.model_fields.items()}
        given = {name: value for name, value in body.items() if value is not None and name not in cls.unread}
        for name, value in given.items():
            if name in cls.off:  # compared with their types, since Python's True is 1, and JSON's is not
                if (type(value) is bool, value) not in [(type(own) is bool, own) for own in cls.off[name]]:
                    allowed = " or ".join(map(json.dumps, cls.off[name]))
                    words = f"expected {allowed}, or nothing, got {_shown(value)}; this server supports no other"
                    raise ValueError(words, name)
            elif name not in known:
                raise ValueError("expected a parameter that this server supports; leave it out", name[:100])
        return {name: value for name, value in given.items() if name in known}


class Overrides(_Strict):
    """A request's settings of its events, in the field "futurebridge"; what is None is the server's."""

    threshold: float | None = Field(default=None, allow_inf_nan=False)  # nats above which the large model is asked
    max_events: int | None = Field(default=None, ge=0)  # at most the server's
    recipe: Literal["greedy", "direct", "futurebridge"] | None = None
    """The first never asks the large model, the second takes its likeliest candidate, the third the reranker's."""


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    off = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}
    include_usage: bool = False


class Request(_Strict):
    """The fields that both kinds of requests have; of `temperature`, `top_p` and `top_k`, None is the server's."""

    off, unread = OFF, UNREAD
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stops)] = ()  # strings that end an answer, which ends before them
    stop_token_ids: Annotated[frozenset[int], PlainValidator(_stop_ids)] = frozenset()  # the same
    ignore_eos: bool = False  # whether end tokens are tokens as others
    min_tokens: int = Field(default=0, ge=0)  # tokens before which none is an end token
    skip_special_tokens: bool = True  # the one that ends the text is never in it
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)  # 0 for the likeliest
    top_p: float | None = Field(default=None, gt=0, le=1)  # share of the probability among which tokens are drawn
    top_k: int | None = Field(default=None, ge=-1)  # likeliest tokens among which they are drawn; 0 or -1 for all
    min_p: float = Field(default=0, ge=0, le=1)  # share of the likeliest token's probability below which none is drawn
    seed: int | None = None  # None for another one each time
    n: int = Field(default=1, ge=1, le=16)  # answers, all the same if nothing is drawn
    return_token_ids: bool = False  # of prompt and answers, under vLLM's names
    return_tokens_as_token_ids: bool = False  # log-probs name a token "token_id:ID"
    given: Annotated[tuple[int, ...] | None, PlainValidator(_given)] = Field(default=None, alias="logprob_token_ids")
    """Ids whose log-probs are returned with each token in place of the likeliest ones."""
    prompt_ranking: int | None = Field(default=None, alias="prompt_logprobs", ge=0, le=RANKED)
    """How many of the likeliest tokens are returned with each token of the prompt."""
    futurebridge: Overrides = Overrides()

    @model_validator(mode="after")
    def _check_stream(self) -> Request:
        if self.stream_options is not None and not self.stream:
            raise ValueError("expected it only with stream true, got it without; leave it out", "stream_options")
        if self.min_tokens and (self.stop or self.stop_token_ids):
            raise ValueError("expected it without stop and stop_token_ids, got both; leave out one", "min_tokens")
        if self.given is not None and (not self.given or getattr(self, "ranking", None) is None):
            raise ValueError("expected some ids, and logprobs, got none; give both", "logprob_token_ids")
        if self.prompt_ranking is not None and self.stream:
            raise ValueError("expected it only without stream, got it with; leave out one of them", "prompt_logprobs")
        return self


class CompletionRequest(Request):
    """A request to `/v1/completions`: prompts as text or as token ids."""

    off = OFF | {"add_special_tokens": (True,)}
    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_prompts)]
    echo: bool = False  # whether an answer begins with its prompt, and its log-probs with the prompt's
    max_tokens: int = Field(default=16, ge=0)  # 0 only to ask about the prompt
    ranking: Annotated[int | None, BeforeValidator(lambda value: None if value is False else value)] = Field(
        default=None, alias="logprobs", ge=0, le=RANKED
    )  # how many of the likeliest tokens are returned with each token; None without log-probs

    @model_validator(mode="after")
    def _answers(self) -> CompletionRequest:
        if not self.max_tokens and not self.echo and self.prompt_ranking is None:
            raise ValueError("expected 1 or more, or 0 with echo or prompt_logprobs, got 0 without", "max_tokens")
        return self

    @property
    def inputs(self) -> Sequence[str | list[int]]:
        """What becomes a sequence each: texts to tokenize, or token ids."""
        return self.prompt


class Message(_Strict):
    """One turn of a conversation, as the model's chat template gets it."""

    off = {"annotations": ([],)}
    role: Literal["system", "user", "assistant"]  # "developer" means "system"
    content: Annotated[str, PlainValidator(_content)]  # empty where an assistant only called tools
    name: str | None = None
    tool_calls: Annotated[list[dict], Field(max_length=CALLS, fail_fast=True), AfterValidator(_calls)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _said(cls, message: Any) -> Any:
        """The message under today's names: clients send back the answers that they got."""
        if not isinstance(message, dict):
            return message
        said = {name: value for name, value in message.items() if value is not None}
        if said.get("role") == "developer":
            said["role"] = "system"
        if said.get("role") == "assistant":
            said.setdefault("content", "")
        elif "tool_calls" in said:
            raise ValueError("expected tool_calls only in an assistant's message, got them in another")
        return said


class ChatRequest(Request):
    """A request to `/v1/chat/completions`."""

    off = OFF | {"add_special_tokens": (False,), "echo": (False,)}
    echo: ClassVar[bool] = False
    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES, fail_fast=True)]
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=RANKED)

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            message = "expected it or max_tokens, got both; max_tokens is its older name"
            raise ValueError(message, "max_completion_tokens")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("expected it only with logprobs true, got it without", "top_logprobs")
        self.max_tokens = self.max_tokens or self.max_completion_tokens
        return self

    @property
    def ranking(self) -> int | None:
        """How many of the likeliest tokens are returned with each token; None without log-probs."""
        return self.top_logprobs if self.logprobs else None

    @property
    def inputs(self) -> Sequence[str | list[int]]:
        """The messages' text, whose length is checked."""
        return ["".join(message.content for message in self.messages)]


class ScoreRequest(_Strict):
    """A request to `/v1/continuations`: all as texts, or all as token ids.

    Attributes:
        prefix: what all continuations follow.
        continuations: those to be scored; None where candidates and their future are.
        candidates: followed by the future, whose tokens alone are scored.
        future: what follows every candidate.
        prior: what they also follow, to be told how much more likely the prefix makes them.
    """

    model: str | None = None
    prefix: Annotated[str | list[int], PlainValidator(_text_or_ids)]
    continuations: Annotated[list[str] | list[list[int]] | None, PlainValidator(_continuations)] = None
    candidates: Annotated[list[str] | list[list[int]] | None, PlainValidator(_continuations)] = None
    future: Annotated[str | list[int] | None, PlainValidator(_text_or_ids)] = None
    prior: Annotated[str | list[int] | None, PlainValidator(_text_or_ids)] = None

    @model_validator(mode="after")
    def _one_form(self) -> ScoreRequest:
        given = [name for name in ("continuations", "candidates", "future") if getattr(self, name) is not None]
        if given not in (["continuations"], ["candidates", "future"]):
            got = " and ".join(given) or "none of them"
            raise ValueError(f"expected it alone, or candidates and future instead, got {got}", "continuations")
        if len({type(text) for text in self.inputs}) > 1:
            raise ValueError("expected all as texts or all as token ids, got both", "prefix")
        return self

    @property
    def many(self) -> list[str] | list[list[int]]:
        """The continuations or the candidates."""
        return self.continuations or self.candidates or []

    @property
    def inputs(self) -> Sequence[str | list[int]]:
        """All texts, or all lists of ids."""
        return [self.prefix, *self.many, *(each for each in (self.future, self.prior) if each is not None)]


class LabelRequest(_Strict):
    """A request to `/v1/score`, SGLang's, or `/generative_scoring`, vLLM's: which label follows the query and an item.

    Attributes:
        query: text or token ids before each item, behind it if `item_first`.
        items: all texts or all lists of ids, as the query is.
        label_token_ids: the next token's ids whose probabilities are asked.
        apply_softmax: whether they are shares of the labels' own sum; None for the route's default.
    """

    unread = UNREAD
    model: str | None = None
    query: Annotated[str | list[int], PlainValidator(_text_or_ids)]
    items: Annotated[list[str] | list[list[int]], PlainValidator(_prompts)]
    label_token_ids: Annotated[list[int], Field(min_length=1)]
    apply_softmax: bool | None = None
    item_first: bool = False

    @model_validator(mode="after")
    def _one_kind(self) -> LabelRequest:
        if {type(item) for item in self.items} != {type(self.query)}:
            raise ValueError("expected all as texts or all as token ids, as the query is, got both", "items")
        return self

    @property
    def inputs(self) -> Sequence[Any]:
        """The prompt of each item."""
        return [item + self.query if self.item_first else self.query + item for item in self.items]  # type: ignore[operator]


def _texts(value: Any) -> list[str]:
    """A text, or several; each may be in an object, as `{"text": ...}`."""
    many = value if isinstance(value, list) else [value]
    given: list[Any] = [each.get("text") if isinstance(each, dict) and len(each) == 1 else each for each in many]
    if not given or not all(isinstance(text, str) and text for text in given):
        raise ValueError(f"expected a text or a list of them, none of them empty, got {_shown(value)}")
    return given


class RerankRequest(_Strict):
    """A request to `/rerank` or `/score`, as vLLM has them: how well each document answers the query.

    Attributes:
        query: one for all documents, or one for each; also named `queries` or `text_1`.
        documents: also named `text_2`.
        top_n: how many of the best are in the answer of `/rerank`; 0 for all.
    """

    unread = UNREAD
    model: str | None = None
    query: Annotated[list[str], PlainValidator(_texts)]
    documents: Annotated[list[str], PlainValidator(_texts)]
    top_n: int = Field(default=0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _name(cls, body: Any) -> Any:
        names = {"queries": "query", "text_1": "query", "text_2": "documents"}
        return {names.get(name, name): value for name, value in body.items()} if isinstance(body, dict) else body

    @model_validator(mode="after")
    def _paired(self) -> RerankRequest:
        if len(self.query) not in (1, len(self.documents)):
            words = f"expected one text, or one for each of {len(self.documents)} documents, got {len(self.query)}"
            raise ValueError(words, "query")
        return self

    def prompts(self, template: str) -> list[str]:
        """The template with each document and its query in it."""
        each = self.query * (len(self.documents) if len(self.query) == 1 else 1)
        pieces = re.split(r"(\{query\}|\{document\})", template)
        pairs = ({"{query}": query, "{document}": text} for query, text in zip(each, self.documents, strict=True))
        return ["".join(pair.get(piece, piece) for piece in pieces) for pair in pairs]


Finish = Literal["stop", "length"]
LEAST = -9999.0  # stands for minus infinity, which JSON does not have


class TokenLogprobs(NamedTuple):
    """A token of an answer with its log-prob, and the likeliest tokens at its place with theirs."""

    name: Name
    logprob: float | None  # None for the first token of a prompt
    top: list[tuple[Name, float]]
    offset: int  # characters of the answer before it


class Piece(NamedTuple):
    """The next part of an answer."""

    text: str = ""
    events: Sequence[dict[str, Any]] = ()  # as clients get them
    logprobs: Sequence[TokenLogprobs] = ()  # if they were requested
    finish: Finish | None = None  # why the answer has ended; None if it goes on
    tokens: Sequence[int] = ()
    prompt: Sequence[dict[str, Any] | None] | None = None  # `prompt_entry` of each of the prompt's tokens, if requested

    @classmethod
    def join(cls, pieces: Sequence[Piece]) -> Piece:
        """The parts of an answer as one."""
        text = "".join(piece.text for piece in pieces)
        events, logprobs, tokens = (
            [item for piece in pieces for item in getattr(piece, name)] for name in ("events", "logprobs", "tokens")
        )
        return cls(text, events, logprobs, pieces[-1].finish, tokens, pieces[0].prompt)


def event_fields(event: Event, texts: Sequence[str], offset: int) -> dict[str, Any]:
    """An event as clients get it; unknown values are null, and what went wrong is not told.

    `texts` are of the pool's tokens, `offset` the characters of the answer before the event's token.
    """
    error = None if event.error is None else "the large model did not answer"
    fields = {name: _finite(value) for name, value in vars(event).items()}
    return fields | {"error": error, "texts": texts, "offset": offset}


def _finite(value: Any) -> Any:
    """The value with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Shape:
    """The JSON of a request's answers, in pieces or whole, with `copies` of each; with the token ids if `ids`."""

    def __init__(self, model: str, *, chat: bool, stream: bool, copies: int, ids: bool = False) -> None:
        self.chat, self.stream, self.copies, self.ids = chat, stream, copies, ids
        kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
        made = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        self.head = {"id": made, "object": kind, "created": int(time.time()), "model": model}

    def fields(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None, prompt: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """A response with the choices, or a part of a streamed one; a chat's prompt is described beside them."""
        more: dict[str, Any] = {} if usage is None else {"usage": usage}
        if self.ids and self.chat and prompt is not None:
            more["prompt_token_ids"] = list(prompt)
        for choice in choices if self.chat else ():
            if "prompt_logprobs" in choice:
                more["prompt_logprobs"] = choice.pop("prompt_logprobs")
        return {**self.head, "choices": choices, **more}

    def choices(self, index: int, piece: Piece, prompt: Sequence[int], first: bool = True) -> list[dict[str, Any]]:
        """A whole answer or a piece of one, for each of its copies; `prompt` are its prompt's token ids."""
        message = {"role": "assistant"} if first else {}
        if piece.text or first:
            message["content"] = piece.text
        choice: dict[str, Any] = {"delta" if self.stream else "message": message} if self.chat else {"text": piece.text}
        choice["logprobs"] = (_chat_logprobs if self.chat else _logprobs)(piece.logprobs) if piece.logprobs else None
        choice["finish_reason"] = piece.finish
        if self.ids:
            choice["token_ids"] = list(piece.tokens)
            if first and not self.chat:
                choice["prompt_token_ids"] = list(prompt)
        if piece.prompt is not None:
            choice["prompt_logprobs"] = piece.prompt
        if piece.events or not self.stream:
            choice["futurebridge"] = {"events": list(piece.events)}
        return [{"index": self.copies * index + copy, **choice} for copy in range(self.copies)]


def _logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Log-probs of a completion; as in OpenAI's, the token itself is always among the likeliest ones."""
    return {
        "tokens": [token.name.text for token in tokens],
        "token_logprobs": [_least(token.logprob) for token in tokens],
        "top_logprobs": [None if token.logprob is None else _top(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _least(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)


def _top(token: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens by name, in order; one whose name another has is told apart by a number behind it."""
    own, top = (token.name.text, token.logprob or 0.0), [(name.text, logprob) for name, logprob in token.top]
    named: dict[str, float] = {}
    for text, logprob in top if own in top else (*top, own):
        name, count = text, 1
        while name in named or (name == token.name.text and logprob != token.logprob):
            count += 1
            name = f"{text} ({count})"
        named[name] = max(logprob, LEAST)
    return named


def _chat_logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Log-probs of a chat."""
    content = []
    for token in tokens:
        content.append(_entry(token.name, token.logprob) | {"top_logprobs": [_entry(*likely) for likely in token.top]})
    return {"content": content, "refusal": None}


def _entry(name: Name, logprob: float | None) -> dict[str, Any]:
    return {"token": name.text, "logprob": _least(logprob), "bytes": list(name.bytes)}


def prompt_entry(tokens: Sequence[tuple[int, Name, float, int]]) -> dict[str, Any]:
    """A place of a prompt in vLLM's form, from the (id, name, log-prob, place among all) of its tokens."""
    return {
        str(token): {"logprob": max(logprob, LEAST), "rank": place, "decoded_token": name.text}
        for token, name, logprob, place in tokens
    }


def score_fields(
    model: str, group: TextGroup, tokens: int, scores: Scores, prior: Scores | None = None
) -> Generator[None, None, dict[str, Any]]:
    """The JSON of scores, of one at each step: of continuations, or of the future after each candidate.

    `tokens` are those of what they follow.
    """
    data = []
    for index, (ids, (exact, greedy)) in enumerate(zip(group.candidates, scores, strict=True)):
        start = len(ids) if group.future else 0
        logprobs = [max(logprob, LEAST) for logprob in exact[start:].tolist()]
        total = sum(logprobs)
        own = {"sum": total, "mean": total / len(logprobs), "logprobs": logprobs, "greedy": greedy[start:].tolist()}
        if prior is not None:
            own["prior"] = sum(max(logprob, LEAST) for logprob in prior[index][0][start:].tolist())
            own["mutual_info"] = total - own["prior"]
            tokens += len(exact)
        data.append({"index": index, **own, "token_ids": [*ids, *group.future]})
        tokens += len(exact)
        yield
    head = _head("scores", "continuations", model)
    return {**head, "data": data, "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}}


def label_fields(
    model: str, logprobs: Sequence[Sequence[float]], tokens: int, shares: bool, *, vllm: bool
) -> dict[str, Any]:
    """The JSON of [items][labels], as SGLang writes it or as vLLM does: there the first label's alone."""
    scores = [_shares(own) if shares else list(map(math.exp, own)) for own in logprobs]
    usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    if not vllm:
        return {"object": "scoring", "model": model, "scores": scores, "usage": usage}
    data = [{"index": index, "object": "score", "score": own[0]} for index, own in enumerate(scores)]
    return {**_head("score", "list", model), "data": data, "usage": usage}


def rerank_fields(
    model: str, request: RerankRequest, logprobs: Sequence[Sequence[float]], tokens: int
) -> dict[str, Any]:
    """The JSON of documents, the best first, as vLLM and Jina write it."""
    scored = [(_shares(own)[0], index) for index, own in enumerate(logprobs)]
    best = sorted(scored, key=lambda each: (-each[0], each[1]))[: request.top_n or None]
    results = [
        {"index": index, "document": {"text": request.documents[index]}, "relevance_score": score}
        for score, index in best
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": "rerank-" + uuid.uuid4().hex, "model": model, "usage": usage, "results": results}


def _shares(logprobs: Sequence[float]) -> list[float]:
    """The labels' shares of their own sum."""
    most = max(logprobs)
    each = [math.exp(logprob - most) if most > -math.inf else 0.0 for logprob in logprobs]
    return [share / (sum(each) or 1.0) for share in each]


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def problem_fields(message: str, kind: str, parameter: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON of an error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": parameter, "code": code}}

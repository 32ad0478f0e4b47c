"""What clients send and get: the part of OpenAI's completions and chat completions that greedy decoding has.

Parameters that nothing here heeds are refused by name.
"""

from __future__ import annotations

import math
import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fb_core.pool import Event

Stop = str | Annotated[list[str], Field(max_length=16)] | None


class Overrides(BaseModel):
    """What a request may say of its events, in the field "futurebridge".

    Attributes:
        threshold: nats above which the large model is asked; None for the server's.
        max_events: None for the server's; no more than that.
    """

    model_config = ConfigDict(extra="forbid")

    threshold: float | None = None
    max_events: int | None = Field(default=None, ge=0)


class StreamOptions(BaseModel):
    """Of a streamed answer."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class Request(BaseModel):
    """What both kinds of requests have.

    Attributes:
        model: whatever it says, the server has one.
        seed: heeded in that the same request always gets the same answer.
        n: how many answers; all of them are the same.
        temperature: 0, since decoding is greedy.
        user: not looked at.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stop = None
    seed: int | None = None
    n: int = Field(default=1, ge=1, le=16)
    temperature: Annotated[float, Field(ge=0, le=0)] | None = None
    top_p: Annotated[float, Field(ge=1, le=1)] | None = None
    user: str | None = None
    futurebridge: Overrides = Overrides()

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)


class CompletionRequest(Request):
    """Of `/v1/completions`: a prompt as text or as token ids."""

    prompt: str | list[int]
    max_tokens: int = Field(default=16, ge=1)


class Message(BaseModel):
    """One turn."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str


class ChatRequest(Request):
    """Of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_completion_tokens: expected it or max_tokens, got both; max_tokens is its older name")
        return self


Finish = Literal["stop", "length"]


def event_fields(event: Event) -> dict[str, Any]:
    """An event as clients get it; what is not known is null."""
    known = {name: _finite(getattr(event, name)) for name in ("slm_logprob", "llm_logprob")}
    return {
        "step": event.step,
        "entropy": _finite([event.entropy])[0],
        "pool": event.pool,
        "sources": event.sources,
        **known,
        "scores": None if event.scores is None else _finite(event.scores),
        "choice": event.choice,
        "error": None if event.error is None else "the large model did not answer",
    }


def _finite(values: list[float]) -> list[float | None]:
    """JSON has no NaN and no infinity."""
    return [value if math.isfinite(value) else None for value in values]


def usage_fields(prompt: int, completion: int, calls: int, chosen: int) -> dict[str, Any]:
    """Tokens of a request, and what it asked of the large model: calls, and tokens chosen with its help."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "large_model": {"calls": calls, "tokens": chosen},
    }


class Shape:
    """How answers of one request are written: as text or as a chat, whole or in pieces."""

    def __init__(self, model: str, chat: bool) -> None:
        self.model = model
        self.chat = chat
        self.id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        self.created = int(time.time())

    def whole(self, texts: list[tuple[str, Finish, list[Event]]], usage: dict[str, Any]) -> dict[str, Any]:
        """The answers at once."""
        kind = "chat.completion" if self.chat else "text_completion"
        choices = []
        for index, (text, finish, events) in enumerate(texts):
            content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            own = {"events": [event_fields(event) for event in events]}
            choices.append({"index": index, **content, "logprobs": None, "finish_reason": finish, "futurebridge": own})
        return {**self._head(kind), "choices": choices, "usage": usage}

    def piece(self, index: int, text: str, finish: Finish | None, events: list[Event], first: bool) -> dict[str, Any]:
        """Some more of one answer."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        role = {"role": "assistant"} if first else {}
        content = {"delta": {**role, "content": text} if text or first else {}} if self.chat else {"text": text}
        choice: dict[str, Any] = {"index": index, **content, "logprobs": None, "finish_reason": finish}
        if events:
            choice["futurebridge"] = {"events": [event_fields(event) for event in events]}
        return {**self._head(kind), "choices": [choice]}

    def used(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last piece, where a client wants to know what its request took."""
        return {
            **self._head("chat.completion.chunk" if self.chat else "text_completion"),
            "choices": [],
            "usage": usage,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def problem_fields(message: str, kind: str, parameter: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": parameter, "code": None}}

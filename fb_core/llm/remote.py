"""A large model on an HTTP server (vLLM, SGLang, llama.cpp), asked by token id, never by text."""

from __future__ import annotations

import math
import os
import reprlib
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from numbers import Integral
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fb_core._util import check_count
from fb_core.llm.http import Connections, JSONClient, ServerError, checked_url
from fb_core.llm.local import LLM, Candidates, Ids, scored_of
from fb_core.llm.protocols import DIALECTS
from fb_core.models.facts import Tokenizer, known_ids
from fb_core.models.tokens import check_max_new_tokens, id_list, text_ids
from fb_core.runtime.sampling import Sampling, seeded

Flavour = Literal["vllm", "sglang", "llama.cpp"]
UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # from reading a malformed answer
TEXTS = (
    "The answer is \\boxed{42}.\n\nSo 3.14159 * 2 = 6.28318, and 1000000 > 999999!",
    "def f(x):\n\treturn [x ** 2 for _ in range(10)]  # tabs,   spaces\r\n",
    "naïve café, Übergröße, Ελληνικά, русский, 中文字符, 日本語, العربية, 🙂👩‍💻, é",
    "don't WON'T I'll  <b>&amp;</b> $\\frac{a}{b}$ a_b-c/d@e.f",
)

Answer = TypeVar("Answer")


def key_in(variable: str | None, setting: str = "api_key_variable") -> str | None:
    """The key in the environment variable that a setting names; None if it names none, ValueError if it is not set."""
    if variable is None:
        return None
    if variable not in os.environ:
        raise ValueError(f"{setting}: expected {variable} in the environment, got none; export it")
    return os.environ[variable]


class ServerLLM(LLM):
    """A large model on a server: greedy unless asked to sample, without penalties, whatever the server's defaults.

    A request that fails (no connection, no complete answer in time, status 429 or 5xx) is sent again up to `retries`
    times with growing pauses; any other failure is final. All calls share one pool of threads and connections.
    Connections are kept open, except to llama.cpp, where each would hold one of its few threads. What each flavour is
    asked is in `dialects.py`, and the versions and flags that it needs in docs/serving.md.

    Samples are drawn by the server, one request per sample, each with its own seed. They are not those of a `LocalLLM`,
    and whether they can be reproduced depends on the server, where each batch may round differently. SGLang applies
    `top_p` to all probabilities instead of those of the `top_k`; vLLM raises a temperature below 0.01 to 0.01 and
    refuses one above 2.

    A continuation ends where the server ends it (its model's end-of-sequence tokens), or after one of `ends`. If a
    server floors the log-probability of impossible tokens (vLLM: -9999; llama.cpp: -3.4e38, below about -103), the
    floor is returned.

    Safe to share between threads, which share its `in_flight`. An `Engine`'s request for a sequence that has ended is
    given up.

    Args:
        url: of the server, http or https, e.g. "http://localhost:8000"; its path is put before the server's own paths.
        flavour: the server's API.
        model: the model name in requests; None if the server has one model.
        vocabulary: number of ids that the served model takes.
        ends: ids that end a continuation.
        timeout: seconds for one request, from connecting to the complete answer.
        retries: how often a failed request is sent again.
        in_flight: maximum concurrent requests.
        api_key: sent as `Authorization: Bearer ...`, and never shown; None if the server needs none.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        url: str,
        flavour: Flavour = "vllm",
        *,
        model: str | None = None,
        vocabulary: int,
        ends: Collection[int] = frozenset(),
        timeout: float = 60.0,
        retries: int = 3,
        in_flight: int = 8,
        api_key: str | None = None,
    ) -> None:
        address = checked_url(url)
        if flavour not in DIALECTS:
            raise ValueError(f"flavour: expected 'vllm', 'sglang' or 'llama.cpp', got {flavour!r}; name the server's")
        for name, count, least, remedy in (
            ("vocabulary", vocabulary, 1, "pass the served model's vocab_size"),
            ("retries", retries, 0, "0 sends every request once"),
            ("in_flight", in_flight, 1, "1 sends one request at a time"),
        ):
            if not isinstance(count, Integral):
                raise TypeError(f"{name}: expected an int, got {type(count).__name__}; convert it with int()")
            check_count(name, count, least, remedy)
        if not 0.0 < timeout < math.inf:
            raise ValueError(f"timeout: expected seconds above 0, got {timeout}; 60 is the default")
        if api_key is not None and not isinstance(api_key, str):
            raise TypeError(f"api_key: expected a str, got {type(api_key).__name__}; None sends no key")
        sendable = api_key is None or (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != "")
        if not sendable:
            raise ValueError(
                "api_key: expected printable ASCII without spaces around it, got another text; pass the server's key"
            )
        self.url = url
        self.flavour = flavour
        self.model = model
        headers = {"Content-Type": "application/json"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self.vocabulary: int = vocabulary
        self._ends = frozenset(id_list("ends", list(ends), vocabulary))
        self._pool = ThreadPoolExecutor(in_flight, "fb-server")
        self._connections = Connections(address, headers, timeout, kept=0 if flavour == "llama.cpp" else in_flight)
        self._client = JSONClient(url, self._connections, model=model, retries=retries, key=api_key)
        self._dialect = DIALECTS[flavour](self._client.post, vocabulary, sorted(self._ends))
        self._closing = weakref.finalize(self, _close, self._pool, self._connections)
        self._process = os.getpid()

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a continuation."""
        return self._ends

    def candidates(self, ids: Ids, k: int, score_ids: Ids | None = None) -> Candidates:
        """As `LLM.candidates`, on the CPU; raises as `candidates_many`."""
        return self.candidates_many([ids], k, None if score_ids is None else [score_ids])[0]

    def candidates_many(
        self, prompts: Sequence[Ids], k: int, score_ids: Sequence[Ids] | None = None
    ) -> list[Candidates]:
        """As `LLM.candidates_many`, at most `in_flight` requests at once; ties go to the lowest of the ids returned.

        Raises:
            TypeError: ids that are not integers.
            ValueError: no ids, one outside the vocabulary, or k below 1.
            ServerError: no answer, or one that lacks what was asked for, repeats an id, has an id outside the
                vocabulary, a log-probability that is not a number up to 0, or a likeliest token with less than half the
                probability of a uniform distribution over the ids. The object stays usable.
        """
        k = check_count("k", k, 1, "the published pools take 8", "{} or more candidates")
        checked = self._prompts(prompts)
        scored = [
            None if ids is None else id_list("score_ids", ids, self.vocabulary) for ids in scored_of(prompts, score_ids)
        ]
        count = min(k, self.vocabulary)
        return self._all(lambda ids, wanted: self._candidates(ids, count, wanted), checked, scored)

    def complete(self, ids: Ids, max_new_tokens: int) -> Tensor:
        """As `LLM.complete`, on the CPU; raises as `complete_many`."""
        return self.complete_many([ids], max_new_tokens)[0]

    def complete_many(self, prompts: Sequence[Ids], max_new_tokens: int) -> list[Tensor]:
        """As `LLM.complete_many`, at most `in_flight` requests at once.

        Raises:
            TypeError: ids or max_new_tokens that are not integers.
            ValueError: no ids, one outside the vocabulary, or max_new_tokens below 1.
            ServerError: no answer, a prompt that the server refuses as too long, or an answer without ids or with ids
                outside the vocabulary. The object stays usable.
        """
        max_new_tokens = check_max_new_tokens(max_new_tokens)
        return self._all(lambda ids: self._complete(ids, max_new_tokens, {}), self._prompts(prompts))

    def _sample(self, prompts: Sequence[Ids], n: int, max_new_tokens: int, how: Sampling) -> list[list[Tensor]]:
        """As `LLM.sample_many`, one request per sample; raises as it does, ServerError as `complete_many`."""
        max_new_tokens = check_max_new_tokens(max_new_tokens)

        def draw(ids: list[int], sample: int) -> Tensor:
            own = seeded(how.seed, ids, sample).getrandbits(31)  # every flavour takes 31 bits
            return self._complete(
                ids, max_new_tokens, self._dialect.sampled(how.temperature, how.top_p, how.top_k, own)
            )

        checked = self._prompts(prompts)
        drawn = self._all(draw, [ids for ids in checked for _ in range(n)], [*range(n)] * len(checked))
        return [drawn[start : start + n] for start in range(0, len(drawn), n)]

    def check_tokenizer(self, tokenizer: Tokenizer, texts: Sequence[str] | None = None) -> None:
        """Refuse a server of another flavour, or one whose tokenizer (its `/tokenize`) disagrees with this one.

        A server is of another flavour if it answers a request for one candidate in that flavour and not in the given
        one. An SGLang from before it had `/tokenize` answers 404, a ServerError.

        Args:
            tokenizer: the tokenizer whose ids this object will be given.
            texts: texts that both must turn into the same ids, without surrounding special tokens; None for a few in
                several scripts and the tokenizer's own special tokens.

        Raises:
            ValueError: another flavour, ids beyond the vocabulary, or different ids for a text.
            ServerError: no answer, or an answer without ids.
        """
        self._check_process()
        most = known_ids(tokenizer)
        if most > self.vocabulary:
            raise ValueError(
                f"tokenizer: expected at most the {self.vocabulary} ids of the served model, got {most}; use the "
                "served model's own tokenizer and vocabulary"
            )
        prompt = text_ids(tokenizer, TEXTS[0], special=False, name="tokenizer")
        speaks = self._pool.submit(self._recognised, prompt).result()
        if speaks != self.flavour:
            raise ValueError(
                f"flavour: expected {speaks!r}, as {self.url} answers, got {self.flavour!r}; name the server's"
            )
        for text in [*TEXTS, "".join(tokenizer.all_special_tokens)] if texts is None else texts:
            ours = text_ids(tokenizer, text, special=False, name="tokenizer")
            theirs = self._pool.submit(self._read, f"the ids of {text!r}", self._dialect.tokenize, text).result()
            if theirs != ours:
                raise ValueError(
                    f"tokenizer: expected the server's ids {reprlib.repr(theirs)} for {text!r}, got "
                    f"{reprlib.repr(ours)}; use the served model's own tokenizer"
                )

    def close(self) -> None:
        """Wait for running requests; connections close soon after, as they also do when the object is collected.

        Calls on a closed object raise RuntimeError.
        """
        self._pool.shutdown()
        self._closing()

    def _check_process(self) -> None:
        """Refuse to run in a forked process: the threads stayed in the parent, so a request would wait for ever."""
        if os.getpid() != self._process:
            raise ValueError("ServerLLM: expected the process that made it, got a fork of it; make one in each process")

    def _prompts(self, prompts: Sequence[Ids]) -> list[list[int]]:
        self._check_process()
        checked = [id_list("ids", ids, self.vocabulary) for ids in prompts]
        if not all(checked):
            raise ValueError("ids: expected at least one token, got none; begin with the prompt")
        return checked

    def _all(self, call: Callable[..., Answer], first: Sequence[Any], *more: Iterable[Any]) -> list[Answer]:
        """The call's results, at most `in_flight` at once, each in the caller's context."""
        contexts = [copy_context() for _ in first]
        return list(self._pool.map(lambda context, *row: context.run(call, *row), contexts, first, *more))

    def _candidates(self, ids: list[int], k: int, wanted: list[int] | None) -> Candidates:
        asked = f"{k} candidates and {len(wanted or ())} scores after {len(ids)} tokens"
        top, scores = self._read(asked, self._dialect.candidates, ids, k, sorted(set(wanted or ())))
        missing = [token for token in wanted or () if token not in scores]
        if len(top) < k or missing:
            raise ServerError(
                f"{self.url}: expected {asked}, got {len(top)} and no score of {reprlib.repr(missing)}; check that it "
                f"is a {self.flavour} server and does not limit its log-probabilities"
            )
        ranked = sorted(top, key=lambda token: (-top[token], token))[:k]
        least = -math.log(2 * self.vocabulary)  # half of 1 / ids: padding rows may take a share
        if not top[ranked[0]] > least:
            raise ServerError(
                f"{self.url}: expected {asked}, the most likely of {self.vocabulary} ids above {least:.1f} nats, got "
                f"{top[ranked[0]]}; check the served model for NaN or infinite logits"
            )
        return Candidates(
            torch.tensor(ranked),
            torch.tensor([top[token] for token in ranked], dtype=torch.float32),
            None if wanted is None else torch.tensor([scores[token] for token in wanted], dtype=torch.float32),
        )

    def _complete(self, ids: list[int], n: int, sampled: dict[str, Any]) -> Tensor:
        asked = f"1 to {n} tokens after {len(ids)}"
        new = self._read(asked, self._dialect.complete, ids, n, sampled)[:n]
        if not new:
            raise ServerError(
                f"{self.url}: expected {asked}, got none; check that the prompt leaves the server room and that it "
                "returns end-of-sequence tokens"
            )
        last = next((index for index, token in enumerate(new) if token in self._ends), n)
        return torch.tensor(new[: last + 1])

    def _read(self, asked: str, read: Callable[..., Answer], *arguments: Any) -> Answer:
        """`read`'s result; an answer that it cannot read is a ServerError."""
        try:
            return read(*arguments)
        except UNREADABLE as problem:
            why = f"{type(problem).__name__}: {self._client.keyless(str(problem))}"
            raise ServerError(
                f"{self.url}: expected {asked} as {self.flavour} answers it, got an answer that does not fit ({why}); "
                "check the flavour and the server's version"
            ) from None

    def _recognised(self, prompt: list[int]) -> str:
        """The server's flavour; the given one if the server answers in no known flavour or not at all."""
        for flavour in (self.flavour, *DIALECTS):
            try:
                DIALECTS[flavour](self._client.post_once, self.vocabulary, []).candidates(prompt, 1, [])
            except (ServerError, *UNREADABLE):
                continue
            except OSError:
                break
            return flavour
        return self.flavour


def _close(pool: ThreadPoolExecutor, connections: Connections) -> None:
    pool.shutdown(wait=False)
    connections.close()

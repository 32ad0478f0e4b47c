"""How vLLM, SGLang and llama.cpp are asked by token id, and how their answers are read."""

from __future__ import annotations

import re
import reprlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE, AGAIN = 3, 64  # answers in a row without what was asked, until only each 64th question asks for it
MASKED = -9999.0  # the log-probability that vLLM gives for -inf
TRIES = 3  # of a request whose answer is padded or too short
TURN = 10.0  # seconds that a request waits at most for those of the other kind
SOON, SLOW, RECENT = 1.5, 4, 8  # or no longer than this, or than so many times the slowest of so many answers
ROUNDING = 1e-3  # nats that a log-probability may exceed 0 by
TOKEN_ID = re.compile(r"token_id:(0|[1-9][0-9]{0,18})", re.ASCII)


class Dialect(ABC):
    """The requests to one kind of server, and how its answers are read; a malformed answer raises whatever it causes.

    Args:
        post: (path, fields, number of tokens that the answer may name, which limits its bytes) -> the answer.
        vocabulary: ids from this one on are refused.
        ends: ids that end a continuation.
    """

    def __init__(self, post: Callable[[str, dict[str, Any], int], Any], vocabulary: int, ends: list[int]) -> None:
        self.post = post
        self.vocabulary = vocabulary
        self.ends = ends

    @abstractmethod
    def candidates(self, ids: list[int], k: int, wanted: list[int]) -> tuple[dict[int, float], dict[int, float]]:
        """Log-probabilities by id: of the k most likely tokens, and of `wanted`; each may contain others."""

    @abstractmethod
    def complete(self, ids: list[int], n: int, sampled: dict[str, Any]) -> list[int]:
        """The continuation, greedy without the fields of `sampled`."""

    def sampled(self, temperature: float, top_p: float, top_k: int, seed: int) -> dict[str, Any]:
        """The fields that make `complete` sample; top_k 0 keeps all."""
        return {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, without surrounding special tokens."""
        fields = {"prompt": text, "add_special_tokens": False}
        return self.tokens(self.post("/tokenize", fields, len(text.encode()))["tokens"])

    def token(self, value: Any) -> int:
        """A token id of an answer."""
        if type(value) is not int or not 0 <= value < self.vocabulary:
            raise ValueError(f"token id {reprlib.repr(value)} is not one from 0 below {self.vocabulary}")
        return value

    def tokens(self, values: Any) -> list[int]:
        """Token ids of an answer."""
        if type(values) is not list:
            raise ValueError(f"{reprlib.repr(values)} is not a list of token ids")
        return [self.token(value) for value in values]

    def logprobs(self, pairs: Iterable[tuple[Any, Any]]) -> dict[int, float]:
        """Token ids and log-probabilities of an answer."""
        logprobs: dict[int, float] = {}
        for token, value in pairs:
            if type(value) not in (float, int) or not value <= ROUNDING:
                raise ValueError(
                    f"log-probability {reprlib.repr(value)} of id {reprlib.repr(token)} is not a number up to 0"
                )
            if self.token(token) in logprobs:
                raise ValueError(f"token id {token} comes twice")
            logprobs[token] = min(float(value), 0.0)
        return logprobs


_PLAIN = {
    "temperature": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class _Turns:
    """Requests of one kind at a time; all that wait go once the other kind's are answered, or take far too long."""

    def __init__(self) -> None:
        self._changed, self._kind = threading.Condition(), ""  # whose turn it is
        self._waiting, self._running = dict[object, str](), dict[object, float]()  # kinds; when they began
        self._took = deque[float](maxlen=RECENT)

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        mine = object()
        with self._changed:
            self._waiting[mine] = kind
            seconds = self._let_go()
            while mine in self._waiting:
                self._changed.wait(seconds)
                seconds = self._let_go()
        try:
            yield
            with self._changed:
                self._took.append(time.monotonic() - self._running[mine])
        finally:
            with self._changed:
                del self._running[mine]
                self._let_go()

    def _let_go(self) -> float:
        """Begin those whose turn it is; the seconds after which the others need not wait any longer."""
        now, others = time.monotonic(), set(self._waiting.values()) - {self._kind}
        patience = min(TURN, max(SOON, SLOW * max(self._took, default=TURN)))
        seconds = max(self._running.values(), default=-TURN) + patience - now
        if others and seconds <= 0:
            self._kind = others.pop()
        if not others or seconds <= 0:
            for mine in [each for each, kind in self._waiting.items() if kind == self._kind]:
                self._running[mine] = now
                del self._waiting[mine]
            self._changed.notify_all()
        return seconds


class VLLM(Dialect):
    """vLLM's `/v1/completions`; without `logprob_token_ids` each id is appended to a prompt of its own.

    If one request of a batch has `logprob_token_ids`, vLLM's V1 runner gives all others the sampled token and padding
    instead of the likeliest tokens (vllm-project/vllm#51789). So the two kinds are sent in turns, and a request that
    another client disturbed is repeated.
    """

    ignored = 0  # questions since the server last answered one with logprob_token_ids

    def __init__(self, post: Callable[[str, dict[str, Any], int], Any], vocabulary: int, ends: list[int]) -> None:
        super().__init__(post, vocabulary, ends)
        self._turns = _Turns()

    def candidates(self, ids: list[int], k: int, wanted: list[int]) -> tuple[dict[int, float], dict[int, float]]:
        for _ in range(TRIES):
            with self._turns.of("likely"):
                top = self._next(ids, logprobs=k)
            if len(top) <= 2 and top.get(0, 0.0) <= MASKED:  # padding has id 0
                del top[0]
            if len(top) >= k:
                break
        scores = dict(top)
        missing = [token for token in wanted if token not in scores]
        if missing and (self.ignored < PATIENCE or self.ignored % AGAIN == 0):
            with self._turns.of("given"):
                scores |= self._next(ids, logprobs=1, logprob_token_ids=missing)
            missing = [token for token in missing if token not in scores]
            if not missing:
                self.ignored = 0
        if missing:
            self.ignored += 1
            prompts, places = [[*ids, token] for token in missing], len(missing) * (len(ids) + 2)
            choices = self._choices(places, prompt=prompts, max_tokens=1, prompt_logprobs=0)
            last = [choice["prompt_logprobs"][-1] for choice in sorted(choices, key=lambda choice: choice["index"])]
            scores |= self.logprobs((t, of[str(t)]["logprob"]) for t, of in zip(missing, last, strict=True))
        return top, scores

    def complete(self, ids: list[int], n: int, sampled: dict[str, Any]) -> list[int]:
        fields = {"max_tokens": n, "return_token_ids": True, "stop_token_ids": self.ends} | sampled
        (choice,) = self._choices(len(ids) + n, prompt=ids, **fields)
        return self.tokens(choice["token_ids"])

    def _next(self, ids: list[int], **fields: Any) -> dict[int, float]:
        named = len(ids) + fields["logprobs"] + len(fields.get("logprob_token_ids", ()))
        (choice,) = self._choices(named, prompt=ids, max_tokens=1, return_tokens_as_token_ids=True, **fields)
        return self.logprobs((self._id(name), value) for name, value in choice["logprobs"]["top_logprobs"][0].items())

    def _choices(self, named: int, **fields: Any) -> Any:
        return self.post("/v1/completions", _PLAIN | fields, named)["choices"]

    def _id(self, name: str) -> int:
        match = TOKEN_ID.fullmatch(name)
        if match is None:
            raise ValueError(f"token {reprlib.repr(name)} is not of the form token_id:...")
        return int(match[1])


class SGLang(Dialect):
    """SGLang's `/generate`."""

    def candidates(self, ids: list[int], k: int, wanted: list[int]) -> tuple[dict[int, float], dict[int, float]]:
        asked = {"token_ids_logprob": wanted} if wanted else {}
        answer = self._generate(ids, 1, {}, return_logprob=True, top_logprobs_num=k, **asked)["meta_info"]
        top = self.logprobs((token, value) for value, token, *_ in answer["output_top_logprobs"][0])
        if not wanted:
            return top, {}
        return top, self.logprobs((token, value) for value, token, *_ in answer["output_token_ids_logprobs"][0])

    def complete(self, ids: list[int], n: int, sampled: dict[str, Any]) -> list[int]:
        return self.tokens(self._generate(ids, n, sampled)["output_ids"])

    def sampled(self, temperature: float, top_p: float, top_k: int, seed: int) -> dict[str, Any]:
        return {"temperature": temperature, "top_p": top_p, "top_k": top_k or -1, "sampling_seed": seed}

    def _generate(self, ids: list[int], n: int, sampled: dict[str, Any], **fields: Any) -> Any:
        sampling = _PLAIN | {"max_new_tokens": n, "stop_token_ids": self.ends} | sampled
        named = len(ids) + n + fields.get("top_logprobs_num", 0) + len(fields.get("token_ids_logprob", ()))
        return self.post("/generate", {"input_ids": ids, "sampling_params": sampling, **fields}, named)


class LlamaCpp(Dialect):
    """llama.cpp's `/completion`; given ids cannot be requested, so `n_probs` grows until they are in the answer."""

    def candidates(self, ids: list[int], k: int, wanted: list[int]) -> tuple[dict[int, float], dict[int, float]]:
        n = min(max(k, 128), self.vocabulary) if wanted else k
        top = self._next(ids, n)
        while n < self.vocabulary and not top.keys() >= set(wanted):
            n = min(16 * n, self.vocabulary)
            top = self._next(ids, n)
        return top, top

    def complete(self, ids: list[int], n: int, sampled: dict[str, Any]) -> list[int]:
        return self.tokens(self._completion(ids, n, return_tokens=True, **sampled)["tokens"])

    def sampled(self, temperature: float, top_p: float, top_k: int, seed: int) -> dict[str, Any]:
        order = {"samplers": ["top_k", "temperature", "top_p"]}  # the default has top_p before temperature
        return super().sampled(temperature, top_p, top_k, seed) | order

    def tokenize(self, text: str) -> list[int]:
        fields = {"content": text, "add_special": False, "parse_special": True}
        return self.tokens(self.post("/tokenize", fields, len(text.encode()))["tokens"])

    def _next(self, ids: list[int], n: int) -> dict[int, float]:
        whole = {"logit_bias": [["0", 1e9]]}  # samples id 0: half a character would have no probabilities
        answer = self._completion(ids, 1, n_probs=n, post_sampling_probs=False, **whole)["completion_probabilities"][0]
        return self.logprobs((entry["id"], entry["logprob"]) for entry in answer["top_logprobs"])

    def _completion(self, ids: list[int], n: int, **fields: Any) -> Any:
        plain = {"temperature": 0, "dynatemp_range": 0, "samplers": ["temperature"], "mirostat": 0, "logit_bias": []}
        asked = plain | {"cache_prompt": True, "prompt": ids, "n_predict": n} | fields
        return self.post("/completion", asked, len(ids) + n + fields.get("n_probs", 0))


DIALECTS: dict[str, type[Dialect]] = {"vllm": VLLM, "sglang": SGLang, "llama.cpp": LlamaCpp}

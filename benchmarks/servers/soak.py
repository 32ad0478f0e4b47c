"""`python -m benchmarks.servers.soak`: thousands of mixed requests to one server: right answers, and no leak.

Requests come from OpenAI's client: streamed and whole, completions and chats, greedy and drawn, with stop strings,
limits, several answers, and without events; log-probs of prompts and of continuations. Some clients leave early, some
requests must be refused. Answers and log-probs are compared with those of the prompts alone; what the server holds at
the end is compared with what it held after the first requests.
"""

from __future__ import annotations

import argparse
import asyncio
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import openai
import torch

from benchmarks import harness
from benchmarks.servers.server_process import MODEL, PAIR, THREADS, Server, Truth, alone
from fb_core import CompatibilityScorer, Sampling
from fb_core.apps.demo.pairs import DemoPair, load_pair

LIMITS, EVENTS, ANSWERS = (60, 25, 7), (8, 0), 2  # maximum tokens, events and answers
SAMPLING = Sampling(0.7, 0.9, 20, seed=5)
DRAWN: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 5, "extra_body": {"top_k": 20}}
KINDS = ("streamed", "whole", "scored", "left while streaming", "left while waiting", "refused")
WEIGHTS = (35, 25, 10, 10, 5, 15)
NATS = 1e-4  # tolerance of a log-prob
BAD: tuple[Mapping[str, Any], ...] = (
    {"temperature": -0.7},
    {"frequency_penalty": 0.5},
    {"max_tokens": 0},
    {"prompt": []},
    {"prompt": [10**6]},
    {"extra_body": {"futurebridge": {"max_events": 99}}},
)
CACHES = dict.fromkeys(("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), "16")
"""Sizes of oneDNN's kernel caches. By default they keep the last 1,024 shapes, and such growth would hide a leak."""
PATIENCE = 0.1  # seconds until a client leaves while waiting; some have not even sent their request
SHOWN = 5  # wrong answers that are printed in full


@dataclass(frozen=True)
class Held:
    """What the server holds while no request is in progress."""

    requests: int  # so far
    resident_bytes: int
    open_files: int
    threads: int


@dataclass
class Soak:
    """The result of a soak test."""

    clients: int
    seconds: float = 0.0
    kinds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    statuses: dict[str, int] = field(default_factory=dict)  # as the server counted them
    wrong: list[str] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)


@dataclass(frozen=True)
class Question:
    """A request, and the expected answer."""

    kind: str
    path: str
    body: Mapping[str, Any]
    want: Sequence[Truth] = ()  # of each answer
    texts: Sequence[str] = ()  # theirs, up to the stop string
    logprobs: Sequence[float] = ()  # of a prompt's tokens but the first, or of all continuations' tokens


def questions(pair: DemoPair, problems: int, count: int, seed: int) -> Iterator[Question]:
    """Random requests, the same ones for the same seed in every process."""
    asked = pair.world.problems(problems, seed=0, role="test")
    ids = [list(problem.prompt_ids) for problem in asked]
    truths = {(limit, events): alone(pair, ids, limit, events) for limit in LIMITS for events in EVENTS}
    samples = alone(pair, [prompt for prompt in ids for _ in range(ANSWERS)], LIMITS[0], EVENTS[0], SAMPLING)
    scored = [
        _scored(pair, problem.prompt, prompt, truths[LIMITS[0], EVENTS[0]])
        for problem, prompt in zip(asked, ids, strict=True)
    ]
    draw = Random(seed)
    for _ in range(count):
        kind, index = draw.choices(KINDS, WEIGHTS)[0], draw.randrange(problems)
        if kind == "scored":
            yield draw.choice(scored[index])
            continue
        limit, events, answers = draw.choice(LIMITS), draw.choice(EVENTS), draw.choice((1, 1, 1, ANSWERS))
        want = [truths[limit, events][index]] * answers
        body: dict[str, Any] = {"n": answers}
        if draw.random() < 0.3:
            limit, want = LIMITS[0], samples[index * ANSWERS :][:answers]
            body |= DRAWN
        elif not events:
            body["extra_body"] = {"futurebridge": {"max_events": 0}}
        body["max_tokens"] = limit
        texts = [truth.text for truth in want]
        if draw.random() < 0.25 and len(texts[0]) > 4 and len(set(texts)) == 1:
            begin = draw.randrange(1, len(texts[0]) - 2)
            stop = texts[0][begin : begin + 3]
            body["stop"] = [stop, "never"]
            texts = [text.partition(stop)[0] for text in texts]
        chat = kind != "refused" and draw.random() < 0.3
        if chat:
            body["messages"] = [{"role": "user", "content": asked[index].prompt}]
        else:
            body["prompt"] = draw.choice((asked[index].prompt, ids[index]))
        path = "chat/completions" if chat else "completions"
        yield Question(kind, path, {**body, **draw.choice(BAD)} if kind == "refused" else body, want, texts)


def _scored(pair: DemoPair, prompt: str, ids: list[int], truths: Sequence[Truth]) -> list[Question]:
    """Requests for the log-probs of a prompt, and of some answers after it."""
    scorer = CompatibilityScorer(pair.slm, tokenizer=pair.world.tokenizer)
    texts = [truth.text for truth in truths[:4]]
    answers = [pair.world.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    of_prompt, of_answers = scorer.logprobs(ids[:1], [ids[1:]]), scorer.logprobs(ids, answers)
    echo = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0}
    bodies = ({"prefix": prompt, "continuations": texts}, {"prefix": ids, "continuations": answers})
    return [
        Question("scored", "completions", echo, texts=[prompt], logprobs=torch.cat(of_prompt).tolist()),
        *(Question("scored", "continuations", body, logprobs=torch.cat(of_answers).tolist()) for body in bodies),
    ]


async def ask(client: openai.AsyncOpenAI, question: Question) -> str | None:
    """Send a request; returns what is wrong with the answer, or None."""
    create: Any = client.chat.completions.create if question.path.startswith("chat") else client.completions.create
    body = {"model": MODEL, **question.body}
    if question.path == "continuations":
        scores: Any = await client.post("/continuations", body=body, cast_to=object)
        return _other(body, question.logprobs, [each for row in scores["data"] for each in row["logprobs"]])
    if question.kind == "scored":
        (choice,) = (await create(**body)).choices
        return _other(body, question.logprobs, choice.logprobs.token_logprobs[1:])
    if question.kind == "refused":
        try:
            return f"{body}: expected to be refused, got {await create(**body)}"
        except openai.BadRequestError:
            return None
    if question.kind == "left while waiting":
        with suppress(TimeoutError):
            await asyncio.wait_for(create(**body), PATIENCE)
        return None
    if question.kind == "left while streaming":
        stream = await create(**body, stream=True)
        async for _ in stream:
            break
        await stream.close()
        return None
    if question.kind == "streamed":
        stream = await create(**body, stream=True, stream_options={"include_usage": True})
        pieces = [piece async for piece in stream]
    else:
        pieces = [await create(**body)]
    got, total = [_answer(pieces, index) for index in range(body["n"])], pieces[-1].usage.completion_tokens
    want, tokens = [], 0
    for truth, text in zip(question.want, question.texts, strict=True):
        cut = text != truth.text  # at the stop string; then all answers are the same
        count = total // body["n"] if cut else truth.tokens
        finish = "stop" if truth.ended or cut else "length"
        want.append((text, finish, [step for step in truth.steps if step < count]))
        tokens += count
    right = got == want and total == tokens
    return None if right else f"{body}: expected {want} of {tokens} tokens, got {got}, {total}"


def _other(body: Mapping[str, Any], want: Sequence[float], got: Sequence[float]) -> str | None:
    """What is wrong with log-probs."""
    right = len(got) == len(want) and all(abs(a - b) < NATS for a, b in zip(got, want, strict=True))
    return None if right else f"{body}: expected log-probs {want}, got {got}"


def _answer(pieces: Sequence[Any], index: int) -> tuple[str, str | None, list[int]]:
    """(text, finish reason, steps of events) of one of the answers, whole or streamed."""
    text, reason, steps = "", None, []
    for choice in (option for piece in pieces for option in piece.choices if option.index == index):
        said = getattr(choice, "delta", None) or getattr(choice, "message", None)
        text += (said.content or "") if said is not None else getattr(choice, "text", "")
        reason = choice.finish_reason or reason
        steps += [event["step"] for event in (choice.model_extra or {}).get("futurebridge", {}).get("events", ())]
    return text, reason, steps


def soak(requests: int, every: int, *, problems: int = 64, clients: int = 64, seed: int = 0) -> Soak:
    """Send requests, and record what the server holds after every `every` of them, with all clients gone."""
    pair = load_pair(PAIR)
    asked, result = list(questions(pair, problems, requests, seed)), Soak(clients)
    with Server(**CACHES) as server:
        for first in range(0, requests, every):
            began = time.perf_counter()
            asyncio.run(_together(f"{server.url}/v1", iter(asked[first : first + every]), result))
            result.seconds += time.perf_counter() - began
            server.wait_until_idle()
            done = min(first + every, requests)
            result.held.append(Held(done, server.resident_bytes(), server.open_files(), server.threads()))
        for name, count in server.metrics().items():
            if status := re.fullmatch(r'futurebridge_requests_total{path="/v1/.*",status="(\d+)"}', name):
                result.statuses[status[1]] = result.statuses.get(status[1], 0) + int(count)
    return result


async def _together(url: str, asked: Iterator[Question], result: Soak) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:

        async def one_after_another() -> None:
            for question in asked:
                result.kinds[question.kind] += 1
                if wrong := await ask(client, question):
                    result.wrong.append(wrong)

        await asyncio.gather(*(one_after_another() for _ in range(result.clients)))


def lines(result: Mapping[str, Any]) -> list[str]:
    """The result in Markdown."""
    first, last = result["held"][0], result["held"][-1]
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in result["kinds"].items())
    statuses = ", ".join(f"{count:,} of {status}" for status, count in sorted(result["statuses"].items()))
    more = (last["resident_bytes"] - first["resident_bytes"]) / 2**20
    return [
        f"{last['requests']:,} requests ({kinds}), {result['clients']} at once, in {result['seconds']:.0f} s: "
        f"{len(result['wrong'])} wrong answers; statuses: {statuses}. From request {first['requests']:,} on, the "
        f"server's memory changed by {more:+.1f} MiB, to {last['resident_bytes'] / 2**20:.0f} MiB, its open files from "
        f"{first['open_files']} to {last['open_files']}, its threads from {first['threads']} to {last['threads']}. "
        "Whenever it was idle, no page of the KV cache was held.",
        "",
        f"*{result['device']}, commit {harness.shown_commit(result)}, {result['date']}*",
    ]


def main() -> None:
    """Print the result; exit with 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(description="thousands of mixed requests to one server")
    parser.add_argument("--requests", type=int, default=10_000, help="number of requests (default: 10,000)")
    parser.add_argument("--every", type=int, default=2_000, help="requests between two records (default: 2,000)")
    parser.add_argument("--write", action="store_true", help="also write benchmarks/results/soak/<device>.json")
    given = parser.parse_args()
    torch.set_num_threads(THREADS)
    result = {**harness.machine(), **asdict(soak(given.requests, given.every))}
    print(*lines(result), *result["wrong"][:SHOWN], sep="\n")
    if given.write:
        harness.write_result("soak", result)
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()

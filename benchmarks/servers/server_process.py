"""`futurebridge serve` with the demo's plans pair in a separate process, and the answers that it should give."""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.servers.live_server import Ours
from fb_core import CollaborativeDecoder, Generation, LLMPreference, RequestPolicy, Sampling
from fb_core.apps.demo.pairs import DemoPair

PAIR, THRESHOLD, NEW, LENGTH = "plans", 1.7, 60, 256  # NEW and LENGTH: maximum tokens of an answer and of a sequence
MODEL = f"demo:{PAIR}"
THREADS = 1  # torch's threads in every process; the models are small


class Server(Ours):
    """The process, on a free port of the loopback; once constructed it is ready, and it ends with the context."""

    def __init__(self, *options: str, **environment: str) -> None:
        given = ("--threshold", str(THRESHOLD), *options)
        super().__init__(MODEL, *given, context=LENGTH, threads=THREADS, **environment)
        self.metrics()  # after this answer it has opened all files that it opens without clients
        time.sleep(0.5)
        self.files = self.open_files()

    def cpu_seconds(self) -> float:
        """CPU time that it has used so far."""
        fields = self._about("stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Its present resident memory."""
        return int(self._about("statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def open_files(self) -> int:
        """Number of open files and sockets."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def threads(self) -> int:
        """Number of its threads."""
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def metrics(self) -> dict[str, float]:
        """Its metrics, by name and labels."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))}

    def wait_until_idle(self, seconds: float = 60.0) -> None:
        """Wait until no sequence is in progress, no page is held and no client is connected, or raise TimeoutError."""
        names = [f"futurebridge_{name}" for name in ("waiting", "running", "asking", "kv_pages_used")]
        stop = time.monotonic() + seconds
        while any((metrics := self.metrics())[name] for name in names):
            if time.monotonic() > stop:
                raise TimeoutError(
                    f"server: expected nothing under way, got { {name: metrics[name] for name in names} }"
                )
            time.sleep(0.05)
        while self.open_files() > self.files:
            if time.monotonic() > stop:
                raise TimeoutError(f"server: expected {self.files} open files without clients, got {self.open_files()}")
            time.sleep(0.05)

    def _about(self, file: str) -> str:
        return Path(f"/proc/{self.process.pid}/{file}").read_text()


class Truth(NamedTuple):
    """The answer to a prompt that runs alone."""

    text: str
    tokens: int
    ended: bool  # with the end-of-sequence token
    steps: list[int]  # of its events

    @classmethod
    def of(cls, generation: Generation, tokenizer: Any) -> Truth:
        """What a generation says."""
        tokens = generation.token_ids.tolist()
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        return cls(text, len(tokens), tokens[-1] == tokenizer.eos_token_id, [event.step for event in generation.events])


def alone(
    pair: DemoPair,
    prompts: Sequence[Sequence[int]],
    new: int = NEW,
    max_events: int = 8,
    sampling: Sampling | None = None,
) -> list[Truth]:
    """The answers to prompts without pages and server, one after another; several drawn ones of a prompt together."""
    words, policy = pair.world.tokenizer, RequestPolicy(THRESHOLD)
    decoder = CollaborativeDecoder(pair.slm, pair.llm, LLMPreference(), policy, tokenizer=words, max_events=max_events)
    equal = [list(group) for _, group in groupby(map(list, prompts))]
    generations = chain.from_iterable(decoder.generate_many(group, new, sampling=sampling) for group in equal)
    return [Truth.of(generation, words) for generation in generations]

"""What a server counts, as Prometheus metrics."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from fb_core.engine.engine import Engine, Token

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
Kind = TypeVar("Kind", Counter, Gauge, Histogram)


class Metrics:
    """Counters of requests, and gauges of the engine, which are read at each scrape.

    Args:
        engine: its load is shown.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.registry = engine, CollectorRegistry()
        self.requests = self._made(Counter, "requests", "Requests by path and status.", labelnames=("path", "status"))
        self.prompt_tokens = self._made(Counter, "prompt_tokens", "Tokens of prompts that were taken.")
        self.tokens = self._made(Counter, "tokens", "Tokens generated, as they come.")
        self.events = self._made(Counter, "events", "Events served, as they come.")
        self.event_errors = self._made(Counter, "event_errors", "Of these, those whose large model did not answer.")
        timed = partial(self._made, Histogram, buckets=SECONDS)
        self.event_seconds = timed("event_seconds", "From an event to its token: the large model, mostly.")
        self.first = timed("first_token_seconds", "From request to first text.")
        self.whole = timed("request_seconds", "From request to end.")
        for name, words, part in (
            ("waiting", "Sequences that wait for room.", "waiting"),
            ("running", "Sequences that run together.", "running"),
            ("asking", "Of these, those that wait for the large model.", "asking"),
            ("kv_pages_used", "Pages of keys and values that sequences hold.", "pages"),
            ("kv_pages", "All pages.", "all_pages"),
        ):
            self._made(Gauge, name, words).set_function(partial(self._load, part))

    def _made(self, kind: type[Kind], name: str, words: str, **options: Any) -> Kind:
        return kind(f"futurebridge_{name}", words, registry=self.registry, **options)

    def _load(self, part: str) -> float:
        return float(getattr(self.engine.load, part))

    def count(self, token: Token) -> None:
        """Count one more token."""
        self.tokens.inc()
        if token.event is not None:
            self.events.inc()
            self.event_errors.inc(token.event.error is not None)
            if token.seconds is not None:
                self.event_seconds.observe(token.seconds)

"""What a server counts, as Prometheus metrics."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from fb_core.decode.engine import Engine, Token

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters of requests, and gauges of the engine, which are read at each scrape."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": "futurebridge", "registry": self.registry}
        self.requests = Counter("requests", "Requests by path and status.", ("path", "status"), **own)
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens of the requests that were accepted.", **own)
        self.scored = Counter(
            "scored_tokens", "Tokens of prompts and continuations whose log-probs were asked for.", **own
        )
        self.tokens = Counter("tokens", "Tokens generated, as they come.", **own)
        self.events = Counter("events", "Events served, as they come.", **own)
        self.event_errors = Counter("event_errors", "Events whose large model did not answer.", **own)
        self.event_seconds = Histogram(
            "event_seconds", "From an event to its token, mostly the large model's time.", buckets=SECONDS, **own
        )
        self.first = Histogram("first_token_seconds", "From a request to its first text.", buckets=SECONDS, **own)
        self.whole = Histogram("request_seconds", "From a request to its end.", buckets=SECONDS, **own)
        for name, words, part in (
            ("waiting", "Sequences that wait to run.", "waiting"),
            ("running", "Sequences that run together.", "running"),
            ("asking", "Running sequences that wait for the large model.", "asking"),
            ("kv_pages_used", "Pages of keys and values that sequences hold.", "pages"),
            ("kv_pages", "Pages of keys and values in all.", "all_pages"),
        ):
            Gauge(name, words, **own).set_function(partial(attrgetter(f"load.{part}"), engine))

    def count(self, token: Token) -> None:
        """Count one more token."""
        self.tokens.inc()
        if token.event is not None:
            self.events.inc()
            self.event_errors.inc(token.event.error is not None)
            if token.seconds is not None:
                self.event_seconds.observe(token.seconds)

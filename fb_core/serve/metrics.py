"""What a server counts, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fb_core.engine.engine import Engine, Token

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics(Collector):
    """Counters of requests, and gauges of the engine, which are read at each scrape.

    Args:
        engine: its load is shown.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.requests = self._counter("requests", "Requests by path and status.", "path", "status")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that were taken.")
        self.tokens = self._counter("tokens", "Tokens generated, as they come.")
        self.events = self._counter("events", "Events served, as they come.")
        self.event_errors = self._counter("event_errors", "Of these, those whose large model did not answer.")
        self.event_seconds = self._seconds("event_seconds", "From an event to its token: the large model, mostly.")
        self.first = self._seconds("first_token_seconds", "From request to first text.")
        self.whole = self._seconds("request_seconds", "From request to end.")

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(f"futurebridge_{name}", words, labels, registry=self.registry)

    def _seconds(self, name: str, words: str) -> Histogram:
        return Histogram(f"futurebridge_{name}", words, buckets=SECONDS, registry=self.registry)

    def count(self, token: Token) -> None:
        """Count one more token."""
        self.tokens.inc()
        if token.event is not None:
            self.events.inc()
            self.event_errors.inc(token.event.error is not None)
            if token.seconds is not None:
                self.event_seconds.observe(token.seconds)

    def unread(self, status: int) -> None:
        """Count a request that could not be read."""
        self.requests.labels("other", str(status)).inc()

    def collect(self) -> Iterator[Metric]:
        """The engine's gauges."""
        load = self.engine.load
        for name, words, value in (
            ("waiting", "Sequences that wait for room.", load.waiting),
            ("running", "Sequences that run together.", load.running),
            ("asking", "Of these, those that wait for the large model.", load.asking),
            ("kv_pages_used", "Pages of keys and values that sequences hold.", load.pages),
            ("kv_pages", "All pages.", load.all_pages),
        ):
            yield GaugeMetricFamily(f"futurebridge_{name}", words, value=value)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

"""Counts what the server did and holds, in the form that Prometheus reads.

Figures of the conversations are read when they are asked for; only requests are counted here. No
label comes from a client.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcap.serve.contract import Figures, Piece, Reply

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
FAMILIES = {"size": GaugeMetricFamily, "count": CounterMetricFamily}  # of a field of `Figures`


class Metrics(Collector):
    """Counts requests, and reads the conversations' figures.

    Args:
        figures: gives them as they are now.
    """

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures
        self.registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "kvcap_http_requests", "Requests over HTTP.", ["path", "status"], registry=self.registry
        )
        self.first = Histogram(
            "kvcap_first_token_seconds",
            "From a request to the first text of its answer.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.whole = Histogram(
            "kvcap_answer_seconds",
            "From a request to the end of its answer.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of this moment."""
        now = self._figures()
        for each in fields(now):
            for kind, text in each.metadata.items():
                yield FAMILIES[kind](f"kvcap_{each.name}", text, getattr(now, each.name) or 0)

    async def timed(self, reply: Reply) -> AsyncIterator[Piece]:
        """Yield the pieces of an answer, and record their times if it ends normally."""
        begun, first = time.perf_counter(), True
        async for piece in reply:
            if first and piece.progress is None:
                self.first.observe(time.perf_counter() - begun)
                first = False
            yield piece
        self.whole.observe(time.perf_counter() - begun)

    def text(self) -> bytes:
        """Write everything as Prometheus reads it."""
        return generate_latest(self.registry)

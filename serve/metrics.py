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
SIZES = {  # of `Figures`; all others but texts, facts and those of yes or no are counts
    "budget_tokens": "Slots per KV head and layer that stay after an eviction.",
    "places": "Conversations that fit in memory.",
    "in_memory": "Conversations in memory, idle ones too.",
    "answering": "Conversations that are being answered.",
    "paused": "Answers that wait for their reader.",
    "waiting": "Requests in the queue.",
    "most_waiting": "Requests that the queue takes.",
    "on_disk": "Conversations on disk.",
    "memory_bytes": "Bytes of all caches that were made.",
    "shared_prompts": "System prompts whose slots are kept for further conversations.",
    "shared_prompt_bytes": "Bytes of the copies of these slots, beside the caches.",
    "index_bytes": "Bytes of the indexes by which evicted text is found, beside the caches.",
    "disk_bytes": "Bytes of conversations on disk.",
    "disk_cap": "Bytes that conversations on disk may take.",
    "process_bytes": "Bytes that the process holds.",
    "memory_cap": "Bytes that the process may hold; 0 where there is no cap.",
}
COUNTS = {
    "asked": "Requests for an answer, refused ones too.",
    "answered": "Answers that were written to their end.",
    "stopped": "Answers that were stopped by their reader, or that nobody read.",
    "failed": "Answers that failed.",
    "refused": "Requests that were refused as too many waited.",
    "prompt_tokens": "Tokens of prompts that were read.",
    "reused_tokens": "Tokens of prompts that were held and need not be read again.",
    "completion_tokens": "Tokens that were written.",
    "evicted_tokens": "Tokens that were evicted.",
    "recalled_tokens": "Tokens of prompts that were evicted text, read again.",
    "prompts_shared": "Conversations that began from the kept slots of a system prompt.",
    "shared_tokens": "Tokens of system prompts that these need not read; reused ones too.",
    "saved": "Conversations that were saved to disk.",
    "restored": "Conversations that were brought back from disk.",
    "dropped": "Files that could not be taken, or conversations that could not be saved.",
}


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
        for name, text in SIZES.items():
            yield GaugeMetricFamily(f"kvcap_{name}", text, getattr(now, name) or 0)
        for name, text in COUNTS.items():
            yield CounterMetricFamily(f"kvcap_{name}", text, getattr(now, name))

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


def unnamed() -> set[str]:
    """Return the fields of `Figures` that no metric shows."""
    return {f.name for f in fields(Figures)} - SIZES.keys() - COUNTS.keys()

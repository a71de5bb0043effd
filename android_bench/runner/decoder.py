"""Times a whole decoder: the first token, an answer, a long prompt, and a sustained run.

The loop over its graphs is that of `kvcap chat`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvcap.android_bench.runner.inputs import Array, Cell, hash11

if TYPE_CHECKING:
    from kvcap.runtime.backends.onnxruntime.decoder import ExportedDecoder

SAME = ("id", "model", "policy", "positions", "dtype", "budget", "block", "evict_every",
        "weights_bytes", "state_bytes", "prompt_tokens", "answer_tokens",
        "long_tokens")  # fmt: skip


def row_of(plan: Cell, threads: int, provider: str) -> Cell:
    """Return the result's row of the plan's decoder, before it is timed."""
    settings = plan["decoder"]
    sha256 = {entry["file"]: entry["sha256"] for entry in plan["files"]}
    return {
        **{key: settings[key] for key in SAME},
        "model_sha256": sha256[settings["manifest"]],
        "threads": threads,
        "provider_asked": provider,
        "provider_got": None,
        "status": "ok",
        "reason": None,
    }


def loaded(manifest: Path, every: int, threads: int) -> ExportedDecoder:
    """Load the decoder and allocate its buffers; `every` tokens of an answer it evicts."""
    from kvcap.runtime.backends.onnxruntime.decoder import ExportedDecoder, evictors_of
    from kvcap.runtime.backends.onnxruntime.graph import Graph
    from kvcap.runtime.backends.onnxruntime.manifest import Manifest

    facts = json.loads(manifest.read_text(encoding="utf-8"))
    parsed = Manifest(manifest.parent, facts)
    graph, evictors = Graph(parsed.decoder, threads), evictors_of(parsed, threads)
    return ExportedDecoder(parsed, graph, evictors, facts["block_size"], every)


class TextReader:
    """A reader that feeds a text to a decoder, token by token or in blocks.

    Args:
        decoder: the decoder, which is emptied first.
        ids: tokens of the text, which begins again at its end.
    """

    def __init__(self, decoder: ExportedDecoder, ids: list[int]) -> None:
        self.decoder, self.ids, self.seen = decoder, ids, 0
        decoder.held = [0] * len(decoder.budgets)

    def read(self, count: int) -> int:
        """Read the first `count` tokens in blocks; return the likeliest next token."""
        token, start = 0, self.seen
        while (left := start + count - self.seen) > 0:
            length = min(left, self.decoder.room)
            at = self.seen - start
            token = self.run([self.ids[(at + i) % len(self.ids)] for i in range(length)])
        return token

    def run(self, ids: list[int]) -> int:
        """Read these tokens in one block; return the likeliest next token."""
        logits = self.decoder.run(ids, self.seen, [])
        self.seen += len(ids)
        return int(logits[0].argmax())


def checked(decoder: ExportedDecoder, check: Cell, folder: Path) -> Cell:
    """Compare the decoder's logits with those that the plan expects; return their parity."""
    text, expected = (
        TextReader(decoder, check["prompt"]),
        np.fromfile(folder / check["file"], "<f4"),
    )
    for length in check["runs"]:
        logits = decoder.run(check["prompt"][text.seen : text.seen + length], text.seen, [])
        text.seen += length
    return compared(logits[0], expected, check["allowed"])


def compared(logits: Array, expected: Array, allowed: float) -> Cell:
    """Compare logits [V] with the expected ones; return their parity."""
    error = float(np.abs(logits - expected).max())
    parity: Cell = {
        "passed": error <= allowed,
        "error": error if error < np.inf else None,
        "allowed": allowed,
    }
    if not parity["passed"]:
        parity["text"] = f"logits differ by {error:.3g}, allowed are {allowed:.3g}"
    return parity


def measured(decoder: ExportedDecoder, settings: Cell, rounds: int) -> Cell:
    """Measure a decoder; return all samples, as fields of its row."""
    count = max(settings["prompt_tokens"], settings["long_tokens"])
    ids = (hash11(settings["seed"], count) % settings["vocabulary"]).tolist()
    TextReader(decoder, ids).read(decoder.block_size)  # warms up: the runtime allocates memory
    row: Cell = {"first_ms": [], "token_us": [], "long_ms": []}
    for _ in range(rounds):
        start = time.perf_counter()
        long = TextReader(decoder, ids)
        long.read(settings["long_tokens"])
        row["long_ms"].append((time.perf_counter() - start) * 1000)
        start = time.perf_counter()
        text = TextReader(decoder, ids)
        token = text.read(settings["prompt_tokens"])
        row["first_ms"].append((time.perf_counter() - start) * 1000)
        samples = []
        for _ in range(settings["answer_tokens"] - 1):
            before = time.perf_counter_ns()
            token = text.run([token])
            samples.append((time.perf_counter_ns() - before) / 1000)
        row["token_us"].append(samples)
    evicting = (
        -(-settings["long_tokens"] // settings["block"]) - settings["budget"] // settings["block"]
    )
    row["evicting_blocks"] = max(0, evicting)
    row["sustained"] = sustained(text, token, settings)
    return row


def sustained(text: TextReader, token: int, settings: Cell) -> list[Cell]:
    """Continue an answer for the plan's time; return tokens and seconds of each window."""
    windows: list[Cell] = []
    end = time.perf_counter() + settings["sustained_seconds"]
    while (start := time.perf_counter()) < end:
        until, tokens = min(start + settings["window_seconds"], end), 0
        while tokens == 0 or time.perf_counter() < until:
            token = text.run([token])
            tokens += 1
        windows.append({"seconds": time.perf_counter() - start, "tokens": tokens})
    return windows

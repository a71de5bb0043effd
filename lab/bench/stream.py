"""Reads a very long text under a cap, and measures bytes of the cache and of the process.

`growth` is how much the process's peak grew since the first row. Reads `lengths` (the last), the
first of `budgets` and of `policies`, `block_size`; runs pocket.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from typing import Any

import torch

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.pocket.prose import filler
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.testing.process_peak import peak

DEFAULTS = {"lengths": (1_000_000,), "budgets": (256,)}
COLUMNS = ("tokens", "kv_bytes", "held", "process_peak", "growth", "tok_s")
SHARES = (0.01, 0.1, 0.25, 0.5, 0.75, 1.0)  # shares of the text after which a row is written
SENTENCES = 64  # sentences that are tokenized at once


def run(options: BenchmarkOptions) -> Result:
    """Return a row at each of `SHARES` of the text; the process's peak includes the weights."""
    tokens = options.lengths[-1]
    runtime = Runtime.from_pretrained(
        policy=options.policies[0],
        budget_tokens=options.budgets[0],
        block_size=options.block_size,
    )
    loop, rows = BlockLoop(runtime.model, runtime.new_cache()), list[dict[str, Any]]()
    stops = sorted({max(1, int(share * tokens)) for share in SHARES})
    start = time.perf_counter()
    text = _blocks(runtime, options.block_size)
    for stop in stops:
        while (left := stop - loop.cache.seen) > 0:
            loop.read(next(text)[:, :left])
        rows.append(
            {
                "tokens": loop.cache.seen,
                "kv_bytes": loop.cache.nbytes,
                "held": loop.cache.held,
                "process_peak": (most := peak()),
                "growth": most - rows[0]["process_peak"] if rows else 0,
                "tok_s": loop.cache.seen / (time.perf_counter() - start),
            }
        )
    plan = runtime.plan
    derived = {
        "policy": plan.policy,
        "budget": plan.budget_tokens,
        "block_size": plan.block_size,
        "positions": plan.positions,
        "planned_kv_bytes": plan.cache_bytes,
    }
    return Result("stream", COLUMNS, rows, derived)


def _blocks(runtime: Runtime, size: int) -> Iterator[torch.Tensor]:
    """Yield endless text of the corpus as token ids [1, size]."""
    sentences, ids = filler(Random("stream")), list[int]()
    while True:
        while len(ids) < size:
            text = " ".join(next(sentences) for _ in range(SENTENCES))
            ids += runtime.tokenizer(text, add_special_tokens=False)["input_ids"]
        yield torch.tensor([ids[:size]], device=runtime.model.device)
        del ids[:size]

"""Times decoding under every policy, budget and mode of positions, beside a growing cache.

Reads `policies`, `budgets`, `block_size`, `steps`, `repeats`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.measure import (
    Plain,
    budget_cache,
    decode_ms,
    percentiles,
    random_llama,
    random_prompt,
)
from kvcap.policies import load_policy
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.types import Positions

COLUMNS = ("runs", "budget", "positions", "evict_every", "decode_ms", "ratio")
EVICT_EVERY = (1, 16, 64)
MODES: tuple[Positions, ...] = ("compact", "true")  # 'auto' is always one of them


def run(options: BenchmarkOptions) -> Result:
    """Time a token over a full cache, in ms; `ratio` is to transformers with equally many slots."""
    capped, plain = random_llama(options, "kvcap"), random_llama(options, "sdpa")
    rows: list[dict[str, Any]] = []
    for budget in options.budgets:
        peer = Plain(plain)
        peer.prefill(random_prompt(budget))
        base = _times(peer, options)
        rows.append(_row("transformers", budget, "", "", base, base))
        for policy, mode, every in product(options.policies, MODES, EVICT_EVERY):
            if every > options.block_size or not load_policy(policy).policy.evicts:
                continue
            cache = budget_cache(
                capped, options, budget, policy=policy, positions=mode, evict_every=every
            )
            loop = BlockLoop(capped, cache)
            loop.prefill(random_prompt(budget + options.block_size))
            rows.append(_row(policy, budget, mode, every, _times(loop, options), base))
    derived = {name: getattr(options, name) for name in ("block_size", "layers", "hidden", "steps")}
    return Result("decode", COLUMNS, rows, {**derived, "dtype": "float32"})


def _times(loop: Any, options: BenchmarkOptions) -> list[float]:
    """Time chunks as long as the rarest eviction's interval, so that all have equal evictions."""
    chunk = min(max(EVICT_EVERY), options.steps)
    return decode_ms(loop.read, options.steps * options.repeats, chunk)


def _row(
    runs: str,
    budget: int,
    positions: Positions | str,
    every: int | str,
    times: list[float],
    base: list[float],
) -> dict[str, Any]:
    took = percentiles(times)
    return {
        "runs": runs,
        "budget": budget,
        "positions": positions,
        "evict_every": every,
        "decode_ms": took,
        "ratio": took["p50"] / percentiles(base)["p50"],
    }

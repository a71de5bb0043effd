"""Times reading a long prompt: kvcap under a cap beside transformers without one.

Reads `lengths`, the first of `budgets` and of `policies`, `block_size`, `repeats`, `steps`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.measure import (
    MIB,
    Plain,
    allocator_peak,
    budget_cache,
    decode_ms,
    percentiles,
    random_llama,
    random_prompt,
    seconds,
)
from kvcap.runtime.backends.pytorch.loop import BlockLoop

COLUMNS = ("runs", "tokens", "prefill_s", "peak_mib", "decode_ms")


def run(options: BenchmarkOptions) -> Result:
    """Measure prefill seconds, peak memory over the weights, and milliseconds per token after it.

    Both models alternate, so that a machine that slows down slows both. Memory is measured in
    separate passes, as the profiler takes time.
    """
    capped, plain = random_llama(options, "kvcap"), random_llama(options, "sdpa")
    makers: dict[str, Callable[[], Any]] = {
        "kvcap": partial(_capped, capped, options),
        "transformers": partial(Plain, plain),
    }
    _warm_up(makers)
    rows: list[dict[str, Any]] = []
    for length in options.lengths:
        ids = random_prompt(length)
        times: dict[str, list[float]] = {name: [] for name in makers}
        decoding: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(options.repeats):
            for name, make in makers.items():
                loop = make()
                times[name].append(seconds(partial(loop.prefill, ids)))
                decoding[name] += decode_ms(loop.read, options.steps)
                del loop
        rows += [
            {
                "runs": name,
                "tokens": length,
                "prefill_s": percentiles(times[name]),
                "peak_mib": allocator_peak(partial(_prefill, make, ids)) / MIB,
                "decode_ms": percentiles(decoding[name]),
            }
            for name, make in makers.items()
        ]
    return Result("prefill", COLUMNS, rows, _derived(options, rows))


def _capped(model: Any, options: BenchmarkOptions) -> BlockLoop:
    cache = budget_cache(model, options, options.budgets[0], policy=options.policies[0])
    return BlockLoop(model, cache)


def _prefill(make: Callable[[], Any], ids: torch.Tensor) -> Any:
    """Return the loop after it has read the prompt, so that its cache counts as memory."""
    loop = make()
    loop.prefill(ids)
    return loop


def _warm_up(makers: dict[str, Callable[[], Any]]) -> None:
    for make in makers.values():
        make().prefill(random_prompt(256))


def _derived(options: BenchmarkOptions, rows: list[dict[str, Any]]) -> dict[str, Any]:
    by = {(row["runs"], row["tokens"]): row for row in rows}
    ratios = {
        str(length): {
            "prefill_speedup": by["transformers", length]["prefill_s"]["p50"]
            / by["kvcap", length]["prefill_s"]["p50"],
            "memory_ratio": by["transformers", length]["peak_mib"]
            / by["kvcap", length]["peak_mib"],
            "decode_speedup": by["transformers", length]["decode_ms"]["p50"]
            / by["kvcap", length]["decode_ms"]["p50"],
        }
        for length in options.lengths
    }
    return {
        "policy": options.policies[0],
        "budget": options.budgets[0],
        "block_size": options.block_size,
        "layers": options.layers,
        "hidden": options.hidden,
        "dtype": "float32",
        "repeats": options.repeats,
        "ratios": ratios,
    }

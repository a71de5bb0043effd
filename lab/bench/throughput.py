"""Times tokens per second at each method's largest batch: Llama-3.2-3B's shape, random weights.

All sequences have a prompt of `lengths` tokens in the cache and generate together, token by token.
`transformers` keeps the whole prompt in its growing cache, on SDPA; kvcap under `policies` keeps
5 % of it. The batch is the largest that the device's memory holds: a multiple of 8, lowered by a
sixteenth whenever a step runs out of memory. Only generation is timed. Prompts are not read:
transformers' cache is filled with random keys and values, and kvcap reads as many random tokens as
fill its slots, as times do not depend on what caches hold. Reads `lengths`, `policies`, `steps`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.measure import percentiles, quoted
from kvcap.evals.reports import device_name, versions
from kvcap.lab.bench.gpu import milliseconds, require_cuda
from kvcap.lab.random_models import random_model
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.errors import MemoryCapExceeded
from kvcap.runtime.models.arguments import cache_argument

DEFAULTS = {"lengths": (32768,), "steps": 16}
SHARE = 0.05  # share of a prompt that is kept
BLOCK = 16  # tokens of every sequence that are read at once, for the activations' memory
MOST = 1024  # most sequences
ROOM = 12 << 30  # bytes left to activations and logits
COLUMNS = (
    "work", "n", "budget", "policy", "batch", "median_ms", "tokens_per_s", "peer",
    "peer_batch", "peer_median_ms", "peer_tokens_per_s", "ratio",
)  # fmt: skip


def run(options: BenchmarkOptions) -> Result:
    """Return a row for every length and policy.

    Raises:
        ValueError: there is no CUDA device.
    """
    require_cuda()
    model = random_model("random-3b", "cuda")
    machine = {"device": device_name("cuda"), "versions": versions()}
    rows: list[dict[str, Any]] = []
    for length in options.lengths:
        plain = _largest(model, _slot_bytes(model) * length, _growing(model, length), options)
        for policy in options.policies:
            budget = round(SHARE * length)
            mine = _largest(
                model, _slot_bytes(model) * (budget + BLOCK), _fixed(model, budget, policy), options
            )
            rows.append(
                {
                    "work": "throughput",
                    "n": length,
                    "budget": budget,
                    "policy": policy,
                    **mine,
                    "peer": "transformers",
                    **{f"peer_{key}": value for key, value in plain.items()},
                    "ratio": mine["tokens_per_s"] / plain["tokens_per_s"],
                    **machine,
                }
            )
    return Result("throughput", COLUMNS, rows, machine)


Begin = Callable[[int], Callable[[Tensor], Any]]  # takes a batch size, returns a reader of [B, 1]


def _growing(model: Any, length: int) -> Begin:
    def begin(batch: int) -> Callable[[Tensor], Any]:
        model.set_attn_implementation("sdpa")
        config, cache = model.config, DynamicCache(config=model.config)
        shape = (batch, config.num_key_value_heads, length, config.head_dim)
        for layer in range(config.num_hidden_layers):
            keys, values = (
                torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2)
            )
            cache.update(keys, values, layer)

        @torch.inference_mode()
        def read(token: Tensor) -> None:
            model(token, **cache_argument(model, cache), use_cache=True, logits_to_keep=1)

        return read

    return begin


def _fixed(model: Any, budget: int, policy: str) -> Begin:
    def begin(batch: int) -> Callable[[Tensor], Any]:
        model.set_attn_implementation("kvcap")
        cache = BudgetCache(model.config, budget, BLOCK, policy)
        loop = BlockLoop(model, cache.allocate(batch, torch.bfloat16, "cuda"))
        text = torch.randint(model.config.vocab_size, (batch, budget + 2 * BLOCK), device="cuda")
        loop.prefill(text)
        return loop.read

    return begin


def _largest(
    model: Any, sequence_bytes: int, begin: Begin, options: BenchmarkOptions
) -> dict[str, Any]:
    """Return a step's times and tokens a second at the largest batch that memory holds."""
    free = torch.cuda.mem_get_info()[0] - ROOM
    batch = min(MOST, max(1, free // sequence_bytes))
    while True:
        batch = batch // 8 * 8 or batch
        try:
            figures = {"batch": batch, **_timed(model, batch, begin(batch), options.steps)}
            torch.cuda.empty_cache()
            return figures
        except (torch.OutOfMemoryError, MemoryCapExceeded):
            if batch == 1:
                raise
        gc.collect()  # after the handler, as its traceback holds the cache and its graphs
        torch.cuda.empty_cache()
        batch = max(1, batch - max(1, batch // 16))


def _timed(model: Any, batch: int, read: Callable[[Tensor], Any], steps: int) -> dict[str, Any]:
    token = torch.randint(model.config.vocab_size, (batch, 1), device="cuda")
    for _ in range(4):
        read(token)
    times = percentiles([milliseconds(partial(read, token)) for _ in range(steps)])
    return {**quoted(times, "ms"), "tokens_per_s": batch / times["p50"] * 1e3}


def _slot_bytes(model: Any) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    config = model.config
    return int(4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim)

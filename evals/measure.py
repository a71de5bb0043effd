"""Measures times for benchmarks, with percentiles, and makes models of random weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvcap.evals.bench import BenchmarkOptions
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.models.arguments import cache_argument
from kvcap.runtime.testing.memory_meter import allocator_peak as allocator_peak

VOCABULARY = 4096
MIB = 1024 * 1024


def seconds(function: Callable[[], Any]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the 20th, 50th and 80th percentile."""
    quantiles = torch.tensor(values, dtype=torch.float64).quantile(
        torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    )
    return dict(zip(("p20", "p50", "p80"), quantiles.tolist(), strict=True))


def quoted(times: Mapping[str, float], unit: str, prefix: str = "") -> dict[str, float]:
    """Return percentiles as the columns of a row that has more than one series of times.

    Args:
        times: the result of `percentiles`.
        unit: the unit of the times, in which names end.
        prefix: a text with which names begin.

    >>> quoted({"p20": 1.0, "p50": 2.0, "p80": 4.0}, "ms", "peer_")
    {'peer_median_ms': 2.0, 'peer_p20_ms': 1.0, 'peer_p80_ms': 4.0}
    """
    names = {"median": "p50", "p20": "p20", "p80": "p80"}
    return {f"{prefix}{name}_{unit}": times[p] for name, p in names.items()}


def random_llama(options: BenchmarkOptions, attention: str) -> Any:
    """Make a Llama of random float32 weights; equal options give equal weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 256),
        head_dim=64,
        intermediate_size=options.hidden * 43 // 16,
        vocab_size=VOCABULARY,
        max_position_embeddings=131072,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation=attention).eval()


def random_prompt(length: int) -> torch.Tensor:
    """Return random token ids [1, length], which are equal for equal lengths."""
    return torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))


class Plain:
    """A peer that runs transformers with SDPA and a growing cache, and reads prompts at once.

    `logits_to_keep=1` saves it the logits of the whole prompt, as a careful user would.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)

    @torch.inference_mode()
    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """Read tokens [1, T]; return the last one's logits [1, V]."""
        given = cache_argument(self.model, self.cache)
        out = self.model(ids, **given, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    prefill = read


def decode_ms(read: Callable[[torch.Tensor], Any], steps: int, chunk: int = 1) -> list[float]:
    """Return milliseconds per token, averaged over chunks of `chunk` tokens, after one warm-up."""
    token = torch.zeros(1, 1, dtype=torch.long)
    read(token)

    def some() -> None:
        for _ in range(chunk):
            read(token)

    return [seconds(some) * 1000 / chunk for _ in range(max(1, steps // chunk))]


def budget_cache(model: Any, options: BenchmarkOptions, budget: int, **more: Any) -> BudgetCache:
    """Allocate a cache for one sequence."""
    cache = BudgetCache(model.config, budget, options.block_size, **more)
    return cache.allocate(1, model.dtype, model.device)

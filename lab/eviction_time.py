"""Times evictions alone: everything that a layer does after its attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.cache import BudgetCache

WARM_UP_BLOCKS, MEASURED_BLOCKS = 4, 12


def eviction_ms(
    model: Any, cache: BudgetCache, ids: torch.Tensor, blocks: int = MEASURED_BLOCKS
) -> list[float]:
    """Return the milliseconds that eviction takes in each of `blocks` blocks, all layers together.

    Eviction is everything that a layer does after its attention: window, state, scores, selection
    and moving kept tokens. The cache is full first, so that every block evicts as many tokens as it
    has. A corrector's work inside attention is not counted.

    Args:
        model: loaded with `attn_implementation='kvcap'`.
        cache: an empty cache.
        ids: tokens [1, any length], which are read over and over.
        blocks: number of measured blocks, after `WARM_UP_BLOCKS` others.
    """
    spent: list[float] = []
    cache.allocate(1, model.dtype, model.device)
    for layer in cache.capped_layers:
        engine: Any = layer.engine
        engine.evict = _timed(engine.evict, spent, model.device)
    loop = BlockLoop(model, cache, graphs=False)  # in a graph, eviction could not be timed alone
    size, budget = cache.block_size, cache.layout.budget_tokens

    def read() -> float:
        spent.clear()
        positions = torch.arange(cache.seen, cache.seen + size, device=ids.device)
        loop.read(ids[:, positions % ids.shape[1]])
        return sum(spent) * 1000

    read()
    # A head with far more slots than the others may never fill up, so four budgets must do.
    while cache.held < budget and cache.seen < 4 * budget:
        read()
    return [read() for _ in range(WARM_UP_BLOCKS + blocks)][WARM_UP_BLOCKS:]


def _timed(
    function: Callable[..., Any], spent: list[float], device: torch.device
) -> Callable[..., Any]:
    """Return `function`, with its times added to `spent`."""

    def timed(*args: Any) -> Any:
        _wait_for(device)
        start = time.perf_counter()
        result = function(*args)
        _wait_for(device)
        spent.append(time.perf_counter() - start)
        return result

    return timed


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

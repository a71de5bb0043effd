"""Which blocks do the same to a cache, so that one CUDA graph serves all of them, or one pass some.

Once every head holds its budget, a block evicts as many tokens as it brings; while nothing was ever
evicted, it only adds to what is held. Knows what a cache counts, no model and no device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcap.runtime.budget_cache import BudgetCache


def uneven(cache: BudgetCache) -> str | None:
    """What keeps the blocks of a full cache from being all alike, if anything."""
    eviction = cache.eviction
    if not cache.layout.shape.all_capped:
        return "native sliding layers grow and shrink"
    if eviction.layers_move:
        return "slots move between layers"
    if eviction.heads_move:
        return "slots move between heads"
    if eviction.corrector is not None:
        return "evicted tokens are decided on one by one"
    return None


def excess(cache: BudgetCache) -> int | None:
    """Slots that heads hold above what they keep, where all do alike and keep what they may."""
    segments = [segment for layer in cache.capped_layers for segment in layer.segments]
    found = {segment.held - segment.budget for segment in segments}
    settled = all(segment.stay == segment.budget for segment in segments)
    return found.pop() if settled and len(found) == 1 else None


def fills(cache: BudgetCache, tokens: int) -> bool:
    """Whether a block of that many only adds to what is held, nothing ever having gone."""
    layers = cache.capped_layers
    if cache.eviction.state or not all(len(layer.segments) == 1 for layer in layers):
        return False
    return all(x.held == x.seen and x.held + tokens <= x.segments[0].stay for x in layers)


def steady(cache: BudgetCache, tokens: int) -> bool:
    """Whether every block of that many does the same to a cache that holds as many slots."""
    if uneven(cache) is not None or not cache.eviction.policy.evicts:
        return False
    every = cache.evict_every if tokens == 1 else 1
    # Where heads lie that hold unequally many is told to the device by the pass before.
    alone = all(len(layer.segments) == 1 for layer in cache.capped_layers)
    return excess(cache) in range(every) and (every == 1 or alone)


def evicts(cache: BudgetCache, tokens: int) -> bool:
    """Whether a steady cache gives slots up after a block of that many."""
    return tokens > 1 or (excess(cache) or 0) + 1 >= cache.evict_every


def blocks_of(cache: BudgetCache, tokens: int) -> int:
    """In how many blocks of one pass that many tokens are read: one where not all are alike."""
    fit = tokens <= cache.block_size + cache.spare
    return 1 if fit or not steady(cache, tokens) else -(-tokens // cache.block_size)

"""CUDA graphs of a block: once a cache is full every block does the same, so it is replayed whole.

A full cache evicts as many tokens as it reads: shapes, addresses and all that Python decides stay
what they are, and only the tokens and their positions differ. Knows a model and a cache.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kvcap.runtime.budget_cache import BudgetCache
from kvcap.runtime.errors import first_line
from kvcap.runtime.tuning import Tuning


class BlockGraphs:
    """The graphs of one cache, a length each.

    Args:
        model: on the cache's device.
        cache: what it reads into.
        compiled: parts of the model by `torch.compile`, see `Tuning`.
    """

    def __init__(self, model: Any, cache: BudgetCache, compiled: bool = False) -> None:
        self.model, self.cache = model, cache
        self.refused = why_not(cache)
        """Why blocks are not replayed; None: they are."""
        self.made: dict[Any, BlockGraph] = {}
        self._tuning = None if self.refused else Tuning(model, compiled)
        # The length last read eagerly, if as its graph will, and whether logits were wanted.
        self._warm: tuple[int, bool] | None = None

    def read(self, ids: Tensor, wanted: bool = True) -> Tensor | None:
        """Read a block [B, T]; returns the last token's logits, or None: not replayable.

        Of shape [B, V], or [0, V] where they are not `wanted`.
        """
        cache, length = self.cache, ids.shape[1]
        if not self._alike(length):
            return None
        spans, seen = tuple(cache.pinned_spans), cache.seen
        key = (*ids.shape, wanted, spans)
        if key in self.made:
            cache.count(length)
        elif self._warm != (length, wanted):
            return None
        else:
            self.made = {k: graph for k, graph in self.made.items() if k[-1] == spans}
            kept, before = next(iter(self.made.values()), None), cache.counts
            try:
                with self._tuned(ids):
                    # One block is never in hand with another: graphs share their memory.
                    self.made[key] = BlockGraph(self.model, cache, ids, wanted, kept and kept.pool)
            except RuntimeError as error:
                cache.counts = before
                self.refused = f"capture failed: {first_line(error)}"
                return None
        return self.made[key].replay(ids, seen)

    def warm_up(self, ids: Tensor, wanted: bool = True) -> AbstractContextManager[None]:
        """Around a block [B, T] that is read eagerly: as its graph will, if it is to have one.

        Only then is everything ready that a graph cannot make: kernels compiled for these shapes,
        and Python's numbers on the device.
        """
        alike = self._alike(ids.shape[1])
        self._warm = (ids.shape[1], wanted) if alike else None
        return self._tuned(ids) if alike else nullcontext()

    def _tuned(self, ids: Tensor) -> AbstractContextManager[None]:
        assert self._tuning is not None
        return self._tuning.applied(ids.numel())

    def _alike(self, length: int) -> bool:
        """Whether every block of this length does the same from now on."""
        one = length == 1 == self.cache.evict_every
        whole = length == self.cache.block_size
        return self.refused is None and (one or whole) and self.cache.full


class BlockGraph:
    """One block's graph. Making it counts the block as read; `replay` does the work.

    Args:
        model: as above.
        cache: full.
        ids: token ids [B, T] of the shape it is for.
        wanted: whether the last token's logits are.
        pool: memory of another graph of the same cache.
    """

    def __init__(
        self, model: Any, cache: BudgetCache, ids: Tensor, wanted: bool, pool: Any = None
    ) -> None:
        start = cache.next_position
        self.ids = ids.clone()
        self.clock = torch.tensor(cache.seen, device=ids.device)
        last = torch.full((int(wanted),), ids.shape[1] - 1, device=ids.device)
        self.graph = torch.cuda.CUDAGraph()
        first = start if cache.moves else self.clock  # compact positions of a full cache stay
        cache.tell_time_by(self.clock)
        cache.reading_at = start
        try:
            with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                place = torch.arange(ids.shape[1], device=ids.device)
                self.logits = model(
                    input_ids=self.ids,
                    position_ids=(first + place).expand(ids.shape[0], -1),
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=last,
                ).logits.flatten(0, 1)
        finally:
            cache.tell_time_by(None)
            cache.reading_at = None
        self.pool, self.last = self.graph.pool(), last  # read by it, as are the rows
        self.rows = [layer.rows for layer in cache.capped_layers]

    def replay(self, ids: Tensor, seen: int) -> Tensor:
        """Read `ids` after `seen` tokens."""
        self.ids.copy_(ids)
        self.clock.fill_(seen)
        self.graph.replay()
        logits: Tensor = self.logits
        return logits.clone()


def why_not(cache: BudgetCache) -> str | None:
    """What keeps a full cache's blocks from being all alike, if anything."""
    eviction = cache.eviction
    if not cache.layout.shape.all_capped:
        return "native sliding layers grow and shrink"
    if eviction.layers_move:
        return "slots move between layers"
    if eviction.heads_move:
        return "slots move between heads"
    if eviction.corrector is not None:
        return "evicted tokens are decided on one by one"
    return None if eviction.policy.evicts else "nothing is evicted"

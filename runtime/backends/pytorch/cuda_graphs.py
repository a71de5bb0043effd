"""CUDA graphs of blocks: what is the same for every block is captured once and replayed whole.

A full cache evicts as many tokens as it reads: shapes, addresses and all that Python decides stay
what they are, and only the tokens and their positions differ. One that evicts every few tokens has
a graph for each of them. A cache that only fills differs in
how many slots are in use besides, which kernels read on the device. Small blocks go several through
the model in one pass, as its matrices are read once for all of them; a layer takes them one after
the other. Knows a model and a cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.step import Pass
from kvcap.runtime.cache.streams import SideStream
from kvcap.runtime.errors import first_line
from kvcap.runtime.models.fused.decoder import decoder_of

PASS = 512  # tokens that a GPU reads at little more cost than fewer


class Kind(NamedTuple):
    """What passes have in common that one graph serves."""

    batch: int
    length: int  # of all its blocks
    wanted: bool  # the last token's logits are
    filling: bool  # nothing was ever evicted
    spans: tuple[tuple[int, int], ...]  # pinned tokens, where any are evicted
    excess: int  # slots held above the budget before it, if not filling


class BlockGraphs:
    """The graphs of one cache.

    Args:
        model: on the cache's device.
        cache: what it reads into.
        compiled: parts of the model by `torch.compile`, see `decoder_of`.
        several: small blocks in one pass, which takes activations of `PASS` tokens, those of
            all sequences counted.
    """

    def __init__(
        self, model: Any, cache: BudgetCache, compiled: bool = False, several: bool = True
    ) -> None:
        self.model, self.cache, self.several = model, cache, several
        self.refused = uneven(cache)
        """Why blocks are not replayed; None: they are."""
        self.made: dict[Kind, BlockGraph] = {}
        self.decoder = None if self.refused else decoder_of(model, compiled)
        """What is captured in the model's place; None: the model itself is."""
        self._warm: set[Kind] = set()  # of passes read as their graphs will

    def read(self, ids: Tensor, wanted: bool = True) -> Tensor | None:
        """Read a pass [B, T]; returns the last token's logits, or None: not replayable.

        Of shape [B, V], or [0, V] where they are not `wanted`.
        """
        cache, kind = self.cache, self._kind(ids, wanted)
        if kind is None:
            return None
        seen = cache.seen
        if kind in self.made:
            cache.count(kind.length, kept=kind.filling or not evicts(cache, kind.length))
        elif kind not in self._warm:
            return None
        else:
            self.made = {k: g for k, g in self.made.items() if k.filling or k.spans == kind.spans}
            kept, before = next(iter(self.made.values()), None), cache.counts
            try:
                # One block is never in hand with another: graphs share their memory.
                model, pool = self.decoder or self.model, kept and kept.pool
                self.made[kind] = BlockGraph(model, cache, ids, kind, pool)
            except RuntimeError as error:
                cache.counts = before
                self.refused = f"capture failed: {first_line(error)}"
                return None
        return self.made[kind].replay(ids, seen)

    def warm_up(self, ids: Tensor, wanted: bool = True) -> Any:
        """Prepare a pass [B, T] that is read eagerly; returns the model that is to read it.

        It reads as its graph will, if it is to have one. Only then is everything ready that a graph
        cannot make: kernels compiled for these shapes, and Python's numbers on the device.
        """
        kind = self._kind(ids, wanted)
        if any(layer.rows for layer in self.cache.capped_layers):
            self._warm.clear()  # of what tells where heads lie, only the last is kept
        if kind is not None:
            self._warm.add(kind)
            if kind.filling:
                clock = torch.tensor(self.cache.seen, device=ids.device)
                self.cache.current.tell_time_by(clock, self.cache.block_size, filling=True)
            else:
                self.cache.move()  # as in all passes that the graph will serve
        return self.model if kind is None else self.decoder or self.model

    def _kind(self, ids: Tensor, wanted: bool) -> Kind | None:
        """Of a pass, if every one that follows it does the same."""
        cache, (batch, length) = self.cache, ids.shape
        lengths = (1, cache.block_size, self._several(batch))
        if self.refused is not None or length not in lengths:
            return None
        if fills(cache, length):
            return Kind(batch, length, wanted, True, (), 0)
        if not steady(cache, length):
            return None
        spans, above = tuple(cache.pinned_spans), excess(cache)
        assert above is not None, "a steady cache has an excess"
        return Kind(batch, length, wanted, False, spans, above)

    def ahead(self, batch: int, left: int) -> int | None:
        """How many of a prompt's tokens the next pass reads, if it is to have several blocks."""
        length, cache = self._several(batch), self.cache
        if self.refused is not None or not cache.block_size < length <= left:
            return None
        return length if steady(cache, length) or fills(cache, length) else None

    def _several(self, batch: int) -> int:
        """Tokens of as many blocks as go through the model in one pass: one, or more."""
        size = self.cache.block_size
        return max(1, PASS // (batch * size)) * size if self.several else size


class BlockGraph:
    """The graph of one kind of pass. Making it counts one as read; `replay` does the work.

    Args:
        model: as above.
        cache: as the kind wants it.
        ids: token ids [B, T] of such a pass.
        kind: of it.
        pool: memory of another graph of the same cache.
    """

    def __init__(
        self, model: Any, cache: BudgetCache, ids: Tensor, kind: Kind, pool: Any = None
    ) -> None:
        start = cache.next_position
        self.ids = ids.clone()
        self.clock = torch.tensor(cache.seen, device=ids.device)
        last = torch.full((int(kind.wanted),), kind.length - 1, device=ids.device)
        self.graph = torch.cuda.CUDAGraph()
        fixed = cache.moves and not kind.filling  # compact positions of a full cache stay
        side, blocks = SideStream(ids.device, kind.batch), blocks_of(cache, kind.length)
        with (
            cache.passing(Pass(start, blocks=blocks, side=side)) as current,
            torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"),
            side,
        ):
            current.tell_time_by(self.clock, cache.block_size, kind.filling)
            place = cache.places(torch.arange(kind.length, device=ids.device))
            self.logits = model(
                input_ids=self.ids,
                position_ids=((start if fixed else self.clock) + place).expand(kind.batch, -1),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=last,
            ).logits.flatten(0, 1)
        self.pool, self.last = self.graph.pool(), last  # read by it, as are the rows
        self.rows = [layer.rows for layer in cache.capped_layers]

    def replay(self, ids: Tensor, seen: int) -> Tensor:
        """Read `ids` after `seen` tokens."""
        self.ids.copy_(ids)
        self.clock.fill_(seen)
        self.graph.replay()
        logits: Tensor = self.logits
        return logits.clone()


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

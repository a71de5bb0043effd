"""Captures a forward pass over a block as a CUDA graph, and replays it for the blocks that follow.

That is possible in the steady state: a full cache evicts as many tokens as it reads, so shapes,
addresses and Python's decisions stay the same, and only tokens and positions differ. While a cache
fills, the number of slots in use differs too; kernels read it on the device. Several small blocks
go through the model in one pass, since its matrices are then read once; each layer takes them one
after the other.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.step import URGENT, ForwardContext, SideStream
from kvcap.runtime.errors import first_line
from kvcap.runtime.models.arguments import cache_argument
from kvcap.runtime.models.fused.decoder import decoder_of

PASS = 512  # tokens of a pass that a GPU reads at little more cost than fewer


class PassKind(NamedTuple):
    """The properties of a pass that its CUDA graph fixes: equal kinds share a graph."""

    batch: int
    length: int  # tokens of all its blocks, fillers included
    need_logits: bool  # of the last token
    longest: int  # no row is longer; 0: slots are no rows
    compact: bool  # the positions at which it is read
    weighs: bool = False  # rows have regions that leave before or after others


class BlockGraphs:
    """A collection of one cache's CUDA graphs, by the kind of pass.

    Args:
        model: on the cache's device.
        cache: the cache that it reads into.
        several: read several small blocks in one pass of up to `PASS` tokens in all sequences.
    """

    def __init__(self, model: Any, cache: BudgetCache, several: bool = True) -> None:
        self.model, self.cache, self.several = model, cache, several
        self.refused = why_unsteady(cache)
        """Says why no pass is replayed; None: some can be."""
        self.captured: dict[PassKind, BlockGraph] = {}
        self.decoder = None if self.refused else decoder_of(model)
        """Holds kvcap's own decoder, which is captured instead of the model; None: the model is."""
        self.failed: str | None = None
        """Says why passes of some kinds are not replayed, where only they are not."""
        # A policy that looks at all queries of a block would look at fillers', too.
        self._fills_up = cache.eviction.policy.queries_observed is not None
        self._read = set[PassKind]()  # kinds read once without a graph, which can be captured
        self._not_captured = set[PassKind]()  # kinds whose capture failed
        self._spans: tuple[tuple[int, ...], ...] = ()  # pinned, or weighed, as graphs were captured

    @property
    def nbytes(self) -> int:
        """Return the bytes that the allocator reserved for the memory pool of all graphs."""
        pools = {graph.pool for graph in self.captured.values()} - {None}
        segments = torch.cuda.memory_snapshot() if pools else []
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) in pools)

    def read(self, ids: Tensor, need_logits: bool = True) -> Tensor | None:
        """Replay a pass over ids [B, T], or return None where that is not possible.

        Returns:
            The last token's logits [B, V]; without `need_logits` [0, V].
        """
        kind = self._kind(ids, need_logits)
        if kind is None:
            return None
        cache = self.cache
        regions = () if cache.by_rows else cache.regions.weighed  # which rows have on the device
        if (spans := (*cache.pinned_spans, *regions)) != self._spans:
            self.captured, self._spans = {}, spans
        if kind not in self.captured and not self._capture(ids, kind):
            return None
        logits = self.captured[kind].replay(ids, cache.seen)
        cache.advance(ids.shape[1])  # while the GPU computes
        return logits

    def reader(self, ids: Tensor, need_logits: bool) -> Any:
        """Return the model to read a pass with, without a graph; note that it can be captured."""
        if (kind := self._kind(ids, need_logits)) is not None:
            self._read.add(kind)
            self.cache.enable_rotation()  # as in all passes that its graph will serve
        return self.decoder or self.model

    def _capture(self, ids: Tensor, kind: PassKind) -> bool:
        """Try to capture this kind of pass; return whether a graph of it exists.

        A model's pass is captured only after one of its kind was read without a graph; kvcap's own
        decoder needs no such pass. A capture fails if something must be loaded or uploaded first,
        which a pass without a graph does, or if a policy reads numbers on the host.
        """
        known = kind in self._read
        if kind in self._not_captured or not (known or self.decoder is not None):
            return False
        # No two run at the same time, so all graphs share the memory of the first.
        pool = next((graph.pool for graph in self.captured.values()), None)
        model = self.decoder or self.model
        self.cache.enable_rotation()  # as in all passes that the graph will serve
        try:
            with self.cache.only_captured():
                graph = BlockGraph(model, self.cache, ids, kind, pool, at_once=not known)
        except RuntimeError as error:
            if known:
                self._not_captured.add(kind)
                self.failed = f"capture failed: {first_line(error)}"
            return False
        self.captured[kind] = graph
        return True

    def _kind(self, ids: Tensor, need_logits: bool) -> PassKind | None:
        """Return the kind of a pass; None where it is read without a graph."""
        cache, (batch, length) = self.cache, ids.shape
        if self.refused is not None:
            return None
        if length == 1 and cache.balance is not None and any(x.excess for x in cache.capped_layers):
            return None  # a graph of a token evicts one slot of each row at most
        block = cache.block_size
        whole = length in (1, block, self._several(batch))
        if not cache.by_rows:
            if not whole or not is_full(cache):
                return None
            return PassKind(batch, length, need_logits, 0, cache.compact_positions)
        if not whole:
            # A prompt's last block is filled up: one graph serves all lengths.
            if not (need_logits and self._fills_up and length < block):
                return None
            length = block
        part = length if blocks_of(cache, length) == 1 else block
        table = cache.row_table()
        longest, weighs = table.longest(part), table.regions is not None
        return PassKind(batch, length, need_logits, longest, cache.compact_positions, weighs)

    def pass_length(self, batch: int, left: int) -> int | None:
        """Return how many of a prompt's `left` tokens are read as several blocks in one pass."""
        length, cache = self._several(batch), self.cache
        if self.refused is not None or not cache.block_size < length <= left:
            return None
        if cache.layout.shares_out(length) or cache.leaves_window(length):
            return None  # a block that would leave the window does so by itself
        fits = cache.by_rows and length <= cache.spare
        return length if fits or is_full(cache) else None

    def _several(self, batch: int) -> int:
        """Return the tokens of as many blocks as go through the model in one pass."""
        size = self.cache.block_size
        return max(1, PASS // (batch * size)) * size if self.several else size


class BlockGraph:
    """A captured pass: making it counts a pass in the cache, `replay` computes one.

    Args:
        model: the model or decoder that is captured.
        cache: in the state in which such passes find it.
        ids: token ids [B, T] of such a pass.
        kind: the kind of the pass.
        pool: memory of another graph of the same cache, to be shared.
        at_once: neither wait for running kernels nor free memory first.
    """

    def __init__(
        self,
        model: Any,
        cache: BudgetCache,
        ids: Tensor,
        kind: PassKind,
        pool: Any = None,
        at_once: bool = False,
    ) -> None:
        device, blocks, start = ids.device, blocks_of(cache, kind.length), cache.next_position
        sizes = cache.admit(kind.length, blocks)
        self.ids = ids.new_zeros(kind.batch, kind.length)
        # A kernel writes it, as a copy would wait for everything that the GPU has yet to compute.
        self.token_counter = torch.full((), cache.seen, device=device)
        self.last = torch.full((int(kind.need_logits),), kind.length - 1, device=device)
        self.count = torch.full((), kind.length, dtype=torch.int32, device=device)
        self.graph = torch.cuda.CUDAGraph()
        side = SideStream(device, kind.batch)
        with (
            cache.passing(
                ForwardContext(start, blocks=blocks, sizes=sizes, stream=side)
            ) as current,
            _capturing(self.graph, pool, device, at_once),
            side,
        ):
            current.bind_token_counter(self.token_counter, cache.block_size)
            offsets = cache.offsets(torch.arange(kind.length, device=device))
            # Compact positions of a full cache are those of every pass.
            first: int | Tensor = start if kind.compact else self.token_counter
            if cache.by_rows:
                count = self.count if kind.length > 1 and blocks == 1 else None
                part = -(-kind.length // blocks)
                current.rows = cache.row_pass(part, always=True, count=count)
                first = current.rows.first(self.token_counter)
            self.logits = model(
                input_ids=self.ids,
                position_ids=(first + offsets).expand(kind.batch, -1),
                **cache_argument(model, cache),
                use_cache=True,
                logits_to_keep=self.last,
            ).logits.flatten(0, 1)
        self.pool = self.graph.pool()
        self.on_device = [layer.on_device for layer in cache.capped_layers]  # which the graph reads

    def replay(self, ids: Tensor, seen: int) -> Tensor:
        """Read `ids` [B, T] after `seen` tokens; returns the logits."""
        self.token_counter.fill_(seen)
        self.ids[:, : ids.shape[1]].copy_(ids)  # fillers may be whatever was read before
        self.count.fill_(ids.shape[1])
        self.last.fill_(ids.shape[1] - 1)
        self.graph.replay()
        logits: Tensor = self.logits
        return logits.clone()


@contextmanager
def _capturing(
    graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device, at_once: bool
) -> Iterator[None]:
    """Capture the `with` block into `graph`, whatever other threads do meanwhile.

    Unless `at_once`, wait for the GPU and free memory first.
    """
    mode, stream = "thread_local", _stream(device)
    with _garbage_stays():
        if not at_once:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
                yield
            return
        with torch.cuda.stream(stream):
            torch.cuda.current_blas_handle()  # make this thread's, as a capture cannot
            graph.capture_begin(pool, mode)
            try:
                yield
            finally:
                graph.capture_end()


@contextmanager
def _garbage_stays() -> Iterator[None]:
    """Keep Python from collecting garbage, as a graph that is freed breaks a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for all captures: one, as libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device, priority=URGENT)


def why_unsteady(cache: BudgetCache) -> str | None:
    """Return why no pass over a cache can be captured; None: some can."""
    eviction, layout = cache.eviction, cache.layout
    if cache.by_rows:
        return None
    # Slots that are no rows are captured, too: without graphs a GPU decodes 20 times as slowly
    # (CaliDrop 7 tokens/s for 143, a policy without kernels 16 for 308, on an H200).
    if layout.shape.shared:
        return "layers read the slots of others"
    if layout.shape.slides:
        return "native sliding layers grow and shrink"
    if cache.state_layers:
        return "some layers are recurrent"
    if layout.shape.latent is not None:
        return "slots hold latents"
    if layout.shape.sinks:
        return "attention has sink logits"
    if eviction.heads_move or eviction.layers_move:
        return f"slots move between {'heads' if eviction.heads_move else 'layers'}"
    if cache.evict_every > 1:
        return "slots are evicted every few tokens"
    if not eviction.policy.evicts:
        return "nothing is evicted"
    if eviction.corrector is not None and eviction.corrector.place != "device":
        return "evicted tokens lie on the host"
    return None


def is_full(cache: BudgetCache) -> bool:
    """Return whether every head holds as many slots as it may, so that passes are all alike."""
    segments = (segment for layer in cache.capped_layers for segment in layer.segments)
    return cache.stores_full and all(s.held == s.target_length for s in segments)


def blocks_of(cache: BudgetCache, tokens: int) -> int:
    """Return in how many blocks a pass reads so many tokens."""
    size = cache.block_size
    fits = tokens <= size or tokens <= size + cache.spare or not is_full(cache)
    return 1 if fits else -(-tokens // size)

"""Captures a forward pass over a block as a CUDA graph, and replays it for the blocks that follow.

That is possible in the steady state: a full cache evicts as many tokens as it reads, so shapes,
addresses and Python's decisions stay the same, and only tokens and positions differ. A cache that
evicts every few tokens has a graph for each of these steps. While a cache fills, the number of
slots in use differs too; kernels read it on the device. Several small blocks go through the model
in one pass, since its matrices are then read once; each layer takes them one after the other.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcap import kernels
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.step import URGENT, ForwardContext, SideStream
from kvcap.runtime.errors import first_line
from kvcap.runtime.models.arguments import cache_argument
from kvcap.runtime.models.fused.decoder import Decoder, covers, decoder_of

PASS = 512  # tokens of a pass that a GPU reads at little more cost than fewer
RUN = 16  # blocks that follow each other before the host hears how they shared slots out


class PassKind(NamedTuple):
    """The properties of a pass that its CUDA graph fixes: equal kinds share a graph."""

    batch: int
    length: int  # tokens of all its blocks, fillers included
    need_logits: bool  # of the last token
    filling: bool  # nothing was ever evicted
    spans: tuple[tuple[int, int], ...]  # pinned tokens, where any are evicted
    excess: int  # slots held above the budget before the pass, if not filling
    longest: int = 0  # of unequal rows that kernels read: none is longer
    slots: tuple[int, ...] = ()  # where they move between layers, those each has and may fill
    compact: bool = False  # the positions at which it is read
    counted: bool = False  # the device is told how many tokens are no fillers


class BlockGraphs:
    """The CUDA graphs of one cache, by the kind of pass.

    Args:
        model: on the cache's device.
        cache: what it reads into.
        several: read several small blocks in one pass of up to `PASS` tokens in all sequences.
    """

    def __init__(self, model: Any, cache: BudgetCache, several: bool = True) -> None:
        self.model, self.cache, self.several = model, cache, several
        self.refused = why_unsteady(cache)
        """Why blocks are not replayed; None: they are."""
        self.captured: dict[PassKind, BlockGraph] = {}
        self.decoder = None if self.refused else self._decoder()
        """What is captured in the model's place; None: the model itself is."""
        self._warm: set[PassKind] = set()  # read once without a graph, so that they can be captured
        self._cold: set[PassKind] = set()  # must be read so: capturing them at once has failed
        self.eager_blocks: str | None = None
        """Why blocks after which slots move are not replayed, where only they are not."""

    def _decoder(self) -> Decoder | None:
        return decoder_of(self.model)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory pool that all graphs share, as the allocator has reserved it."""
        pools = {graph.pool for graph in self.captured.values()} - {None}
        segments = torch.cuda.memory_snapshot() if pools else []
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) in pools)

    def read(self, ids: Tensor, need_logits: bool = True) -> Tensor | None:
        """Replay a pass over ids [B, T], or return None where that is not possible.

        Returns:
            The last token's logits [B, V]; without `need_logits` [0, V].
        """
        cache, kind = self.cache, self._kind(ids, need_logits)
        if kind not in self.captured and cache.settle():
            kind = self._kind(ids, need_logits)
        if kind is None:
            return None
        seen, table = cache.seen, cache.row_table() if kind.longest else None
        known = kind in self.captured
        if not known and not self._capture(ids, kind):
            return None
        logits = self.captured[kind].replay(ids, seen)
        if known:  # while the GPU computes
            stay = kind.filling or not evicts(cache, kind.length, kind.excess)
            cache.advance(ids.shape[1], kept=stay)
        if table is not None:
            cache.agree(table, ids.shape[1])
        return logits

    def _capture(self, ids: Tensor, kind: PassKind) -> bool:
        """Capture a pass, at the latest when such a one was read without a graph; whether it was.

        What was not `warm_up` is captured all the same where kvcap's own code reads it, which the
        trial of the decoder has run before, and unless a policy of somebody's own may read numbers
        to share slots out: its first such pass is not. It may fail: something is to be uploaded, or
        loaded.
        """
        cache, warm = self.cache, kind in self._warm
        alike = {k._replace(need_logits=kind.need_logits, counted=kind.counted)
                 for k in self.captured}  # fmt: skip
        known = kind in alike or not cache.shares_out(kind.length)
        known = known and self.decoder is not None
        if not warm and (not known or kind in self._cold):
            return False
        these = kind.spans, kind.slots
        self.captured = {k: g for k, g in self.captured.items()
                         if k.filling or (k.spans, k.slots) == these}  # fmt: skip
        first, before = next(iter(self.captured.values()), None), cache.counters
        if not kind.filling:
            cache.enable_rotation()  # as in all passes that the graph will serve
        try:
            # No two run at the same time, so all graphs share the memory of the first.
            model, pool = self.decoder or self.model, first and first.pool
            self.captured[kind] = BlockGraph(model, cache, ids, kind, pool, at_once=not warm)
            if ids.shape[1] < kind.length:  # fillers were counted
                cache.counters = before
                cache.advance(ids.shape[1], kept=False)
        except RuntimeError as error:
            cache.counters, why = before, f"capture failed: {first_line(error)}"
            if not warm:
                self._cold.add(kind)
            elif cache.shares_out(kind.length):
                self.eager_blocks = why  # a policy may read numbers; tokens have graphs
            else:
                self.refused = why
        return kind in self.captured

    def warm_up(self, ids: Tensor, need_logits: bool = True) -> Any:
        """Prepare a pass [B, T] that is read eagerly; returns the model that is to read it.

        It reads by the code that its graph will capture, if it is to have one. That prepares
        what cannot be done during a capture: kernels are compiled for these shapes, and Python's
        numbers are copied to the device. Other passes are read by the same model, as it launches
        fewer kernels.
        """
        kind = self._kind(ids, need_logits)
        rows = self.cache.context.rows
        if rows is None and any(len(layer.segments) > 1 for layer in self.cache.capped_layers):
            self._warm.clear()  # of what tells the device where heads lie, only the last is kept
        if kind is not None:
            self._warm.add(kind)
            if kind.filling:
                token_counter = torch.full((), self.cache.seen, device=ids.device)
                self.cache.context.bind_token_counter(
                    token_counter, self.cache.block_size, filling=True
                )
            else:
                self.cache.enable_rotation()  # as in all passes that the graph will serve
            if rows is not None:
                rows.always = True
        return self.decoder or self.model

    def _kind(self, ids: Tensor, need_logits: bool) -> PassKind | None:
        """The kind of a pass; None where the passes that follow it would differ."""
        cache, (batch, length) = self.cache, ids.shape
        if self.refused is not None:
            return None
        lengths, rows = (1, cache.block_size, self._several(batch)), cache.by_rows()
        counted = rows and need_logits and self._counts(length)
        if length not in lengths and not counted:
            return None
        if rows:
            return self._kind_of_rows(batch, length, need_logits, counted)
        compact = cache.compact_positions
        if fills(cache, length):
            return PassKind(batch, length, need_logits, True, (), 0, compact=compact)
        above = _steady_excess(cache, length)
        if above is None:
            return None
        spans, slots = tuple(cache.pinned_spans), tuple[int, ...]()
        if cache.eviction.layers_move:
            each = [layer.segments[0] for layer in cache.capped_layers]
            slots = tuple(n for segment in each for n in (segment.budget, segment.target_length))
        return PassKind(
            batch, length, need_logits, False, spans, above, slots=slots, compact=compact
        )

    def _counts(self, length: int) -> bool:
        """Whether a prompt's last block of that length is filled up to a whole one.

        Of unequal rows, of which the device knows how many slots each has: one graph serves all
        lengths. Not where a policy looks at all queries of a block, fillers' too.
        """
        observed = self.cache.eviction.policy.queries_observed
        return 1 < length <= self.cache.block_size and observed is not None

    def _kind_of_rows(
        self, batch: int, length: int, need_logits: bool, counted: bool
    ) -> PassKind | None:
        """The same where kernels read where unequal rows lie, and whether they are full."""
        cache = self.cache
        table, length = cache.row_table(), cache.block_size if counted else length
        if table is None or (self.eager_blocks and cache.shares_out(length)):
            return None
        if length > cache.room and not steady(cache, length):
            return None
        if length == 1 and any(s.held > s.target_length for x in cache.capped_layers
                               for s in x.segments):  # fmt: skip
            return None  # a graph of a token gives up one slot of each at most
        longest = table.longest(min(length, cache.block_size))
        spans, compact = tuple(cache.pinned_spans), cache.compact_positions
        return PassKind(
            batch, length, need_logits, False, spans, 0, longest, compact=compact, counted=counted
        )

    def pass_length(self, batch: int, left: int) -> int | None:
        """How many of the `left` tokens of a prompt go into one pass of several blocks, if any."""
        length, cache = self._several(batch), self.cache
        if self.refused is not None or not cache.block_size < length <= left:
            return None
        if cache.leaves_window(length):
            return None  # the block that would does so by itself
        return length if steady(cache, length) or fills(cache, length) else None

    def run_length(self, left: int) -> int | None:
        """How many of the `left` tokens of a prompt are read block by block in one go, if any.

        The host need not hear after each block how it shared slots out, if graphs replay them.
        """
        size, cache = self.cache.block_size, self.cache
        length = left if left <= (RUN + 1) * size else RUN * size
        replays = any(kind.longest and kind.length == size for kind in self.captured)
        if not replays or not self.follows(length) or cache.room < size:
            return None
        return None if cache.leaves_window(length) else length

    def follows(self, tokens: int) -> bool:
        """Whether so many tokens are several blocks after each of which slots are shared out."""
        cache = self.cache
        return tokens > cache.block_size > 1 and cache.shares_out(tokens) and cache.by_rows()

    def _several(self, batch: int) -> int:
        """The tokens of as many blocks as go through the model in one pass."""
        size = self.cache.block_size
        return max(1, PASS // (batch * size)) * size if self.several else size


class Uncaptured(BlockGraphs):
    """Reads all passes by the code that graphs capture, untried, and captures none."""

    def _decoder(self) -> Decoder | None:
        if not covers(self.model):
            return None
        decoder = Decoder(self.model)
        decoder.join()
        return decoder

    def read(self, ids: Tensor, need_logits: bool = True) -> Tensor | None:
        """Nothing is replayed."""
        return None


class BlockGraph:
    """A captured pass. Making it advances the cache's counters by a pass; `replay` computes it.

    Args:
        model: as above.
        cache: in the state in which such passes find it.
        ids: token ids [B, T] of such a pass.
        kind: of the pass.
        pool: memory of another graph of the same cache, to be shared.
        at_once: do not wait for what runs, nor free memory first.
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
        start, table = cache.next_position, cache.row_table() if kind.longest else None
        self.ids = ids.new_zeros(kind.batch, kind.length)
        self.ids[:, : ids.shape[1]] = ids
        # By a kernel, since a copy would wait for all that the GPU is to compute.
        self.token_counter = torch.full((), cache.seen, device=ids.device)
        last = torch.full((int(kind.need_logits),), ids.shape[1] - 1, device=ids.device)
        self.count = torch.full((), ids.shape[1], dtype=torch.int32, device=ids.device)
        self.graph = torch.cuda.CUDAGraph()
        fixed = (
            cache.compact_positions and not kind.filling
        )  # compact positions of a full cache stay
        side, blocks = SideStream(ids.device, kind.batch), blocks_of(cache, kind.length)
        with (
            cache.passing(ForwardContext(start, blocks=blocks, stream=side)) as current,
            _capturing(self.graph, pool, ids.device, at_once),
            side,
        ):
            current.bind_token_counter(self.token_counter, cache.block_size, kind.filling)
            place = cache.places(torch.arange(kind.length, device=ids.device))
            first = start if fixed else self.token_counter
            if table is not None:
                count = self.count if kind.length > 1 and blocks == 1 else None
                current.rows = cache.row_pass(table, kind.longest, count, always=True)
                first = current.rows.first(first)
            self.logits = model(
                input_ids=self.ids,
                position_ids=(first + place).expand(kind.batch, -1),
                **cache_argument(model, cache),
                use_cache=True,
                logits_to_keep=last,
            ).logits.flatten(0, 1)
            cache.evict_together()
        self.counted, self.pool = kind.counted, self.graph.pool()
        self.last = last  # read by the graph, as is `on_device`
        self.on_device = [layer.on_device for layer in cache.capped_layers]

    def replay(self, ids: Tensor, seen: int) -> Tensor:
        """Read `ids` [B, T] after `seen` tokens; returns the logits."""
        self.token_counter.fill_(seen)
        if not self.counted:
            self.ids.copy_(ids)
        else:
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
    """Within it `graph` captures, without an error for what other threads do meanwhile.

    Unless `at_once`, it first waits for the GPU and frees what memory it can.
    """
    mode, stream = "thread_local", _stream(device)
    with _garbage_stays():
        if not at_once:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
                yield
            return
        with torch.cuda.stream(stream):
            torch.cuda.current_blas_handle()  # this thread's, which no capture can make
            graph.capture_begin(pool, mode)
            try:
                yield
            finally:
                graph.capture_end()


@contextmanager
def _garbage_stays() -> Iterator[None]:
    """Within it Python collects no garbage, which may be a graph, whose end breaks a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """On which all graphs are captured, as libraries keep a workspace for every stream."""
    return torch.cuda.Stream(device, priority=URGENT)


def why_unsteady(cache: BudgetCache) -> str | None:
    """Why a full cache never reaches a steady state; None: it does."""
    eviction = cache.eviction
    if cache.layout.shape.shared:
        return "layers read the slots of others"
    if cache.layout.shape.slides:
        return "native sliding layers grow and shrink"
    if cache.state_layers:
        return "some layers are recurrent"
    if cache.layout.shape.latent is not None:
        return "slots hold latents"
    if cache.layout.shape.sinks:
        return "attention has sink logits"
    allocated = cache.allocation.batch is not None
    if eviction.heads_move and not (
        cache.by_rows() if allocated else kernels.covers_rows(eviction)
    ):
        return "slots move between heads"
    if eviction.corrector is not None and eviction.corrector.place != "device":
        return "evicted tokens lie on the host"
    return None


def excess(cache: BudgetCache) -> int | None:
    """Slots that every head holds above its budget; None where heads differ or are shrinking.

    Where slots move between layers, above what the layer is to have until the next block.
    """
    found, moves = None, cache.eviction.layers_move
    for layer in cache.capped_layers:  # asked before every token
        for segment in layer.segments:
            above = segment.held - segment.target_length
            shrinks = segment.target_length != segment.budget and not moves
            if shrinks or found not in (None, above):
                return None
            found = above
    return found


def fills(cache: BudgetCache, tokens: int) -> bool:
    """Whether a block of so many tokens only fills free slots of a cache that never evicted."""
    layers = cache.capped_layers
    if layers[0].held < layers[0].seen:
        return False  # asked before every token
    if cache.eviction.layers_move and tokens > 1:
        return False  # each block says what its layers want
    if not all(len(layer.segments) == 1 for layer in layers):
        return False
    if cache.eviction.state and not cache.covers_rows():
        return False
    return all(x.held == x.seen and x.held + tokens <= x.segments[0].target_length for x in layers)


def steady(cache: BudgetCache, tokens: int) -> bool:
    """Detects the steady state, in which one CUDA graph replays every block of so many tokens."""
    return _steady_excess(cache, tokens) is not None


def _steady_excess(cache: BudgetCache, tokens: int) -> int | None:
    """The `excess` of a cache that is `steady`; None: it is not."""
    if why_unsteady(cache) is not None or not cache.eviction.policy.evicts:
        return None
    if not cache.stores_full:
        return None
    if cache.balance is not None and (tokens > 1 or not cache.balance.keeps):
        return None
    if cache.eviction.heads_move and (cache.layout.divides(tokens) or not cache.by_rows()):
        return None
    every = cache.evict_every if tokens == 1 else 1
    # Where heads lie that hold unequally many is told to the device by the pass before.
    if every > 1 and any(len(layer.segments) > 1 for layer in cache.capped_layers):
        return None
    above = excess(cache)
    return above if above is not None and 0 <= above < every else None


def evicts(cache: BudgetCache, tokens: int, above: int) -> bool:
    """Whether a cache that holds so many slots above its budget evicts after such a block."""
    return tokens > 1 or above + 1 >= cache.evict_every


def blocks_of(cache: BudgetCache, tokens: int) -> int:
    """In how many blocks a pass reads so many tokens: one outside the steady state."""
    fit = tokens <= cache.block_size + cache.spare
    return 1 if fit or not steady(cache, tokens) else -(-tokens // cache.block_size)

"""Lets several sessions share a cache while they answer, so that one pass reads a token of each.

A model's weights are read once for all of them, which is most of the time that a token takes. Every
session has equally many slots, however much it has read: they are copied into a row of the shared
cache while it answers, and back afterwards. Kernels read how many slots of each row are in use, so
that one CUDA graph serves whatever they hold. Knows sessions and caches; no policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kvcap import kernels
from kvcap.runtime.backends.pytorch.cuda_graphs import why_unsteady
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.sampler import draw_each
from kvcap.runtime.backends.pytorch.shared_pass import (
    SharedPass,
    passes_on,
    rehearse_pass,
    rotated_key_shapes,
    why_no_pass,
)
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.pinned_slots import merged
from kvcap.runtime.cache.pool import Segment
from kvcap.runtime.cache.regions import MOST, PINNED, Region, moved
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.models.wrappers import text_config
from kvcap.runtime.planning.dry_run import rehearse_block
from kvcap.runtime.planning.plan import MemoryPlan
from kvcap.runtime.planning.serving import Shared
from kvcap.runtime.session.batch import Answer
from kvcap.runtime.types import Span


@dataclass
class Begun:
    """A record of a pass over rows that has begun."""

    rows: list[int]  # one of each answer, in their order
    drawing: set[int]  # rows whose next tokens the pass draws
    uncounted: set[int]  # rows whose sessions' caches have not counted the token yet
    logits: torch.Tensor | None = None  # [rows, V]
    wait: Callable[[], object] = lambda: None  # waits until it is computed
    error: Exception | None = None  # why it failed


@dataclass
class Lease:
    """A record of a row that a session has while it answers."""

    cache: BudgetCache  # the session's own
    first: int  # tokens of the session, from its first on, that are never evicted
    ahead: int = 0  # the rows' counter minus the session's

    @property
    def regions(self) -> tuple[Region, ...]:
        """Return what leaves before or after other text, or never, where the rows have it."""
        spans = self.cache.pinned_spans
        pins = [(start, stop, PINNED) for start, stop in spans if stop > self.first]
        return moved([*self.cache.regions.weighed, *pins], self.first, self.ahead)


class SharedCache:
    """A cache for several sessions, each of which has a row of its slots.

    Positions of slots count the tokens read before them. All rows share one counter, so that the
    positions of a session's tokens are raised when it gets a row. Those of first tokens that are
    never evicted stay, as policies know these by their positions.
    """

    def __init__(self, model: Any, cache: BudgetCache, size: int) -> None:
        self.cache, self.size = cache, size
        self.loop = BlockLoop(model, cache, several=False)
        cache.by_sequence()
        self._pins = pins_of(cache)
        self.sinks = max(sinks for sinks, _ in self._pins)
        self._named = {
            name: buffer.unflatten(0, (size, -1))
            for name, buffer in cache.allocation.buffers.items()
            if not name.startswith("rotation.")  # a table that all share
        }
        self._leases: dict[int, Lease] = {}  # by row
        self._begun: Begun | None = None
        self.asynchronous = model.device.type == "cuda"
        """Says whether `begin` returns before a pass is computed; see `TokenReader`."""
        self._ids = torch.zeros(size, 1, dtype=torch.long, device=model.device)
        self._drawn = torch.zeros(size, dtype=torch.long, pin_memory=self.asynchronous)
        self._empty()

    @property
    def nbytes(self) -> int:
        """Return the bytes of the cache and its CUDA graphs, without the sessions' own."""
        return self.cache.nbytes + self.loop.graph_bytes

    def fits(self, answer: Answer) -> bool:
        """Return whether a session's slots can be copied into a row."""
        loop: Any = answer.session.loop
        cache = loop.cache
        if self._row_of(cache) is not None:
            return True
        if loop.read_short or not cache.compact_positions or cache.eviction != self.cache.eviction:
            return False
        # A pinned first token that is read later would get a position of the shared counter.
        first, later = self._pinned(cache)
        if cache.seen < max(1, first):
            return False
        if later and (self.cache.eviction.rescorer is not None or len(later) > MOST):
            return False  # a rescorer asks for pins, which rows know as scores
        if later and pins_of(cache) != self._pins:
            return False  # first tokens yielded to them
        return all(s.held <= s.target_length for x in cache.capped_layers for s in x.segments)

    def join(self, answer: Answer) -> None:
        """Copy a session's slots into a free row; `Session.fetch_cache` copies them back."""
        session, own = answer.session, answer.session.loop.cache
        if self._row_of(own) is not None:
            return
        assert self._begun is None, "rows are given between passes"
        row = next(row for row in range(self.size) if row not in self._leases)
        with interrupts_deferred():
            if not self._leases or own.seen > self.cache.seen:
                self._count_from(max(own.seen, self.cache.seen))
            lease = Lease(own, self._pinned(own)[0])
            self._copy(row, own, into_row=True)
            self._move(row, lease, self.cache.seen - own.seen)
            self._leases[row] = lease
            self._place(row, lease)
            session.cache_away = partial(self._give_back, row, lease)

    def begin(self, answers: list[Answer], tokens: list[int]) -> Callable[[], list[Any]]:
        """Begin to read the token of each of these, which have rows; see `TokenReader.begin`.

        A pass changes all rows, so that sessions that are not among these give their rows back.
        """
        ids, rows, samplers = [0] * self.size, list[int](), dict[int, Any]()
        for answer, token in zip(answers, tokens, strict=True):
            row = self._row_of(answer.session.loop.cache)
            assert row is not None
            assert answer.step is not None
            ids[row] = token
            rows.append(row)
            if answer.step.sampler is not None:
                samplers[row] = answer.step.sampler
        for row in self._leases.keys() - set(rows):
            self._give_back(row, self._leases[row])
        self.cache.regions.of_rows = {row: lease.regions for row, lease in self._leases.items()}
        begun = self._begun = Begun(rows, set(samplers), set(rows))
        with interrupts_deferred():
            self._ids.copy_(torch.tensor(ids)[:, None], non_blocking=True)
            try:
                begun.logits = self.loop.read(self._ids)
                if samplers:
                    self._drawn.copy_(draw_each(begun.logits, samplers), non_blocking=True)
                begun.wait = self.loop.launched()
            except Exception as error:
                begun.error = error
        return self._end

    def _end(self) -> list[Any]:
        """End the pass that has begun; return a token or logits [1, V] for each of its answers."""
        begun = self._begun
        assert begun is not None
        with interrupts_deferred():
            for row in list(begun.uncounted):
                self._count(row)
            self._begun = None
            if begun.error is not None:
                self.cache.reset()
                self._empty()
                error, begun.error = begun.error, None
                try:
                    raise error
                finally:
                    del error  # whose traceback has this frame
        begun.wait()
        logits, drawn = begun.logits, self._drawn.tolist()
        assert logits is not None
        return [drawn[i] if i in begun.drawing else logits[i : i + 1] for i in begun.rows]

    def _count(self, row: int) -> None:
        """Count the token in a session's cache; if the pass failed, reset it and free its row."""
        begun = self._begun
        assert begun is not None
        begun.uncounted.remove(row)
        cache = self._leases[row].cache
        if begun.error is None:
            for layer in cache.capped_layers:
                layer.advance(1)
        else:
            self._free(row)
            cache.reset()

    def _row_of(self, own: BudgetCache) -> int | None:
        """Return the row of the session that has this cache; None: it has none."""
        return next((row for row, lease in self._leases.items() if lease.cache is own), None)

    def _give_back(self, row: int, lease: Lease) -> None:
        """Copy a row's slots back into its session's cache, and free the row; do nothing again.

        A session calls it by its `cache_away`, as rows know caches and no sessions.
        """
        with interrupts_deferred():
            if self._begun is not None and row in self._begun.uncounted:
                self._count(row)
            if self._leases.get(row) is not lease:
                return
            self._move(row, lease, -lease.ahead)
            self._copy(row, lease.cache, into_row=False)
            self._free(row)

    def _free(self, row: int) -> None:
        del self._leases[row]
        for segment in self._segments(row):  # passes read free rows, too, with no slots in use
            segment.held, segment.first_pinned = 0, ()
        self.cache.changed_by_host()

    def _empty(self) -> None:
        """Prepare a new or reset cache: no row has slots in use."""
        self.cache.enable_rotation()
        for row in range(self.size):
            for segment in self._segments(row):
                segment.held, segment.first_pinned = 0, ()
        self.cache.changed_by_host()

    def _segments(self, row: int) -> Iterator[Segment]:
        """Yield a row's segments in all layers, one after the other."""
        return (s for layer in self.cache.capped_layers for s in layer.segments if s.row == row)

    def _pinned(self, own: BudgetCache) -> tuple[int, list[Span]]:
        """Return how many first tokens of a session are pinned, and the spans pinned later."""
        spans = merged([(0, self.sinks), *own.pinned_spans])
        first = next((stop for start, stop in spans if not start), 0)
        return first, [span for span in spans if span[0]]

    def _place(self, row: int, lease: Lease) -> None:
        """Give a row's segments the sizes, the slots in use and the pins of its session's."""
        theirs = (segment for layer in lease.cache.capped_layers for segment in layer.segments)
        for mine, its in zip(self._segments(row), theirs, strict=True):
            mine.start = row * (mine.pool.slots // self.size) + its.start
            mine.budget, mine.target_length, mine.held = its.budget, its.target_length, its.held
            mine.first_pinned = ((0, lease.first),) if lease.cache.pinned_spans else ()
        self.cache.enable_rotation()
        self.cache.changed_by_host()

    def _copy(self, row: int, own: BudgetCache, *, into_row: bool) -> None:
        theirs = own.allocation.buffers
        for name, rows in self._named.items():
            mine, its = rows[row], theirs[name].view(rows[row].shape)
            if into_row:
                mine.copy_(its)
            else:
                its.copy_(mine)

    def _move(self, row: int, lease: Lease, by: int) -> None:
        """Raise the positions of a row's tokens by `by`, but not of pinned first tokens."""
        lease.ahead += by
        for name, rows in self._named.items():
            if by and name.endswith(".positions"):
                rows[row].add_((rows[row] >= lease.first) * by)

    def _count_from(self, seen: int) -> None:
        """Raise the rows' counter to `seen`, and the positions of all rows with it."""
        later = seen - self.cache.seen
        for row, lease in self._leases.items():
            self._move(row, lease, later)
        self.cache.counters = [(seen, held) for _, held in self.cache.counters]


def pins_of(cache: BudgetCache) -> list[tuple[int, int]]:
    """Return how many first and newest tokens of the first sequence stay, segment by segment."""
    every = ((layer.policy, s) for layer in cache.capped_layers for s in layer.segments)
    return [policy.pins(segment) for policy, segment in every if segment.row == 0]


def shared_rows(runtime: Any, size: int) -> tuple[SharedCache | SharedPass | None, str | None]:
    """Return an object that reads a token of so many sessions at once, or None and the reason.

    On a CPU it runs passes over the sessions' own caches, elsewhere over rows of one cache. Without
    one, sessions are read one by one.
    """
    if size == 1:
        return None, "one session needs no cache beside its own"
    if passes_on(runtime.model.device):
        if why := why_no_pass(runtime.new_cache()):
            return None, why
        return SharedPass(runtime.model, runtime.new_cache(), size), None
    positions = _of_rows(runtime.settings).positions
    if why := why_no_rows(runtime.new_cache(positions=positions)):
        return None, why
    cache = runtime.new_cache(size, positions=positions)
    if not reads_rows(cache):
        return None, f"no kernels cover policy {cache.eviction.name!r} over rows"
    return SharedCache(runtime.model, cache, size), None


def _of_rows(settings: CacheSettings) -> CacheSettings:
    """Return the settings of rows: compact positions for 'auto', as sessions join in that state."""
    return replace(settings, positions="compact") if settings.positions == "auto" else settings


def plan_shared(
    config: Any,
    settings: CacheSettings,
    plan: MemoryPlan,
    size: int,
    *,
    device: str | torch.device = "cpu",
) -> Shared:
    """Plan the memory that answering `size` sessions at once takes besides the sessions' own.

    The model need not be loaded.
    """
    dtype: torch.dtype = getattr(torch, plan.dtype)
    text, settings = text_config(config), plan.sized(settings)
    rows = _of_rows(settings)
    cache = BudgetCache(text, rows)
    if size == 1:
        return Shared()
    if passes_on(device):
        if why_no_pass(cache):
            return Shared()
        keys = sum(math.prod(shape) for shape in rotated_key_shapes(cache, dtype)) * dtype.itemsize
        return Shared(size * keys, rehearse_pass(text, settings, plan, size))
    if why_no_rows(cache) or not kernels.covers_rows(cache.eviction):
        return Shared()
    longest = plan.budget_tokens + plan.block_size - 1  # rows are copied with what lies behind
    token = replace(rows, budget_tokens=longest, block_size=1, evict_every=1)
    nbytes: dict[str, int] = cache.layout.nbytes(size, dtype)
    return Shared(sum(nbytes.values()), rehearse_block(text, token, dtype, size))


def reads_rows(cache: BudgetCache) -> bool:
    """Return whether one pass reads rows that hold unequally many slots: by kernels."""
    return cache.by_rows


def why_no_rows(cache: BudgetCache) -> str | None:
    """Return why sessions that hold such a cache cannot be rows of one; None: they may be."""
    if not cache.compact_positions:
        return "at true positions every session reads at a position of its own"
    if cache.eviction.layers_move:
        return "slots move between layers"
    if cache.layout.divides(1):
        return "slots move between heads"
    return why_unsteady(cache)

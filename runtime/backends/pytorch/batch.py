"""A cache that several sessions share while they answer, so that one pass reads a token of each.

A model's weights are read once for all of them, which is most of what a token takes. Every session
has the same slots, however much it has read, so that all fit into one cache: a session's slots are
copied into a row of it while it answers, and back afterwards. Where all rows are full the cache is
read as one of so many sequences; while any fills its slots yet, kernels read how many each has in
use, and one CUDA graph serves whatever they hold. Knows sessions and caches; no policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from kvcap.kernels.choice import ready
from kvcap.policies import Eviction
from kvcap.runtime.backends.pytorch.cuda_graphs import steady, why_unsteady
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.shared_pass import (
    SharedPass,
    lent_shapes,
    passes_on,
    rehearse_pass,
    why_no_pass,
)
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.pool import Segment
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.models.wrappers import text_config
from kvcap.runtime.planning.dry_run import rehearse_block
from kvcap.runtime.planning.plan import MemoryPlan
from kvcap.runtime.planning.serving import Shared
from kvcap.runtime.session.batch import Answer
from kvcap.runtime.types import Positions


class Rows:
    """One cache for several sessions, of a row of slots each.

    Slots know by a counter of tokens how old they are. Those of a row are moved to the rows' own
    counter as they come, first tokens that are never evicted excepted: policies ask how old a slot
    is, and whether it is one of those.
    """

    def __init__(self, model: Any, cache: BudgetCache, size: int) -> None:
        self.cache, self.size = cache, size
        self.loop = BlockLoop(model, cache, several=False)
        layers = [list(layer.segments) for layer in cache.capped_layers]
        pins = (c.evictor.row_pins(s) for c in cache.capped_layers if c.evictor for s in c.segments)
        self.sinks = max(sinks for sinks, _ in pins)
        self._whole = layers  # where all rows hold as many slots
        self._each = [[part for s in those for part in s.by_sequence()] for those in layers]
        self.unequal = self._holds_unequally()
        """Whether rows may hold unequally many slots."""
        self._named = {
            name: buffer.unflatten(0, (size, -1))
            for name, buffer in cache.allocation.buffers.items()
            if not name.startswith("rotation.")  # a table that all share
        }
        self._taken: dict[int, Answer] = {}
        self._ahead: dict[int, int] = {}  # of a row: the rows' counter minus its session's
        self._layers: dict[int, list[Any]] = {}  # of a row: those of its session's cache
        self._unfilled: set[int] = set()  # rows taken that do not hold all their slots
        self._ids = torch.zeros(size, 1, dtype=torch.long, device=model.device)
        self._empty()

    @property
    def nbytes(self) -> int:
        """Bytes of the cache and its CUDA graphs, beside the sessions' own."""
        return self.cache.nbytes + self.loop.graph_bytes

    def fits(self, answer: Answer) -> bool:
        """Whether a session's slots can lie in a row."""
        cache = answer.session.loop.cache
        if not cache.compact_positions or cache.pinned_spans:
            return False
        if not self.unequal:
            return steady(cache, 1)
        # Sinks that are yet to come would be taken for later tokens.
        held = [s.held <= s.target_length for layer in cache.capped_layers for s in layer.segments]
        return cache.seen >= max(1, self.sinks) and all(held)

    def join(self, answer: Answer) -> None:
        """Copy a session's slots into a free row; `Session.fetch_cache` copies them back."""
        if answer.row is not None:
            return
        session, own = answer.session, answer.session.loop.cache
        row = next(row for row in range(self.size) if row not in self._taken)
        with interrupts_deferred():
            if not self._taken or own.seen > self.cache.seen:
                self._count_from(max(own.seen, self.cache.seen))
            self._copy(row, own, into_row=True)
            self._ahead[row] = self.cache.seen - own.seen
            self._move(row, self._ahead[row])
            self._taken[row], self._layers[row] = answer, own.capped_layers
            self._place(row, own)
            answer.row = row
            session.cache_away = lambda: self._give_back(row)

    def read(self, answers: list[Answer]) -> None:
        """Read the token of each of these, which have rows; rows of others are changed as well.

        So whoever has a row must be read, or give it back. After an error nobody has one, and the
        sessions' caches are empty: their conversations are read again with the next message.
        """
        if len(answers) < len(self._taken):
            for answer in [a for a in self._taken.values() if a not in answers]:
                answer.session.fetch_cache()
        tokens = [0] * self.size
        for answer in answers:
            assert answer.row is not None
            assert answer.asked is not None
            tokens[answer.row] = answer.asked.token
        with interrupts_deferred():
            self._ids.copy_(torch.tensor(tokens)[:, None], non_blocking=True)
            try:
                logits = self.loop.read(self._ids)
            except Exception:
                for answer in answers:
                    self._free(answer.row)  # type: ignore[arg-type]
                    answer.session.loop.cache.reset()
                self.cache.reset()
                self._empty()
                raise
            for answer in answers:
                for layer in self._layers[answer.row]:  # type: ignore[index]
                    layer.advance(1, kept=all(s.held < s.target_length for s in layer.segments))
            if filled := {row for row in self._unfilled if self._full(row)}:
                self._unfilled -= filled
                self._cut()
        greedy = any(answer.asked.likeliest for answer in answers if answer.asked)
        likeliest = logits.argmax(-1).tolist() if greedy else []
        for answer in answers:
            row, asked = answer.row, answer.asked
            assert row is not None
            assert asked is not None
            answer.found = likeliest[row] if asked.likeliest else logits[row : row + 1]

    def _give_back(self, row: int) -> None:
        """Copy a row's slots back into its session's cache, and free the row."""
        answer = self._taken[row]
        own = answer.session.loop.cache
        with interrupts_deferred():
            self._move(row, -self._ahead[row])
            self._copy(row, own, into_row=False)
            self._free(row)

    def _free(self, row: int) -> None:
        answer = self._taken.pop(row)
        answer.row = answer.session.cache_away = None
        del self._ahead[row], self._layers[row]
        self._unfilled.discard(row)
        for segment in self._segments(row):
            segment.held = 0  # it is read with the others, for nobody, and so costs little
        self._cut()

    def _holds_unequally(self) -> bool:
        """Whether rows that hold unequally many slots are read in one pass here.

        On a GPU by kernels; on a CPU one after the other within the pass.
        """
        keys = self._whole[0][0].pool.keys
        if self.cache.layout.slot_format.quantised:
            return False
        self.cache.cut(self._each)
        found = self.cache.by_rows() or (keys.device.type == "cpu" and not ready(keys))
        self.cache.cut(self._whole)
        return found

    def _empty(self) -> None:
        """Begin anew, in a cache that is as it was made or reset."""
        self.cache.enable_rotation()
        for segments in self._whole:
            for segment in segments:
                segment.held = segment.budget if segment.batch > 1 else 0
        self._cut()

    def _cut(self) -> None:
        """Have the cache know of how many slots each row has in use, where some are not full."""
        self.cache.cut(self._each if self._unfilled else self._whole)

    def _segments(self, row: int) -> Iterator[Segment]:
        """A row's segments in all layers, one after the other."""
        return (s for segments in self._each for s in segments if s.row == row)

    def _full(self, row: int) -> bool:
        """Whether a row holds all its slots."""
        return all(segment.held == segment.budget for segment in self._segments(row))

    def _place(self, row: int, own: BudgetCache) -> None:
        """Have a row hold as many slots as its session does, and cut likewise among heads."""
        theirs = (segment for layer in own.capped_layers for segment in layer.segments)
        for mine, its in zip(self._segments(row), theirs, strict=True):
            mine.start = row * (mine.pool.slots // self.size) + its.start
            mine.budget, mine.target_length, mine.held = its.budget, its.target_length, its.held
        if not self._full(row):
            self._unfilled.add(row)
        self.cache.enable_rotation()
        self._cut()

    def _copy(self, row: int, own: BudgetCache, *, into_row: bool) -> None:
        theirs = own.allocation.buffers
        for name, rows in self._named.items():
            mine, its = rows[row], theirs[name].view(rows[row].shape)
            if into_row:
                mine.copy_(its)
            else:
                its.copy_(mine)

    def _move(self, row: int, by: int) -> None:
        """Let a row's tokens count `by` later, first ones that are never evicted excepted."""
        for name, rows in self._named.items():
            if by and name.endswith(".positions"):
                rows[row].add_((rows[row] >= self.sinks) * by)

    def _count_from(self, seen: int) -> None:
        """Have the rows' counter stand at `seen`, which is no less than before."""
        later = seen - self.cache.seen
        for row in self._taken:
            self._move(row, later)
            self._ahead[row] += later
        self.cache.counters = [(seen, held) for _, held in self.cache.counters]
        self.cache.count_stores_full()


def shared_rows(runtime: Any, size: int) -> tuple[Rows | SharedPass | None, str | None]:
    """What reads a token of so many sessions at once, or why they are read one after the other.

    Rows where all hold as many slots; else, on a CPU, passes over their own caches.
    """
    if size == 1:
        return None, "one session needs no cache beside its own"
    # With 'auto' positions, sessions join once theirs have become compact.
    positions = "compact" if runtime.plan.positions == "auto" else None
    passes = passes_on(runtime.model.device)
    if why := _why_apart(runtime.new_cache(1, positions), passes):
        if passes:
            why = why_no_pass(runtime.new_cache())
        return (None, why) if why else (SharedPass(runtime.model, runtime.new_cache(), size), None)
    return Rows(runtime.model, runtime.new_cache(size, positions), size), None


def plan_shared(
    config: Any,
    eviction: Eviction,
    plan: MemoryPlan,
    size: int,
    *,
    evict_every: int = 1,
    device: str | torch.device = "cpu",
) -> Shared:
    """What answering so many sessions at once takes beside these, before a model is loaded."""
    dtype: torch.dtype = getattr(torch, plan.dtype)
    text, slots = text_config(config), (plan.budget_tokens, plan.block_size)
    positions: Positions = "compact" if plan.positions == "auto" else plan.positions
    cache = BudgetCache(
        text, *slots, eviction, positions=positions, evict_every=evict_every, kv_dtype=plan.kv_dtype
    )
    if size == 1:
        return Shared()
    passes = passes_on(device)
    if _why_apart(cache, passes):
        if not passes or why_no_pass(cache):
            return Shared()
        lent = sum(math.prod(shape) for shape in lent_shapes(cache, dtype)) * dtype.itemsize
        return Shared(size * lent, rehearse_pass(text, eviction, plan, size, evict_every))
    rows: dict[str, int] = cache.layout.nbytes(size, dtype)
    # Keys of unequal rows are copied with the slots behind them.
    longest = plan.budget_tokens if passes else plan.budget_tokens + plan.block_size - 1
    workspace = rehearse_block(text, eviction, longest, 1, dtype, positions, size, plan.kv_dtype)
    return Shared(sum(rows.values()), workspace)


def _why_apart(cache: BudgetCache, passes: bool) -> str | None:
    """Why sessions that hold such a cache cannot share one; None: they can.

    Args:
        cache: such a one.
        passes: they can share `SharedPass`es in its place.
    """
    if not cache.compact_positions:
        return "at true positions every session reads at a position of its own"
    if cache.evict_every > 1:
        return "sessions that evict every few tokens hold unequally many"
    if not cache.eviction.policy.evicts:
        return "nothing is evicted, so that sessions hold unequally many"
    if cache.eviction.layers_move:
        return "slots move between layers"
    if passes and cache.eviction.heads_move:
        return "slots move between heads"
    return why_unsteady(cache)

"""Evicts one layer's slots after every block: score, budget, rescore, select, compact.

Every stage is a Triton kernel where one covers it, else the policy's own eager code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from kvcap import kernels
from kvcap.kernels import evict
from kvcap.kernels import rows as row_kernels
from kvcap.kernels.choice import ready
from kvcap.kernels.division import Division
from kvcap.policies import Eviction, Observation, Policy
from kvcap.policies.base import Expansion, Rows, evenly
from kvcap.policies.base.component import ATTENTION_VIEWS
from kvcap.policies.base.eviction import Score
from kvcap.runtime.cache.allocation import LayerStorage
from kvcap.runtime.cache.layer_balance import LayerBalance, Shares
from kvcap.runtime.cache.layout import CacheLayout
from kvcap.runtime.cache.policy_guard import PolicyGuard, is_own
from kvcap.runtime.cache.pool import SHIFT, Segment, resize
from kvcap.runtime.cache.row_table import LayerRows, LayerScores, RowPass
from kvcap.runtime.models.output_projection import output_projection
from kvcap.runtime.types import Span

RunAsync = Callable[[Any], AbstractContextManager[None]]


@dataclass(frozen=True)
class AttentionStep:
    """What attention saw of a block, for the policy to look at."""

    tokens: int  # read so far, the block's included
    length: int  # of the block
    keys: list[Tensor]  # of every segment [b, k, held, D], at today's positions
    queries: list[Tensor] | None = None  # [b, h, T, D] likewise; None: stock attention
    module: nn.Module | None = None  # the attention module
    scaling: float = 1.0
    softcap: float | None = None
    sinks: Tensor | None = None  # [H], the model's sink logits
    expansion: Expansion | None = None  # of slots that hold latents
    token_counter: Tensor | None = None  # `tokens` on the device [], inside a CUDA graph
    stored: kernels.StoredKeys | None = None  # of the first segment's keys
    values: list[Tensor] | None = None  # of every segment likewise; None: read from its slots
    rows: LayerRows | None = None  # of unequal rows; the first keys [slots, D] are the pool's
    new_values: Tensor | None = None  # [B, K, T, D], of the block, as `PendingBlock` has them
    lse: Tensor | None = None  # [B, H, T], of the logits over what is held, if attention told it
    attended: Tensor | None = None  # [B, H, T, D], its output likewise


@dataclass
class SegmentEviction:
    """Gives up slots of one segment: they are selected first, then compacted.

    Where kernels do it (`fused`) they may select and compact at once.
    """

    index: int
    segment: Segment
    obs: Observation
    scores: Tensor  # [b, k, held] of the policy, not made finite where fused
    count: int  # slots of each head
    eviction: Eviction
    fused: bool
    pinned: Tensor | None = None  # bool [b, k, held], where not fused and any are
    shift: Tensor | None = None  # how far the segment's keys have moved, if they are moved
    newer: Tensor | None = None  # likewise kept queries, newer than all that goes
    worth: Tensor | None = None  # by what kernels choose, where fused: scores, rescored
    choice: evict.Choice | None = None

    def select_by_kernel(self) -> None:
        """Decide which slots go; they stay until compacted."""
        assert self.worth is not None
        self.choice = evict.choose(
            self.worth, self.obs.positions, self.count, self.pins, self.shift, self.newer
        )

    def compact_by_kernel(self) -> None:
        """Give up the selected slots, or select them on the way."""
        buffers = self.segment.buffers()
        if self.choice is not None:
            evict.move(self.choice, self.obs.positions, buffers)
        else:
            assert self.worth is not None
            evict.give_up(
                self.worth, self.obs.positions, self.count, self.pins, self.shift, buffers,
                self.newer,
            )  # fmt: skip
        self.segment.held -= self.count

    def select(self) -> Tensor:
        """The slots [b, k, count] that go, eagerly."""
        return self.eviction.choose(self.scores, self.pinned, self.obs, self.count)

    @property
    def pins(self) -> evict.Pins:
        """What stays whatever its score."""
        obs = self.obs
        return evict.Pins(*self.eviction.pins_of(obs), obs.num_tokens, obs.pinned_spans)


class Evictor:
    """Applies the policy to one layer: observes its slots, and evicts what is above the budget.

    Args:
        layout: of the cache.
        index: of the layer among the capped ones.
        storage: of the layer.
        balance: of the layers, if slots move between them.
        evict_every: in generation, evict every so many tokens.
        pinned_spans: of the cache.
    """

    def __init__(
        self,
        layout: CacheLayout,
        index: int,
        storage: LayerStorage,
        balance: LayerBalance | None,
        evict_every: int,
        pinned_spans: Sequence[Span] = (),
    ) -> None:
        self.eviction, self.layout, self.index = layout.eviction, layout, index
        self.storage, self.segments = storage, storage.segments
        self.balance, self.evict_every, self.pinned_spans = balance, evict_every, pinned_spans
        self._has_state = bool(self.eviction.state)  # asked for at every token
        trusted = all(map(is_own, self.eviction.components))
        self._guard = None if trusted else PolicyGuard(self.eviction)
        self._kinds: list[tuple[Policy, Tensor]] | None = None
        """Policies of unequal heads, and which of them have each, [K] on the device."""

    @property
    def excess(self) -> int:
        """The most slots that a head holds above what stays."""
        return max(0, max(segment.held - segment.target_length for segment in self.segments))

    @property
    def free(self) -> int:
        """Slots that every head has for the next block."""
        return min(segment.capacity - segment.held for segment in self.segments)

    @property
    def uses_stored_keys(self) -> bool:
        """Whether the policy's kernel is faster for what attention found out about the keys."""
        return len(self.segments) == 1 and kernels.uses_stored_keys(self.eviction.policy)

    @property
    def uses_lse(self) -> bool:
        """Whether the policy's kernel is faster if attention tells its logits' log-sum-exp."""
        return kernels.uses_lse(self.eviction.policy, self.eviction.saliency)

    @property
    def reads_all_output(self) -> bool:
        """Whether the policy looks at attention's output for all queries of a block."""
        return self.eviction.policy.queries_observed is None and "output" in self.eviction.observes

    @property
    def rotates_keys_itself(self) -> bool:
        """Whether that kernel rotates keys as it reads them, and nothing else looks at any."""
        return self.uses_stored_keys and len(self.eviction.components) == 1

    @property
    def rotates_rows_itself(self) -> bool:
        """The same where rows are unequal, which are read in one launch."""
        alone = len(self.eviction.components) == 1
        return alone and kernels.uses_stored_keys(self.eviction.policy)

    @property
    def reads_queries(self) -> bool:
        """Whether the policy looks at queries."""
        return self.eviction.policy.queries_observed != 0

    @property
    def reads_values(self) -> bool:
        """Whether the policy looks at values, or at what is made of them."""
        return bool(self.eviction.observes & {"values", "output"})

    @property
    def reads_keys(self) -> bool:
        """Whether the policy looks at keys, or at what is made of them."""
        return bool(self.eviction.observes & (ATTENTION_VIEWS | {"keys"}))

    def due(self, length: int) -> int:
        """Slots to give up after a block of `length`: at once, or every so many tokens."""
        excess = self.excess
        return excess if length > 1 or excess >= self.evict_every else 0

    def has_work(self, length: int) -> bool:
        """Whether the policy has anything to do after a block of `length`."""
        return bool(self.due(length) or self._has_state or (self.balance and length > 1))

    def evict_if_due(self, step: AttentionStep, now: bool = False) -> None:
        """Update the policy's state and, if it is time or `now`, evict down to the budget."""
        observed = self._observe_all(step)
        self._update_state(observed)
        if self.balance is not None and step.length > 1:
            with suppress(DataDependentOutputException):
                preference = kernels.preference(self.balance.budget, observed[0])
                if not _is_rehearsed(preference):
                    self.balance.prefer(self.index, float(preference), step.tokens)
        if now or self.due(step.length):
            self.compact(self._evictions(observed, step.stored))
        last = self.index == len(self.layout.budgets) - 1
        # Tokens that are generated change nothing about what layers want.
        if self.balance is not None and last and (step.length > 1 or not self.balance.settled):
            self.balance.rebalance(step.tokens)

    def row_pins(self, segment: Segment) -> tuple[int, int]:
        """How many first and how many newest tokens of a segment are never evicted."""
        sinks, recents = self.eviction.pins_of(self._placed(segment))
        return max(sinks, segment.first_pinned), recents

    def tell_policies(self) -> None:
        """Tell the device which heads have which policy, where they have budgets of their own.

        For `evict_rows`. While a CUDA graph is captured nothing can be uploaded.
        """
        budget, heads = self.eviction.head_budget, self.layout.shape.kv_heads
        if budget is None:
            return
        places = [self._placed(segment) for segment in self.segments[:heads]]
        mine = [budget.policy_of(place, self.eviction.policy) for place in places]
        device = self.segments[0].pool.keys.device
        self._kinds = [
            (policy, torch.tensor([type(x) is type(policy) for x in mine], device=device))
            for policy in {type(policy): policy for policy in mine}.values()
        ]

    def evict_rows(self, step: AttentionStep) -> None:
        """`evict_if_due` of unequal rows, by kernels that read where they lie.

        After a single token each gives up one slot at most, and heads that move keep their
        division; but where slots moved between layers, a block may have left more than stay.
        Where they share slots out anew, the device alone knows how many each has; the host is told
        after the pass, see `RowTable.agreed`. Layers that do evict after the pass, all together:
        see `evict_together`.
        """
        rows, eviction, pool = step.rows, self.eviction, self.segments[0].pool
        assert rows is not None
        if self.balance is not None and step.length > 1:
            obs = self._observe_rows(step, rows.after, rows.always)
            scores = self._score_rows(obs, step.stored)
            preference = kernels.preference(self.balance.budget, obs)
            rows.waiting.append(LayerScores(scores, preference, step.length, obs.num_tokens))
            return
        due = self.excess > 0
        divides = (due or rows.always) and self.layout.divides(step.length)
        if not (due or eviction.state or rows.always):
            rows.held.copy_(rows.after.lengths)
            return
        obs = self._observe_rows(step, rows.after, rows.always)
        for component in eviction.components:
            kernels.update_rows(component, obs, step.new_values, rows.before.lengths)
        if not (due or rows.always):
            rows.held.copy_(rows.after.lengths)
            return
        scores = self._score_rows(obs, step.stored)
        pins = evict.Pins(0, 0, obs.num_tokens, obs.pinned_spans)
        division = self._divide(scores, obs, rows) if divides else None
        scores = kernels.rescore(eviction.rescorer, scores, pins, obs, rows.targets, rows.pins)
        shift = None if self.storage.rotation is None else pool.aux[SHIFT]
        newer = None if self.storage.query_window is None else self.storage.query_window.shift
        moved = row_kernels.Pool(pool.buffers(), shift, rows.after, rows.pins, rows.targets)
        if step.length == 1 and self.excess <= 1 and not divides:
            row_kernels.give_up_one(scores, pins, moved, rows.held, newer)
        else:
            starts = None if division is None else division.starts
            row_kernels.give_up(scores, pins, moved, rows.held, newer, starts)
        for segment in self.segments:
            segment.held = min(segment.held, segment.target_length)
        if division is not None:
            rows.table.divide(self.index, division.starts, division.budgets)
        self.storage.enable_rotation()

    def fill(self, step: AttentionStep, used: Tensor) -> None:
        """Update the policy's state after a block that only filled slots; nothing goes.

        Args:
            step: of the block, with its `new_values`.
            used: slots in use before it, an integer on the device [], as in a CUDA graph.
        """
        if not self.eviction.state:
            return
        (segment,), used = self.segments, used.int()
        count = segment.batch * segment.heads
        starts = torch.arange(count, dtype=torch.int32, device=used.device) * segment.capacity
        after = Rows(starts + segment.start, (used + step.length).repeat(count), segment.capacity)
        obs, before = self._observe_rows(step, after, always=True), used.repeat(count)
        for component in self.eviction.components:
            kernels.update_rows(component, obs, step.new_values, before)

    def select_early(self, step: AttentionStep, run_async: RunAsync) -> list[SegmentEviction]:
        """Select what goes after a block before it is attended, where kernels can.

        Args:
            step: of the block.
            run_async: around work that nothing but `compact` waits for; takes what that reads.

        Returns:
            What to `compact` after attention; nothing: `evict_if_due` does all of it.
        """
        observed = self._observe_all(step)
        counts = [segment.held - segment.target_length for segment in self.segments]
        if self.balance is not None or 1 in counts or not self._fused(observed):
            return []
        self._update_state(observed)
        with run_async((step, observed)):
            found = self._evictions(observed, step.stored)
            for one in found:
                one.select_by_kernel()
        return found

    def compact(self, evictions: Sequence[SegmentEviction]) -> None:
        """Give up what is selected, selecting it first where that has not been done."""
        store = self.storage.evicted_store
        for one in evictions:
            take = None if store is None else partial(
                store.take, one.index, one.segment, scores=one.scores, obs=one.obs
            )  # fmt: skip
            if not one.fused:
                self._give_up(one.segment, one.select(), take)
                continue
            if take is not None:
                if one.choice is None:
                    one.select_by_kernel()
                assert one.choice is not None
                take(slots=one.choice.evicted)
            one.compact_by_kernel()
            self.storage.enable_rotation()
        if self.eviction.heads_move:
            shares = self._filled([segment.target_length for segment in self.segments])
            if shares != [segment.budget for segment in self.segments]:
                resize(self.segments, shares)

    def shrink_to_budget(self, segment: Segment, step: AttentionStep) -> None:
        """Evict one head's slots down to `segment.target_length`, without queries.

        By the policy's scores where those need none, else the oldest that nothing pins.
        """
        eviction = self.eviction
        obs = self._observe(0, segment, step)
        pinned = eviction.pinned(obs)
        blind = eviction.observes & (ATTENTION_VIEWS | {"output_projection"})
        if blind or not eviction.policy.scores_heads_alone:
            eviction = Eviction(eviction.policy)  # no rescorer, which may look at queries too
            scores = segment.positions.float()
        else:
            scores = eviction.score(obs, self._score_by(None))
        slots = eviction.choose(scores, pinned, obs, segment.held - segment.target_length)
        self._give_up(segment, slots)

    def _update_state(self, observed: list[Observation]) -> None:
        """What the policy remembers of slots."""
        for segment, obs in zip(self.segments, observed, strict=True):
            update = kernels.update if self._guard is None else self._guard.update
            for name, tensor in self.eviction.update(obs, update).items():
                segment.aux(name).copy_(tensor)

    def _evictions(
        self, observed: list[Observation], stored: kernels.StoredKeys | None
    ) -> list[SegmentEviction]:
        """What every segment is to give up: scored, and the layer's budget shared out."""
        eviction, storage, fused = self.eviction, self.storage, self._fused(observed)
        divides = self.layout.divides(observed[0].new)
        score = self._score_by(stored)
        found = []
        for i, (segment, obs) in enumerate(zip(self.segments, observed, strict=True)):
            if segment.held <= segment.target_length and not divides:
                continue
            shift = None if storage.rotation is None else segment.aux(SHIFT)
            newer = (
                None
                if storage.query_window is None
                else segment.rows_of(storage.query_window.shift)
            )
            scores = eviction.score(obs, score, finite=not fused)
            masked = eviction.heads_move or (not fused and eviction.pins_any(obs))
            pinned = eviction.pinned(obs) if masked else None
            count = segment.held - segment.target_length
            those = scores, count, eviction, fused, pinned, shift, newer
            found.append(SegmentEviction(i, segment, obs, *those))
            if fused:
                pins = found[-1].pins
                found[-1].worth = kernels.rescore(eviction.rescorer, scores, pins, obs)
        if divides:
            for one, kept in zip(found, self._split(found), strict=True):
                one.segment.target_length = one.obs.budget = kept
                one.count = one.segment.held - kept
        return [one for one in found if one.count > 0]

    def _score_by(self, stored: kernels.StoredKeys | None) -> Score:
        """Return what scores slots: kernels and policies themselves, if they are kvcap's own."""
        return partial(kernels.score, stored=stored) if self._guard is None else self._guard.score

    def _score_rows(self, obs: Observation, stored: kernels.StoredKeys | None) -> Tensor:
        """Scores of unequal rows [B, K, longest], where some heads have a policy of their own."""
        if self.eviction.head_budget is None:
            return kernels.score_rows(self.eviction.policy, obs, stored)
        assert self._kinds is not None, "heads' policies are told when the table of rows is made"
        (first, _), *others = self._kinds
        scores = kernels.score_rows(first, obs)
        for policy, whose in others:
            scores = torch.where(whose[:, None], kernels.score_rows(policy, obs), scores)
        return scores

    def _divide(self, scores: Tensor, obs: Observation, rows: LayerRows) -> Division:
        """Share the layer's slots out among its heads, if any is to give up some.

        By the device alone, which evicts down to `rows.targets` then.
        """
        budget, average = self.eviction.head_budget, self.layout.budgets[self.index]
        assert budget is not None
        pins = evict.Pins(0, 0, obs.num_tokens, obs.pinned_spans)
        places = rows.after, rows.pins, rows.targets, average, self.layout.block_size
        found = kernels.divide(budget, scores, obs.positions, pins, *places)
        rows.targets.copy_(found.kept)
        return found

    def _placed(self, segment: Segment) -> Observation:
        """A segment's place and budget, for what depends on no more."""
        none = segment.positions
        return Observation(
            none, none, none, 0, segment.target_length, layer=self.index, first_head=segment.head,
            pinned_spans=tuple(self.pinned_spans),
        )  # fmt: skip

    def _observe_rows(self, step: AttentionStep, rows: Rows, always: bool) -> Observation:
        """All heads of a layer, with as many slots as its `rows` say, a block's included."""
        eviction, pool, projection = self.eviction, self.segments[0].pool, None
        assert step.queries is not None
        values, placed = pool.values, rows
        if step.rows is not None and step.values is not None:
            values = step.values[0]
            if step.rows.copies is not None:
                placed = rows._replace(starts=step.rows.copies)
        batch, heads = len(step.queries[0]), self.layout.shape.kv_heads
        if "output_projection" in eviction.observes and step.module is not None:
            projection = output_projection(step.module, self.layout.shape)
        queries, count = step.queries[0], eviction.policy.queries_observed
        if count is not None and count > 1 and self.storage.query_window is not None:
            count = count if always else min(count, step.tokens)
            storage = self.storage
            rotation = storage.rotation if always else storage.pending_rotation
            queries = self.storage.query_window.last(None, count, rotation)
        elif count:
            queries = queries[:, :, -count:]
        return Observation(
            keys=step.keys[0][None, None].expand(batch, heads, -1, -1),
            values=values[None, None].expand(batch, heads, -1, -1),
            positions=row_kernels.padded_positions(pool.positions, rows, batch),
            num_tokens=step.tokens if step.token_counter is None else step.token_counter,
            budget=self.segments[0].target_length,
            new=step.length,
            layer=self.index,
            queries=queries,
            scaling=step.scaling,
            softcap=step.softcap,
            sinks=step.sinks,
            attended=step.attended,
            state={name: pool.aux[name] for name in eviction.state},
            output_projection=projection,
            saliency=eviction.saliency,
            pinned_spans=tuple(self.pinned_spans),
            rows=placed,
        )

    def _fused(self, observed: list[Observation]) -> bool:
        """Whether kernels select and compact all that segments are to give up."""
        eviction, spans = self.eviction, tuple(self.pinned_spans)
        divides = self.layout.divides(observed[0].new)
        if not ready(observed[0].keys) or divides:
            return False
        if not all(kernels.rescores(eviction.rescorer, obs) for obs in observed):
            return False
        return all(
            evict.covers(
                obs.positions, segment.held - segment.target_length, spans, segment.buffers()
            )
            for segment, obs in zip(self.segments, observed, strict=True)
            if segment.held > segment.target_length
        )

    def _give_up(
        self, segment: Segment, evicted: Tensor, take: Callable[..., None] | None = None
    ) -> None:
        """Evict the slots [b, k, e] of a segment; what is newer moves down.

        `take` is called with them when shifts have grown and nothing has moved yet.
        """
        storage = self.storage
        if storage.rotation is not None:
            # A survivor moves down by the number of evicted tokens older than itself.
            gone, positions = segment.positions.gather(-1, evicted), segment.positions
            if evicted.shape[-1] == 1:
                older = positions > gone
            else:
                gone = gone.sort(dim=-1).values
                older = torch.searchsorted(gone, positions.contiguous(), out_int32=True)
            segment.aux(SHIFT).add_(older)
        if take is not None:
            take(slots=evicted)
        storage.enable_rotation()
        if storage.query_window is not None:
            storage.query_window.move_down(segment, evicted.shape[-1])
        segment.compact(evicted)

    def _split(self, evictions: Sequence[SegmentEviction]) -> list[int]:
        """Slots that every head keeps, sequence by sequence; of all segments, one a head."""
        budget, heads = self.eviction.head_budget, self.layout.shape.kv_heads
        assert budget is not None

        def rows(numbers: Iterable[Tensor | None]) -> Tensor:
            each = [x[0, 0] for x in numbers if x is not None]
            padded: Tensor = nn.utils.rnn.pad_sequence(each, batch_first=True)
            return padded.view(-1, heads, padded.shape[1])

        scores = rows(one.scores for one in evictions)
        pinned, places = rows(x.pinned for x in evictions), rows(x.obs.positions for x in evictions)
        lengths = torch.tensor([one.segment.held for one in evictions])
        lengths = lengths.view(-1, heads).to(scores.device, non_blocking=True)
        average = self.layout.budgets[self.index]
        kept = [one.segment.target_length for one in evictions]
        with suppress(DataDependentOutputException):
            split = budget.split(scores, pinned, places, lengths, average).flatten()
            if not _is_rehearsed(split):
                kept = split.tolist()
        return kept

    def _filled(self, kept: list[int]) -> list[int]:
        """Budgets that share all slots, where heads hold fewer: loaded from a smaller budget."""
        heads, found = self.layout.shape.kv_heads, list[int]()
        for first in range(0, len(kept), heads):
            mine = kept[first : first + heads]
            spare = heads * self.layout.budgets[self.index] - sum(mine)
            found += [slots + evenly(spare, heads, i) for i, slots in enumerate(mine)]
        return found

    def _window(self, index: int, segment: Segment, step: AttentionStep) -> Tensor | None:
        """The queries the policy observes [b, h, w, D], at today's positions, or None."""
        count = self.eviction.policy.queries_observed
        if count == 0 or step.queries is None:
            return None
        if count is None:
            return step.queries[index]
        if self.storage.query_window is None:
            return step.queries[index][:, :, -count:]
        count = min(count, step.tokens)
        return self.storage.query_window.last(segment, count, self.storage.window_rotation)

    def _values(self, segment: Segment) -> Tensor:
        """A segment's values [b, k, held, D]; of quantised ones none where no policy reads any."""
        if segment.pool.format.quantised and not self.eviction.observes & {"values", "output"}:
            return segment.empty(0)
        return segment.read_values()

    def _observe_all(self, step: AttentionStep) -> list[Observation]:
        return [self._observe(i, segment, step) for i, segment in enumerate(self.segments)]

    def _observe(self, index: int, segment: Segment, step: AttentionStep) -> Observation:
        eviction, projection, spans = self.eviction, None, tuple(self.pinned_spans)
        if segment.first_pinned:
            spans = (*spans, (0, segment.first_pinned))
        if "output_projection" in eviction.observes and step.module is not None:
            projection = output_projection(step.module, self.layout.shape)
            projection = projection[segment.head : segment.head + segment.heads]
        return Observation(
            keys=step.keys[index],
            values=self._values(segment) if step.values is None else step.values[index],
            positions=segment.positions,
            num_tokens=step.tokens if step.token_counter is None else step.token_counter,
            budget=segment.target_length,
            new=step.length,
            layer=self.index,
            first_head=segment.head,
            queries=self._window(index, segment, step),
            scaling=step.scaling,
            softcap=step.softcap,
            sinks=segment.query_heads_of(step.sinks),
            lse=step.lse,
            attended=step.attended,
            state={name: segment.aux(name) for name in eviction.state},
            output_projection=projection,
            expansion=step.expansion,
            saliency=eviction.saliency,
            pinned_spans=spans,
        )


def _is_rehearsed(x: Tensor) -> bool:
    """Return whether a tensor has no data, as in a rehearsal, where slots stay in place."""
    return type(x) is not Tensor


def evict_together(evictors: Sequence[Evictor], rows: RowPass) -> None:
    """Evict the slots of all layers, which share a pool, and move slots between them in one go.

    By numbers of the device alone, after a block that all layers have read.
    """
    first, table, waiting = evictors[0], rows.table, rows.waiting
    balance, pool, count = first.balance, first.segments[0].pool, table.count
    assert balance is not None
    preferences = torch.stack([layer.preference for layer in waiting])  # [L]
    scores = torch.stack([layer.scores for layer in waiting])  # [L, B, K, longest]
    scores, block = scores.view(1, -1, scores.shape[-1]), first.layout.block_size
    before, lengths = table.starts, rows.after(waiting[0].length)[:, 0]
    slots = (before[:, 1] - before[:, 0]).long()
    had = Shares(slots - block, table.targets[:, 0].long())
    seen = torch.as_tensor(waiting[-1].seen, device=slots.device)
    kept, shares = balance.after_block(table.preferences, preferences, lengths.long(), had, seen)

    def each(numbers: Tensor) -> Tensor:
        """Of every row [L·B·K] int32, by numbers of layers [L]."""
        return numbers.int()[:, None].expand(-1, count).flatten()

    begin, ends = before[0, :1], each(shares.budgets + block).cumsum(0)
    starts = torch.cat((begin, begin + ends)).int()
    placed = Rows(before[:, :-1].flatten(), each(lengths), rows.most)
    shift = pool.aux.get(SHIFT)
    moved = row_kernels.Pool(pool.buffers(), shift, placed, table.pins.flatten(0, 1), each(kept))
    left = torch.empty_like(placed.lengths)
    spans = tuple(first.pinned_spans)
    row_kernels.give_up(scores, evict.Pins(0, 0, seen, spans), moved, left, None, starts)
    for evictor, gone in zip(evictors, (lengths - kept).int().unbind(), strict=True):
        if evictor.storage.query_window is not None:
            evictor.storage.query_window.shift.add_(gone)
        evictor.storage.enable_rotation()
    table.share_out(starts, left, shares.targets, preferences)

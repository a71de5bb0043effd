"""What a policy does with one layer's slots after every block: look, share out, choose, give up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvcap import kernels
from kvcap.kernels.choice import ready
from kvcap.policies import Eviction, Observation
from kvcap.policies.base import apportion
from kvcap.policies.base.component import ATTENTION_VIEWS
from kvcap.runtime.cache.due import Due
from kvcap.runtime.cache.evicted_store import Calibration
from kvcap.runtime.cache.layer_balance import LayerBalance
from kvcap.runtime.cache.layout import CacheLayout
from kvcap.runtime.cache.pool import Segment, resize
from kvcap.runtime.cache.query_window import QueryRing
from kvcap.runtime.models.output_projection import output_projection
from kvcap.runtime.models.rope import Rotation

Meanwhile = Callable[[Any], AbstractContextManager[None]]

SHIFT = "shift"  # side tensor: how far a slot's position has moved down since it was read


@dataclass(frozen=True)
class Seen:
    """What attention saw of a block."""

    tokens: int  # read so far, the block's included
    length: int  # of the block
    keys: list[Tensor]  # of every segment [b, k, held, D], at today's positions
    queries: list[Tensor] | None = None  # [b, h, T, D] likewise; None: stock attention
    scaling: float = 1.0
    softcap: float | None = None
    module: nn.Module | None = None  # the attention module
    clock: Tensor | None = None  # `tokens` on the device [], inside a CUDA graph
    key_sums: Tensor | None = None  # of the first segment's keys, as in `Observation`
    turn: tuple[Tensor, Tensor] | None = None  # likewise


class Evictor:
    """The policy's side of one layer.

    Args:
        layout: of the cache.
        index: of the layer among the capped ones.
        segments: its slots.
        ring: its last queries, if the policy observes more than a block may hold.
        calibration: where its evicted tokens go, if they are kept.
        balance: of the layers, if slots move between them.
        evict_every: in generation, evict every so many tokens.
        rotation: what moves its keys, if they are moved.
        pinned_spans: of the cache.
    """

    def __init__(
        self,
        layout: CacheLayout,
        index: int,
        segments: list[Segment],
        ring: QueryRing | None,
        calibration: Calibration | None,
        balance: LayerBalance | None,
        evict_every: int,
        rotation: Rotation | None,
        pinned_spans: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.eviction, self.layout, self.index = layout.eviction, layout, index
        self.segments, self.ring, self.calibration = segments, ring, calibration
        self.balance, self.evict_every, self.rotation = balance, evict_every, rotation
        self.pinned_spans = pinned_spans
        self.moved = False  # compact positions differ from true ones

    def due(self, length: int) -> int:
        """Slots to give up after a block of `length`: at once, or in steps by the way."""
        excess = self.excess
        return excess if length > 1 or excess >= self.evict_every else 0

    @property
    def excess(self) -> int:
        """The most slots that a head holds above what stays."""
        return max(0, max(segment.held - segment.stay for segment in self.segments))

    @property
    def free(self) -> int:
        """Slots that every head has for the next block."""
        return min(segment.capacity - segment.held for segment in self.segments)

    @property
    def reads_sums(self) -> bool:
        """Whether the policy makes use of sums of a layer's keys."""
        return len(self.segments) == 1 and kernels.reads_sums(self.eviction.policy)

    @property
    def turns_keys(self) -> bool:
        """Whether that rotates keys as it reads them, and nothing else looks at any."""
        return self.reads_sums and len(self.eviction.components) == 1

    @property
    def reads_keys(self) -> bool:
        """Whether the policy looks at keys, or at what is made of them."""
        return bool(self.eviction.observes & (ATTENTION_VIEWS | {"keys"}))

    def looks(self, length: int) -> bool:
        """Whether the policy has anything to do after a block of `length`."""
        return bool(self.due(length) or self.eviction.state or (self.balance and length > 1))

    def look(self, seen: Seen, now: bool = False) -> None:
        """Update the policy's state, and evict when it is time, or `now`."""
        observed = self._observed(seen)
        self._update(observed)
        if self.balance is not None and seen.length > 1:
            preference = float(self.balance.budget.preference(observed[0]))
            self.balance.prefer(self.index, preference, seen.tokens)
        if now or self.due(seen.length):
            self._evict(observed)
        if self.balance is not None and self.index == len(self.layout.budgets) - 1:
            self.balance.rebalance(seen.tokens)

    def decide(self, seen: Seen, meanwhile: Meanwhile) -> list[Due]:
        """Choose what goes after a block before it is attended, if kernels can.

        Args:
            seen: of the block.
            meanwhile: around work that nothing but `settle` waits for; takes what that reads.

        Returns:
            What to `settle` after attention; nothing: `look` does all of it.
        """
        observed = self._observed(seen)
        due = self._due(observed) if self.balance is None else None
        if not due or any(one.count == 1 for one in due):
            return []
        self._update(observed)
        scores = [one.scores() for one in due]
        with meanwhile(scores):
            for one, its in zip(due, scores, strict=True):
                one.choose(its)
        return due

    def settle(self, decided: list[Due]) -> None:
        """Give up what was decided."""
        for one in decided:
            one.settle()
        self.move()

    def move(self) -> None:
        """Have keys rotated from now on, though by nothing before a slot was given up."""
        self.moved = self.rotation is not None

    def _update(self, observed: list[Observation]) -> None:
        """What the policy remembers of slots."""
        for segment, observation in zip(self.segments, observed, strict=True):
            for name, tensor in self.eviction.update(observation, kernels.update).items():
                segment.side(name).copy_(tensor)

    def _evict(self, observed: list[Observation]) -> None:
        """Score, share out the layer's slots, choose, compact."""
        due = self._due(observed)
        if due is not None:
            for one in due:
                one.give_up()
            self.move()
            return
        eviction = self.eviction
        scores = [eviction.score(seen, kernels.score) for seen in observed]
        pinned = [eviction.pinned(seen) for seen in observed]
        stays = [min(segment.stay, segment.held) for segment in self.segments]
        if eviction.heads_move:
            stays = self._split(scores, pinned, observed)
        for i, (segment, seen) in enumerate(zip(self.segments, observed, strict=True)):
            if (count := segment.held - stays[i]) > 0:
                seen.budget = stays[i]
                evicted = eviction.choose(scores[i], pinned[i], seen, count)
                if self.calibration is not None:
                    shift = None if self.rotation is None else segment.side(SHIFT)
                    self.calibration.take(i, segment, evicted, scores[i], seen.keys, shift)
                self._give_up(segment, evicted)
        if eviction.heads_move:
            resize(self.segments, self._filled(stays))

    def _due(self, observed: list[Observation]) -> list[Due] | None:
        """What segments are to give up, if kernels can do that."""
        eviction, ring = self.eviction, self.ring
        if not ready(observed[0].keys) or eviction.heads_move:
            return None
        if eviction.rescorer is not None or self.calibration is not None:
            return None
        due = []
        for segment, seen in zip(self.segments, observed, strict=True):
            if (count := segment.held - segment.stay) > 0:
                shift = None if self.rotation is None else segment.side(SHIFT)
                newer = None if ring is None else segment.rows_of(ring.shift)
                due.append(Due(segment, seen, count, eviction, shift, newer))
        return due if all(one.covered for one in due) else None

    def _filled(self, stays: list[int]) -> list[int]:
        """Budgets that share all slots, where heads hold fewer: loaded from a smaller budget."""
        heads, found = self.layout.shape.kv_heads, list[int]()
        for first in range(0, len(stays), heads):
            mine = stays[first : first + heads]
            spare = apportion([1] * heads, heads * self.layout.budgets[self.index] - sum(mine))
            found += [slots + extra for slots, extra in zip(mine, spare, strict=True)]
        return found

    def fit(self, segment: Segment, seen: Seen) -> None:
        """Evict one head's slots down to `segment.stay`, without queries.

        By the policy's scores where those need none, else the oldest that nothing pins.
        """
        eviction = self.eviction
        observation = self._observe(0, segment, seen)
        blind = eviction.observes & (ATTENTION_VIEWS | {"output_projection"})
        if blind or not eviction.policy.scores_heads_alone:
            eviction = Eviction(eviction.policy)  # no rescorer, which may look at queries too
            scores = segment.positions.float()
        else:
            scores = eviction.score(observation)
        pinned = self.eviction.pinned(observation)
        count = segment.held - segment.stay
        self._give_up(segment, eviction.choose(scores, pinned, observation, count))

    def _split(
        self, scores: list[Tensor], pinned: list[Tensor], observed: list[Observation]
    ) -> list[int]:
        """Slots that every head keeps, sequence by sequence."""
        budget = self.eviction.head_budget
        assert budget is not None
        heads, stays = self.layout.shape.kv_heads, list[int]()
        for first in range(0, len(scores), heads):
            mine = slice(first, first + heads)
            stays += budget.split(
                [x[0, 0] for x in scores[mine]],
                [x[0, 0] for x in pinned[mine]],
                [seen.positions[0, 0] for seen in observed[mine]],
                self.layout.budgets[self.index],
            )
        return stays

    def _give_up(self, segment: Segment, evicted: Tensor) -> None:
        """Evict the slots [b, k, e] of a segment."""
        if self.rotation is not None:
            # A survivor moves down by the number of evicted tokens older than itself.
            gone = segment.positions.gather(-1, evicted).sort(dim=-1).values
            older = torch.searchsorted(gone, segment.positions.contiguous(), out_int32=True)
            segment.side(SHIFT).add_(older)
        self.move()
        if self.ring is not None:  # all that is newer moves down
            self.ring.moved(segment, evicted.shape[-1])
        segment.compact(evicted)

    def _window(self, index: int, segment: Segment, seen: Seen) -> Tensor | None:
        """The queries the policy observes, at today's positions."""
        count = self.eviction.policy.queries_observed
        if count == 0 or seen.queries is None:
            return None
        queries = seen.queries[index]
        if count is None:
            return queries
        if self.ring is None:
            return queries[:, :, -count:]
        rotation = self.rotation if self.moved else None
        return self.ring.last(segment, min(count, seen.tokens), rotation)

    def _observed(self, seen: Seen) -> list[Observation]:
        return [self._observe(i, segment, seen) for i, segment in enumerate(self.segments)]

    def _observe(self, index: int, segment: Segment, seen: Seen) -> Observation:
        eviction, projection = self.eviction, None
        if "output_projection" in eviction.observes and seen.module is not None:
            projection = output_projection(seen.module, self.layout.shape)
            projection = projection[segment.head : segment.head + segment.heads]
        return Observation(
            keys=seen.keys[index],
            values=segment.values,
            positions=segment.positions,
            num_tokens=seen.tokens if seen.clock is None else seen.clock,
            budget=segment.stay,
            new=seen.length,
            layer=self.index,
            first_head=segment.head,
            queries=self._window(index, segment, seen),
            scaling=seen.scaling,
            softcap=seen.softcap,
            state={name: segment.side(name) for name in eviction.state},
            output_projection=projection,
            saliency=eviction.saliency,
            key_sums=seen.key_sums if index == 0 else None,
            turn=seen.turn,
            pinned_spans=tuple(self.pinned_spans),
        )

    def reset(self) -> None:
        """Forget everything; the buffers stay."""
        for segment in self.segments:
            segment.held = 0
        if self.calibration is not None:
            self.calibration.reset()
        if self.balance is not None:
            self.balance.reset()
        self.moved = False

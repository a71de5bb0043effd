"""The rows of a session's file back into a cache, which may be of another size.

What does not fit is evicted on the way in: by the policy's own scores where they need no queries,
which are gone, else the oldest tokens that nothing pins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcap.policies.base import apportion
from kvcap.runtime.budget_layer import BudgetLayer
from kvcap.runtime.evictor import SHIFT, Seen
from kvcap.runtime.pins import check_pins
from kvcap.runtime.rope import rotate_back_eagerly, rotations
from kvcap.runtime.saved_layers import SavedLayers
from kvcap.runtime.slot_pool import Segment, SlotPool, resize


class Refill:
    """Fills a cache from what was `saved`; all is checked when this is made, nothing changed.

    Raises:
        SessionFileCorrupt: boundaries between segments that the cache cannot have.
        PinsTooLarge: the pinned tokens do not fit.
    """

    def __init__(self, saved: SavedLayers) -> None:
        self.saved, self.cache, self.exact, self.seen = saved, saved.cache, saved.exact, saved.seen
        self.budgets = self._budgets()
        check_pins(self.cache, saved.spans, self.budgets)

    def run(self) -> None:
        """Fill the cache; should that fail, it is empty."""
        cache = self.cache
        cache.reset()
        if not self.seen:
            return
        try:
            for segments, budgets in self._pools():
                resize(segments, budgets)
            cache.set_pins(self.saved.spans)
            for layer in cache.capped_layers:
                self._fill(layer)
            for index in cache.sliding_layers:
                device = cache.capped_layers[0].segments[0].pool.keys.device
                keys, values = (self.saved.sliding(index, x).to(device) for x in ("keys", "values"))
                cache.refill_sliding(index, keys, values, self.seen)
            if self.exact and cache.balance is not None and self.saved.preferences is not None:
                cache.balance.preferences = list(self.saved.preferences)
        except BaseException:
            cache.reset()
            raise

    def _pools(self) -> list[tuple[list[Segment], list[int]]]:
        """Segments that share slots, and their budgets."""
        layers = [(layer.segments, self.budgets[layer.index]) for layer in self.cache.capped_layers]
        if not self.cache.layout.pooled:
            return layers
        return [([s for x, _ in layers for s in x], [b for _, x in layers for b in x])]

    def _budgets(self) -> list[list[int]]:
        """What every segment of every layer will have, for what it is to hold."""
        layout, layers = self.cache.layout, self.cache.capped_layers
        fresh = [[layout.allotments[c.index][s.head] for s in c.segments] for c in layers]
        if not self.seen:
            return fresh
        if self.exact:
            return [self._saved_budgets(layer, fresh[layer.index]) for layer in layers]
        least = max(1, *(max(self.cache.eviction.pins(b), 1) for row in fresh for b in row))
        least += sum(b - a for a, b in self.saved.spans)
        if layout.pooled:
            held = [max(saved["held"]) for saved in self.saved.layers]
            return [[n] for n in _share(held, sum(map(sum, fresh)), least)]
        if layout.eviction.heads_move:
            held_rows = [saved["held"] for saved in self.saved.layers]
            pairs = zip(held_rows, fresh, strict=True)
            return [_share(row, sum(given), least) for row, given in pairs]
        return fresh

    def _saved_budgets(self, layer: BudgetLayer, fresh: list[int]) -> list[int]:
        """The saved boundaries of a layer, if they can be."""
        saved, layout = self.saved.layers[layer.index], self.cache.layout
        found = []
        for s in layer.segments:
            rows = slice(s.head, s.head + s.heads)
            for row in (saved["held"][rows], saved["budgets"][rows], saved["stays"][rows]):
                self.saved.demand(len(set(row)) == 1, f"layer {layer.index}'s slots")
            budget = saved["budgets"][s.head]
            fits = saved["held"][s.head] <= budget + s.block and saved["stays"][s.head] <= budget
            self.saved.demand(fits, f"layer {layer.index}'s slots")
            found.append(budget)
        if layout.pooled:
            total = [sum(x["budgets"][0] for x in self.saved.layers), len(self.saved.layers)]
            self.saved.demand(total[0] == total[1] * layout.budget_tokens, "the layers' slots")
        else:
            moves = layout.eviction.heads_move
            same = sum(found) == sum(fresh) if moves else found == fresh
            self.saved.demand(same, f"layer {layer.index}'s slots")
        return found

    def _fill(self, layer: BudgetLayer) -> None:
        """Put a layer's rows, ring and store in place."""
        index, evictor, saved = layer.index, layer.evictor, self.saved.layers[layer.index]
        assert evictor is not None
        layer.seen, evictor.moved = self.seen, bool(saved["moved"])
        if layer.ring is not None:
            layer.ring.fill(*(self.saved.tensor(index, f"ring.{x}") for x in ("queries", "shift")))
        rows = self._split(index, "slots", layer.segments[0].pool, saved["held"])
        for i, s in enumerate(layer.segments):
            mine = rows[s.head : s.head + s.heads]
            limit = s.capacity if self.exact else s.budget
            keep = min(limit, *(len(row["positions"]) for row in mine))
            s.held = keep
            if self.exact:
                s.stay = saved["stays"][s.head]
            for k, row in enumerate(mine):
                small = self._evicted_to(keep, layer, i, k, row)
                self._bring_in_reach(layer, small)
                for name, buffer in s.pool.named().items():
                    s.view(buffer)[0, k].copy_(small[name])
        if layer.ring is not None and layer.rotates and not self.exact:
            shift = layer.ring.shift
            group = layer.ring.queries.shape[1] // shift.shape[1]
            wide = shift.repeat_interleave(group, dim=1)
            layer.ring.fill(self._back(layer.ring.queries, wide), torch.zeros_like(shift))
        if layer.calibration is not None and saved["evicted"] is not None:
            self._fill_evicted(layer, saved)

    def _fill_evicted(self, layer: BudgetLayer, saved: dict[str, Any]) -> None:
        kept = layer.calibration
        assert kept is not None
        held, counts = saved["evicted"], saved["counts"]
        places = kept.evicted
        alike = all(len(set(held[s.head : s.head + s.heads])) == 1 for s in places)
        if not alike or any(held[s.head] > s.budget for s in places):
            return  # a smaller store begins anew
        rows = self._split(layer.index, "evicted", kept.pool, held)
        span = self.cache.layout.rotation_span
        if layer.rotates and any(bool((row["made_at"] >= span).any()) for row in rows):
            return  # and one whose keys a smaller table cannot rotate
        for s in places:
            s.held = held[s.head]
            for k, row in enumerate(rows[s.head : s.head + s.heads]):
                for name, buffer in kept.pool.named().items():
                    s.view(buffer)[0, k].copy_(row[name])
        for name, tensor in kept.remembered.items():
            tensor.copy_(self.saved.tensor(layer.index, f"remembered.{name}"))
        kept.steps, kept.recomputed = counts

    def _split(
        self, index: int, part: str, pool: SlotPool, held: list[int]
    ) -> list[dict[str, Tensor]]:
        """Every head's row of every buffer; a side tensor that the file lacks is zero."""
        rows: list[dict[str, Tensor]] = [{} for _ in held]
        for name, buffer in pool.named().items():
            if self.saved.has(index, f"{part}.{name}"):
                whole = self.saved.tensor(index, f"{part}.{name}")
            else:
                whole = torch.zeros(sum(held), dtype=buffer.dtype)
            for row, piece in zip(rows, whole.split(held), strict=True):
                row[name] = piece
        return rows

    def _evicted_to(
        self, keep: int, layer: BudgetLayer, index: int, head: int, row: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """A row of `keep` slots: those that the policy, as far as it can see, would keep."""
        held, segment, evictor = len(row["positions"]), layer.segments[index], layer.evictor
        assert evictor is not None
        if held <= keep:
            return row
        pool, side = segment.pool, segment.pool.kinds()
        size = pool.keys.shape[-1]
        aside = SlotPool(held, size, pool.keys.dtype, pool.keys.device, side)
        one = Segment(
            aside, 0, held, 0, head=segment.head + head, layer_heads=segment.layer_heads,
        )  # fmt: skip
        one.held, one.stay = held, keep
        for name, buffer in aside.named().items():
            buffer.copy_(row[name])
        keys = one.keys
        if layer.rotates:
            keys = self._back(keys, one.side(SHIFT))
        evictor.fit(one, Seen(self.seen, 0, [keys]))
        return {name: one.view(buffer)[0, 0] for name, buffer in aside.named().items()}

    def _bring_in_reach(self, layer: BudgetLayer, row: dict[str, Tensor]) -> None:
        """Rotate keys once and for all where they were made further off than this cache counts."""
        if not layer.rotates or self.exact or not len(row["positions"]):
            return
        shift = row[SHIFT]
        made_at = row["positions"].argsort().argsort() + shift
        if int(made_at.max()) >= self.cache.layout.rotation_span:
            row["keys"] = self._back(row["keys"], shift)
            row[SHIFT] = torch.zeros_like(shift)

    def _back(self, x: Tensor, shift: Tensor) -> Tensor:
        """Rotate x [..., n, D] back by `shift` [..., n], however far, without a table."""
        rope = self.cache.layout.rope
        assert rope is not None
        assert rope.inv_freq is not None
        rows = rotations(rope.inv_freq.double().cpu(), shift.cpu()).to(x.device)
        return rotate_back_eagerly(x, rows)


def _share(held: list[int], total: int, least: int) -> list[int]:
    """`total` slots: what is held and as many free ones each, else in proportion to it."""
    least = min(least, total // len(held))
    sure = [max(n, least) for n in held]
    if sum(sure) <= total:
        free = apportion([1] * len(held), total - sum(sure))
        return [slots + extra for slots, extra in zip(sure, free, strict=True)]
    more = apportion([max(0, n - least) for n in held], total - least * len(held))
    return [least + extra for extra in more]

"""Saves the slots of a cache in a session's file, and restores them into a cache of any size.

Tokens that do not fit are evicted on the way in: by the policy's scores, or, if these need past
queries, which are not saved, the oldest tokens that are not pinned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcap.policies.base import apportion, evenly
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.layer import BudgetLayer
from kvcap.runtime.cache.pinned_slots import check_pins, merged
from kvcap.runtime.cache.pool import SHIFT, Segment, SlotPool, resize
from kvcap.runtime.cache.slots import eager_of
from kvcap.runtime.cache.slots.step import AttentionStep
from kvcap.runtime.models.rope import moved_by
from kvcap.runtime.session.file import SessionFile


def held_by(cache: BudgetCache) -> tuple[dict[str, list[Tensor]], dict[str, Any]]:
    """Return the tensors of all that a cache holds, each in pieces that are views, and figures."""
    tensors, layers = dict[str, list[Tensor]](), list[dict[str, Any]]()
    for index, layer in enumerate(cache.capped_layers):
        pieces, figures = saved(layer)
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in pieces.items()}
        layers.append(figures)
    for index, native in cache.sliding_layers.items():
        if cache.seen:
            tensors[f"sliding.{index}.keys"] = [native.keys]
            tensors[f"sliding.{index}.values"] = [native.values]
    for index, recurrent in cache.state_layers.items():
        if cache.seen:
            named = recurrent.named.items()
            tensors |= {f"state.{index}.{name}": [state] for name, state in named}
    return tensors, {
        "seen": cache.seen,
        "compact": cache.allocation.compact,
        "layers": layers,
        "preferences": cache.balance and cache.balance.preferences,
    }


def saved(layer: BudgetLayer) -> tuple[dict[str, list[Tensor]], dict[str, Any]]:
    """Return a layer's tensors, each in pieces to be joined, and its other facts, by head."""
    pieces = {f"slots.{name}": rows for name, rows in _rows(layer.segments).items()}
    heads = [s for s in layer.segments for _ in range(s.heads)]
    kept, ring = layer.engine.evicted_store, layer.engine.query_window
    facts = {
        "held": [s.held for s in heads],
        "budgets": [s.budget for s in heads],
        "stays": [s.target_length for s in heads],
        "moved": layer.engine.positions.moved,
        "ring": 0 if ring is None else ring.queries.shape[2],
        "evicted": None,
    }
    if layer.engine.key_mean is not None:
        pieces["mean"] = [layer.engine.key_mean]
    if ring is not None:
        pieces |= {"ring.queries": [ring.queries], "ring.shift": [ring.shift]}
    if kept is not None:
        facts["evicted"] = [s.held for s in kept.evicted for _ in range(s.heads)]
        facts["counts"] = kept.counts
        pieces |= {f"evicted.{name}": rows for name, rows in _rows(kept.evicted).items()}
        made_at = [row for place in kept.made_at(layer.segments) for row in place[0]]
        pieces["evicted.made_at"] = made_at
        del pieces[f"evicted.{SHIFT}"]  # follows from `made_at` and the held positions
        pieces |= {f"remembered.{name}": [x] for name, x in kept.remembered.items()}
    return pieces, facts


def _rows(segments: list[Segment]) -> dict[str, list[Tensor]]:
    """Return the slots in use of every buffer, head by head."""
    return {
        name: [row for s in segments for row in s.view(buffer)[0]]
        for name, buffer in segments[0].pool.named().items()
    }


class SavedLayers:
    """A view of the layers saved in `file`, for a `cache`, which is not changed.

    Args:
        cache: in any state.
        file: a session's file that the cache may take over; its facts were checked by their schema.
        exact: the eviction and all sizes are the same, so that segments get their saved budgets.
    """

    def __init__(self, cache: BudgetCache, file: SessionFile, exact: bool) -> None:
        facts = file.facts
        self.cache, self.file, self.exact = cache, file, exact
        self.seen: int = facts["seen"]
        self.compact: bool = facts.get("compact", cache.layout.positions == "compact")
        self.layers: list[dict[str, Any]] = facts["layers"]
        self.preferences = facts["preferences"]
        self.spans = merged((a, b) for a, b in facts["pinned_spans"])

    def checked(self) -> SavedLayers:
        """Return itself, unless the file has what no cache can have.

        Raises:
            SessionFileCorrupt: it has such tensors or figures.
        """
        cache = self.cache
        mode, count = cache.layout.positions, len(cache.layout.budgets)
        self.demand(mode == "auto" or self.compact == (mode == "compact"), "the positions")
        self.demand(len(self.layers) == count, "the number of layers")
        fits = self.preferences is None or len(self.preferences) == count
        self.demand(fits, "the number of preferences")
        for index, saved in enumerate(self.layers):
            self._check(index, saved)
        for name, shape, dtype in self._beside() if self.seen else ():
            self._check_floats(name, shape, dtype, name)
        return self

    def _beside(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """Yield name, shape and type of the tensors that layers hold beside slots."""
        cache, layers = self.cache, self.cache.layout.shape.layers
        dtype = _dtype(cache.capped_layers[0])
        for index, native in cache.sliding_layers.items():
            own, length = layers[index], min(native.sliding_window - 1, self.seen)
            for name in ("keys", "values"):
                yield f"sliding.{index}.{name}", (1, own.kv_heads, length, own.head_size), dtype
        for index in cache.state_layers:
            for state in layers[index].states:
                yield f"state.{index}.{state.name}", (1, *state.shape), state.dtype(dtype)

    def demand(self, ok: bool, what: str) -> None:
        """Refuse the file unless `ok`."""
        if not ok:
            raise self.file.corrupt(f"{what} cannot be so")

    def moved(self, layer: BudgetLayer) -> bool:
        """Return whether a layer's keys have other positions than they were read at."""
        return self.compact and layer.rotates

    def has(self, index: int, name: str) -> bool:
        """Return whether the file has a tensor of that name for a layer."""
        return f"layers.{index}.{name}" in self.file.names

    def tensor(self, index: int, name: str) -> Tensor:
        """Return one tensor of a layer."""
        tensor: Tensor = self.file.tensor(f"layers.{index}.{name}")
        return tensor

    def window(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a layer's kept queries and their shifts, with zeros before the first token.

        Files of earlier versions may have queries of a cleared conversation there.
        """
        queries, shift = self.tensor(index, "ring.queries"), self.tensor(index, "ring.shift")
        unread = max(0, shift.shape[2] - self.seen)
        queries[:, :, :unread], shift[:, :, :unread] = 0, 0
        return queries, shift

    def sliding(self, index: int, name: str) -> Tensor:
        """Return the keys or values of a native sliding layer."""
        tensor: Tensor = self.file.tensor(f"sliding.{index}.{name}")
        return tensor

    def _check(self, index: int, saved: dict[str, Any]) -> None:
        shape, layer = self.cache.layout.shape, self.cache.capped_layers[index]
        rows, dtype = [saved["held"], saved["budgets"], saved["stays"]], _dtype(layer)
        self.demand({len(row) for row in rows} == {shape.kv_heads}, f"layer {index}'s slots")
        self.demand(all(n <= self.seen for n in rows[0]), f"layer {index}'s slots")
        self.demand(not self.seen or min(rows[0]) > 0, f"layer {index}'s slots")
        total, size, pool = sum(rows[0]), shape.head_size, layer.segments[0].pool
        prefix, what = f"layers.{index}", f"layer {index}'s keys, values or queries"
        for name, (one, kind) in pool.format.shapes(size, dtype).items():
            if name in pool.named():  # values may be part of keys
                self._check_floats(f"{prefix}.slots.{name}", (total, *one), kind, what)
        if (mean := layer.engine.key_mean) is not None:
            self._check_floats(f"{prefix}.mean", tuple(mean.shape), mean.dtype, what)
        positions = self._take(index, "slots.positions", (total,), torch.int32)
        inside = bool(((positions >= 0) & (positions < self.seen)).all())
        self.demand(inside, f"layer {index}'s positions")
        held = positions.split(rows[0])
        for row in held:
            self.demand(len(row.unique()) == len(row), f"layer {index}'s positions")
        for name, kind in pool.kinds().items():
            if self.has(index, f"slots.{name}"):
                side = self._take(index, f"slots.{name}", (total,), kind)
                self.demand(not bool(side.isnan().any()), f"layer {index}'s {name}")
                if name == SHIFT:
                    ranks = torch.cat([_ranks(row, row) for row in held])
                    if pool.format.quantised:
                        held_so = not self.moved(layer) or torch.equal(side, -ranks)
                        self.demand(held_so, f"layer {index}'s shifts")
                    else:
                        self._in_reach(layer, side, ranks + side, "shifts")
            elif self.exact or (name == SHIFT and layer.rotates):
                self._take(index, f"slots.{name}", (total,), kind)  # says what is missing
        if layer.engine.query_window is not None and self.seen:
            length = saved["ring"]
            queries = (1, shape.heads, length, size)
            self._check_floats(f"{prefix}.ring.queries", queries, dtype, what)
            self._take(index, "ring.shift", (1, shape.kv_heads, length), torch.int32)
            _, shift = self.window(index)
            newest = torch.tensor(rows[0])[:, None] - length + torch.arange(length)
            self._in_reach(layer, shift, newest.clamp(min=0) + shift, "window")
        if layer.engine.evicted_store is not None and saved["evicted"] is not None:
            self._check_evicted(layer, saved, held)

    def _in_reach(self, layer: BudgetLayer, shift: Tensor, made_at: Tensor, what: str) -> None:
        """Refuse shifts that exceed the tokens read, and keys at positions that no table has."""
        exact = self.exact and self.moved(layer)
        last = self.cache.layout.rotation_span - 1 if exact else 2 * self.seen
        fits = bool(((shift >= 0) & (shift <= self.seen) & (made_at <= last)).all())
        self.demand(fits, f"layer {layer.index}'s {what}")

    def _check_evicted(
        self, layer: BudgetLayer, saved: dict[str, Any], rows: Sequence[Tensor]
    ) -> None:
        """Check the evicted tokens of a layer whose heads hold the positions in `rows`."""
        index, kept, counts = layer.index, layer.engine.evicted_store, saved["evicted"]
        assert kept is not None
        what = f"layer {index}'s evicted tokens"
        self.demand(len(counts) == len(rows) and max(counts) <= self.seen, what)
        tensors = {
            name: self._take(index, f"evicted.{name}", (sum(counts), *like.shape[1:]), like.dtype)
            for name, like in kept.pool.named().items()
            if name != SHIFT
        }
        tensors["made_at"] = self._take(index, "evicted.made_at", (sum(counts),), torch.int32)
        finite = all(bool(tensors[name].isfinite().all()) for name in ("keys", "values"))
        self.demand(finite and not bool(tensors["score"].isnan().any()), what)
        times, made_at = tensors["positions"], tensors["made_at"]
        self.demand(bool(((times >= 0) & (times < self.seen)).all()), what)
        pairs = zip(rows, times.split(counts), strict=True)
        ranks = torch.cat([_ranks(row, evicted) for row, evicted in pairs])
        self._in_reach(layer, made_at - (ranks if self.moved(layer) else 0), made_at, what)
        for name, like in kept.remembered.items():
            tensor = self._take(index, f"remembered.{name}", tuple(like.shape), like.dtype)
            missing = tensor.isneginf() if name == "lse" else tensor.new_zeros((), dtype=torch.bool)
            self.demand(bool((tensor.isfinite() | missing).all()), f"layer {index}'s {name}")
        steps, recomputed = saved.get("counts", (0, 1))
        self.demand(recomputed <= steps, f"layer {index}'s counts")

    def states(self, index: int) -> dict[str, Tensor]:
        """Return the states of a recurrent layer by name."""
        names = [state.name for state in self.cache.layout.shape.layers[index].states]
        return {name: self.file.tensor(f"state.{index}.{name}") for name in names}

    def _check_floats(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, what: str
    ) -> None:
        """Refuse a tensor of another shape or type, or with numbers that are none."""
        self.demand(bool(self.file.taken(name, shape, dtype).isfinite().all()), what)

    def _take(self, index: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor: Tensor = self.file.taken(f"layers.{index}.{name}", shape, dtype)
        return tensor


def _dtype(layer: BudgetLayer) -> torch.dtype:
    return layer.segments[0].pool.dtype


def _ranks(row: Tensor, times: Tensor) -> Tensor:
    """Return for each of `times` [m] how many positions of `row` [n] are older."""
    return torch.searchsorted(row.sort().values, times.contiguous(), out_int32=True)


class Refill:
    """Fills a cache with `saved` layers; making it checks everything and changes nothing.

    Raises:
        SessionFileCorrupt: boundaries between segments that the cache cannot have.
        PinsTooLarge: the pinned tokens do not fit.
    """

    def __init__(self, saved: SavedLayers) -> None:
        self.saved, self.cache, self.exact, self.seen = saved, saved.cache, saved.exact, saved.seen
        self.budgets = self._budgets()
        check_pins(self.cache.layout, saved.spans, self.seen, self.budgets)

    def run(self) -> None:
        """Fill the cache; if that fails, it is left empty."""
        cache = self.cache
        cache.reset()
        if not self.seen:
            return
        try:
            if self.saved.compact:
                cache.become_compact()
            for segments, budgets in self._pools():
                resize(segments, budgets)
            cache.set_pins(self.saved.spans)
            for layer in cache.capped_layers:
                self._fill(layer)
            for index in cache.sliding_layers:
                device = cache.capped_layers[0].segments[0].pool.keys.device
                keys, values = (self.saved.sliding(index, x).to(device) for x in ("keys", "values"))
                cache.refill_sliding(index, keys, values, self.seen)
            for index, layer in cache.state_layers.items():
                layer.fill(self.saved.states(index), self.seen)
            if self.exact and cache.balance is not None and self.saved.preferences is not None:
                cache.balance.preferences = list(self.saved.preferences)
        except BaseException:
            cache.reset()
            raise

    def _pools(self) -> list[tuple[list[Segment], list[int]]]:
        """Return the groups of segments that share slots, with their new budgets."""
        layers = [(layer.segments, self.budgets[layer.index]) for layer in self.cache.capped_layers]
        if not self.cache.layout.pooled:
            return layers
        return [([s for x, _ in layers for s in x], [b for _, x in layers for b in x])]

    def _budgets(self) -> list[list[int]]:
        """Return the slots that each segment of each layer gets, for its saved tokens."""
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
        """Return the saved budgets of a layer's segments; refuse those that it cannot have."""
        saved, layout = self.saved.layers[layer.index], self.cache.layout
        kept = []
        for s in layer.segments:
            rows = slice(s.head, s.head + s.heads)
            for row in (saved["held"][rows], saved["budgets"][rows], saved["stays"][rows]):
                self.saved.demand(len(set(row)) == 1, f"layer {layer.index}'s slots")
            budget = saved["budgets"][s.head]
            fits = saved["held"][s.head] <= budget + s.block and saved["stays"][s.head] <= budget
            self.saved.demand(fits, f"layer {layer.index}'s slots")
            kept.append(budget)
        if layout.pooled:
            total = [sum(x["budgets"][0] for x in self.saved.layers), len(self.saved.layers)]
            self.saved.demand(total[0] == total[1] * layout.budget_tokens, "the layers' slots")
        else:
            moves = layout.eviction.heads_move
            same = sum(kept) == sum(fresh) if moves else kept == fresh
            self.saved.demand(same, f"layer {layer.index}'s slots")
        return kept

    def _fill(self, layer: BudgetLayer) -> None:
        """Restore a layer: its slots, its window of queries and its evicted tokens."""
        index, saved = layer.index, self.saved.layers[layer.index]
        layer.seen = self.seen
        layer.engine.positions.note_moved(bool(saved["moved"]))
        if layer.engine.key_mean is not None:
            layer.engine.key_mean.copy_(self.saved.tensor(index, "mean"))
        if layer.engine.query_window is not None:
            layer.engine.query_window.fill(*self.saved.window(index))
        rows = self._split(index, "slots", layer.segments[0].pool, saved["held"])
        for i, s in enumerate(layer.segments):
            mine = rows[s.head : s.head + s.heads]
            limit = s.capacity if self.exact else s.budget
            keep = min(limit, *(len(row["positions"]) for row in mine))
            s.held = keep
            if self.exact:
                s.target_length = saved["stays"][s.head]
            for k, row in enumerate(mine):
                small = self._evicted_to(keep, layer, i, k, row)
                self._bring_in_reach(layer, small)
                for name, buffer in s.pool.named().items():
                    s.view(buffer)[0, k].copy_(small[name])
        if layer.engine.query_window is not None and self.saved.moved(layer) and not self.exact:
            shift = layer.engine.query_window.shift
            group = layer.engine.query_window.queries.shape[1] // shift.shape[1]
            wide = shift.repeat_interleave(group, dim=1)
            layer.engine.query_window.fill(
                self._back(layer.engine.query_window.queries, wide), torch.zeros_like(shift)
            )
        if layer.engine.evicted_store is not None and saved["evicted"] is not None:
            self._fill_evicted(layer, saved)

    def _fill_evicted(self, layer: BudgetLayer, saved: dict[str, Any]) -> None:
        kept = layer.engine.evicted_store
        assert kept is not None
        held, counts = saved["evicted"], saved["counts"]
        stored = kept.evicted
        alike = all(len(set(held[s.head : s.head + s.heads])) == 1 for s in stored)
        if not alike or any(held[s.head] > s.budget for s in stored):
            return  # a smaller store begins anew
        rows = self._split(layer.index, "evicted", kept.pool, held)
        made_at = self.saved.tensor(layer.index, "evicted.made_at")
        if self.saved.moved(layer) and bool((made_at >= self.cache.layout.rotation_span).any()):
            return  # so does one whose keys the smaller table of rotations does not reach
        for row, rotated_to in zip(rows, made_at.split(held), strict=True):
            row[SHIFT] = rotated_to
        for s, segment in zip(stored, layer.segments, strict=True):
            s.held = held[s.head]
            for k, row in enumerate(rows[s.head : s.head + s.heads]):
                if self.saved.moved(layer):
                    times = row["positions"]
                    row[SHIFT] -= _ranks(segment.positions[0, k].to(times.device), times)
                for name, buffer in kept.pool.named().items():
                    s.view(buffer)[0, k].copy_(row[name])
        for name, tensor in kept.remembered.items():
            tensor.copy_(self.saved.tensor(layer.index, f"remembered.{name}"))
        kept.counts = counts

    def _split(
        self, index: int, part: str, pool: SlotPool, held: list[int]
    ) -> list[dict[str, Tensor]]:
        """Return each head's saved row of every buffer; zeros where the file lacks a buffer."""
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
        """Evict slots of a row down to `keep`, by scores that the policy can still compute."""
        held, segment = len(row["positions"]), layer.segments[index]
        if held <= keep:
            return row
        pool, side = segment.pool, segment.pool.kinds()
        size, device = self.cache.layout.shape.head_size, pool.keys.device
        aside = SlotPool(
            held,
            size,
            pool.dtype,
            device,
            side,
            values_from=pool.values_from,
            slot_format=pool.format,
        )
        one = Segment(
            aside,
            0,
            held,
            0,
            head=segment.head + head,
            layer_heads=segment.layer_heads,
        )
        one.held, one.target_length = held, keep
        for name, buffer in aside.named().items():
            buffer.copy_(row[name])
        keys = one.keys
        if (numbers := pool.format.keys) is not None:
            keys = one.empty(held)
            mean = layer.engine.mean
            own = None if mean is None else mean[:1, one.head : one.head + 1]
            numbers.dequantise(pool.format.parts("key", one.held_views()), keys, own)
        if self.saved.moved(layer):
            keys = self._back(keys, one.aux(SHIFT))
        engine = eager_of(layer.layout)(layer.engine.memory, layer.policy)
        engine.shrink_to_budget(one, AttentionStep(self.seen, 0, [keys]))
        return {name: one.view(buffer)[0, 0] for name, buffer in aside.named().items()}

    def _bring_in_reach(self, layer: BudgetLayer, row: dict[str, Tensor]) -> None:
        """Rotate a row's keys at once if their shifts exceed this cache's table of rotations."""
        if not self.saved.moved(layer) or self.exact or not len(row["positions"]):
            return
        if layer.segments[0].pool.format.quantised:
            return  # unrotated: their shifts are ranks, whatever the cache was
        shift = row[SHIFT]
        made_at = row["positions"].argsort().argsort() + shift
        if int(made_at.max()) >= self.cache.layout.rotation_span:
            row["keys"] = self._back(row["keys"], shift)
            row[SHIFT] = torch.zeros_like(shift)

    def _back(self, x: Tensor, shift: Tensor) -> Tensor:
        """Rotate x [..., n, D] back by `shift` [..., n], however far, without a table."""
        rope = self.cache.layout.rope
        assert rope is not None
        return moved_by(rope, x, -shift)


def _share(held: list[int], total: int, least: int) -> list[int]:
    """Divide `total` slots by those `held`, plus equal shares of the rest; at least `least` each.

    If the held ones exceed the total, the slots above `least` are divided in proportion.
    """
    least = min(least, total // len(held))
    sure = [max(n, least) for n in held]
    if sum(sure) <= total:
        free = total - sum(sure)
        return [slots + evenly(free, len(held), i) for i, slots in enumerate(sure)]
    more = apportion([max(0, n - least) for n in held], total - least * len(held))
    return [least + extra for extra in more]

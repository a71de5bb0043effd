"""What a session's file says of a cache's slots, and whether a cache can take it up.

A row is what one KV head of one layer holds, in the order it lies in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcap.runtime.budget_cache import BudgetCache
from kvcap.runtime.budget_layer import BudgetLayer
from kvcap.runtime.evictor import SHIFT
from kvcap.runtime.pins import merged
from kvcap.runtime.session_file import SessionFile
from kvcap.runtime.slot_pool import Segment


def saved(layer: BudgetLayer) -> tuple[dict[str, list[Tensor]], dict[str, Any]]:
    """A layer's tensors, in pieces to be joined, and its figures by head."""
    pieces = {f"slots.{name}": rows for name, rows in _rows(layer.segments).items()}
    heads = [s for s in layer.segments for _ in range(s.heads)]
    evictor, kept, ring = layer.evictor, layer.calibration, layer.ring
    facts = {
        "held": [s.held for s in heads],
        "budgets": [s.budget for s in heads],
        "stays": [s.stay for s in heads],
        "moved": evictor is not None and evictor.moved,
        "ring": 0 if ring is None else ring.queries.shape[2],
        "evicted": None,
    }
    if ring is not None:
        pieces |= {"ring.queries": [ring.queries], "ring.shift": [ring.shift]}
    if kept is not None:
        facts["evicted"] = [s.held for s in kept.evicted for _ in range(s.heads)]
        facts["counts"] = [kept.steps, kept.recomputed]
        pieces |= {f"evicted.{name}": rows for name, rows in _rows(kept.evicted).items()}
        pieces |= {f"remembered.{name}": [x] for name, x in kept.remembered.items()}
    return pieces, facts


def _rows(segments: list[Segment]) -> dict[str, list[Tensor]]:
    """Every buffer's held part, head by head."""
    return {
        name: [row for s in segments for row in s.view(buffer)[0]]
        for name, buffer in segments[0].pool.named().items()
    }


class SavedLayers:
    """Figures and tensors of `file`, checked against `cache`, which stays as it is.

    Args:
        cache: any state.
        file: of a session that it may take up, whose facts are those of its schema.
        exact: same eviction and sizes, so that the boundaries between segments are the saved ones.

    Raises:
        SessionFileCorrupt: tensors or figures that no cache can have.
    """

    def __init__(self, cache: BudgetCache, file: SessionFile, exact: bool) -> None:
        facts = file.facts
        self.cache, self.file, self.exact = cache, file, exact
        self.seen: int = facts["seen"]
        self.layers: list[dict[str, Any]] = facts["layers"]
        self.preferences = facts["preferences"]
        self.spans = merged((a, b) for a, b in facts["pinned_spans"])
        count = len(cache.layout.budgets)
        self.demand(len(self.layers) == count, "the number of layers")
        fits = self.preferences is None or len(self.preferences) == count
        self.demand(fits, "the number of preferences")
        for index, saved in enumerate(self.layers):
            self._check(index, saved)
        for index, native in cache.sliding_layers.items():
            self._check_sliding(index, native.sliding_window)

    def demand(self, ok: bool, what: str) -> None:
        """Refuse the file unless `ok`."""
        if not ok:
            raise self.file.corrupt(f"{what} cannot be so")

    def has(self, index: int, name: str) -> bool:
        """Whether there is such a tensor of a layer."""
        return f"layers.{index}.{name}" in self.file.names

    def tensor(self, index: int, name: str) -> Tensor:
        """A tensor of a layer."""
        found: Tensor = self.file.tensor(f"layers.{index}.{name}")
        return found

    def sliding(self, index: int, name: str) -> Tensor:
        """Keys or values of a native sliding layer."""
        found: Tensor = self.file.tensor(f"sliding.{index}.{name}")
        return found

    def _check(self, index: int, saved: dict[str, Any]) -> None:
        shape, layer = self.cache.layout.shape, self.cache.capped_layers[index]
        rows, dtype = [saved["held"], saved["budgets"], saved["stays"]], _dtype(layer)
        self.demand({len(row) for row in rows} == {shape.kv_heads}, f"layer {index}'s slots")
        self.demand(all(n <= self.seen for n in rows[0]), f"layer {index}'s slots")
        self.demand(not self.seen or min(rows[0]) > 0, f"layer {index}'s slots")
        total, size = sum(rows[0]), shape.head_size
        for name in ("keys", "values"):
            self._finite(self._take(index, f"slots.{name}", (total, size), dtype), index)
        positions = self._take(index, "slots.positions", (total,), torch.int32)
        inside = bool(((positions >= 0) & (positions < self.seen)).all())
        self.demand(inside, f"layer {index}'s positions")
        held = positions.split(rows[0])
        for row in held:
            self.demand(len(row.unique()) == len(row), f"layer {index}'s positions")
        for name, kind in layer.segments[0].pool.kinds().items():
            if self.has(index, f"slots.{name}"):
                side = self._take(index, f"slots.{name}", (total,), kind)
                self.demand(not bool(side.isnan().any()), f"layer {index}'s {name}")
                if name == SHIFT:
                    made_at = torch.cat([_ranks(row, row) for row in held]) + side
                    self._in_reach(layer, side, made_at, "shifts")
            elif self.exact or (name == SHIFT and layer.rotates):
                self._take(index, f"slots.{name}", (total,), kind)  # says what is missing
        if layer.ring is not None and self.seen:
            length = saved["ring"]
            queries = (1, shape.heads, length, size)
            self._finite(self._take(index, "ring.queries", queries, dtype), index)
            shift = self._take(index, "ring.shift", (1, shape.kv_heads, length), torch.int32)
            newest = torch.tensor(rows[0])[:, None] - length + torch.arange(length)
            self._in_reach(layer, shift, newest.clamp(min=0) + shift, "window")
        if layer.calibration is not None and saved["evicted"] is not None:
            self._check_evicted(layer, saved, held)

    def _in_reach(self, layer: BudgetLayer, shift: Tensor, made_at: Tensor, what: str) -> None:
        """Refuse positions that moved further than was read, or from where none can be made."""
        exact = self.exact and layer.rotates
        last = self.cache.layout.rotation_span - 1 if exact else 2 * self.seen
        fits = bool(((shift >= 0) & (shift <= self.seen) & (made_at <= last)).all())
        self.demand(fits, f"layer {layer.index}'s {what}")

    def _check_evicted(
        self, layer: BudgetLayer, saved: dict[str, Any], rows: Sequence[Tensor]
    ) -> None:
        """The evicted tokens of a layer that holds `rows` of others."""
        index, kept, counts = layer.index, layer.calibration, saved["evicted"]
        assert kept is not None
        what = f"layer {index}'s evicted tokens"
        self.demand(len(counts) == len(rows) and max(counts) <= self.seen, what)
        found = {
            name: self._take(index, f"evicted.{name}", (sum(counts), *like.shape[1:]), like.dtype)
            for name, like in kept.pool.named().items()
        }
        finite = all(bool(found[name].isfinite().all()) for name in ("keys", "values"))
        self.demand(finite and not bool(found["score"].isnan().any()), what)
        times, made_at = found["positions"], found["made_at"]
        self.demand(bool(((times >= 0) & (times < self.seen)).all()), what)
        pairs = zip(rows, times.split(counts), strict=True)
        ranks = torch.cat([_ranks(row, evicted) for row, evicted in pairs])
        self._in_reach(layer, made_at - (ranks if layer.rotates else 0), made_at, what)
        for name, like in kept.remembered.items():
            tensor = self._take(index, f"remembered.{name}", tuple(like.shape), like.dtype)
            missing = tensor.isneginf() if name == "lse" else tensor.new_zeros((), dtype=torch.bool)
            self.demand(bool((tensor.isfinite() | missing).all()), f"layer {index}'s {name}")
        steps, recomputed = saved.get("counts", (0, 1))
        self.demand(recomputed <= steps, f"layer {index}'s counts")

    def _check_sliding(self, index: int, window: int) -> None:
        if self.seen:
            shape, dtype = self.cache.layout.shape, _dtype(self.cache.capped_layers[0])
            wanted = (1, shape.kv_heads, min(window - 1, self.seen), shape.head_size)
            for name in ("keys", "values"):
                found = self.file.taken(f"sliding.{index}.{name}", wanted, dtype)
                self.demand(bool(found.isfinite().all()), f"sliding layer {index}")

    def _finite(self, tensor: Tensor, index: int) -> None:
        self.demand(bool(tensor.isfinite().all()), f"layer {index}'s keys, values or queries")

    def _take(self, index: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        found: Tensor = self.file.taken(f"layers.{index}.{name}", shape, dtype)
        return found


def _dtype(layer: BudgetLayer) -> torch.dtype:
    return layer.segments[0].pool.keys.dtype


def _ranks(row: Tensor, times: Tensor) -> Tensor:
    """How many tokens of `row` [n] are older than each of `times` [m]."""
    return torch.searchsorted(row.sort().values, times.contiguous(), out_int32=True)

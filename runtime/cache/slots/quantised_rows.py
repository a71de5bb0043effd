"""Holds one layer's slots of 8 or 4 bits as rows: one kernel writes them, one copies them out.

Attention and the policy read a copy in the model's own type, made for one pass over a layer, as
`EagerSlots` does. Evictions move bytes and scales as they are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvcap.kernels import dequantise, quantise
from kvcap.policies.base import RowRanges
from kvcap.runtime.cache.pool import SHIFT
from kvcap.runtime.cache.row_table import LayerRowPass
from kvcap.runtime.cache.slots.quantised import QuantisedKeys
from kvcap.runtime.cache.slots.rows import RowSlots
from kvcap.runtime.cache.step import PendingBlock


class QuantisedRowSlots(QuantisedKeys, RowSlots):
    """An engine that works on a layer's quantised slots, all of its rows at once."""

    def _write(self, keys: Tensor, values: Tensor, block: PendingBlock) -> Tensor:
        rotation, rows, turn = self.positions.rotation, block.rows, None
        if rotation is not None and rows.read_at is not None:
            keys = self._at_read_at(keys, rows, rotation)
            turn = rows.read_at, rotation.table
        quantise.append(
            keys,
            values,
            block.place.token_index,
            self.pool.named(),
            rows.before,
            self.mean,
            turn,
            rows.whole.count,
            interleaved=rotation is not None and rotation.interleaved,
        )
        kept = self.policy.has_state and self.policy.reads_values  # numbers made of values
        return self._as_held(values) if kept else values

    def _as_held(self, values: Tensor) -> Tensor:
        """Return values [B, K, T, D] as they are read once they are quantised."""
        numbers, out = self.pool.format.values, values.float()
        assert numbers is not None, "all formats of fewer bits quantise values"
        numbers.dequantise(numbers.quantise(out), out, None)
        return out.to(values.dtype)

    def _held_keys(
        self, rows: LayerRowPass, values: bool = True
    ) -> tuple[Tensor, Tensor, RowRanges]:
        pool, rotation, mean = self.pool, self.positions.rotation, self.mean
        # By themselves rows lie in the copy as in their pool.
        to, room = rows.shown.starts, pool.slots
        if rows.copies is not None:
            to, room = rows.copies, len(rows.held) * rows.shown.longest
        named, parts = pool.named(), pool.format.parts
        turn = None if rotation is None else (pool.aux[SHIFT], rotation.table)
        keys, copy = dequantise.read(
            parts("key", named),
            parts("value", named) if values else None,
            pool.size,
            pool.dtype,
            rows.shown,
            to,
            room,
            mean,
            turn,
            interleaved=rotation is not None and rotation.interleaved,
        )
        return keys, copy, rows.shown._replace(starts=to)

    def token(self, *_: Any) -> None:
        """Change nothing and return None: a token is read as any block is."""

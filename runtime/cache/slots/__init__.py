"""Exports the engines that hold a layer's slots; an `Allocation` chooses one for all layers.

Both have `append`, `attend`, `token` and `evict`; rows of fewer bits are read and written their own
way. Nobody asks afterwards which one it is, but for what only one of them has: `EagerSlots.again`
of layers that share slots, the `RowTable` of rows.
"""

from kvcap.runtime.cache.slots.eager import EagerSlots
from kvcap.runtime.cache.slots.quantised_rows import QuantisedRowSlots
from kvcap.runtime.cache.slots.rows import RowSlots, covers

__all__ = ["EagerSlots", "QuantisedRowSlots", "RowSlots", "covers"]

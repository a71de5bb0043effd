"""Exports the engines that hold a layer's slots; an `Allocation` chooses one for all layers.

All derive from `SlotEngine` in `base.py`. Nobody asks afterwards which one it is.
"""

from kvcap.runtime.cache.layout import CacheLayout
from kvcap.runtime.cache.slots.corrected import CorrectedSlots
from kvcap.runtime.cache.slots.eager import EagerSlots
from kvcap.runtime.cache.slots.latent import LatentSlots
from kvcap.runtime.cache.slots.quantised import QuantisedSlots
from kvcap.runtime.cache.slots.quantised_rows import QuantisedRowSlots
from kvcap.runtime.cache.slots.rows import RowSlots, covers

__all__ = ["EagerSlots", "QuantisedRowSlots", "RowSlots", "covers", "eager_of"]


def eager_of(layout: CacheLayout) -> type[EagerSlots]:
    """Return the engine in plain PyTorch of what a layout's slots hold."""
    if layout.slot_format.quantised:
        return QuantisedSlots
    if layout.shape.latent is not None:
        return LatentSlots
    return EagerSlots if layout.eviction.corrector is None else CorrectedSlots

"""Defines the cache and the block loop of ONNX Runtime, as a conversation sees them.

They are the counterpart of `cache/cache.py` and `backends/pytorch/loop.py`; an `ExportedDecoder`
runs the graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.backends.arrays import ArrayCache, ArrayLoop, Arrays
from kvcap.runtime.backends.onnxruntime.decoder import ExportedDecoder, slots_in_use
from kvcap.runtime.backends.onnxruntime.slots import Int32
from kvcap.runtime.cache.pinned_slots import check_slots
from kvcap.runtime.errors import PinsTooLarge
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.session.engine import CacheCopy, Room
from kvcap.runtime.types import KeptTokens, Span

if TYPE_CHECKING:
    from kvcap.runtime.session.file import SessionFile

Ids = NDArray[np.int64]


class OrtCache(ArrayCache):
    """A cache of a conversation over a decoder's slots: it says what is held and what is pinned."""

    def __init__(self, decoder: ExportedDecoder, policy: str) -> None:
        self.decoder, self.policy = decoder, policy
        super().__init__(self.budget)
        decoder.regions = self.regions

    @property
    def held(self) -> int:
        """Return the slots in use per KV head and capped layer, on average (rounded up)."""
        slots = self._capped(self.decoder.held)
        return -(-sum(slots) // len(slots))

    @property
    def spare(self) -> int:
        """Return how many tokens fit before any head must evict."""
        budgets, held = self._capped(self.decoder.budgets), self._capped(self.decoder.held)
        return max(0, min(budget - slots for budget, slots in zip(budgets, held, strict=True)))

    @property
    def budget(self) -> int:
        """Return the slots of a KV head that the smallest capped layer keeps."""
        return min(self._capped(self.decoder.budgets))

    def _capped(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of the capped layers, from a list with one for each layer."""
        return [n for i, n in enumerate(numbers) if i not in self.decoder.windows]

    @property
    def nbytes(self) -> int:
        """Return the exact bytes of all buffers."""
        return self.decoder.nbytes

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the slots in use."""
        return self.decoder.used_bytes(self.seen)

    @property
    def positions(self) -> list[Int32]:
        """Return the positions of the kept tokens, by capped layer: [K, held]."""
        return self.decoder.positions(self.seen)

    @property
    def sinks(self) -> int:
        """Return how many first tokens of the conversation are never evicted."""
        return self.decoder.sinks

    def kept_tokens(self) -> list[KeptTokens]:
        """Return the tokens that every layer holds, as `BudgetCache.kept_tokens` does."""
        windows, capped = self.decoder.windows, iter(self.positions)
        return [
            KeptTokens(
                i,
                i not in windows,
                list(windows[i].positions(self.seen) if i in windows else next(capped)),
            )
            for i in range(len(self.decoder.budgets))
        ]

    @property
    def pins(self) -> list[Span]:
        """Return the pinned spans, and the regions that leave last, if a head holds these too."""
        protected = self.regions.protected
        if protected:
            with suppress(PinsTooLarge):
                self.check_pins([*self.pinned_spans, *protected])
                return [*self.pinned_spans, *protected]
        return self.pinned_spans

    def check_pins(self, spans: Sequence[Span]) -> None:
        """Refuse spans that a head cannot hold beside the policy's own pins.

        Raises:
            PinsTooLarge: naming the layer.
        """
        decoder = self.decoder
        layers = zip(decoder.budgets, decoder.recents, strict=True)
        for layer, (budget, recents) in enumerate(layers):
            if layer not in decoder.windows:
                check_slots(spans, decoder.sinks, recents, budget, self.policy, layer)

    def reset(self) -> None:
        """Forget the conversation; the buffers stay."""
        super().reset()
        self.decoder.held = [0] * len(self.decoder.budgets)


class OrtLoop(ArrayLoop):
    """A loop that reads tokens through a decoder."""

    cache: OrtCache

    @property
    def execution(self) -> str:
        """Return the version of ONNX Runtime."""
        return f"ONNX Runtime {self.cache.decoder.version}"

    def next_length(self, batch: int, left: int) -> int:
        """Return the tokens of a block, or as many as fit before the next eviction."""
        return self.cache.decoder.room

    def read(self, ids: Ids, need_logits: bool = True) -> NDArray[Any]:
        """Read one block [1, T]; return the last token's logits [1, V], needed or not.

        Raises:
            MemoryCapExceeded: before anything is read; or the system refused memory half-way, then
                the cache is empty again.
        """
        cache, tokens = self.cache, ids.shape[1]
        with self.reading(tokens):
            logits = cache.decoder.run(ids[0].tolist(), cache.seen, cache.pins)
            cache.seen += tokens
        return logits

    def drop(self, spans: Sequence[Span]) -> bool:
        """Free the slots of these tokens in layers that are capped."""
        with interrupts_deferred():
            self.cache.decoder.drop(spans, self.cache.seen)
        return True

    def copied(self) -> CacheCopy:
        """Return a copy of what the cache holds."""
        views, facts = self._views()
        arrays = {name: array.copy() for name, array in views.items()}
        return CacheCopy(facts, arrays, sum(array.nbytes for array in arrays.values()))

    def _views(self) -> tuple[Arrays, dict[str, Any]]:
        """Return views of all that the cache holds, and how many tokens and slots these are."""
        seen, held = self.cache.seen, list(self.cache.decoder.held)
        return self.cache.decoder.state(seen, held) if seen else {}, {"seen": seen, "held": held}

    def go_on_from(self, copy: CacheCopy) -> None:
        """Have the cache hold what a cache of this decoder held when it was copied."""
        cache, seen, held = self.cache, copy.facts["seen"], list(copy.facts["held"])
        with interrupts_deferred():
            cache.seen, cache.decoder.held = seen, held
            for name, array in (cache.decoder.state(seen, held) if seen else {}).items():
                array[...] = copy.tensors[name]

    def held(self) -> tuple[Arrays, dict[str, Any]]:
        """Return the slots in use as views, and facts."""
        views, facts = self._views()
        return {f"state.{name}": array for name, array in views.items()}, facts

    def saved_in(self, file: SessionFile) -> CacheCopy:
        """Return the slots in a file, checked against the decoder's shapes.

        Raises:
            LookupError, ValueError: no slots can be so.
        """
        decoder, seen = self.cache.decoder, file.facts["seen"]
        held = _held(file.facts, decoder.budgets, seen)
        arrays = {
            name: file.taken(f"state.{name}", array.shape, array.dtype)
            for name, array in (decoder.state(seen, held) if seen else {}).items()
        }
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ValueError(f"{name} holds numbers that are none")
            span = 0 if decoder.turns is None else len(decoder.turns.table)
            if name.startswith("shifts") and not ((array >= 0) & (array < span)).all():
                raise ValueError(f"{name} are none that keys can have")
            if name.startswith("positions"):
                rows = array.reshape(-1, array.shape[-1])
                inside = (rows >= 0).all() and (rows < seen).all()
                if not inside or not (np.diff(np.sort(rows, axis=1), axis=1) > 0).all():
                    raise ValueError(f"{name} are none that slots can have")
        return CacheCopy({"seen": seen, "held": held}, arrays)

    @property
    def room(self) -> Room:
        """Return how many slots are in use, free and in the budget."""
        cache = self.cache
        return Room(cache.held, cache.spare, cache.budget, lambda budget: budget)


def _held(facts: Mapping[str, Any], budgets: Sequence[int], seen: int) -> list[int]:
    """Return the slots in use by layer; older files lack them, and evict after every token."""
    held = facts.get("held") or [slots_in_use(budget, seen) for budget in budgets]
    numbers = all(type(slots) is int for slots in held) and len(held) == len(budgets)
    if not numbers or (not seen and any(held)):
        raise ValueError(f"held: {str(held)[:100]}")
    return list(held)

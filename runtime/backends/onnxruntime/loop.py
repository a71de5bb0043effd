"""Defines the cache and the block loop of ONNX Runtime, as a conversation sees them.

They are the counterpart of `cache/cache.py` and `backends/pytorch/loop.py`; an `ExportedDecoder`
runs the graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.backends.onnxruntime.decoder import ExportedDecoder
from kvcap.runtime.backends.onnxruntime.slots import Int32
from kvcap.runtime.cache.pinned_slots import check_slots
from kvcap.runtime.cache.regions import Regions
from kvcap.runtime.errors import MemoryCapExceeded, PinsTooLarge
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.memory.cap_guard import CapGuard
from kvcap.runtime.session.engine import CacheCopy, Loop, Room
from kvcap.runtime.types import KeptTokens, Span

Ids = NDArray[np.int64]


class OrtCache:
    """A cache of a conversation over a decoder's slots: it says what is held and what is pinned."""

    consistent = True  # a graph reads a block in all layers, or fails and the cache is emptied

    recomputed: list[float] = []  # noqa: RUF012  # evicted tokens are not kept

    def __init__(self, decoder: ExportedDecoder, policy: str) -> None:
        self.decoder, self.policy = decoder, policy
        self.seen = 0
        self.pinned_spans: list[Span] = []
        self.regions = decoder.regions = Regions(self.budget)
        self.unread: tuple[int, int] | None = None  # as in `BudgetCache`

    @property
    def held(self) -> int:
        """Return the slots in use per KV head and capped layer, on average (rounded up)."""
        slots = self._capped(self.decoder.held)
        return -(-sum(slots) // len(slots))

    @property
    def spare(self) -> int:
        """Return how many tokens fit before any head must evict."""
        return max(0, self.budget - self.seen)

    @property
    def budget(self) -> int:
        """Return the slots of a KV head that the smallest capped layer keeps."""
        return min(self._capped(self.decoder.budgets))

    def _capped(self, numbers: Sequence[int]) -> list[int]:
        """Return those of each layer's numbers that are of capped layers."""
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

    def pin(self, spans: Sequence[Span]) -> None:
        """Pin these tokens, [start, stop) in tokens read or still to be read: never evict them.

        Raises:
            PinsTooLarge: a head cannot hold them beside those pinned before; nothing is changed.
        """
        self.set_pins(self.pinned_with(spans))

    def pinned_with(self, spans: Sequence[Span], *, emptied: bool = False) -> list[Span]:
        """Return all pinned spans once `spans` are pinned too, or only these if it is `emptied`.

        Raises:
            PinsTooLarge: a head cannot hold them.
        """
        # Tokens that were announced and then not read, as after a Ctrl-C, are not pinned.
        seen = 0 if emptied else self.seen
        found = [*((a, min(b, seen)) for a, b in self.pinned_spans if a < seen), *spans]
        self._check_pins(found)
        return found

    def set_pins(self, spans: Sequence[Span]) -> None:
        """Pin these spans and no others.

        Raises:
            PinsTooLarge: they do not fit.
        """
        self._check_pins(spans)
        self.pinned_spans = list(spans)

    @property
    def pins(self) -> list[Span]:
        """Return the pinned spans, and the regions that leave last, if a head holds these too."""
        late = self.regions.late
        if late:
            with suppress(PinsTooLarge):
                self._check_pins([*self.pinned_spans, *late])
                return [*self.pinned_spans, *late]
        return self.pinned_spans

    def _check_pins(self, spans: Sequence[Span]) -> None:
        decoder = self.decoder
        layers = zip(decoder.budgets, decoder.recents, strict=True)
        for layer, (budget, recents) in enumerate(layers):
            if layer not in decoder.windows:
                check_slots(spans, decoder.sinks, recents, budget, self.policy, layer)

    def reset(self) -> None:
        """Forget the conversation; the buffers stay."""
        self.seen, self.pinned_spans, self.unread = 0, [], None
        self.decoder.held = [0] * len(self.decoder.budgets)


class OrtLoop(Loop):
    """A loop that reads tokens through a decoder; after each call the cache is within its budget.

    Args:
        cache: of the decoder.
        guard: holds the process to a cap, if there is one.
    """

    cache: OrtCache

    def __init__(self, cache: OrtCache, guard: CapGuard | None = None) -> None:
        super().__init__(cache)
        self.guard = guard

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
        self.check_room(tokens)
        if self.guard is not None:
            self.guard.check(tokens)
        try:
            with interrupts_deferred():
                logits = cache.decoder.run(ids[0].tolist(), cache.seen, cache.pins)
                cache.seen += tokens
        except (MemoryCapExceeded, MemoryError) as error:
            cache.reset()
            raise MemoryCapExceeded(
                f"{error}, for a block of {tokens} tokens; what was held is forgotten, the "
                "conversation is read again with the next message"
            ) from error
        except Exception:
            cache.reset()  # layers may hold different tokens
            raise
        return logits

    def copied(self) -> CacheCopy:
        """Return a copy of what the cache holds."""
        seen, held = self.cache.seen, list(self.cache.decoder.held)
        state = self.cache.decoder.state(seen, held) if seen else {}
        arrays = {name: array.copy() for name, array in state.items()}
        facts = {"seen": seen, "held": held}
        return CacheCopy(facts, arrays, sum(array.nbytes for array in arrays.values()))

    def go_on_from(self, copy: CacheCopy) -> None:
        """Have the cache hold what a cache of this decoder held when it was copied."""
        cache, seen, held = self.cache, copy.facts["seen"], list(copy.facts["held"])
        with interrupts_deferred():
            cache.seen, cache.decoder.held = seen, held
            for name, array in (cache.decoder.state(seen, held) if seen else {}).items():
                array[...] = copy.tensors[name]

    @property
    def room(self) -> Room:
        """Return what the cache holds and what still fits."""
        cache = self.cache
        return Room(cache.held, cache.spare, cache.budget, lambda budget: budget)

"""The cache and the block loop of the ONNX Runtime backend, as a conversation sees them.

The counterpart of `budget_cache.py` and `loop.py`; what runs the graphs is a `Decoder`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.backends.onnxruntime.decoder import Decoder, Int32, held
from kvcap.runtime.cache.pinned_slots import covered
from kvcap.runtime.errors import MemoryCapExceeded, PinsTooLarge
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.memory.cap_guard import CapGuard
from kvcap.runtime.session.engine import Room
from kvcap.runtime.types import OnFull, Span

Ids = NDArray[np.int64]


class OrtCache:
    """What is held of a conversation, and what of it is pinned."""

    recomputed: list[float] = []  # noqa: RUF012  # evicted tokens are not kept

    def __init__(self, decoder: Decoder, policy: str) -> None:
        self.decoder, self.policy = decoder, policy
        self.seen = 0
        self.pinned_spans: list[Span] = []
        self.unread: tuple[int, int] | None = None  # as in `BudgetCache`

    @property
    def held(self) -> int:
        """Slots in use per KV head and layer, on average (rounded up)."""
        slots = [held(budget, self.seen) for budget in self.decoder.budgets]
        return -(-sum(slots) // len(slots))

    @property
    def spare(self) -> int:
        """Tokens that fit before any head must evict."""
        return max(0, min(self.decoder.budgets) - self.seen)

    @property
    def nbytes(self) -> int:
        """Exact bytes of all buffers."""
        return self.decoder.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots in use."""
        return self.decoder.used_bytes(self.seen)

    @property
    def positions(self) -> list[Int32]:
        """The kept tokens' places in the conversation, by layer: [K, held]."""
        return self.decoder.positions(self.seen)

    def pin(self, spans: Sequence[Span]) -> None:
        """Never evict these tokens, as [start, stop) in tokens read; those to come, too.

        Raises:
            PinsTooLarge: a head cannot hold them beside those pinned before; nothing is changed.
        """
        self.set_pins(self.pinned_with(spans))

    def pinned_with(self, spans: Sequence[Span], *, emptied: bool = False) -> list[Span]:
        """What is pinned once `spans` are; `emptied`, after a reset. Nothing is changed.

        Raises:
            PinsTooLarge: a head cannot hold them.
        """
        # What was announced and then not read, as after a Ctrl-C, is not pinned.
        seen = 0 if emptied else self.seen
        found = [*((a, min(b, seen)) for a, b in self.pinned_spans if a < seen), *spans]
        self._check_pins(found)
        return found

    def set_pins(self, spans: Sequence[Span]) -> None:
        """Pin exactly these.

        Raises:
            PinsTooLarge: they do not fit.
        """
        self._check_pins(spans)
        self.pinned_spans = list(spans)

    def _check_pins(self, spans: Sequence[Span]) -> None:
        decoder, pinned = self.decoder, covered(spans)
        for layer, (budget, recents) in enumerate(
            zip(decoder.budgets, decoder.recents, strict=True)
        ):
            needed = covered([*spans, (0, decoder.sinks)]) + recents
            if spans and needed > budget:
                raise PinsTooLarge(
                    f"{pinned} tokens would be pinned, which needs {needed} slots in every head "
                    f"with the {needed - pinned} that policy {self.policy!r} pins, and a head of "
                    f"layer {layer} has {budget}; pin less, use a larger budget, or /clear"
                )

    def reset(self) -> None:
        """Forget everything; the buffers stay."""
        self.seen, self.pinned_spans, self.unread = 0, [], None


class OrtLoop:
    """Reads tokens through a decoder; after every call the cache holds at most its budget.

    Args:
        cache: of the decoder.
        guard: holds the process to a cap, if there is one.
    """

    def __init__(self, cache: OrtCache, guard: CapGuard | None = None) -> None:
        self.cache, self.guard = cache, guard
        self.on_full: OnFull = "evict"
        self.peak_bytes = cache.nbytes

    @property
    def execution(self) -> str:
        """How blocks run that are all alike."""
        return f"ONNX Runtime {self.cache.decoder.version}"

    def prefill(self, ids: Ids, on_block: Callable[[int], None] | None = None) -> NDArray[Any]:
        """Read ids [1, T] block by block; returns the last token's logits [1, V].

        A Ctrl-C takes effect between blocks: what was read stays.

        Raises:
            MemoryCapExceeded: nothing may be evicted, and too many tokens; nothing is read.
        """
        self.check_room(ids.shape[1])
        assert ids.size, "prefill of no tokens"
        size = self.cache.decoder.block_size
        for start in range(0, ids.shape[1], size):
            block = ids[:, start : start + size]
            logits = self.read(block)
            if on_block is not None:
                on_block(start + block.shape[1])
        return logits

    def read(self, ids: Ids) -> NDArray[Any]:
        """Read one block [1, T]; returns the last token's logits [1, V].

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
                logits = cache.decoder.run(ids[0].tolist(), cache.seen, cache.pinned_spans)
                cache.seen += tokens
        except MemoryCapExceeded as error:
            cache.reset()
            raise MemoryCapExceeded(
                f"{error}, for a block of {tokens} tokens; what was held is forgotten, the "
                "conversation is read again with the next message"
            ) from error
        return logits

    def check_room(self, tokens: int, answer: int = 0, *, emptied: bool = False) -> None:
        """Where nothing may be evicted, refuse what does not fit before any of it is read.

        Args:
            tokens: to be read next.
            answer: that follow at most, which a budget that is advised holds too.
            emptied: they are read into the cache once it was reset.

        Raises:
            MemoryCapExceeded: naming the budget that would do.
        """
        cache = self.cache
        room = Room(cache.held, cache.spare, min(cache.decoder.budgets), lambda budget: budget)
        (room.emptied if emptied else room).check(tokens, answer, self.on_full, None)

"""Reads tokens into the cells of a conversation, and frees those of tokens that a policy evicts.

The counterpart of `backends/onnxruntime/loop.py` over llama.cpp's library.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.backends.arrays import ArrayCache, ArrayLoop, Arrays, in_spans
from kvcap.runtime.backends.llamacpp.context import Context, Floats, for_streams
from kvcap.runtime.backends.llamacpp.model import reason
from kvcap.runtime.backends.llamacpp.rank import Indices, Ranking
from kvcap.runtime.cache.pinned_slots import check_slots
from kvcap.runtime.errors import MemoryCapExceeded, SessionFileForeign, UnsupportedModel
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.memory.cap_guard import CapGuard
from kvcap.runtime.session.engine import CacheCopy, Room
from kvcap.runtime.types import KeptTokens, Positions, Span

if TYPE_CHECKING:
    from kvcap.runtime.session.file import SessionFile

SAVED = ("state", "tokens", "places")
NONE: Indices = np.empty(0, np.int64)
BEYOND = 1 << 31  # of all positions


class LlamaCache(ArrayCache):
    """A cache of a conversation in one sequence of a context, of which it says what is held.

    A slot is a cell: all layers and KV heads hold the same tokens.

    Args:
        context: that has a free sequence.
        ranking: says which tokens stay.
        budget: slots that stay after every block.
        positions: of kept tokens: 'true'; 'compact': numbered from 0 after every eviction; 'auto':
            only before positions exceed the model's trained length. Keys of 4 bits, which the
            library rounds anew whenever they move, become compact only before positions exceed
            twice the cells.

    Raises:
        UnsupportedModel: tokens are to be renumbered, and the library cannot turn their keys.
    """

    def __init__(
        self, context: Context, ranking: Ranking, budget: int, positions: Positions
    ) -> None:
        if positions != "true" and not context.can_shift:
            raise UnsupportedModel(
                f"llama.cpp cannot move keys of {context.model.architecture}, so kept tokens keep "
                "their positions; use --positions true"
            )
        super().__init__(budget)
        self.context, self.ranking, self.budget = context, ranking, budget
        self.positions, trained = positions, context.model.trained_length
        compact = min(2 * context.cells, trained) if context.kv_dtype == "q4_0" else 0
        self.limit = {"compact": compact, "auto": trained, "true": BEYOND}[positions]
        """Holds the position beyond which kept tokens are numbered anew, from 0."""
        self.sequence = context.lease()
        # A finaliser may run in any thread, so it only says that the sequence is free.
        weakref.finalize(self, context.free.append, self.sequence)
        self.tokens = NONE
        """Holds the index in the conversation of each token that is held, ascending."""
        self.cell_positions = NONE
        """Holds their positions."""
        self._moved = False  # True: keys are turned to their positions with the next pass

    @property
    def held(self) -> int:
        """Return the slots in use."""
        return len(self.tokens)

    @property
    def spare(self) -> int:
        """Return how many tokens fit before any must be evicted."""
        return max(0, self.budget - self.held)

    @property
    def room(self) -> int:
        """Return how many tokens can be read at once."""
        return self.context.block

    @property
    def nbytes(self) -> int:
        """Return the exact bytes of the sequence's cells and states."""
        allocated = self.context.allocated
        whole = allocated.cells + allocated.sliding + allocated.states
        return whole // self.context.sequences

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the cells in use, and of windows and states."""
        allocated, context = self.context.allocated, self.context
        own = allocated.cells // context.sequences // context.cells
        beside = (allocated.sliding + allocated.states) // context.sequences
        return own * self.held + (beside if self.seen else 0)

    @property
    def sinks(self) -> int:
        """Return how many first tokens of the conversation are never evicted."""
        return self.ranking.pins(self.budget)[0]

    def kept_tokens(self) -> list[KeptTokens]:
        """Return the tokens that the layers hold, the same in all."""
        return [KeptTokens(0, True, [self.tokens])]

    def check_pins(self, spans: Sequence[Span]) -> None:
        """Refuse spans that do not fit beside the policy's own pins.

        Raises:
            PinsTooLarge: they do not.
        """
        pins = self.ranking.pins(self.budget, spans)
        check_slots(spans, *pins, self.budget, self.ranking.name, 0)

    def reset(self) -> None:
        """Forget the conversation; the cells stay."""
        self.context.remove(self.sequence)
        super().reset()
        self.tokens = self.cell_positions = NONE
        self._moved = False

    def next_positions(self, count: int) -> list[int]:
        """Return the positions of the next tokens; evicts first where cells are not enough."""
        if self.held + count > self.context.cells:
            self.evict()
        self._renumber_beyond_limit(count)
        first = self._next
        return list(range(first, first + count))

    @property
    def _next(self) -> int:
        return int(self.cell_positions[-1]) + 1 if self.held else 0

    def append(self, positions: Sequence[int]) -> None:
        """Record that the next tokens were read at these positions."""
        count = len(positions)
        self.tokens = np.concatenate((self.tokens, np.arange(self.seen, self.seen + count)))
        self.cell_positions = np.concatenate((self.cell_positions, np.array(positions, np.int64)))
        self.seen += count
        self._moved = False

    def evict(self) -> None:
        """Free the cells of all tokens beyond the budget that the policy ranks lowest."""
        if self.held <= self.budget or not self.ranking.evicts:
            return
        self.settle_keys()
        self._keep(
            self.ranking.kept(
                self.tokens,
                self.seen,
                self.budget,
                self.pinned_spans,
                lambda: self.context.layers(self.sequence, self.held),
                self.regions.weighed,
            )
        )

    def drop(self, spans: Sequence[Span]) -> None:
        """Free the cells of these tokens."""
        self.settle_keys()
        self._keep(~in_spans(self.tokens, spans))

    def _keep(self, stays: NDArray[np.bool_]) -> None:
        """Free the cells of tokens that do not stay."""
        for start, stop in runs(~stays):
            first, last = int(self.cell_positions[start]), int(self.cell_positions[stop - 1])
            self.context.remove(self.sequence, first, last + 1)
        self.tokens, self.cell_positions = self.tokens[stays], self.cell_positions[stays]
        self._renumber_beyond_limit(0)

    def _renumber_beyond_limit(self, count: int) -> None:
        """Number kept tokens from 0 if positions would exceed the limit with so many more."""
        if self._next + count <= self.limit or self._next == self.held:
            return
        positions = self.cell_positions
        by = np.arange(len(positions)) - positions  # 0 or less, and falling
        for start, stop in runs_of_equal(by):
            if by[start]:
                first, last = int(positions[start]), int(positions[stop - 1])
                self.context.move(self.sequence, first, last + 1, int(by[start]))
                self._moved = True
        self.cell_positions = np.arange(len(positions))

    def settle_keys(self) -> None:
        """Rotate moved keys to their new positions now, not with the next token.

        The library does it at the start of a pass, so one is run over a token whose cell is freed
        again. A state copied before would have keys of old positions under new numbers.
        """
        if self._moved:
            position = self._next
            self.context.read([(self.sequence, 0, position)], [])
            self.context.remove(self.sequence, position)
            self._moved = False


def runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return where runs of True begin and end.

    >>> runs(np.array([1, 1, 0, 1], bool))
    [(0, 2), (3, 4)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def runs_of_equal(values: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return where runs of equal numbers begin and end.

    >>> runs_of_equal(np.array([0, 0, -2, -2, -3]))
    [(0, 2), (2, 4), (4, 5)]
    """
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [(a, b) for a, b in pairwise(edges) if a < b]


class LlamaLoop(ArrayLoop):
    """A loop that reads tokens by llama.cpp; after each block the cache is within its budget.

    Args:
        cache: of the conversation.
        block: tokens read at once, at most.
        every: tokens of an answer between evictions.
        guard: holds the process to a cap, if there is one.
    """

    cache: LlamaCache

    def __init__(
        self, cache: LlamaCache, block: int, every: int, guard: CapGuard | None = None
    ) -> None:
        super().__init__(cache, guard, None if cache.ranking.evicts else cache.ranking.name)
        self.block, self.every = block, every
        if cache.context.outputs >= block:
            self.read_every = self._read_every

    @property
    def execution(self) -> str:
        """Return the version of llama.cpp."""
        return self.cache.context.library.label

    def next_length(self, batch: int, left: int) -> int:
        """Return the tokens of a block."""
        return self.block

    def read(self, ids: NDArray[np.int64], need_logits: bool = True) -> Floats:
        """Read one block [1, T]; return the last token's logits [1, V], if they are needed.

        Raises:
            MemoryCapExceeded: before anything is read; or the library refused the block, then the
                cache is empty again.
        """
        return self._read(ids, [ids.shape[1] - 1] if need_logits else [])

    def _read_every(self, ids: NDArray[np.int64]) -> Floats:
        """Read one block [1, T] as `read` does; return the logits [1, T, V] of all its tokens.

        Raises:
            MemoryCapExceeded: as in `read`.
        """
        return self._read(ids, range(ids.shape[1]))[None]

    def _read(self, ids: NDArray[np.int64], outputs: Sequence[int]) -> Floats:
        cache, tokens = self.cache, ids[0].tolist()
        with self.reading(len(tokens)):
            positions = cache.next_positions(len(tokens))
            logits = cache.context.read(
                [(cache.sequence, t, p) for t, p in zip(tokens, positions, strict=True)], outputs
            )
            cache.append(positions)
            self.evict(len(tokens))
        return logits

    def evict(self, read: int) -> None:
        """Evict after so many tokens were read, of an answer only every few tokens."""
        waiting = self.cache.held - self.cache.budget
        if waiting >= (self.every if read == 1 else 1):
            self.cache.evict()

    def drop(self, spans: Sequence[Span]) -> bool:
        """Free the cells of these tokens."""
        with interrupts_deferred():
            self.cache.drop(spans)
        return True

    def copied(self) -> CacheCopy:
        """Return a copy of what the cache holds."""
        cache = self.cache
        if not cache.seen:
            return CacheCopy({"seen": 0}, {}, 0)
        cache.settle_keys()
        arrays: dict[str, NDArray[Any]] = {
            "state": cache.context.state(cache.sequence),
            "tokens": cache.tokens,
            "places": cache.cell_positions,
        }
        return CacheCopy(
            {"seen": cache.seen}, arrays, sum(array.nbytes for array in arrays.values())
        )

    def go_on_from(self, copy: CacheCopy) -> None:
        """Have the cache hold what a cache of this model held when it was copied.

        Raises:
            MemoryCapExceeded: the library does not take it; the cache is empty then.
        """
        cache = self.cache
        with interrupts_deferred():
            cache.context.remove(cache.sequence)
            cache.seen, cache._moved = copy.facts["seen"], False
            if not cache.seen:
                cache.tokens = cache.cell_positions = NONE
                return
            cache.tokens, cache.cell_positions = copy.tensors["tokens"], copy.tensors["places"]
            if not cache.context.set_state(cache.sequence, copy.tensors["state"]):
                cache.reset()
                raise MemoryCapExceeded(
                    f"llama.cpp did not take back the cells that were copied: "
                    f"{reason(cache.context.library.take_log())}"
                )
            cache._renumber_beyond_limit(0)  # as the copy may be of other positions

    def take(self, copy: CacheCopy, spans: Sequence[Span]) -> None:
        """Have the cache hold the cells of a file that its budget has room for; see `ArrayLoop`.

        Raises:
            MemoryCapExceeded: the library does not take them.
        """
        before = self.copied()
        try:
            super().take(copy, spans)
        except MemoryCapExceeded:
            self.go_on_from(before)
            raise
        if copy.facts["budget_tokens"] > self.cache.budget:  # else it goes on as it was
            self.cache.evict()

    def held(self) -> tuple[Arrays, dict[str, Any]]:
        """Return the cells in use, as a context of one conversation has them, and facts.

        A file has cells without gaps, and attention adds up its numbers in the order of cells. So
        this conversation goes on from the same order, or its answers would be others than those of
        one that is loaded from the file.
        """
        cache, copy = self.cache, self.copied()
        self.go_on_from(copy)
        tensors = dict(copy.tensors)
        if cache.seen:
            tensors["state"] = for_streams(tensors["state"], 1, cache.context.model)
        return tensors, {
            "dtype": "float16",
            "positions": cache.positions,
            "policy": cache.ranking.name,
            "budget_tokens": cache.budget,
            "compact": cache.positions == "compact",
            **copy.facts,
        }

    def saved_in(self, file: SessionFile) -> CacheCopy:
        """Return the cells in a file, checked against each other, as the context takes them.

        Raises:
            SessionFileForeign: it holds more tokens than there are cells.
            LookupError, ValueError: no cells can be so.
        """
        facts, context = file.facts, self.cache.context
        if not (seen := facts["seen"]):
            return CacheCopy({"seen": 0, "budget_tokens": 0}, {})
        if missing := [name for name in SAVED if name not in file.names]:
            raise ValueError(f"{missing[0]} is missing")
        arrays = {name: file.tensor(name) for name in SAVED}
        tokens, positions = arrays["tokens"], arrays["places"]
        for array in (tokens, positions):
            if array.dtype != np.int64 or array.ndim != 1 or (np.diff(array) <= 0).any():
                raise ValueError("tokens are in no order")
        if not len(tokens) or len(tokens) != len(positions) or tokens[0] < 0 or tokens[-1] >= seen:
            raise ValueError("tokens are none that were read")
        if positions[0] < 0 or arrays["state"].dtype != np.uint8:
            raise ValueError("cells are none that can be")
        if len(tokens) > context.cells:
            raise SessionFileForeign(
                f"{str(file.path)!r} holds {len(tokens):,} tokens, and there are "
                f"{context.cells:,} cells; load it with a budget of {facts['budget_tokens']:,} "
                "slots"
            )
        arrays["state"] = for_streams(arrays["state"], context.sequences, context.model)
        return CacheCopy({"seen": seen, "budget_tokens": facts["budget_tokens"]}, arrays)

    @property
    def room(self) -> Room:
        """Return how many slots are in use, free and in the budget."""
        cache = self.cache
        return Room(cache.held, cache.spare, cache.budget, lambda budget: budget, self.never)


class LlamaTokenReader:
    """A reader of one token of each of several sessions, in one pass for each context.

    It is a `TokenReader` (`session/batch.py`).
    """

    nbytes = 0
    asynchronous = False

    def fits(self, answer: Any) -> bool:
        """Return whether a session's context has room for others."""
        return bool(answer.session.loop.cache.context.sequences > 1)

    def join(self, answer: Any) -> None:
        """Refuse a session's token as its own loop would.

        Raises:
            MemoryCapExceeded: nothing may be evicted for it.
        """
        answer.session.loop.check_room(1)

    def begin(self, answers: list[Any], tokens: list[int]) -> Callable[[], list[Floats]]:
        """Read a token of each of these answers; return a function that gives logits [1, V]."""
        loops: list[LlamaLoop] = [answer.session.loop for answer in answers]
        logits: dict[int, Floats] = {}
        for context in {id(loop.cache.context): loop.cache.context for loop in loops}.values():
            mine = [i for i, loop in enumerate(loops) if loop.cache.context is context]
            logits |= self._pass(context, {i: (loops[i], tokens[i]) for i in mine})
        return lambda: [logits[i] for i in range(len(loops))]

    def _pass(
        self, context: Context, tokens: Mapping[int, tuple[LlamaLoop, int]]
    ) -> dict[int, Floats]:
        """Read a token by each of these loops, whose sequences are in one context."""
        positions = {i: loop.cache.next_positions(1) for i, (loop, _) in tokens.items()}
        read = [
            (loop.cache.sequence, token, positions[i][0]) for i, (loop, token) in tokens.items()
        ]
        try:
            logits = context.read(read, range(len(read)))
        except Exception:
            for loop, _ in tokens.values():
                loop.cache.reset()
            raise
        for i, (loop, _) in tokens.items():
            loop.cache.append(positions[i])
            loop.evict(1)
        return {i: row[None] for i, row in zip(tokens, logits, strict=True)}

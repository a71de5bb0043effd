"""Calls llama.cpp's library directly, as a slow reference for kvcap's cells in it.

A `Plain` context reads tokens at given positions and frees them one by one. A `Follower` reads in
it whatever a conversation reads, and compares logits and positions.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_int8, c_int32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
from numpy.typing import NDArray

from kvcap.runtime.backends.llamacpp.context import Context
from kvcap.runtime.backends.llamacpp.library import (
    CELL_TYPES,
    LlamaBatch,
    find_library,
    load_library,
)
from kvcap.runtime.backends.llamacpp.loop import LlamaCache, LlamaLoop
from kvcap.runtime.backends.llamacpp.model import LlamaModel
from kvcap.runtime.backends.llamacpp.rank import ranking_of
from kvcap.runtime.backends.llamacpp.runtime import LlamaRuntime
from kvcap.runtime.types import Positions

Floats = NDArray[np.float32]
CELLS = 512  # of a plain context
TOLERANCE = (
    0.02  # of logits of some units: cells in another order, so sums of float16 round otherwise
)

needs_library = pytest.mark.skipif(
    find_library() is None, reason="no library of llama.cpp is installed: pip install xllamacpp"
)


@functools.cache
def loaded(file: Path) -> LlamaModel:
    """Return the model of a file, loaded once."""
    return LlamaModel(load_library(), file)


class Plain:
    """A context of a model in which tokens are read and freed by the library's own functions.

    Args:
        model: loaded.
        kv_dtype: of cells.
        block: tokens read at once, at most.
        whole: whether sliding layers keep all tokens, of which their windows see some.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        kv_dtype: str | None = None,
        block: int = CELLS,
        whole: bool = True,
    ) -> None:
        self.calls: Any = model.library.calls
        self.model, self.vocabulary = model, model.vocabulary
        settings = model.library.context_settings(sliding_whole=whole)
        settings.n_ctx, settings.n_batch, settings.n_ubatch = CELLS, block, block
        settings.n_threads = settings.n_threads_batch = 1
        settings.type_k = settings.type_v = CELL_TYPES[kv_dtype]
        self.pointer = self.calls.llama_init_from_model(model.pointer, settings)
        assert self.pointer
        self.memory = self.calls.llama_get_memory(self.pointer)

    def close(self) -> None:
        """Free the context."""
        self.calls.llama_free(self.pointer)

    def read(self, tokens: Sequence[int], positions: Sequence[int]) -> Floats:
        """Read tokens at these positions; return the logits [n, V] behind each."""
        count = len(tokens)
        sequence = (c_int32 * 1)(0)
        arrays = (
            (c_int32 * count)(*tokens),
            None,
            (c_int32 * count)(*positions),
            (c_int32 * count)(*[1] * count),
            (c_void_p * count)(*[ctypes.addressof(sequence)] * count),
            (c_int8 * count)(*[1] * count),
        )
        addresses = (None if a is None else ctypes.addressof(a) for a in arrays)
        assert self.calls.llama_decode(self.pointer, LlamaBatch(count, *addresses)) == 0
        rows = (self.calls.llama_get_logits_ith(self.pointer, i) for i in range(count))
        return np.stack([np.ctypeslib.as_array(r, (self.vocabulary,)).copy() for r in rows])

    def free(self, position: int) -> None:
        """Free the token of one position."""
        assert self.calls.llama_memory_seq_rm(self.memory, 0, position, position + 1)

    def move(self, position: int, by: int) -> None:
        """Move the token of one position, and all behind it."""
        self.calls.llama_memory_seq_add(self.memory, 0, position, -1, by)

    def greedy(self, tokens: Sequence[int], count: int, block: int) -> list[int]:
        """Return the likeliest next tokens after some that are read block by block."""
        for at in range(0, len(tokens), block):
            part = tokens[at : at + block]
            logits = self.read(part, range(at, at + len(part)))
        written = [int(logits[-1].argmax())]
        while len(written) < count:
            position = len(tokens) + len(written) - 1
            written.append(int(self.read(written[-1:], [position])[-1].argmax()))
        return written


class Follower:
    """A reader of what a conversation reads, in a plain context, token for token.

    Args:
        plain: the context.
        positions: how kept tokens are numbered.
        limit: the position that compact ones may reach before they are numbered from 0 again.
    """

    def __init__(self, plain: Plain, positions: Positions, limit: int = 0) -> None:
        self.plain, trained = plain, plain.model.trained_length
        self.limit = {"compact": limit, "auto": trained, "true": 1 << 40}[positions]
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.plain.calls.llama_memory_seq_rm(self.plain.memory, 0, 0, -1)
        self.held: list[tuple[int, int]] = []  # places in the conversation, and positions
        self.seen = 0
        self.steps: list[tuple[list[int], list[int]]] = []
        """Holds what was kept before each block, and the block."""

    def replay(self, steps: list[tuple[list[int], list[int]]]) -> None:
        """Become what read these blocks."""
        self.reset()
        for kept, block in steps:
            self.keep(kept)
            self.read(block)

    def read(self, tokens: Sequence[int]) -> Floats:
        """Read a block; return all its logits [n, V]."""
        self.steps.append(([position for position, _ in self.held], [*tokens]))
        self._close_up_beyond(len(tokens))
        first = self.held[-1][1] + 1 if self.held else 0
        positions = range(first, first + len(tokens))
        logits = self.plain.read(tokens, positions)
        self.held += zip(range(self.seen, self.seen + len(tokens)), positions, strict=True)
        self.seen += len(tokens)
        return logits

    def keep(self, tokens: Sequence[int]) -> None:
        """Free every token but these, given by their places in the conversation."""
        stay = set(tokens)
        assert stay <= {position for position, _ in self.held}
        for entry in [entry for entry in self.held if entry[0] not in stay]:
            self.plain.free(entry[1])
            self.held.remove(entry)
        self._close_up_beyond(0)

    def _close_up_beyond(self, count: int) -> None:
        """Move every token next to the one before it if so many more would exceed the limit."""
        if not self.held or self.held[-1][1] + 1 + count <= self.limit:
            return
        for i in range(len(self.held)):
            if by := i - self.held[i][1]:
                self.plain.move(self.held[i][1], by)
                self.held = [(t, p + by if j >= i else p) for j, (t, p) in enumerate(self.held)]


def loop_over(
    model: LlamaModel,
    policy: str,
    budget: int,
    block: int,
    *,
    positions: Positions = "compact",
    options: dict[str, Any] | None = None,
    kv_dtype: str | None = None,
    every: int = 1,
    context: Context | None = None,
) -> LlamaLoop:
    """Return a loop over the cells of a sequence, that gives all logits of a block."""
    context = context or Context(
        model, budget + block, block, kv_dtype=kv_dtype, outputs=block, threads=1
    )
    cache = LlamaCache(context, ranking_of(policy, options or {}), budget, positions)
    return LlamaLoop(cache, block, every)


def runtime_of(file: Path, **settings: Any) -> LlamaRuntime:
    """Return a runtime of a small budget over a file, on one thread."""
    given = {"budget_tokens": 48, "block_size": 16, "threads": 1, **settings}
    return LlamaRuntime.from_file(file, **given)


def text_ids(seed: int, count: int) -> list[int]:
    """Return random tokens that are no special ones."""
    known = len(tiny_gguf.vocabulary())
    rng = np.random.default_rng(seed)
    ids: list[int] = rng.integers(len(tiny_gguf.SPECIAL), known, count).tolist()
    return ids


def agree(logits: Floats, expected: Floats, tolerance: float = TOLERANCE) -> None:
    """Check that logits are equal, but for rounding."""
    np.testing.assert_allclose(logits, expected, rtol=tolerance, atol=tolerance)

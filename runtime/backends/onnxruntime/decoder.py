"""A decoder that reads a block and evicts: what `fused` and `paired` graphs have in common.

The slots of all layers, in time order, in buffers that are allocated once. Knows no text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.backends.onnxruntime.graph import Array
from kvcap.runtime.types import Span

Int32 = NDArray[np.int32]


class Decoder(Protocol):
    """Runs a model and keeps its slots."""

    budgets: list[int]  # slots per KV head that stay, of every layer
    block_size: int
    version: str  # of ONNX Runtime
    sinks: int  # first tokens that the policy pins
    recents: list[int]  # newest ones, of every layer

    @property
    def nbytes(self) -> int:
        """Exact bytes of all buffers: they are allocated, and never more."""

    def used_bytes(self, seen: int) -> int:
        """Bytes of the slots in use after `seen` tokens, in all places where they lie."""

    def run(self, ids: Sequence[int], seen: int, spans: Sequence[Span]) -> NDArray[np.float32]:
        """Read up to `block_size` tokens after `seen`, evict; the last one's logits [1, V].

        Raises:
            MemoryCapExceeded: the system refused memory; the slots are no longer whole.
        """

    def positions(self, seen: int) -> list[Int32]:
        """The kept tokens' places in the conversation after `seen`, by layer: [K, held]."""

    def state(self, seen: int) -> Mapping[str, Array]:
        """Everything that is held after `seen` tokens, by name (views)."""


def held(budget: int, seen: int) -> int:
    """Slots in use of a head that keeps `budget` of `seen` tokens."""
    return min(budget, seen)


def spans_array(spans: Sequence[Span], buffer: Int32) -> Int32:
    """Spans as the rows [S, 2] of a graph's input; an empty one where there are none.

    Written into `buffer` [S_max, 2] where they fit, so that its place stays the same.
    """
    rows = np.array(spans or [(0, 0)], np.int32)
    if len(rows) > len(buffer):
        return rows
    buffer[: len(rows)] = rows
    return buffer[: len(rows)]

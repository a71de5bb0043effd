"""Describes one forward pass through the cache: its context, pending blocks and streams.

Knows tensors, and where unequal heads lie.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcap.runtime.cache.row_table import RowPass

LAYERS = 4  # of one sequence that evict at once, each on a stream of its own
URGENT = -1  # the priority of the stream that captures; evictions have 0, which is less


class SideStream:
    """Runs evictions on CUDA streams of their own, beside the matrix products that follow.

    Used while a CUDA graph is captured: the graph gets branches, which are joined at its end.

    Args:
        device: of the graph.
        batch: sequences. Evictions of many sequences read much and fill the device, so that fewer
            layers evict at once.
    """

    def __init__(self, device: torch.device, batch: int = 1) -> None:
        layers = max(1, LAYERS // batch)
        self._streams = deque(_streams(device)[:layers])  # the first is that of the layer in hand
        self._kept: list[Any] = []  # of the layer in hand
        self._before: deque[tuple[torch.cuda.Event, list[Any]]] = deque()  # of those before

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        """Wait for all streams, after an error too: torch ends no capture with open branches."""
        self.join()

    def join(self) -> None:
        """Wait for everything that layers run on their streams."""
        self.next_layer()
        for event, _ in list(self._before)[-len(self._streams) :]:  # the last of every stream
            torch.cuda.current_stream().wait_event(event)
        self._before.clear()

    @contextmanager
    def run_async(self, kept: Any) -> Iterator[None]:
        """Run the `with` block on another stream, after everything launched before.

        `make_room` and the end of the capture wait for it.

        Args:
            kept: the tensors that the body reads; their memory is not reused until then.
        """
        self._kept.append(kept)
        stream = self._streams[0]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def wait(self) -> None:
        """Wait for everything that the present layer runs on its stream, if it runs anything."""
        if self._kept:  # a capture may not wait for a stream that is no part of it
            torch.cuda.current_stream().wait_stream(self._streams[0])

    def next_layer(self) -> None:
        """Begin another layer, on the stream of the layer that began the longest time ago."""
        if self._kept:
            self._before.append((self._streams[0].record_event(), self._kept))
            self._kept = []
            self._streams.rotate(-1)

    def make_room(self) -> None:
        """Wait for the layer that used this stream before, so that the memory it kept is free.

        For layers that keep large tensors; others need not wait.
        """
        while len(self._before) >= len(self._streams):
            event, _ = self._before.popleft()
            torch.cuda.current_stream().wait_event(event)


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """Return the streams that all graphs share, as libraries keep a workspace for each stream."""
    return tuple(torch.cuda.Stream(device) for _ in range(LAYERS))


class BlockPlace(NamedTuple):
    """A record of where a block lies in the conversation, one of which all layers share."""

    seen: int
    """Counts the tokens read before it."""
    total_tokens: int
    """Counts the tokens read, its own included."""
    read_at: int
    """Holds the position of its first token, as transformers or the block loop counted."""
    token_index: Tensor
    """Holds the indices of its tokens in the conversation, [T] int32."""
    total_counter: Tensor | None
    """Holds `total_tokens` as a tensor [] on the device, inside a CUDA graph."""


@dataclass
class ForwardContext:
    """Describes one forward pass; the default is a pass that transformers makes by itself."""

    start: int | None = None
    """Holds the first token's position; None: the number of tokens read, as transformers counts.

    The block loop sets it so that keys arrive at compact positions and need no rotation."""
    tokens: int | None = None
    """Counts its tokens without the fillers behind them; None: there are no fillers."""
    blocks: int = 1
    """Counts its blocks, which each layer takes one after the other."""
    block: int = 0
    """Holds the index of the block that a layer is reading."""
    sizes: list[int] | None = None
    """Lists the lengths of the blocks that each layer reads one by one; None: all tokens at once.

    The cache notes them as it admits the pass."""
    stream: SideStream | None = None
    """Runs evictions beside other work while a CUDA graph is captured."""
    rows: RowPass | None = None
    """Holds the rows of unequal heads, if kernels read them; see `BudgetCache.by_rows`."""
    _counters: list[Tensor] = field(default_factory=list)
    _places: dict[tuple[int, int, int, torch.device], BlockPlace] = field(default_factory=dict)
    _mask: Tensor | None = None

    def bind_token_counter(self, token_counter: Tensor, block_size: int) -> None:
        """Count tokens by a tensor [] on the device, while a CUDA graph is captured."""
        later = [token_counter + i * block_size for i in range(1, self.blocks)]
        self._counters = [token_counter, *later]

    @property
    def is_waited_for(self) -> bool:
        """Return whether another block of the pass follows, which waits for this one's eviction."""
        return self.block + 1 < self.blocks

    @property
    def runs_attention_async(self) -> bool:
        """Return whether attention runs on another stream, as another block waits for eviction."""
        return self.stream is not None and self.is_waited_for

    def run_async_unless_last(self, kept: Any) -> AbstractContextManager[None]:
        """Run attention on another stream, but that of the pass's last block.

        `kept` as in `SideStream.run_async`. The last block waits for it.
        """
        if self.stream is None or not self.is_waited_for:
            return nullcontext()
        return self.stream.run_async(kept)

    def run_async_if_last(self, kept: Any) -> AbstractContextManager[None]:
        """Run an eviction on another stream after the pass's last block, which no block waits for.

        `kept` as in `SideStream.run_async`. After any other block the body runs at once.
        """
        if self.stream is None or self.is_waited_for:
            return nullcontext()
        self.stream.wait()
        return self.stream.run_async(kept)

    def make_room(self) -> None:
        """Free the memory of earlier layers before one keeps large tensors; see `SideStream`."""
        if self.stream is not None:
            self.stream.make_room()

    def join(self) -> None:
        """Wait for what all layers run on other streams."""
        if self.stream is not None:
            self.stream.join()

    @property
    def token_counter(self) -> Tensor | None:
        """Return the number of tokens read before the block as a tensor [], inside a CUDA graph.

        What a graph computes must depend on this tensor and not on Python's numbers, which a
        replay does not change. None outside a graph.
        """
        return self._counters[self.block] if self._counters else None

    def place_of(self, seen: int, length: int, device: torch.device) -> BlockPlace:
        """Return where the block in hand lies, which has `length` tokens after `seen` others.

        It is computed for the first layer of a device.
        """
        key = (self.block, seen, length, device)
        if key not in self._places:
            if len(self._places) >= self.blocks:
                self._places.clear()
            first: int | Tensor = seen
            after = None
            if self._counters:
                counter = self._counters[self.block]
                count = None if self.rows is None else self.rows.count
                first, after = counter, counter + (length if count is None else count)
            token_index = first + torch.arange(length, dtype=torch.int32, device=device)
            read_at = seen if self.start is None else self.start
            self._places[key] = BlockPlace(seen, seen + length, read_at, token_index, after)
        return self._places[key]

    def causal_bias(self, length: int, slots: int, like: Tensor) -> Tensor:
        """Return a block's causal mask as it is added to logits, [1, 1, T, n].

        All layers share one tensor; on a CPU attention would make one in every layer.
        """
        if self._mask is None or self._mask.shape[2:] != (length, slots):
            hidden = like.new_full((length, slots), float("-inf"))
            self._mask = hidden.triu_(slots - length + 1)[None, None]
        return self._mask


@dataclass
class PendingBlock:
    """A block on its way through a layer: it arrives, is appended and attended to, then evicted.

    A layer has at most one.
    """

    context: ForwardContext
    length: int
    arrived: tuple[Tensor, Tensor] | None
    """Holds keys and values [B, K, T, D] until they are appended; None: they are in slots."""
    sizes: list[int]
    """Holds the lengths of the blocks in which it is appended one by one; mostly it is one."""
    place: BlockPlace = field(init=False)
    """Says where it lies in the conversation, once it is appended."""
    readers: int = 0
    """Counts the layers that are yet to attend to it: its own, and others that read its slots."""
    offsets: tuple[int, ...] = (0,)
    """Says how far past the slots of each segment it was read; `EagerSlots` uses it."""
    shown: Any = None
    """Holds the keys and values that its own layer attended to, for others; of `EagerSlots`."""
    rows: Any = None
    """Holds the layer's `LayerRowPass`; `RowSlots` uses it."""
    turn: Tensor | None = None
    """Says by how far each row rotates it back, [B, K] int32; `RowSlots` uses it."""
    new_values: Tensor | None = None
    """Holds its values [B, K, T, D]; `RowSlots` uses them."""

    def parts(self, query: Tensor) -> Iterator[tuple[PendingBlock, Tensor]]:
        """Yield its blocks one by one, each with its queries [B, H, t, D]."""
        assert self.arrived is not None
        keys, values, queries = (x.split(self.sizes, 2) for x in (*self.arrived, query))
        for i, size in enumerate(self.sizes):
            self.context.block = i if self.context.blocks > 1 else 0
            yield PendingBlock(self.context, size, (keys[i], values[i]), [size]), queries[i]

"""One forward pass through the cache: its context, its blocks on their way, its second stream.

Knows torch only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

LAYERS = 4  # of one sequence that evict at once, each on a stream of its own


class SideStream:
    """Further branches of the graph that is being captured within it, joined at the end.

    Args:
        device: of the graph.
        batch: sequences. What many read is large, and evicting of them fills the device: fewer
            layers do so at once.
    """

    def __init__(self, device: torch.device, batch: int = 1) -> None:
        layers = max(1, LAYERS // batch)
        self._streams = deque(_streams(device)[:layers])  # the first is that of the layer in hand
        self._kept: list[Any] = []  # of the layer in hand
        self._before: deque[tuple[torch.cuda.Event, list[Any]]] = deque()  # of those before

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        """Wait for all of it, of a pass that failed too: torch ends no capture that is in parts."""
        self.next_layer()
        for event, _ in list(self._before)[-len(self._streams) :]:  # the last of every stream
            torch.cuda.current_stream().wait_event(event)
        self._before.clear()

    @contextmanager
    def run_async(self, kept: Any) -> Iterator[None]:
        """What runs within it waits for all before; `rejoin`, `make_room` and the end wait for it.

        Args:
            kept: holds the tensors that it reads, whose memory nobody else may have until then.
        """
        self._kept.append(kept)
        self._streams[0].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._streams[0]):
            yield

    def rejoin(self) -> None:
        """Wait for the layer in hand, which may go on beside after that."""
        torch.cuda.current_stream().wait_stream(self._streams[0])

    def next_layer(self) -> None:
        """Another layer begins, on the stream of the one that began the longest ago."""
        if self._kept:
            self._before.append((self._streams[0].record_event(), self._kept))
            self._kept = []
            self._streams.rotate(-1)

    def make_room(self) -> None:
        """Wait for the layer that had the stream of the one in hand; what it kept can go.

        For layers that keep much. What others keep may stay to the end, and nothing waits.
        """
        while len(self._before) >= len(self._streams):
            event, _ = self._before.popleft()
            torch.cuda.current_stream().wait_event(event)


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """The same for all graphs: libraries keep workspaces for every stream that they have met."""
    return tuple(torch.cuda.Stream(device) for _ in range(LAYERS))


@dataclass
class ForwardContext:
    """One forward pass; as it is by default, what transformers makes without the block loop."""

    start: int | None = None
    """The position it is read at; None: at the logical length, as transformers does. The block loop
    says it so that compact positions need no rotation on arrival."""
    tokens: int | None = None
    """How many it has, where fillers follow them; see `BlockLoop.read`."""
    blocks: int = 1
    """How many it has: each layer takes them one after the other."""
    block: int = 0
    """Which of them a layer has in hand."""
    filling: bool = False
    """With a token counter: no slot was given up yet, so that it also says how many are in use."""
    room: int | None = None
    """Tokens that fitted into the cache when it began; a longer block is read in two, by all
    layers alike."""
    stream: SideStream | None = None
    """Where layers evict while a CUDA graph is made."""
    _counters: list[Tensor] = field(default_factory=list)
    _times: dict[tuple[int, int, torch.device], Tensor] = field(default_factory=dict)
    _after: dict[int, Tensor] = field(default_factory=dict)

    def bind_token_counter(self, token_counter: Tensor, block_size: int, filling: bool) -> None:
        """Take what was read before it from a tensor [], while a CUDA graph is made or prepared."""
        later = [token_counter + i * block_size for i in range(1, self.blocks)]
        self._counters, self.filling = [token_counter, *later], filling

    @property
    def is_waited_for(self) -> bool:
        """Whether another block of the pass begins where a layer is done with the one in hand."""
        return self.block + 1 < self.blocks

    def run_async_if_last(self, kept: Any) -> AbstractContextManager[None]:
        """What attention does not wait for runs within it; see `SideStream.run_async`.

        Only of the last block: any other has one behind it that waits.
        """
        return nullcontext() if self.is_waited_for else self.run_async(kept)

    def run_async(self, kept: Any) -> AbstractContextManager[None]:
        """Likewise of any block; whoever needs what comes of it calls `rejoin` before."""
        return nullcontext() if self.stream is None else self.stream.run_async(kept)

    def make_room(self) -> None:
        """Before a layer keeps what is large beside; see `SideStream.make_room`."""
        if self.stream is not None:
            self.stream.make_room()

    def rejoin(self) -> None:
        """Wait for what runs beside the layer in hand."""
        if self.stream is not None:
            self.stream.rejoin()

    @property
    def token_counter(self) -> Tensor | None:
        """Inside a CUDA graph: how many tokens were read before the block, on the device [].

        Whatever enters a computation must come from there, not from Python's numbers.
        """
        return self._counters[self.block] if self._counters else None

    def token_counter_after(self, length: int) -> Tensor | None:
        """The counter after the block of `length` in hand; layers share one tensor."""
        if self.token_counter is not None and self.block not in self._after:
            self._after[self.block] = self.token_counter + length
        return self._after.get(self.block)

    def times_of(self, seen: int, length: int, device: torch.device) -> Tensor:
        """Which tokens a block of `length` after `seen` has, [T] int32; layers share one."""
        asked = (seen, length, device)
        if asked not in self._times:
            if len(self._times) >= self.blocks:
                self._times.clear()
            first = seen if self.token_counter is None else self.token_counter
            self._times[asked] = first + torch.arange(length, dtype=torch.int32, device=device)
        return self._times[asked]


@dataclass
class PendingBlock:
    """A block on its way through a layer: it arrives, is appended, attended and evicted after.

    A layer has at most one. With stock attention, which never says when it has attended, a block
    stays pending until the next one arrives.
    """

    context: ForwardContext
    length: int
    arrived: tuple[Tensor, Tensor] | None
    """Keys and values [B, K, T, D] that are yet to be appended; None: they are in their slots."""
    sizes: list[int]
    """Tokens of each of the blocks it is appended in, one after the other: one, or several."""
    total_tokens: int = 0
    """Tokens read, these included, once there is room for it."""
    offsets: tuple[int, ...] = (0,)
    """How far past the slots of each segment it was read: of one for all heads, or of each."""

    @property
    def appended(self) -> bool:
        """Whether its keys and values are in their slots."""
        return self.arrived is None

    def parts(self, query: Tensor) -> Iterator[tuple[PendingBlock, Tensor]]:
        """Its blocks one by one, each with its queries [B, H, t, D]."""
        assert self.arrived is not None
        keys, values, queries = (x.split(self.sizes, 2) for x in (*self.arrived, query))
        for i, size in enumerate(self.sizes):
            self.context.block = i if self.context.blocks > 1 else 0
            yield PendingBlock(self.context, size, (keys[i], values[i]), [size]), queries[i]

"""The forward pass in hand: what a cache's layers cannot see of it. Knows torch only."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvcap.runtime.cache.streams import SideStream


@dataclass
class Pass:
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
    """With a clock: no slot was given up yet, so that it also says how many are in use."""
    side: SideStream | None = None
    """Where layers evict while a CUDA graph is made."""
    _clocks: list[Tensor] = field(default_factory=list)
    _times: dict[tuple[int, int, torch.device], Tensor] = field(default_factory=dict)
    _after: dict[int, Tensor] = field(default_factory=dict)

    def tell_time_by(self, clock: Tensor, block_size: int, filling: bool) -> None:
        """Take what was read before it from a tensor [], while a CUDA graph is made or prepared."""
        later = [clock + i * block_size for i in range(1, self.blocks)]
        self._clocks, self.filling = [clock, *later], filling

    @property
    def is_waited_for(self) -> bool:
        """Whether another block of the pass begins where a layer is done with the one in hand."""
        return self.block + 1 < self.blocks

    def beside(self, kept: Any) -> AbstractContextManager[None]:
        """What attention does not wait for runs within it; see `SideStream.beside`.

        Only of the last block: any other has one behind it that waits.
        """
        return nullcontext() if self.is_waited_for else self.meanwhile(kept)

    def meanwhile(self, kept: Any) -> AbstractContextManager[None]:
        """Likewise of any block; whoever needs what comes of it calls `rejoin` before."""
        return nullcontext() if self.side is None else self.side.beside(kept)

    def make_room(self) -> None:
        """Before a layer keeps what is large beside; see `SideStream.make_room`."""
        if self.side is not None:
            self.side.make_room()

    def rejoin(self) -> None:
        """Wait for what runs beside the layer in hand."""
        if self.side is not None:
            self.side.rejoin()

    @property
    def clock(self) -> Tensor | None:
        """Inside a CUDA graph: how many tokens were read before the block, on the device [].

        Whatever enters a computation must come from there, not from Python's numbers.
        """
        return self._clocks[self.block] if self._clocks else None

    def clock_after(self, length: int) -> Tensor | None:
        """What the clock says after the block of `length` in hand; layers share one tensor."""
        if self.clock is not None and self.block not in self._after:
            self._after[self.block] = self.clock + length
        return self._after.get(self.block)

    def times_of(self, seen: int, length: int, device: torch.device) -> Tensor:
        """Which tokens a block of `length` after `seen` has, [T] int32; layers share one."""
        asked = (seen, length, device)
        if asked not in self._times:
            if len(self._times) >= self.blocks:
                self._times.clear()
            first = seen if self.clock is None else self.clock
            self._times[asked] = first + torch.arange(length, dtype=torch.int32, device=device)
        return self._times[asked]

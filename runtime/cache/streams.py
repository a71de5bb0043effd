"""Work beside the stream that a CUDA graph is made of: eviction while the next products run.

What a layer gives up is of no interest to anybody before its next block. Knows torch only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

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
        self.turn()
        for event, _ in list(self._before)[-len(self._streams) :]:  # the last of every stream
            torch.cuda.current_stream().wait_event(event)
        self._before.clear()

    @contextmanager
    def beside(self, kept: Any) -> Iterator[None]:
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

    def turn(self) -> None:
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

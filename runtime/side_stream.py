"""Work beside the stream that a CUDA graph is made of: eviction while the next products run.

What a layer gives up is of no interest to anybody before its next block. Knows torch only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


class SideStream:
    """A second branch of the graph that is being captured on `device`; join it before the end."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream(device)
        self._kept: list[Any] = []  # of the layer in hand
        self._before: tuple[torch.cuda.Event, list[Any]] | None = None  # of the one before

    @contextmanager
    def beside(self, kept: Any) -> Iterator[None]:
        """What runs within it waits for all before it, and only `turn` and `join` wait for it.

        Args:
            kept: holds the tensors that it reads, whose memory nobody else may have until then.
        """
        self._kept.append(kept)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Any:
        """What is done when all is that was begun beside so far."""
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Wait for it."""
        torch.cuda.current_stream().wait_event(mark)

    def turn(self) -> None:
        """Another layer begins: wait for the one before the last, whose tensors can go."""
        if self._before is not None:
            self.wait(self._before[0])
        self._before = (self.mark(), self._kept) if self._kept else None
        self._kept = []

    def join(self) -> None:
        """Wait for all of it."""
        if self._kept or self._before is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._kept, self._before = [], None


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all graphs: libraries keep workspaces for every stream that they have met."""
    return torch.cuda.Stream(device)

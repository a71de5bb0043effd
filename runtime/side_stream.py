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
        self._kept: list[Any] = []

    @contextmanager
    def beside(self, kept: Any) -> Iterator[None]:
        """What runs within it waits for all before it; only `join` waits for it.

        Args:
            kept: holds the tensors that it reads, whose memory nobody else may have until then.
        """
        self._kept.append(kept)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Wait for it, if there is anything to wait for."""
        if self._kept:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._kept.clear()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all graphs: libraries keep workspaces for every stream that they have met."""
    return torch.cuda.Stream(device)

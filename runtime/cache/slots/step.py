"""Describes what attention saw of a block, for the policy to look at."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from kvcap.runtime.cache.slots.policy import AttentionCall


@dataclass(frozen=True)
class AttentionStep:
    """A record of what attention saw of a block in one layer, segment by segment."""

    tokens: int
    """Tokens read so far, the block's included."""
    length: int
    """Tokens of the block."""
    keys: list[Tensor]
    """Keys of every segment [b, k, held, D], at the positions where they count."""
    queries: list[Tensor] | None = None
    """Queries of every segment [b, h, T, D] likewise; None: stock attention shows none."""
    values: list[Tensor] | None = None
    """Values of every segment [b, k, held, D]; None: they are read from its slots."""
    call: AttentionCall = field(default_factory=AttentionCall)
    token_counter: Tensor | None = None
    """`tokens` on the device [], inside a CUDA graph."""
    attended: Tensor | None = None
    """[B, H, T, D], attention's output, where the policy looks at all of it."""

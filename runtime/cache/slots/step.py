"""Describes what attention saw of a block, for the policy to look at."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from kvcap.runtime.cache.slots.policy import AttentionCall


@dataclass(frozen=True)
class AttentionStep:
    """A record of what attention saw of a block in one layer, segment by segment."""

    tokens: int
    """Counts the tokens read so far, the block's included."""
    length: int
    """Counts the tokens of the block."""
    keys: list[Tensor]
    """Holds the keys of every segment [b, k, held, D], at their present positions."""
    queries: Tensor | None = None
    """Holds the queries of the layer [B, H, T, D], likewise; None: the policy reads none."""
    values: list[Tensor] | None = None
    """Holds copies of the values of every segment [b, k, held, D]; None: slots hold them so."""
    call: AttentionCall = field(default_factory=AttentionCall)
    token_counter: Tensor | None = None
    """Holds `tokens` as a tensor [] on the device, inside a CUDA graph."""
    attended: Tensor | None = None
    """Holds attention's output [B, H, T, D], where the policy looks at all of it."""

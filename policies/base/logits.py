"""Defines by which rule products of queries and keys become attention weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

KNOWN = frozenset(("scale", "softcap", "sinks"))
"""Names what kernels and exports know of a rule; with any other field, plain PyTorch runs it."""


class Logits(NamedTuple):
    """The rule by which products of queries and keys become the logits of a softmax."""

    scale: float = 1.0
    softcap: float | None = None
    """Bounds logits in Gemma 2: logits = softcap · tanh(logits / softcap)."""
    sinks: Tensor | None = None
    """Holds the sink logit of every query head [H] in gpt-oss, which has no value.

    `softmax([z, sink])` without the sink's own weight: weights sum to less than 1.
    """

    @property
    def further(self) -> list[str]:
        """Return the names of fields that are used, and that neither kernels nor exports know."""
        return [name for name in FURTHER if getattr(self, name) is not None]

    @property
    def linear(self) -> bool:
        """Return whether logits are products times the scale, as torch's fused attention has it."""
        return self.softcap is None and not (FURTHER and self.further)

    def of(self, products: Tensor) -> Tensor:
        """Return the logits of products, each by itself."""
        z = products * self.scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)

    def weights(self, z: Tensor) -> Tensor:
        """Return `softmax(z)` over the last axis, with sink logits; `z` is [B, K, G, ..., n]."""
        if self.sinks is None:
            return z.softmax(-1)
        sinks = self.sinks.to(z.dtype).view(z.shape[1], -1, *[1] * (z.dim() - 3))  # [K, G, 1, ...]
        return (z - torch.logaddexp(z.logsumexp(-1, keepdim=True), sinks)).exp()


FURTHER = tuple(name for name in Logits._fields if name not in KNOWN)
PRODUCTS = Logits()
"""Takes products as they are."""

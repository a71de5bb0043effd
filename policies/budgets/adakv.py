"""Ada-KV: gives a layer's slots to the heads whose tokens score highest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcap.policies.base import HeadBudget, Preset, apportion
from kvcap.policies.base.order import ordered


@dataclass(frozen=True)
class AdaKV(HeadBudget):
    """Shares a layer's slots out by how many of the layer's best scores each head has.

    Head `k` gets its pinned slots and `(1-f)·c_k + f·R` more: the pins leave `R` slots per head,
    `c_k` of the layer's `K·R` best scores are head `k`'s, and `f` is `safeguard`. No head goes
    without a slot. Ada-KV, https://arxiv.org/abs/2407.11550, Alg. 1.
    """

    safeguard: float = 0.2

    moves: ClassVar = True
    paper: ClassVar = "Ada-KV, arXiv 2407.11550, Alg. 1"
    formula: ClassVar = "(1-f) · (a head's part of the layer's best scores) + f · R + pinned"
    when: ClassVar = "to compare with other tools that share slots out between heads"
    presets: ClassVar = {"adakv": Preset("snapkv+adakv")}

    def __post_init__(self) -> None:
        self.require("safeguard", 0 <= self.safeguard <= 1, "a fraction, 0 to 1 (uniform)")

    def split(
        self,
        scores: Sequence[Tensor],
        pinned: Sequence[Tensor],
        positions: Sequence[Tensor],
        budget: int,
    ) -> list[int]:
        device = scores[0].device
        free = [
            ordered(score.masked_fill(pin, -torch.inf), places)
            for score, pin, places in zip(scores, pinned, positions, strict=True)
        ]
        heads = [torch.full_like(p, k, dtype=torch.long) for k, p in enumerate(pinned)]
        fixed = torch.stack([p.sum() for p in pinned])  # [K]
        order = torch.cat(free).argsort(descending=True, stable=True)  # [Σ n_k]
        best = torch.arange(len(order), device=device) < budget * len(scores) - fixed.sum()
        counts = torch.zeros_like(fixed).index_add(0, torch.cat(heads)[order], best.long())
        pins, wins = torch.stack((fixed, counts)).tolist()  # the one synchronisation
        left = budget * len(scores) - sum(pins)
        even = self.safeguard * left / len(scores)
        sure = [max(pin, min(1, len(s))) for pin, s in zip(pins, scores, strict=True)]
        shares = [
            max(0.0, (1 - self.safeguard) * won + even - (s - pin))
            for won, s, pin in zip(wins, sure, pins, strict=True)
        ]
        most = [len(x) - s for x, s in zip(scores, sure, strict=True)]
        more = apportion(shares, left - (sum(sure) - sum(pins)), most)
        return [s + m for s, m in zip(sure, more, strict=True)]

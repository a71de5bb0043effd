"""Ada-KV: gives a layer's slots to the heads whose tokens score highest."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from kvcap.policies.base import HeadBudget, Preset, apportion_rows
from kvcap.policies.base.order import ordered

FINEST = 1000  # of a safeguard: it is a fraction of whole numbers up to this


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

    @property
    def fraction(self) -> Fraction:
        """Return the safeguard as a fraction of whole numbers; every device rounds it alike."""
        return Fraction(str(self.safeguard)).limit_denominator(FINEST)

    def split(
        self, scores: Tensor, pinned: Tensor, positions: Tensor, lengths: Tensor, budget: int
    ) -> Tensor:
        (_, heads, n), lengths = scores.shape, lengths.long()
        held = torch.arange(n, device=scores.device) < lengths[..., None]  # [B, K, n]
        pins = (pinned & held).sum(-1)  # [B, K]
        # Those that are pinned, and then the best, are as many as the layer's slots.
        ends = torch.iinfo(torch.int64)
        worth = ordered(scores, positions).masked_fill(pinned, ends.max)
        worth = worth.masked_fill(~held, ends.min)
        slots = min(budget, n) * heads
        last = worth.flatten(1).topk(slots, dim=-1, sorted=False).values.amin(-1)[:, None, None]
        above, equal = (worth > last).sum(-1), ((worth == last) & held).sum(-1)
        # Of the same token in several heads the first heads' goes before.
        free = slots - above.sum(-1, keepdim=True) - equal.cumsum(-1) + equal
        won = above + free.clamp(min=0).minimum(equal) - pins
        left = budget * heads - pins.sum(-1, keepdim=True)  # [B, 1], K·R
        sure = pins.maximum(lengths.clamp(max=1))
        # Whole numbers all through: `K` and the denominator of `f` times those of the formula.
        part, whole = self.fraction.numerator, self.fraction.denominator * heads
        shares = (whole - part * heads) * won + part * left - whole * (sure - pins)
        left = left - (sure - pins).sum(-1, keepdim=True)
        return sure + apportion_rows(shares.clamp(min=0), left.clamp(min=0), lengths - sure)

"""CAKE: gives slots to the layers whose attention is spread out and keeps moving."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcap.policies.base import LayerBudget, Observation, Preset, apportion_rows


@dataclass(frozen=True)
class Cake(LayerBudget):
    """Shares slots out between layers by the entropy and the variance of their attention.

    `(-Σ A ln A)^(1/τ1) · (Σ_j var_t A_tj)^(1/τ2)` over the window of queries is a layer's share.
    CAKE, https://arxiv.org/abs/2503.12491, Eq. 5-7. Every layer keeps at least `floor` of the
    uniform budget: entropy falls with the slots, so a layer that lost once would go on losing.
    """

    tau1: float = 1.0
    tau2: float = 1.0
    floor: float = 0.25

    moves: ClassVar = True
    observes: ClassVar = frozenset({"keys", "queries", "attention"})
    paper: ClassVar = "CAKE, arXiv 2503.12491"
    formula: ClassVar = "slots in proportion to entropy^(1/τ1) · variance^(1/τ2) of attention"
    when: ClassVar = "where layers differ much in what they need"
    presets: ClassVar = {"cake": Preset("cake+cake")}

    def __post_init__(self) -> None:
        self.require("tau1", self.tau1 > 0, "a temperature above 0")
        self.require("tau2", self.tau2 > 0, "a temperature above 0")
        self.require("floor", 0 <= self.floor <= 1, "a fraction of the budget, 0 to 1")

    def preference(self, obs: Observation) -> Tensor:
        a = obs.attention  # [B, K, G, w, n]
        entropy = torch.special.entr(a).sum((-2, -1)).mean()
        variance = a.var(-2, correction=0).sum(-1).mean()
        return self.wanted(entropy, variance)

    def wanted(self, entropy: Tensor, variance: Tensor) -> Tensor:
        """The preference by the mean of each over query heads. All []."""
        both: Tensor = entropy ** (1 / self.tau1) * variance ** (1 / self.tau2)
        return both.nan_to_num(nan=0.0)

    def resplit(self, preferences: Tensor, budget: int, most: Tensor, pinned: int) -> Tensor:
        least = min(budget, max(math.ceil(self.floor * budget), pinned + 1))
        total, most = budget * preferences.shape[-1], most.expand(preferences.shape)
        sure = most.clamp(max=least)  # [R, L]
        rest = total - sure.sum(-1, keepdim=True)
        return sure + apportion_rows(_whole(preferences, total), rest, most - sure)


def _whole(shares: Tensor, total: int) -> Tensor:
    """Whole numbers in proportion to shares [R, L] float32, as large as `apportion_rows` takes.

    Those of a share that is 2^-k of its row's largest one lose what lies below their last bit.
    """
    mantissas, exponents = shares.frexp()  # of 24 bits
    bits = 62 - (total * shares.shape[-1]).bit_length()  # of the largest
    shift = exponents - exponents.amax(-1, keepdim=True) + (bits - 24)
    whole = (mantissas * (1 << 24)).long()
    return torch.where(shift < 0, whole >> (-shift).clamp(0, 62), whole << shift.clamp(min=0))

"""CAKE: gives slots to the layers whose attention is spread out and keeps moving."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcap.policies.base import LayerBudget, Observation, Preset


@dataclass(frozen=True)
class CakeBudget(LayerBudget):
    """A budget that shares slots out between layers by the entropy and variance of attention.

    A layer's share is `(-Σ A ln A)^(1/τ1) · (Σ_j var_t A_tj)^(1/τ2)` over the window of queries.
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
        entropy = torch.special.entr(obs.attention).sum((-2, -1)).mean()
        variance = obs.variance.sum(-1).mean()
        return self.wanted(entropy, variance)

    def wanted(self, entropy: Tensor, variance: Tensor) -> Tensor:
        """Return the preference by the mean of each over query heads, for every layer. All []."""
        both: Tensor = entropy ** (1 / self.tau1) * variance ** (1 / self.tau2)
        return both.nan_to_num(nan=0.0)

    def least(self, budget: int, pinned: int) -> int:
        return min(budget, max(math.ceil(self.floor * budget), pinned + 1))

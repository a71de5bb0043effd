"""H2O: keeps the heavy hitters, the tokens that drew most attention so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcap.policies.base import Group, Observation, Policy, over_group


@dataclass(frozen=True)
class H2O(Policy):
    """Scores a token by the sum of all attention that it has drawn since it was read.

    `φ_j <- φ_j + Σ_t A_tj` over every query of every block; `score = φ`. H2O,
    https://arxiv.org/abs/2306.14048; the block form is KeyDiff's appendix A.1. `recent` is 0.5 in
    the official code and CaliDrop, 0 in KeyDiff's table.
    """

    recent: float = 0.5  # fraction of the budget reserved for the newest tokens
    group: Group = "mean"

    observes: ClassVar = frozenset({"keys", "queries", "attention", "state"})
    state: ClassVar = {"accumulated": torch.float32}
    paper: ClassVar = "H2O, arXiv 2306.14048"
    formula: ClassVar = "sum over all queries of A_tj"
    when: ClassVar = "as a baseline: it keeps what was looked at most so far"

    def __post_init__(self) -> None:
        self.require("recent", 0 <= self.recent < 1, "a fraction of the budget, 0 to below 1")
        self.require("group", self.group in ("mean", "sum", "max"), "mean, sum or max")

    @property
    def queries_observed(self) -> None:
        return None

    def recents_pinned(self, budget: int) -> int:
        return int(self.recent * budget)

    def update(self, obs: Observation) -> dict[str, Tensor]:
        block = over_group(obs.weight.sum(-2), self.group)  # [B, K, n]
        return {"accumulated": obs.state["accumulated"] + block}

    def score(self, obs: Observation) -> Tensor:
        return obs.state["accumulated"]

"""CAKE: what the last queries look at, and what they disagree about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvcap.policies.base import Group, Observation, Policy, over_group, pool_in_time


@dataclass(frozen=True)
class Cake(Policy):
    """`score_j = mean_t A_tj + γ · var_t A_tj` over the last `window` queries; the window pinned.

    CAKE, https://arxiv.org/abs/2503.12491, Eq. 11. The population's variance; a query older than
    the token counts as not looking at it. Averaged in time per query head, then over the group.
    """

    window: int = 32
    gamma: float = 200.0
    kernel: int = 5
    group: Group = "mean"

    observes: ClassVar = frozenset({"keys", "positions", "queries", "attention"})
    paper: ClassVar = "CAKE, arXiv 2503.12491, Eq. 11"
    formula: ClassVar = "avg pool(mean over the window of A_tj + γ variance of A_tj)"

    def __post_init__(self) -> None:
        self.require("window", self.window >= 1, "a number of queries, 1 or more")
        self.require("gamma", self.gamma >= 0, "a weight, 0 or more")
        self.require("kernel", self.kernel % 2 == 1 and self.kernel > 0, "an odd number of tokens")
        self.require("group", self.group in ("mean", "sum", "max"), "mean, sum or max")

    @property
    def queries_observed(self) -> int:
        return self.window

    def recents_pinned(self, budget: int) -> int:
        return min(self.window, budget)  # the cap wins over the window

    def score(self, seen: Observation) -> Tensor:
        a = seen.attention  # [B, K, G, w, n]
        scores = a.mean(-2) + self.gamma * a.var(-2, correction=0)  # [B, K, G, n]
        return over_group(pool_in_time(scores, seen.positions, self.kernel, "avg"), self.group)

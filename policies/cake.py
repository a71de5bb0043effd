"""CAKE: keeps what the last queries look at, and what they disagree about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvcap.policies.base import Observation, WindowPolicy, over_group, pool_in_time


@dataclass(frozen=True)
class Cake(WindowPolicy):
    """Scores a token by the mean and the variance of the attention that the last queries pay it.

    `score_j = mean_t A_tj + γ · var_t A_tj` over the last `window` queries, whose own tokens are
    pinned. CAKE, https://arxiv.org/abs/2503.12491, Eq. 11. `var` is the population's variance, in
    which a query older than the token counts as attention 0. Scores are averaged over neighbours in
    time for each query head, then over the query group.
    """

    gamma: float = 200.0
    kernel: int = 5

    observes: ClassVar = frozenset({"keys", "positions", "queries", "attention"})
    paper: ClassVar = "CAKE, arXiv 2503.12491, Eq. 11"
    formula: ClassVar = "avg pool(mean over the window of A_tj + γ variance of A_tj)"
    when: ClassVar = "where layers differ much in what they need"
    small: ClassVar = {"window": 4, "kernel": 3}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("gamma", self.gamma >= 0, "a weight, 0 or more")
        self.require_kernel(self.kernel)

    def score(self, obs: Observation) -> Tensor:
        scores = obs.attention.mean(-2) + self.gamma * obs.variance  # [B, K, G, n]
        pooled = pool_in_time(
            scores, obs.positions, self.kernel, "avg", obs.num_tokens, self.window
        )
        return over_group(pooled, self.group)

"""SnapKV: keeps what the last queries look at, and its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvcap.policies.base import Observation, WindowPolicy, over_group, pool_in_time


@dataclass(frozen=True)
class SnapKV(WindowPolicy):
    """Scores a token by the attention that the last queries pay it and its neighbours in time.

    `score_j = pool(Σ_t A_tj)` over the last `window` queries, whose own tokens are pinned. SnapKV,
    https://arxiv.org/abs/2404.14469. Scores are pooled for each query head and then combined over
    the query group, in this order since a maximum does not commute with the mean. KeyDiff's
    baseline has `pool='avg'`.
    """

    kernel: int = 7
    pool: Literal["max", "avg"] = "max"

    observes: ClassVar = frozenset({"keys", "positions", "queries", "attention"})
    paper: ClassVar = "SnapKV, arXiv 2404.14469"
    formula: ClassVar = "pool(sum over the window of A_tj)"
    when: ClassVar = "to compare with other tools; needs 512 slots or more to remember well"
    small: ClassVar = {"window": 4, "kernel": 3, "pool": "avg"}  # maxima tie

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_kernel(self.kernel)
        self.require("pool", self.pool in ("max", "avg"), "max or avg")

    def score(self, obs: Observation) -> Tensor:
        summed = obs.weight.sum(-2)  # [B, K, G, n]
        pooled = pool_in_time(
            summed, obs.positions, self.kernel, self.pool, obs.num_tokens, self.window
        )
        return over_group(pooled, self.group)

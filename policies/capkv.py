"""CapKV: keeps values that no other value could stand in for, where queries look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from kvcap.policies.base import Observation, WindowPolicy, leverage, over_group


@dataclass(frozen=True)
class CapKV(WindowPolicy):
    """Scores a token by how much its value adds to the log-determinant of all held values.

    `score_j = w_j · v_jᵀ (I + Σ_i w_i v_i v_iᵀ)⁻¹ v_j` with `w_j = exp(τ (c_j - max_i c_i))`, where
    `c_j = cos(k_j, μ)` and `μ` is the mean of the last `window` queries, whose own tokens are
    pinned. CapKV, https://arxiv.org/abs/2604.25975, as kvpress's `CapPress` writes it; there `μ` is
    the mean of all queries of the prompt, rotated to later positions. The first `sinks` tokens are
    pinned and left out of the sum. The inverse is computed by Newton-Schulz iterations
    (`base/leverage.py`).
    """

    tau: float = 5.0
    sinks: int = 4

    observes: ClassVar = frozenset({"keys", "values", "positions", "queries"})
    paper: ClassVar = "CapKV, arXiv 2604.25975, as kvpress writes it"
    formula: ClassVar = (
        "w_j v_jᵀ (I + sum of w_i v_i v_iᵀ)⁻¹ v_j, w_j = exp(τ cos(k_j, mean query))"
    )
    when: ClassVar = "as a baseline: it keeps values that differ; inverts a matrix per query head"
    small: ClassVar = {"window": 4, "sinks": 2}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("tau", 0 <= self.tau <= 80, "a number from 0 to 80")
        self.require("sinks", self.sinks >= 0, "a number of tokens, 0 or more")

    def sinks_pinned(self) -> int:
        return self.sinks

    def score(self, obs: Observation) -> Tensor:
        assert obs.queries is not None
        free = (obs.positions >= self.sinks)[:, :, None]  # [B, K, 1, n]
        mean = obs.queries.float().mean(2).unflatten(1, (-1, obs.groups))  # [B, K, G, D]
        keys = normalize(obs.keys.float(), dim=-1)
        cosine = normalize(mean, dim=-1).matmul(keys.mT)  # [B, K, G, n]
        most = cosine.masked_fill(~free, -1.0).amax(-1, keepdim=True)
        root = ((self.tau / 2) * (cosine - most)).exp() * free  # √w
        rows = obs.values.float()[:, :, None] * root[..., None]  # [B, K, G, n, D]
        return over_group(leverage(rows, ridge=1.0), self.group)

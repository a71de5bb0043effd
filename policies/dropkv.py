"""DropKV: keeps the tokens without which attention's output would move most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvcap.policies.base import Observation, WindowPolicy, over_group, pool_in_time


@dataclass(frozen=True)
class DropKV(WindowPolicy):
    """Scores a token by how far attention's output would move if that token alone were removed.

    `score_j = Σ_t (p / (1 - p + ε))² · ‖a_t - v_j‖²` over the last `window` queries, `p = A_tj`.
    DropKV (Zhang et al. 2026), Lemma 1 and Alg. 1-2: each term is the squared change of `a_t`. It
    is combined over the query group, then pooled over neighbours in time (published code: `avg`);
    the window's own tokens are pinned. `bf16_ratio` rounds `p` to bfloat16, as line 6 of Alg. 2
    does.
    """

    window: int = 8
    kernel: int = 11
    pool: Literal["max", "avg"] = "max"
    epsilon: float = 1e-6
    bf16_ratio: bool = False

    observes: ClassVar = frozenset(
        {"keys", "values", "positions", "queries", "attention", "output"}
    )
    paper: ClassVar = "DropKV (Zhang et al. 2026), Lemma 1"
    formula: ClassVar = "pool(sum over the window of (A_tj / (1 - A_tj))² |a_t - v_j|²)"
    when: ClassVar = "to score by attention with little extra memory: a window of 8 queries"
    small: ClassVar = {"window": 4, "kernel": 3, "pool": "avg"}  # maxima tie

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_kernel(self.kernel)
        self.require("pool", self.pool in ("max", "avg"), "max or avg")
        self.require("epsilon", 0 < self.epsilon < 1, "a number between 0 and 1")
        self.require("bf16_ratio", self.bf16_ratio in (True, False), "True or False")

    def score(self, obs: Observation) -> Tensor:
        p = obs.attention.bfloat16().float() if self.bf16_ratio else obs.attention
        a, v = obs.output, obs.values.float()  # [B, K, G, w, D], [B, K, n, D]
        along = torch.matmul(a.flatten(2, 3), v.mT).view_as(obs.attention)  # [B, K, G, w, n]
        squares = a.square().sum(-1, keepdim=True) + v.square().sum(-1)[:, :, None, None]
        distance = (squares - 2 * along).clamp(min=0)  # rounding may leave it below 0
        # Where a query looks at one token, a is nearly v: that distance is taken by differences.
        most = obs.attention > 0.5
        own = torch.matmul(most.float().flatten(2, 3), v).view_as(a)  # its v, or 0
        distance = torch.where(most, (a - own).square().sum(-1, keepdim=True), distance)
        cost = ((p / (1 - p + self.epsilon)).square() * distance).sum(-2)  # [B, K, G, n]
        cost = over_group(cost, self.group)  # [B, K, n]
        return pool_in_time(
            cost, obs.positions, self.kernel, self.pool, obs.num_tokens, self.window
        )

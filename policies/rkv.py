"""R-KV: keeps what the last queries look at, and of keys that resemble each other the newest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvcap.policies.base import Group, Observation, WindowPolicy, over_group, pool_in_time


@dataclass(frozen=True)
class RKV(WindowPolicy):
    """Scores a token by the attention of the last queries, less how much its key repeats others.

    `score_j = λ·I_j - (1-λ)·R_j`. Importance `I_j = maxpool(mean_t softmax_j(max_g z_tj))` over the
    last `window` queries, whose own tokens are left out and pinned. Redundancy
    `R_j = softmax_j(mean_i cos(k_i, k_j))`, in which `i` leaves out one pair for every token: with
    the newest token that it resembles by a cosine above `threshold`, which is to stay in its place.
    R-KV, https://arxiv.org/abs/2505.24133, its joint score of importance and redundancy, β = 1. If
    a token resembles none, published code leaves out its pair with the first slot, this code none.
    """

    window: int = 8
    group: Group = "max"  # of the logits, before the softmax
    kernel: int = 7
    mix: float = 0.1  # λ: the part of importance; published code has 0.07
    threshold: float = 0.5

    observes: ClassVar = frozenset({"keys", "positions", "queries", "logits"})
    paper: ClassVar = "R-KV, arXiv 2505.24133"
    formula: ClassVar = "λ pool(mean_t A_tj) - (1-λ) softmax_j(mean_i cos(k_i, k_j))"
    when: ClassVar = (
        "where facts and the flow of a text both matter and time does not: it compares all keys"
    )
    small: ClassVar = {"window": 4, "kernel": 3}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_kernel(self.kernel)
        self.require("mix", 0 <= self.mix <= 1, "a fraction, 0 to 1")
        self.require("threshold", 0 <= self.threshold <= 1, "a cosine, 0 to 1")

    @property
    def compares_pairs(self) -> bool:
        return True

    def score(self, obs: Observation) -> Tensor:
        older = obs.positions < obs.num_tokens - self.window  # [B, K, n]
        seen = obs.visible[:, :, 0] & older[:, :, None]  # [B, K, w, n]
        z = over_group(obs.logits, self.group)  # [B, K, w, n]
        weights = z.masked_fill(~seen, torch.finfo(torch.float32).min).softmax(-1) * seen
        importance = pool_in_time(
            weights.mean(-2), obs.positions, self.kernel, "max", obs.num_tokens, self.window
        )
        # One head at a time: all pairs of keys of every head are more than the cache itself.
        heads = zip(obs.keys.unbind(1), obs.positions.unbind(1), strict=True)
        redundancy = torch.stack([self._redundancy(*head) for head in heads], 1)  # [B, K, n]
        return self.mix * importance - (1 - self.mix) * redundancy

    def _redundancy(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Return how much keys [B, n, D] repeat of each other. [B, n]."""
        mine, theirs = positions[:, :, None], positions[:, None]
        units = normalize(keys.float(), dim=-1)
        cosine = torch.matmul(units, units.mT).masked_fill(mine == theirs, 0.0)  # [B, n, n]
        newest = torch.where(cosine > self.threshold, theirs, -1).amax(-1, keepdim=True)
        return cosine.masked_fill(theirs == newest, 0.0).mean(-2).softmax(-1)

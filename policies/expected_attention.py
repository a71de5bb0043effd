"""Expected Attention: keeps what queries to come are expected to look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcap.policies.base import Observation, WindowPolicy, over_group


@dataclass(frozen=True)
class ExpectedAttention(WindowPolicy):
    """Scores a token by the attention that a normally distributed query is expected to pay it.

    For queries of mean `μ` and covariance `Σ` a key's logits `z_tj` have the mean `s μ·k_j` and the
    variance `s² k_j'Σk_j` (`s` the scaling), and `E[exp(z)] = exp(mean + var / 2)`. So
    `score_j = (softmax_j(mean_t z_tj + var_t z_tj / 2) + ε) |v_j|`; the first `sinks` are left out
    of the softmax and pinned. Expected Attention, https://arxiv.org/abs/2510.00636, its expected
    score times the norm of the value. The paper takes `μ` and `Σ` before rotation and rotates them
    by the mean of the next 512 positions. Here `μ` and `Σ` are those of the last `window` queries,
    rotated at their own positions, and the tokens of these queries are pinned.
    """

    sinks: int = 4
    epsilon: float = 0.0  # added before the norm of the value
    covariance: bool = True  # False: of the mean query alone

    observes: ClassVar = frozenset({"keys", "values", "positions", "queries", "logits"})
    paper: ClassVar = "Expected Attention, arXiv 2510.00636"
    formula: ClassVar = "(softmax_j(mean_t z_tj + var_t z_tj / 2) + ε) |v_j|"
    when: ClassVar = "as a baseline: the queries of a window stand for all to come"
    small: ClassVar = {"window": 4, "sinks": 2}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("sinks", self.sinks >= 0, "a number of tokens, 0 or more")
        self.require("epsilon", 0 <= self.epsilon < 1, "a number from 0 to below 1")
        self.require("covariance", self.covariance in (True, False), "True or False")

    def sinks_pinned(self) -> int:
        return self.sinks

    def recents_pinned(self, budget: int) -> int:
        return max(0, min(self.window, budget - self.sinks))

    def score(self, obs: Observation) -> Tensor:
        z = obs.unmasked_logits  # [B, K, G, w, n]: queries to come see every slot
        expected = z.mean(-2)  # [B, K, G, n]
        if self.covariance:
            expected = expected + (z - expected[..., None, :]).square().mean(-2) / 2
        sinks = (obs.positions < self.sinks)[:, :, None]
        # Not infinity: of sinks alone each gets an equal part.
        expected = expected.masked_fill(sinks, torch.finfo(torch.float32).min)
        attention = over_group(expected.softmax(-1), self.group)  # [B, K, n]
        norms: Tensor = torch.linalg.vector_norm(obs.values, dim=-1, dtype=torch.float32)
        return (attention + self.epsilon) * norms

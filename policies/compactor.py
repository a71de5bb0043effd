"""Compactor: keeps keys that stand out, and tokens that their own block looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcap.policies.base import (
    Group,
    Observation,
    Policy,
    leverage,
    over_group,
    pool_in_time,
    sign_sketch,
)


@dataclass(frozen=True)
class Compactor(Policy):
    """Scores a token by the leverage of its key and by attention that is not causal.

    `score_j = blend · z(l_j) + z(pool(a_j ‖v_j‖))`, `z(x) = (x - mean) / std` over a head's tokens
    that are not pinned. `l_j = x_jᵀ (XᵀX + ridge · I)⁻¹ x_j`, `X` the centred keys times a sketch
    of random signs (heads of no more than `sketch` numbers: the keys themselves), the inverse by
    Newton-Schulz. `a_j` is the attention that token `j` gets from all queries of its run of `chunk`
    tokens, later ones too, by softmax of the unscaled `q·k` over that run. It is computed in the
    block in which `j` is read, where the run ends at the latest, and then kept. Compactor,
    https://arxiv.org/abs/2507.08143, as kvpress's `CompactorPress` writes it. That takes keys
    before rotation (here they are as attention sees them), a Gaussian sketch, and `z` over all
    heads. A token that is alone in its run attends to itself with 1, which is the mean.
    """

    blend: float = 0.35
    sketch: int = 48
    ridge: float = 0.01
    chunk: int = 256
    sinks: int = 8
    recent: int = 4
    group: Group = "mean"

    observes: ClassVar = frozenset({"keys", "values", "positions", "queries", "state"})
    state: ClassVar = {"mutual": torch.float32}
    paper: ClassVar = "Compactor, arXiv 2507.08143, as kvpress writes it"
    formula: ClassVar = "blend z(leverage of k_j) + z(pool(attention within its block · |v_j|))"
    when: ClassVar = "as a baseline: it asks which keys stand out before any question is read"
    small: ClassVar = {"sinks": 2, "recent": 2, "chunk": 16}

    def __post_init__(self) -> None:
        self.require("blend", self.blend >= 0, "a weight, 0 or more")
        self.require("sketch", self.sketch >= 1, "a number of columns, 1 or more")
        self.require("ridge", self.ridge > 0, "a number above 0")
        self.require("chunk", self.chunk >= 1, "a number of tokens, 1 or more")
        self.require("sinks", self.sinks >= 0, "a number of tokens, 0 or more")
        self.require("recent", self.recent >= 0, "a number of tokens, 0 or more")
        self.require("group", self.group in ("mean", "sum", "max"), "mean, sum or max")

    @property
    def queries_observed(self) -> None:
        return None

    def sinks_pinned(self) -> int:
        return self.sinks

    def recents_pinned(self, budget: int) -> int:
        return min(self.recent, budget)

    def update(self, obs: Observation) -> dict[str, Tensor]:
        assert obs.queries is not None
        w = obs.queries.shape[2]
        index = obs.positions - (obs.num_tokens - w)  # [B, K, n] in the block, below 0: held before
        own = torch.arange(w, device=index.device)[:, None] // self.chunk  # [w, 1]
        run = (index // self.chunk).masked_fill(index < 0, -1)[:, :, None, None]  # [B, K, 1, 1, n]
        together = own == run  # [B, K, 1, w, n]
        q = obs.queries.float().unflatten(1, (-1, obs.groups))  # [B, K, G, w, D]
        z = q.flatten(2, 3).matmul(obs.keys.float().mT).unflatten(2, (obs.groups, w))
        # Not -inf: of a query whose whole run is gone all weights would be NaN.
        weights = z.masked_fill(~together, torch.finfo(torch.float32).min).softmax(-1)
        mutual = over_group(weights.masked_fill(~together, 0).sum(-2), self.group)  # [B, K, n]
        return {"mutual": torch.where(index >= 0, mutual, obs.state["mutual"])}

    def score(self, obs: Observation) -> Tensor:
        free = obs.positions >= self.sinks
        free = free & (obs.positions < obs.num_tokens - self.recent)  # [B, K, n]
        lengths = torch.linalg.vector_norm(obs.values, dim=-1, dtype=torch.float32)
        looked_at = pool_in_time(
            obs.state["mutual"] * lengths, obs.positions, 3, "avg", obs.num_tokens, self.recent
        )
        return self.blend * _z(self._leverage(obs.keys.float(), free), free) + _z(looked_at, free)

    def _leverage(self, keys: Tensor, free: Tensor) -> Tensor:
        """Return the leverage [B, K, n] of keys [B, K, n, D] among the free slots' keys."""
        count = free.sum(-1, keepdim=True).clamp(min=1)[..., None]  # [B, K, 1, 1]
        mean = (keys * free[..., None]).sum(-2, keepdim=True) / count
        rows = (keys - mean) * free[..., None]
        if keys.shape[-1] > self.sketch:
            rows = rows.matmul(sign_sketch(keys.shape[-1], self.sketch, keys.device))
        return leverage(rows, self.ridge)


def _z(scores: Tensor, free: Tensor) -> Tensor:
    """Return z-scores [B, K, n], by the mean and deviation of the free slots."""
    count = free.sum(-1, keepdim=True).clamp(min=1)  # [B, K, 1]
    off = scores - (scores * free).sum(-1, keepdim=True) / count
    spread = ((off * free).square().sum(-1, keepdim=True) / count).sqrt()
    return off / spread.clamp(min=1e-6)

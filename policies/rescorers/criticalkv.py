"""CriticalKV: chooses half of the slots by what a value does behind the output projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcap.policies.base import Observation, Preset, Rescorer


@dataclass(frozen=True)
class CriticalKV(Rescorer):
    """Keeps the best slots by score, then others by score and the norm of the projected value.

    The fraction `α` of the unpinned budget goes to the best scores `S`, the rest to the best
    `(S̄ + ε)·‖v_j W_O‖₁`. CriticalKV, https://arxiv.org/abs/2502.03805, Alg. 1 (box: `α` 0.25;
    experiments: 0.5). `S̄` is `S` per observed query, as Alg. 2 averages attention over the window.
    The norm is computed once for each token, by each query head's slice of `W_O`, and averaged over
    the query group. If a head has scores below 0, which the paper has not, all are raised by the
    lowest, since small norms would win otherwise.
    """

    alpha: float = 0.5
    epsilon: float = 1e-4

    observes: ClassVar = frozenset({"values", "positions", "output_projection", "state"})
    state: ClassVar = {"output_norm": torch.float32}
    paper: ClassVar = "CriticalKV, arXiv 2502.03805, Alg. 1"
    formula: ClassVar = "the top α by score S, then by (S + ε) |v_j W_O|₁"
    when: ClassVar = "to evict once, after a long prompt; in a chat some models lose facts by it"
    presets: ClassVar = {
        "criticalkv": Preset("snapkv+criticalkv"),
        "criticalkv-adakv": Preset("snapkv+adakv+criticalkv"),
        "criticalkv-headkv": Preset("snapkv+headkv+criticalkv"),
    }

    def __post_init__(self) -> None:
        self.require("alpha", 0 <= self.alpha <= 1, "a fraction of the budget, 0 to 1 (the base)")
        self.require("epsilon", self.epsilon >= 0, "a number, 0 or more")

    def update(self, obs: Observation) -> dict[str, Tensor]:
        assert obs.output_projection is not None
        old = obs.values.shape[2] - obs.new
        values, weights = obs.values[:, :, old:], obs.output_projection.flatten(0, 1)
        if obs.expansion is not None:  # every query head makes its own value of a latent
            values = obs.expansion.head_values(values)
        else:
            values = values.repeat_interleave(len(weights) // values.shape[1], 1)  # [B, H, T, D]
        at_once = len(weights) if obs.new == 1 else 1  # a block's products would take much memory
        heads = zip(values.split(at_once, 1), weights.split(at_once), strict=True)
        norms = torch.cat([_norms(*some) for some in heads], 1)  # [B, H, T]
        norms = norms.unflatten(1, (obs.keys.shape[1], -1)).mean(2)  # [B, K, T]
        return {"output_norm": torch.cat((obs.state["output_norm"][..., :old], norms), -1)}

    def rescore(self, scores: Tensor, pinned: Tensor, obs: Observation) -> Tensor:
        if self.alpha == 1:
            return scores
        lowest = scores.masked_fill(pinned, 0.0).amin(-1, keepdim=True).clamp(max=0.0)  # [B, K, 1]
        rows = 1 if obs.queries is None else obs.queries.shape[2]
        second = ((scores - lowest) / rows + self.epsilon) * obs.state["output_norm"]
        return self.best_first(self.alpha, scores, second, pinned, obs)


def _norms(values: Tensor, weights: Tensor) -> Tensor:
    """Return `‖v W‖₁` of each query head: [B, H, T, D], [H, D, hidden] -> [B, H, T]."""
    projected = values.transpose(0, 1).flatten(1, 2) @ weights.to(values.dtype)  # [H, B·T, hidden]
    norms = projected.abs().sum(-1, dtype=torch.float32)
    each: Tensor = norms.unflatten(1, (len(values), values.shape[2]))  # [H, B, T]
    return each.transpose(0, 1)

"""TOVA: evicts what the newest token attends to least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvcap.policies.base import Group, Observation, Policy, over_group


@dataclass(frozen=True)
class TOVA(Policy):
    """Scores a token by the attention that the newest token pays it.

    `score_j = A[last, j]`, combined over the query group or over all heads of the layer. Oren et
    al. 2024, https://arxiv.org/abs/2401.06104 (their code: `layer`; KeyDiff's baseline: `group`).
    Nothing is pinned.
    """

    across: Literal["group", "layer"] = "group"
    group: Group = "mean"

    observes: ClassVar = frozenset({"keys", "queries", "attention"})
    paper: ClassVar = "TOVA, arXiv 2401.06104"
    formula: ClassVar = "A[last, j]"
    when: ClassVar = "as a baseline: it keeps what the last token looks at"

    def __post_init__(self) -> None:
        self.require("across", self.across in ("group", "layer"), "group or layer")
        self.require("group", self.group in ("mean", "sum", "max"), "mean, sum or max")

    @property
    def queries_observed(self) -> int:
        return 1

    @property
    def scores_heads_alone(self) -> bool:
        return self.across == "group"

    def score(self, obs: Observation) -> Tensor:
        weight = obs.weight[..., -1, :]  # [B, K, G, n]
        if self.across == "layer":
            # Every head gets the same scores, so that all hold the same tokens at the same slots.
            weight = weight.mean((1, 2), keepdim=True).expand_as(weight)
        return over_group(weight, self.group)

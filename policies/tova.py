"""TOVA: what the newest token attends to least goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvcap.policies.base import Observation, Policy


@dataclass(frozen=True)
class TOVA(Policy):
    """`score_j = A[last, j]`, mean over the query group, or over the whole layer's heads.

    Oren et al. 2024, https://arxiv.org/abs/2401.06104 (their code: `layer`; KeyDiff's baseline:
    `group`). Nothing is pinned.
    """

    across: Literal["group", "layer"] = "group"

    observes: ClassVar = frozenset({"keys", "queries", "attention"})
    paper: ClassVar = "TOVA, arXiv 2401.06104"
    formula: ClassVar = "A[last, j]"

    def __post_init__(self) -> None:
        self.require("across", self.across in ("group", "layer"), "group or layer")

    @property
    def queries_observed(self) -> int:
        return 1

    def score(self, seen: Observation) -> Tensor:
        weight = seen.weight[..., -1, :].mean(2)  # [B, K, n]
        if self.across == "layer":
            # Heads hold different tokens once they evict alone; here they never do, since every
            # head gets the same scores at the same slots.
            weight = weight.mean(1, keepdim=True).expand_as(weight)
        return weight

"""AnDPro: keeps tokens whose values point where attention's output points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcap.policies.base import Group, Observation, WindowPolicy, over_group


@dataclass(frozen=True)
class AnDPro(WindowPolicy):
    """Scores a token by its attention and by how far its value points along attention's output.

    `score_j = Σ_t A_tj · (a_t · v_j)` over the last `window` queries, whose own tokens are pinned.
    Geng et al. 2025, https://openreview.net/forum?id=Tdl89SZItB, Eq. 15, as DropKV's Table 11 gives
    it, with the window of that comparison. A score can be negative: such a token pulls against the
    output.
    """

    window: int = 8
    group: Group = "sum"

    observes: ClassVar = frozenset({"keys", "values", "queries", "attention", "output"})
    paper: ClassVar = "AnDPro (Geng et al. 2025), Eq. 15"
    formula: ClassVar = "sum over the window of A_tj (a_t · v_j)"
    when: ClassVar = "as a baseline: it keeps values that point where the output does"

    def score(self, obs: Observation) -> Tensor:
        a, v = obs.output, obs.values.float()  # [B, K, G, w, D], [B, K, n, D]
        along = torch.matmul(a.flatten(2, 3), v.mT).view_as(obs.attention)  # [B, K, G, w, n]
        return over_group((obs.attention * along).sum(-2), self.group)

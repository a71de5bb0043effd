"""Distinct: keeps a share of the slots by score, and the rest by how distinct their keys are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvcap.policies.base import Observation, Preset, Rescorer
from kvcap.policies.keydiff import KeyDiff


@dataclass(frozen=True)
class Distinct(Rescorer):
    """Keeps the best slots by score, then those whose keys look least like all others.

    The fraction `share` of the unpinned budget goes to the policy's best scores, the rest to the
    best of KeyDiff's (arXiv 2504.15364, Eq. 8). The first part keeps the flow of the text, if the
    score follows attention or time; the second keeps facts that nothing has attended to yet.
    """

    share: float = 0.5  # of the budget, by the policy's own score

    observes: ClassVar = frozenset({"keys", "positions"})
    paper: ClassVar = "kvcap's own, on KeyDiff's score, arXiv 2504.15364, Eq. 8"
    formula: ClassVar = "the top share by score S, then by -cos(k_j, mean of held keys)"
    when: ClassVar = "to remember facts with a policy that follows attention or time"
    presets: ClassVar = {
        "balanced": Preset(
            "dropkv+distinct",
            {},
            "where facts and the flow of a long text both matter, from 256 slots on",
        ),
    }

    def __post_init__(self) -> None:
        self.require("share", 0 <= self.share <= 1, "a fraction of the budget, 0 to 1 (the policy)")

    def rescore(self, scores: Tensor, pinned: Tensor, obs: Observation) -> Tensor:
        if self.share == 1:
            return scores
        return self.best_first(self.share, scores, KeyDiff().score(obs), pinned, obs)

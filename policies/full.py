"""Full: never evicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvcap.policies.base import Observation, Policy


@dataclass(frozen=True)
class Full(Policy):
    """Keeps everything: the cache refuses a token beyond the budget, rather than drop one."""

    observes: ClassVar = frozenset()
    evicts: ClassVar = False
    paper: ClassVar = "the uncapped model, refused past the cap"
    formula: ClassVar = "none: nothing is evicted"
    when: ClassVar = "to compare with no eviction at all: reading ends where the budget is full"

    def score(self, obs: Observation) -> Tensor:
        return obs.positions.float()

"""Random: evicts at random, the floor of every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcap.policies.base import Observation, Policy, hashed


@dataclass(frozen=True)
class Random(Policy):
    """Scores a token by a hash of its position, its head and the seed.

    A hash, unlike a generator of random numbers, gives the same scores for any block size, on any
    device and in any export.
    """

    seed: int = 0

    observes: ClassVar = frozenset({"positions"})
    paper: ClassVar = "the floor of every comparison"
    formula: ClassVar = "hash(position_j, head, seed)"
    when: ClassVar = "as a baseline that any policy should beat"

    def __post_init__(self) -> None:
        self.require("seed", 0 <= self.seed < 2**31, "an integer from 0 to 2^31 - 1")

    def score(self, obs: Observation) -> Tensor:
        heads = torch.arange(obs.positions.shape[1], device=obs.positions.device)[:, None]
        heads = heads + obs.first_head
        x = obs.positions.long() + 0x9E3779B1 * (heads + 1) + 0x85EBCA6B * (self.seed + 1)
        return hashed(x).float()

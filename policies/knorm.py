"""Knorm: keeps keys of small norm, which attention tends to look for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcap.policies.base import Observation, Policy


@dataclass(frozen=True)
class Knorm(Policy):
    """Scores a token by how small the L2 norm of its key is.

    `score_j = -‖k_j‖₂`. Devoto et al. 2024, https://arxiv.org/abs/2406.11430. Their code leaves the
    first two layers whole; here the cap holds in every layer.
    """

    observes: ClassVar = frozenset({"keys"})
    paper: ClassVar = "L2 norm, arXiv 2406.11430"
    formula: ClassVar = "-|k_j|"
    when: ClassVar = "as a baseline: it looks at nothing but the length of keys"

    def score(self, obs: Observation) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(obs.keys, dim=-1, dtype=torch.float32)
        return -norms

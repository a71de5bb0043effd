"""Composition: what is scored, how the budget is spread, and which slots go.

Order: score -> budget -> rescore -> select; the cache then compacts. Pins are a mask applied in
selection, never arithmetic on scores. Knows no cache and no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvcap.policies.base.observation import Observation, Saliency
from kvcap.policies.base.policy import Policy, PolicyError


class LayerBudget(Protocol):
    """Spreads `layers · budget` slots over the layers; the sum is exact."""

    def split(self, budget: int, layers: int) -> list[int]:
        """Slots per KV head for each layer."""
        ...


class HeadBudget(Protocol):
    """Spreads a layer's `K · budget` slots over its KV heads; the sum is exact."""

    def split(self, scores: Tensor, budget: int) -> Tensor:
        """Slots [B, K] from the scores [B, K, n]."""
        ...


class Rescorer(Protocol):
    """Replaces the scores once the budget is known."""

    def rescore(self, scores: Tensor, seen: Observation) -> Tensor:
        """New scores [B, K, n] from the old."""
        ...


class Corrector(Protocol):
    """Corrects attention's output for what was evicted."""

    def correct(self, output: Tensor, seen: Observation) -> Tensor:
        """New output [B, H, T, D] from attention's."""
        ...


@dataclass(frozen=True)
class Eviction:
    """A policy and what it is combined with, by values in six slots.

    Raises:
        PolicyError: for a combination that cannot be run.
    """

    policy: Policy
    saliency: Saliency | None = None
    layer_budget: LayerBudget | None = None
    head_budget: HeadBudget | None = None
    rescorer: Rescorer | None = None
    corrector: Corrector | None = None
    name: str = ""
    sink_tokens: int = 0  # pinned besides what the policy pins
    recent_tokens: int = 0

    def __post_init__(self) -> None:
        if self.sink_tokens < 0 or self.recent_tokens < 0:
            raise PolicyError(
                f"sink_tokens={self.sink_tokens}, recent_tokens={self.recent_tokens}: "
                "pins are counted in tokens, 0 or more"
            )
        for slot in ("head_budget", "corrector"):
            if getattr(self, slot) is not None:
                raise PolicyError(
                    f"{slot} needs ragged or offloaded storage, which this version of the cache "
                    "does not have; layer_budget, saliency and rescorer work"
                )

    def sinks(self) -> int:
        """First tokens of the conversation that are never evicted."""
        return max(self.policy.sinks_pinned(), self.sink_tokens)

    def recents(self, budget: int) -> int:
        """Newest tokens that are never evicted."""
        return max(self.policy.recents_pinned(budget), self.recent_tokens)

    def split(self, budget: int, layers: int) -> list[int]:
        """Slots per KV head for each layer, summing to `layers · budget`."""
        split = self.layer_budget.split(budget, layers) if self.layer_budget else [budget] * layers
        assert sum(split) == budget * layers, "a layer budget must spread exactly what it was given"
        return split

    def check(self, split: list[int]) -> None:
        """Refuse budgets that hold no token or not the pinned ones.

        Raises:
            PolicyError: naming the smallest budget that would work.
        """
        for slots in split:
            if slots < 1:
                raise PolicyError(f"a budget of {slots} slots cannot hold a token; use 1 or more")
            pinned = self.sinks() + self.recents(slots)
            if pinned > slots:
                raise PolicyError(
                    f"{self.name or 'the policy'} pins {self.sinks()} sinks and "
                    f"{self.recents(slots)} recent tokens, more than the budget of {slots} slots; "
                    f"use a budget of at least {pinned} or pin fewer"
                )

    def select(self, seen: Observation, count: int) -> Tensor:
        """The `count` slots of each head to give up. Shape [B, K, count], unordered."""
        scores = self.policy.score(seen)
        if self.rescorer is not None:
            scores = self.rescorer.rescore(scores, seen)
        # Finite first, so that a pinned slot's +inf is above every score, whatever it was.
        scores = scores.float().nan_to_num(nan=torch.finfo(torch.float32).min)
        scores = scores.masked_fill(self._pinned(seen), float("inf"))
        return scores.topk(count, dim=-1, largest=False, sorted=False).indices

    def _pinned(self, seen: Observation) -> Tensor:
        """Bool [B, K, n]."""
        recents = self.recents(seen.budget)
        return (seen.positions < self.sinks()) | (seen.positions >= seen.seen - recents)

"""The contracts of what a policy is combined with, a class for each kind; sharing slots out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvcap.policies.base.component import Component
from kvcap.policies.base.observation import Observation
from kvcap.policies.base.policy import Policy


@dataclass(frozen=True)
class Saliency(Component):
    """Replaces the attention weights in scores that add attention up."""

    def weigh(self, obs: Observation) -> Tensor:
        """What is added up instead of `A`. Shape [B, K, G, w, n], 0 where masked."""
        raise NotImplementedError


@dataclass(frozen=True)
class LayerBudget(Component):
    """Spreads `layers · budget` slots over the layers; the sum is exact."""

    moves: ClassVar[bool] = False
    """Whether slots move between layers while blocks arrive, by `preference` and `resplit`."""

    def split(self, budget: int, layers: int, pinned: int) -> list[int]:
        """Slots per KV head of each layer, before anything is read.

        Args:
            budget: slots per KV head and layer on average (`N`).
            layers: how many there are.
            pinned: slots that pins take in every layer; no layer gets fewer than one more.
        """
        return [budget] * layers

    def preference(self, obs: Observation) -> Tensor:
        """How much one layer wants slots, above 0; only where `moves`. Shape []."""
        raise NotImplementedError

    def resplit(
        self, preferences: Sequence[float], budget: int, most: Sequence[int], pinned: int
    ) -> list[int]:
        """New slots per KV head of each layer; only where `moves`.

        Args:
            preferences: of every layer.
            budget: slots per KV head and layer on average (`N`).
            most: slots each layer can fill.
            pinned: as in `split`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class HeadBudget(Component):
    """Spreads the slots of a layer over its KV heads, each of which stores only its own."""

    moves: ClassVar[bool] = False
    """Whether slots move between heads after every block of several tokens, by `split`."""

    def allot(self, budgets: Sequence[int], kv_heads: int, pinned: int) -> list[list[int]]:
        """Slots of every KV head of every layer before anything is scored. [L][K].

        Sums to `K · Σ budgets` over the model, and where `moves` to `K · budgets[l]` in layer l.

        Args:
            budgets: slots per KV head of each layer.
            kv_heads: `K`.
            pinned: slots that pins take in every head.

        Raises:
            PolicyError: a table made for another model.
        """
        return [[budget] * kv_heads for budget in budgets]

    def split(
        self,
        scores: Sequence[Tensor],
        pinned: Sequence[Tensor],
        positions: Sequence[Tensor],
        budget: int,
    ) -> list[int]:
        """Slots that each head of one sequence keeps; only where `moves`. Sums to `K · budget`.

        Args:
            scores: [n_k] of each of the K heads.
            pinned: bool [n_k] each, slots that stay in any case.
            positions: [n_k] each, by which equal scores are told apart.
            budget: slots per KV head on average.
        """
        raise NotImplementedError

    def policy_of(self, obs: Observation, base: Policy) -> Policy:
        """The policy for the KV head that is observed, where heads of some kinds have their own.

        Args:
            obs: of one head: `obs.layer`, `obs.first_head`, and its `obs.budget` slots.
            base: the policy of the eviction.
        """
        return base


@dataclass(frozen=True)
class Rescorer(Component):
    """Replaces the scores once it is known how many slots stay."""

    def rescore(self, scores: Tensor, pinned: Tensor, obs: Observation) -> Tensor:
        """New scores [B, K, n]; `obs.budget` slots of each head stay.

        Args:
            scores: [B, K, n], finite float32.
            pinned: bool [B, K, n], slots that stay whatever is returned.
            obs: what the policy was given.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Corrector(Component):
    """Corrects attention's output for what was evicted; the runtime keeps the evicted tokens."""

    @property
    def size(self) -> int:
        """Evicted tokens kept per KV head and layer."""
        raise NotImplementedError

    @property
    def directory(self) -> str | None:
        """Where to map them into memory from a file; None: in memory."""
        return None

    def decide(self, query: Tensor, cached: Tensor) -> tuple[Tensor, Tensor]:
        """Which queries [B, H, T, D] need a recomputation, and which a correction.

        Args:
            query: the queries in hand.
            cached: [B, H, 1, D], the queries that attended to the evicted tokens last.

        Returns:
            Two masks [B, H, T]; a recomputed query is corrected too.
        """
        raise NotImplementedError


def apportion(shares: Sequence[float], total: int, most: Sequence[int] | None = None) -> list[int]:
    """Whole numbers in proportion to `shares` that sum to `total` exactly (largest remainder).

    What a `most` cuts off goes to the others in proportion; where all are full the sum is theirs.

    Args:
        shares: 0 or more each; all 0 counts as equal.
        total: what is shared out.
        most: upper bounds.

    >>> apportion([1, 1, 1], 10)
    [4, 3, 3]
    >>> apportion([8, 1, 1], 10, most=[4, 9, 9])
    [4, 3, 3]
    """
    limits = [total] * len(shares) if most is None else list(most)
    found = [0] * len(shares)
    open_ = list(range(len(shares)))
    left = min(total, sum(limits))
    while True:
        weights = [shares[i] for i in open_]
        if sum(weights) <= 0:
            weights = [1.0] * len(open_)
        exact = {i: left * w / sum(weights) for i, w in zip(open_, weights, strict=True)}
        full = [i for i in open_ if exact[i] >= limits[i]]
        if not full:
            break
        for i in full:
            found[i] = limits[i]
            left -= limits[i]
        open_ = [i for i in open_ if i not in full]
        if not open_:
            return found
    for i in open_:
        found[i] = int(exact[i])
    rest = left - sum(found[i] for i in open_)
    for i in sorted(open_, key=lambda i: (found[i] - exact[i], i))[:rest]:
        found[i] += 1
    return found

"""Defines the contracts of a policy's companions, a class for each kind; shares slots out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from kvcap.policies.base.component import Component
from kvcap.policies.base.observation import Observation
from kvcap.policies.base.order import best
from kvcap.policies.base.policy import Policy

Count = TypeVar("Count", int, Tensor)  # one whole number, or many


@dataclass(frozen=True)
class Saliency(Component):
    """Replaces the attention weights in scores that add attention up."""

    def weigh(self, obs: Observation) -> Tensor:
        """Return the weights to add up instead of `A`. Shape [B, K, G, w, n], 0 where masked."""
        raise NotImplementedError


@dataclass(frozen=True)
class LayerBudget(Component):
    """Spreads `layers · budget` slots over the layers; the sum is exact."""

    moves: ClassVar[bool] = False
    """Says whether slots move between layers while blocks arrive, by `preference` and `least`."""

    def split(self, budget: int, layers: int, pinned: int) -> list[int]:
        """Return the slots per KV head of each layer, before anything is read.

        Args:
            budget: slots per KV head and layer on average (`N`).
            layers: how many there are.
            pinned: slots that pins take in every layer; no layer gets fewer than one more.
        """
        return [budget] * layers

    def preference(self, obs: Observation) -> Tensor:
        """Return how much one layer wants slots, above 0; only where `moves`. Shape []."""
        raise NotImplementedError

    def least(self, budget: int, pinned: int) -> int:
        """Return the slots per KV head that every layer has in any case; only where `moves`.

        All others go to the layers in proportion to what they prefer.

        Args:
            budget: slots per KV head and layer on average (`N`).
            pinned: as in `split`.
        """
        return min(budget, pinned + 1)


@dataclass(frozen=True)
class HeadBudget(Component):
    """Spreads a layer's slots over its KV heads; each head stores only its own."""

    moves: ClassVar[bool] = False
    """Says whether slots move between heads after every block of several tokens, by `split`."""

    def allot(self, budgets: Sequence[int], kv_heads: int, pinned: int) -> list[list[int]]:
        """Return the slots of every KV head of every layer before anything is scored. [L][K].

        They sum to `K · Σ budgets` over the model, and with `moves` to `K · budgets[l]` in layer l.

        Args:
            budgets: slots per KV head of each layer.
            kv_heads: `K`.
            pinned: slots that pins take in every head.

        Raises:
            PolicyError: a table made for another model.
        """
        return [[budget] * kv_heads for budget in budgets]

    def split(
        self, scores: Tensor, pinned: Tensor, positions: Tensor, lengths: Tensor, budget: int
    ) -> Tensor:
        """Return the slots [B, K] that each head keeps, int64; only where `moves`.

        Those of a sequence sum to `K · budget`, or to all that its heads hold. On a GPU it is pure
        tensor code, which a CUDA graph captures: nothing is read by the host.

        Args:
            scores: [B, K, n] float32; where a head holds fewer slots, the rest is arbitrary.
            pinned: bool [B, K, n], slots that stay in any case, likewise.
            positions: [B, K, n], which order equal scores, likewise.
            lengths: [B, K], the slots that each head holds.
            budget: slots per KV head on average.
        """
        raise NotImplementedError

    def policy_of(self, obs: Observation, base: Policy) -> Policy:
        """Return the policy for the KV head that is observed; some kinds of heads have their own.

        Args:
            obs: of one head: `obs.layer`, `obs.first_head`, and its `obs.budget` slots.
            base: the policy of the eviction.
        """
        return base


@dataclass(frozen=True)
class Rescorer(Component):
    """Replaces the scores once it is known how many slots stay."""

    def rescore(self, scores: Tensor, pinned: Tensor, obs: Observation) -> Tensor:
        """Return new scores [B, K, n]; `obs.budget` slots of each head stay.

        Args:
            scores: [B, K, n], finite float32.
            pinned: bool [B, K, n], slots that stay whatever is returned.
            obs: what the policy was given.
        """
        raise NotImplementedError

    def best_first(
        self, share: float, scores: Tensor, second: Tensor, pinned: Tensor, obs: Observation
    ) -> Tensor:
        """Rank the best by `scores` first, and all others by `second`; return scores [B, K, n].

        Args:
            share: of the slots that stay and are not pinned, how many go by `scores`.
            scores: [B, K, n], as `rescore` is given them.
            second: [B, K, n], likewise.
            pinned: as `rescore` is given it.
            obs: likewise.
        """
        free = obs.budget - pinned.sum(-1, keepdim=True)  # [B, K, 1]
        others = scores.masked_fill(pinned, -torch.inf)
        first = best(others, obs.positions, share * free)  # [B, K, n]
        return second.masked_fill(first, torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class Corrector(Component):
    """Corrects attention's output for what was evicted; the runtime keeps the evicted tokens."""

    @property
    def size(self) -> int:
        """Return how many evicted tokens are kept per KV head and layer."""
        raise NotImplementedError

    @property
    def place(self) -> str:
        """Return where they lie: on the model's `device`, on the `host`, or in a directory."""
        return "device"

    def decide(self, query: Tensor, cached: Tensor) -> tuple[Tensor, Tensor]:
        """Return which queries [B, H, T, D] need a recomputation, and which a correction.

        Args:
            query: the queries in hand.
            cached: [B, H, 1, D], the queries that attended to the evicted tokens last.

        Returns:
            Two masks [B, H, T]; a recomputed query is corrected too.
        """
        raise NotImplementedError


def evenly(total: Count, parts: int, index: Count) -> Count:
    """Return part `index`, from 0, of `total` shared out evenly: the first ones get one more.

    >>> [evenly(10, 3, place) for place in range(3)]
    [4, 3, 3]
    """
    return (total + parts - 1 - index) // parts


def apportion(shares: Sequence[float], total: int, most: Sequence[int] | None = None) -> list[int]:
    """Return whole numbers in proportion to `shares` that sum to `total` (largest remainder).

    A share above its `most` is cut off, and the rest goes to the others in proportion; if all are
    full, the sum is that of `most`.

    Args:
        shares: 0 or more each; if all are 0, they count as equal.
        total: the sum of the numbers.
        most: upper bounds of the numbers.

    >>> apportion([1, 1, 1], 10)
    [4, 3, 3]
    >>> apportion([8, 1, 1], 10, most=[4, 9, 9])
    [4, 3, 3]
    """
    limits = [total] * len(shares) if most is None else most
    portions = [0] * len(shares)
    open_ = list(range(len(shares)))
    left = min(total, sum(limits))
    while open_:
        weights = {i: shares[i] for i in open_}
        if sum(weights.values()) <= 0:
            weights = dict.fromkeys(open_, 1)
        whole = sum(weights.values())
        full = [i for i in open_ if left * weights[i] >= limits[i] * whole]
        if not full:
            # Of whole numbers all of this is exact, so that equal remainders are.
            parts = {i: divmod(left * weights[i], whole) for i in open_}
            for i, (part, _) in parts.items():
                portions[i] = int(part)
            rest = left - sum(portions[i] for i in open_)
            for i in sorted(open_, key=lambda i: (-parts[i][1], i))[:rest]:
                portions[i] += 1
            break
        for i in full:
            portions[i] = limits[i]
            left -= limits[i]
        open_ = [i for i in open_ if i not in full]
    return portions


def apportion_rows(shares: Tensor, total: Tensor, most: Tensor) -> Tensor:
    """Apportion whole numbers row by row [B, K]; on a GPU in tensors that the host does not read.

    On a CPU it goes through `apportion`, since tensors of a few numbers take ten times as long.

    Args:
        shares: [B, K] int64, 0 or more each; the sum of `shares` times that of `most`, and that
            times `total`, are below 2^63.
        total: [B, 1] int64, 0 or more.
        most: [B, K] int64.

    >>> shares, total = torch.tensor([[1, 1, 1], [8, 1, 1]]), torch.tensor([[10], [10]])
    >>> apportion_rows(shares, total, torch.tensor([[10, 10, 10], [4, 9, 9]])).tolist()
    [[4, 3, 3], [4, 3, 3]]
    """
    if shares.device.type == "cpu":
        rows = zip(shares.tolist(), total.flatten().tolist(), most.tolist(), strict=True)
        return torch.tensor([apportion(*row) for row in rows])
    return _apportion_on_device(shares, total, most)


def _apportion_on_device(shares: Tensor, total: Tensor, most: Tensor) -> Tensor:
    """Apportion as `apportion_rows` does, without a loop over heads; see its arguments."""
    left, some = total.minimum(most.sum(-1, keepdim=True)), shares > 0
    # Where all that have a share can be full the others are given the rest, and are equal.
    rest = left - (most * some).sum(-1, keepdim=True)
    full, enough = some & (rest >= 0), rest >= 0
    left, shares = torch.where(enough, rest, left), torch.where(enough, ~some, shares)
    # Raise all in proportion to their shares until this one is full: does that fit into `left`?
    proportional = shares[..., None] * most[..., None, :]  # [B, K, K]
    fills = (proportional.minimum(proportional.mT).sum(-1) <= left * shares) & (shares > 0)
    left, shares = left - (most * fills).sum(-1, keepdim=True), shares * ~fills
    exact, whole = left * shares, shares.sum(-1, keepdim=True).clamp(min=1)
    floor = exact // whole
    order = (exact - floor * whole).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return most * (full | fills) + floor + (order < left - floor.sum(-1, keepdim=True))

"""Moves slots between layers while blocks arrive, inside one pool that never grows.

A layer that should shrink does so when it evicts next, and only then can another take its slots.
While an answer is written layers keep what they hold, if nearly all slots are in use.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

from kvcap import kernels
from kvcap.policies import Observation
from kvcap.policies.base import LayerBudget, apportion, apportion_rows
from kvcap.runtime.cache.pool import Segment, has_data, resize

EMPTY = 16  # at most one of so many slots, where layers keep what they hold


class Shares(NamedTuple):
    """A division of slots between layers, int64 [L] each."""

    budgets: Tensor  # the slots of a head
    targets: Tensor  # how many of them it may hold


class LayerBalance:
    """Collects how many slots layers should have, and moves slots between them.

    Layers that evict one by one give the host their preferences. For layers that evict together,
    after a block that a CUDA graph may replay, the device computes the same; see `after_block`.

    Args:
        budget: says what the layers should have by their preferences.
        average: slots per KV head and layer (`N`).
        layers: how many there are.
        pinned: slots that pins take in a head.
    """

    def __init__(self, budget: LayerBudget, average: int, layers: int, pinned: int) -> None:
        self.budget, self.average, self.pinned = budget, average, pinned
        self.preferences: list[float | None] = [None] * layers
        self.segments: list[Segment] = []  # of all layers, one each
        self.floor = 0  # slots that no layer goes below, where tokens of the text are pinned

    def observe(self, index: int, obs: Observation, seen: int) -> None:
        """Note a layer's preference by what its policy observes; in a dry run there is none."""
        with suppress(DataDependentOutputException):
            preference = kernels.preference(self.budget, obs)
            if has_data(preference):
                self.prefer(index, float(preference), seen)

    def after(self, index: int, seen: int, *, anew: bool) -> None:
        """Rebalance after the last layer, if preferences are `anew` or layers lack their slots.

        Tokens that are generated change nothing about what layers want.
        """
        if index == len(self.preferences) - 1 and (anew or not self.is_balanced):
            self.rebalance(seen)

    def prefer(self, index: int, preference: float, seen: int) -> None:
        """Note a layer's preference, and set the slots that its next eviction leaves by it."""
        self.preferences[index] = preference
        if (wanted := self._wanted(seen)) is not None:
            segment = self.segments[index]
            segment.target_length = min(segment.budget, wanted[index])

    def rebalance(self, seen: int) -> bool:
        """Give layers that should have more the slots that others have freed, after a block.

        If few slots are empty, each layer keeps the number that it holds until the next block:
        generated tokens say nothing about preferences, and change no layer's length then.

        Returns:
            Whether slots are divided by preferences: all are known, and not all tokens fit.
        """
        wanted = self._wanted(seen)
        if wanted is None:
            return False
        # Tokens over the budget lie in a block's slots. No layer had fewer slots than the floor.
        held = [max(self.floor, min(s.held, s.budget)) for s in self.segments]
        shares = [max(0, w - h) for w, h in zip(wanted, held, strict=True)]
        more = apportion(shares, self.average * len(held) - sum(held))
        resize(self.segments, [h + extra for h, extra in zip(held, more, strict=True)])
        keeps = self.keeps
        for segment, slots in zip(self.segments, wanted, strict=True):
            segment.target_length = max(1, min(segment.budget, segment.held if keeps else slots))
        return True

    def after_block(
        self, old: Tensor, new: Tensor, held: Tensor, had: Shares, seen: Tensor
    ) -> tuple[Tensor, Shares]:
        """Compute on the device what `prefer` and `rebalance` do, if all layers evict together.

        Args:
            old: preferences before the block [L] float32, NaN where a layer has none yet.
            new: preferences after it, likewise.
            held: slots in use by a head of each layer [L] int64, the block's included.
            had: the layers' slots before.
            seen: tokens read [].

        Returns:
            The slots of a head that stay [L], and the layers' slots after it.
        """
        below = torch.ones(len(new), len(new), dtype=torch.bool, device=new.device).tril()
        each = torch.where(below, new, old)  # [L, L], preferences known as each layer evicts
        wanted = self._wanted_on_device(each.nan_to_num(nan=0.0), seen)
        due = seen > self.average
        known = due & ~each.isnan().any(-1)
        targets = torch.where(known, wanted.diagonal().minimum(had.budgets), had.targets)
        kept = held.minimum(targets)
        shares = self._rebalanced(wanted[-1], kept, had.budgets)
        budgets, later = torch.where(
            due, torch.stack(shares), torch.stack((had.budgets, targets))
        ).unbind()
        return kept, Shares(budgets, later)

    @property
    def is_balanced(self) -> bool:
        """Return whether every layer holds as many slots as it should, so that none has to move."""
        return self.keeps and all(s.held == s.target_length for s in self.segments)

    @property
    def keeps(self) -> bool:
        """Return whether so few slots are empty that layers keep their lengths during an answer."""
        empty = sum(max(0, s.budget - s.held) for s in self.segments)
        return EMPTY * empty <= self.average * len(self.segments)

    def reset(self) -> None:
        """Forget all preferences and the floor."""
        self.preferences, self.floor = [None] * len(self.preferences), 0

    def _wanted(self, seen: int) -> list[int] | None:
        """Return the slots of a head of every layer by the present preferences.

        None as long as some are unknown or all tokens fit.
        """
        known = [p for p in self.preferences if p is not None]
        if len(known) < len(self.preferences) or seen <= self.average:
            return None  # while everything fits everywhere, nobody gives anything up
        total = len(known) * self.average
        most = min(total, seen)  # slots that a layer can fill
        sure = min(self.least, most)
        more = apportion(known, total - sure * len(known), [most - sure] * len(known))
        return [sure + extra for extra in more]

    @property
    def least(self) -> int:
        """Return the slots of a head that every layer has in any case."""
        return self.budget.least(self.average, max(self.pinned, self.floor))

    def _wanted_on_device(self, preferences: Tensor, seen: Tensor) -> Tensor:
        """Compute `_wanted` [R, L] for each row of preferences [R, L], after `seen` [] tokens."""
        total = preferences.shape[-1] * self.average
        most = seen.clamp(max=total)
        sure = most.clamp(max=self.least)
        rest = (total - sure * preferences.shape[-1]).expand(len(preferences), 1)
        return sure + apportion_rows(
            _whole(preferences, total), rest, (most - sure).expand(preferences.shape)
        )

    def _rebalanced(self, wanted: Tensor, held: Tensor, budgets: Tensor) -> Shares:
        """Compute `rebalance` from the slots of a head that layers want, hold and had [L]."""
        sure = held.minimum(budgets).clamp(min=self.floor)
        total = self.average * len(held)
        rest = (total - sure.sum()).view(1, 1)
        more = apportion_rows((wanted - sure).clamp(min=0)[None], rest, rest.expand(1, len(held)))
        budgets = sure + more[0]
        keeps = EMPTY * (budgets - held).clamp(min=0).sum() <= total
        return Shares(budgets, torch.where(keeps, held, wanted).minimum(budgets).clamp(min=1))


def _whole(shares: Tensor, total: int) -> Tensor:
    """Return whole numbers in proportion to shares [R, L] float32, for `apportion_rows`.

    They are as large as it can take.

    Shares far below their row's largest lose the bits that would stand behind its last one.
    """
    mantissas, exponents = shares.frexp()  # of 24 bits
    bits = 62 - (total * shares.shape[-1] ** 2).bit_length()  # of the largest
    shift = exponents - exponents.amax(-1, keepdim=True) + (bits - 24)
    whole = (mantissas * (1 << 24)).long()
    return torch.where(shift < 0, whole >> (-shift).clamp(0, 62), whole << shift.clamp(min=0))

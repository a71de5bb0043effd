"""Moves slots between layers while blocks arrive, inside one pool that never grows.

A layer that should shrink does so when it evicts next, and only then can another take its slots.
While an answer is written layers keep what they hold, if nearly all slots are in use.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcap.policies.base import LayerBudget, apportion_rows
from kvcap.runtime.cache.pool import Segment, resize

EMPTY = 16  # at most one of so many slots, where layers keep what they hold


class Shares(NamedTuple):
    """What layers have from now on, int64 [L] each."""

    budgets: Tensor  # the slots of a head
    targets: Tensor  # how many of them it may hold


class LayerBalance:
    """Collects how many slots layers should have, and moves slots between them.

    The numbers come from tensor code: of the host, or inside a CUDA graph of the device.

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

    def prefer(self, index: int, preference: float, seen: int) -> None:
        """Note a layer's preference; from now on it evicts down to the slots it should have."""
        self.preferences[index] = preference
        if (wanted := self._wanted(seen)) is not None:
            segment = self.segments[index]
            segment.target_length = min(segment.budget, int(wanted[index]))

    def rebalance(self, seen: int) -> bool:
        """After a block of all layers, give those that want more what others no longer hold.

        Returns:
            Whether there was need.
        """
        wanted = self._wanted(seen)
        if wanted is None:
            return False
        held, budgets = ([s.held for s in self.segments], [s.budget for s in self.segments])
        shares = self.shared_out(wanted, torch.tensor(held), torch.tensor(budgets))
        resize(self.segments, shares.budgets.tolist())
        for segment, slots in zip(self.segments, shares.targets.tolist(), strict=True):
            segment.target_length = slots
        return True

    def wanted(self, preferences: Tensor, seen: Tensor) -> Tensor:
        """Slots of every layer [R, L] by rows of preferences [R, L], after `seen` [] tokens."""
        most = seen.clamp(max=preferences.shape[-1] * self.average)
        return self.budget.resplit(preferences, self.average, most, max(self.pinned, self.floor))

    def shared_out(self, wanted: Tensor, held: Tensor, budgets: Tensor) -> Shares:
        """What layers have that want, hold and had so many slots of a head, int64 [L] each.

        Where little is empty, each is to have what it holds until the next block says what it
        wants: tokens that are generated tell nothing, and change the lengths of no layer then.
        """
        # The rest lies in a block's slots. No layer has fewer slots than the floor before, either.
        sure = held.minimum(budgets).clamp(min=self.floor)
        total = self.average * len(held)
        rest = (total - sure.sum()).view(1, 1)
        more = apportion_rows((wanted - sure).clamp(min=0)[None], rest, rest.expand(1, len(held)))
        budgets = sure + more[0]
        keeps = EMPTY * (budgets - held).clamp(min=0).sum() <= total
        targets = torch.where(keeps, held, wanted).minimum(budgets).clamp(min=1)
        return Shares(budgets, targets)

    def after_block(
        self, old: Tensor, new: Tensor, held: Tensor, had: Shares, seen: Tensor
    ) -> tuple[Tensor, Shares]:
        """What `prefer` and `rebalance` say where all layers evict after the block, together.

        Args:
            old: preferences before the block [L] float32, NaN where a layer has told none.
            new: those after it.
            held: slots of a head [L] int64, the block's included.
            had: what layers have.
            seen: tokens read [].

        Returns:
            The slots of a head that stay [L], and what layers have then.
        """
        below = torch.ones(len(new), len(new), dtype=torch.bool, device=new.device).tril()
        each = torch.where(below, new, old)  # [L, L], what is known when a layer has told its own
        wanted, due = self.wanted(each.nan_to_num(nan=0.0), seen), seen > self.average
        told = due & ~each.isnan().any(-1)
        targets = torch.where(told, wanted.diagonal().minimum(had.budgets), had.targets)
        kept = held.minimum(targets)
        shares = self.shared_out(wanted[-1], kept, had.budgets)
        budgets, later = torch.where(
            due, torch.stack(shares), torch.stack((had.budgets, targets))
        ).unbind()
        return kept, Shares(budgets, later)

    @property
    def settled(self) -> bool:
        """Whether every layer holds what it should, so that nothing is to be moved."""
        return self.keeps and all(s.held == s.target_length for s in self.segments)

    @property
    def keeps(self) -> bool:
        """Whether so few slots are empty that layers keep what they hold during an answer."""
        empty = sum(max(0, s.budget - s.held) for s in self.segments)
        return EMPTY * empty <= self.average * len(self.segments)

    def reset(self) -> None:
        """Forget what was preferred."""
        self.preferences, self.floor = [None] * len(self.preferences), 0

    def _wanted(self, seen: int) -> Tensor | None:
        """Slots of every layer [L] by today's preferences, once all are known and there is need."""
        known = [p for p in self.preferences if p is not None]
        if len(known) < len(self.preferences) or seen <= self.average:
            return None  # while everything fits everywhere, nobody gives anything up
        return self.wanted(torch.tensor([known]), torch.tensor(seen))[0]

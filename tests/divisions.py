"""Defines simple budgets of two heads or two layers, for tests of rows of unequal lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcap.policies.base import HeadBudget, LayerBudget

TABLE = [[16, 8], [5, 19]]
"""Holds the slots of two layers' two heads, 12 on average."""
FUNNEL = [[13, 13], [11, 11]]
"""Holds the slots that `Funnel` gives two layers' two heads, 12 on average."""


@dataclass(frozen=True)
class Table(HeadBudget):
    """A budget that gives every head the slots of `TABLE`."""

    def allot(self, budgets: Sequence[int], kv_heads: int, pinned: int) -> list[list[int]]:
        return TABLE


@dataclass(frozen=True)
class Best(HeadBudget):
    """A budget that gives a head as many slots as it has among the layer's best, at least 4."""

    moves = True

    def split(self, scores: Any, pinned: Any, positions: Any, lengths: Any, budget: int) -> Any:
        slots = []
        for row, pins, held in zip(scores, pinned, lengths.tolist(), strict=True):
            each = [
                [x[:n].tolist() for x, n in zip(part, held, strict=True)] for part in (row, pins)
            ]
            slots.append(best(*each, budget))
        return torch.tensor(slots)


def best(scores: list[list[float]], pinned: list[list[bool]], budget: int) -> list[int]:
    """Return the slots of two heads for the scores of what they hold."""
    ranked = sorted(((s, k) for k, head in enumerate(scores) for s in head), reverse=True)
    first = sum(k == 0 for _, k in ranked[: 2 * budget])
    most = min(2 * budget - 4, len(scores[0]))
    first = max(min(first, most), 4, 2 * budget - len(scores[1]))
    return [first, 2 * budget - first]


@dataclass(frozen=True)
class Funnel(LayerBudget):
    """A budget that gives lower layers more slots."""

    def split(self, budget: int, layers: int, pinned: int) -> list[int]:
        return [budget + layers - 1 - 2 * i for i in range(layers)]

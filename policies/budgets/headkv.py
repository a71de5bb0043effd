"""HeadKV: gives slots to heads by a table of how much each head matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvcap.policies.base import HeadBudget, Preset, apportion
from kvcap.policies.base.table import read_table


@dataclass(frozen=True)
class HeadKV(HeadBudget):
    """Takes slots from every head of the model, and shares them out again by importance.

    A head gets its pinned slots and `base - base//β + pool · importance / Σ importance` more:
    `base` is what the pins leave of the budget, the pool is the sum of what all heads give up.
    HeadKV, https://arxiv.org/abs/2410.19258.
    `kvcap policies calibrate headkv` makes a `table` of the importance.
    """

    table: str = ""
    beta: float = 1.5

    paper: ClassVar = "HeadKV, arXiv 2410.19258"
    formula: ClassVar = "base - base//β + pool · importance / Σ importance + pinned"
    when: ClassVar = "to score by attention under 256 to 512 slots, after calibrating once"
    presets: ClassVar = {"headkv": Preset("snapkv+headkv")}

    def __post_init__(self) -> None:
        self.require("table", isinstance(self.table, str), "the name of a JSON file")
        self.require("beta", 1.01 <= self.beta <= 10, "a number, 1.01 (most uneven) to 10")

    def allot(self, budgets: Sequence[int], kv_heads: int, pinned: int) -> list[list[int]]:
        table = read_table(self.table, len(budgets), kv_heads, "headkv")
        pooled = [int(max(0, budget - pinned) // self.beta) for budget in budgets]
        importance = [score for row in table.scores for score in row]
        shares = iter(apportion(importance, kv_heads * sum(pooled)))
        return [
            [budget - gave + next(shares) for _ in range(kv_heads)]
            for budget, gave in zip(budgets, pooled, strict=True)
        ]

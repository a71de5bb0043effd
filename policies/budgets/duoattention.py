"""DuoAttention: heads that only stream keep sinks and recents; the others get the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from kvcap.policies.base import HeadBudget, Observation, Policy, Preset, apportion
from kvcap.policies.base.table import Table, last_read, read_table
from kvcap.policies.streaming_llm import StreamingLLM


@dataclass(frozen=True)
class DuoAttention(HeadBudget):
    """Gives a streaming head `sinks + recents` slots, and retrieval heads the rest of the layer's.

    DuoAttention, https://arxiv.org/abs/2410.10819, under a cap, which the paper has not. The
    retrieval heads are the fraction `retrieval` of all heads with the highest scores in `table`.
    Under a smaller budget sinks and recents shrink in proportion. A layer without a retrieval head
    has equal budgets.
    """

    table: str = ""
    retrieval: float = 0.5
    sinks: int = 64
    recents: int = 256

    observes: ClassVar = frozenset({"positions"})
    paper: ClassVar = "DuoAttention, arXiv 2410.10819"
    formula: ClassVar = "sinks + recents for streaming heads, the layer's rest for retrieval heads"
    when: ClassVar = "for very small budgets, after calibrating once"
    small: ClassVar = {"sinks": 2, "recents": 6}
    presets: ClassVar = {"duoattention": Preset("keydiff+duoattention")}

    def __post_init__(self) -> None:
        self.require("table", isinstance(self.table, str), "the name of a JSON file")
        self.require("retrieval", 0 <= self.retrieval <= 1, "a fraction of all heads, 0 to 1")
        self.require("sinks", self.sinks >= 0, "a number of tokens, 0 or more")
        self.require("recents", self.recents >= 1, "a number of tokens, 1 or more")

    def allot(self, budgets: Sequence[int], kv_heads: int, pinned: int) -> list[list[int]]:
        table = read_table(self.table, len(budgets), kv_heads, "duoattention")
        head_budgets = []
        for budget, retrieves in zip(budgets, _retrieving(table, self.retrieval), strict=True):
            small = min(max(self.sinks + self.recents, pinned + 1), budget)
            if not any(retrieves):
                small = budget
            rest = kv_heads * budget - small * retrieves.count(False)
            shares = iter(apportion([1] * sum(retrieves), rest))
            head_budgets.append([next(shares) if mine else small for mine in retrieves])
        return head_budgets

    def policy_of(self, obs: Observation, base: Policy) -> Policy:
        layer = _retrieving(last_read(self.table, "duoattention"), self.retrieval)[obs.layer]
        mine = set(layer[obs.first_head : obs.first_head + obs.positions.shape[1]])
        assert len(mine) == 1, "heads of both classes are observed one by one"
        if mine == {True}:
            return base
        whole = self.sinks + self.recents
        return StreamingLLM(min(self.sinks, self.sinks * obs.budget // whole))


@lru_cache
def _retrieving(table: Table, fraction: float) -> list[list[bool]]:
    """Return which heads retrieve, [L][K]: the highest scores; of equal ones, earlier layers'."""
    ranked = sorted(
        (-score, layer, head)
        for layer, row in enumerate(table.scores)
        for head, score in enumerate(row)
    )
    chosen = {(layer, head) for _, layer, head in ranked[: int(fraction * len(ranked) + 0.5)]}
    return [
        [(layer, head) in chosen for head in range(len(row))]
        for layer, row in enumerate(table.scores)
    ]

"""Which buffers a cache has and how many bytes they take. Sizes only; nothing is allocated here.

The one place that counts: `MemoryPlan` predicts with it, `BudgetCache` allocates by it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property

import torch

from kvcap.policies import Eviction
from kvcap.runtime.errors import PlanInfeasible, UnsupportedModel
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.rope import Rope, table_dtype
from kvcap.runtime.types import Positions


@dataclass(frozen=True)
class CacheLayout:
    """The sizes of a cache for a model, an eviction and a budget.

    Raises:
        PlanInfeasible: sizes below 1.
        UnsupportedModel: compact positions where keys cannot be moved exactly.
    """

    shape: ModelShape
    eviction: Eviction
    budget_tokens: int  # N
    block_size: int  # T
    positions: Positions

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise PlanInfeasible(f"block_size={self.block_size}: a block holds 1 or more tokens")
        if self.positions not in ("compact", "true"):
            raise PlanInfeasible(f"positions={self.positions!r}: use 'compact' or 'true'")
        if self.positions == "compact" and not self.shape.moves_exactly:
            raise UnsupportedModel(
                f"positions='compact' are not exact for RoPE of type {self.shape.rope_kinds}, "
                "whose frequencies depend on the length; use positions='true'"
            )

    @cached_property
    def budgets(self) -> list[int]:
        """Slots per KV head kept in each capped layer, on average over its heads."""
        return self.eviction.split(self.budget_tokens, len(self.shape.capped))

    @cached_property
    def allotments(self) -> list[list[int]]:
        """Slots kept by each KV head of each capped layer before anything is read."""
        layers, heads = len(self.shape.capped), self.shape.kv_heads
        return self.eviction.allot(self.budget_tokens, layers, heads)

    @property
    def ragged(self) -> bool:
        """Whether the heads of a layer may hold unequally many slots."""
        return self.eviction.head_budget is not None

    @property
    def pooled(self) -> bool:
        """Whether slots move between layers, so that all layers share one pool."""
        return self.eviction.layers_move

    @property
    def longest(self) -> int:
        """The most slots a head can ever keep."""
        layers, heads = len(self.shape.capped), self.shape.kv_heads
        if self.pooled:
            return layers * self.budget_tokens
        if self.eviction.heads_move:
            return heads * max(self.budgets)
        return max(map(max, self.allotments))

    @cached_property
    def rotates(self) -> list[bool]:
        """Whether the keys of each capped layer are moved to other positions."""
        compact = self.positions == "compact"
        return [compact and self.shape.layers[i].rope is not None for i in self.shape.capped]

    def slots(self, index: int, batch: int) -> int:
        """Slots of a capped layer, over all heads of `batch` sequences."""
        kept = self.allotments[index]
        return batch * (sum(kept) + len(kept) * self.block_size)

    def shifts(self, layers: list[int]) -> bool:
        """Whether the slots of capped layers that share a pool remember how far they moved."""
        return any(self.rotates[index] for index in layers)

    @property
    def ring_length(self) -> int:
        """Queries kept per layer between blocks."""
        observed = self.eviction.policy.queries_observed
        return observed if observed is not None and observed > 1 else 0

    @property
    def rotation_span(self) -> int:
        """Shifts that can occur: a key's within the slots, a kept query's by the ring more."""
        if not any(self.rotates):
            return 0
        return self.longest + self.ring_length + self.block_size + 1

    @property
    def rope(self) -> Rope | None:
        """The rotary embedding that capped layers share."""
        return next((r for i in self.shape.capped if (r := self.shape.layers[i].rope)), None)

    def nbytes(self, batch: int, dtype: torch.dtype) -> dict[str, int]:
        """Exact bytes of every component for `batch` sequences of `dtype` keys."""
        heads, vector = self.shape.kv_heads, self.shape.head_size * dtype.itemsize
        layers = range(len(self.budgets))
        slots = [self.slots(index, batch) for index in layers]
        groups = [list(layers)] if self.pooled else [[index] for index in layers]
        moved = sum(slots[index] for group in groups if self.shifts(group) for index in group)
        windows = [layer.window for layer in self.shape.layers if layer.window is not None]
        rotated = 0 if self.rope is None or self.rope.inv_freq is None else len(self.rope.inv_freq)
        state = sum(dt.itemsize for dt in self.eviction.state.values())
        evicted, remembered = self._corrector_bytes(batch, dtype)
        queries = batch * self.shape.heads * vector + 4 * batch * heads  # and their shifts
        return {
            "keys_values": 2 * sum(slots) * vector,
            "slot_positions": 4 * (sum(slots) + moved),  # int32 positions, and shifts
            "policy_state": sum(slots) * state + remembered,
            "evicted_store": evicted,
            "query_window": len(slots) * self.ring_length * queries,
            "rotation_table": self.rotation_span * 2 * rotated * table_dtype(dtype).itemsize,
            "sliding_layers": sum(
                2 * batch * heads * (window - 1 + self.block_size) * vector for window in windows
            ),
        }

    def _corrector_bytes(self, batch: int, dtype: torch.dtype) -> tuple[int, int]:
        """Of the evicted tokens that are kept, and of what queries got from them."""
        if self.eviction.corrector is None:
            return 0, 0
        layers, shape = len(self.budgets), self.shape
        rows = layers * batch * shape.kv_heads
        slot = 2 * shape.head_size * dtype.itemsize + 4 + 4 + 4  # time, score, position
        remembered = batch * shape.heads * (shape.head_size * (dtype.itemsize + 4) + 4)
        return rows * (self.eviction.corrector.size + self.block_size) * slot, layers * remembered


def default_positions(shape: ModelShape) -> Positions:
    """The default of chat and generate: compact where exact, else true with a warning."""
    if shape.moves_exactly:
        return "compact"
    warnings.warn(
        f"RoPE of type {shape.rope_kinds} changes with the length, so positions stay true; "
        f"answers will suffer beyond {shape.trained_length} tokens",
        stacklevel=2,
    )
    return "true"

"""Defines the contract of a policy, and operations that scores share.

A policy's `score` is pure tensor code (no `.item()`, no data-dependent Python, no in-place
writes), because the same method is traced for ONNX and mirrored by a Triton kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvcap.policies.base.component import Component
from kvcap.policies.base.observation import Observation

Group = Literal["mean", "sum", "max"]


@dataclass(frozen=True)
class Policy(Component):
    """Decides what every slot is worth. Subclasses add options as fields and define `score`."""

    evicts: ClassVar[bool] = True
    """Says whether it evicts; False only for `full`, which refuses instead."""

    @property
    def scores_heads_alone(self) -> bool:
        """Return whether a head's scores depend on that head alone, as unequal heads require."""
        return True

    @property
    def compares_pairs(self) -> bool:
        """Return whether a score compares all pairs of slots: of many, that takes gigabytes."""
        return False

    def score(self, obs: Observation) -> Tensor:
        """Return the worth of every slot, higher is kept. Shape [B, K, n], float32."""
        raise NotImplementedError

    def scored(self, obs: Observation, rank: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `score` with the ranks of numbers taken by `rank`, as `policies.base.order.ranks`.

        A policy whose scores are ranks defines this, and its `score` gives it `ranks`. Numbers that
        are nearly equal may change places in another engine; a check gives other ranks to say so.
        """
        return self.score(obs)

    @property
    def queries_observed(self) -> int | None:
        """Return how many of the last queries `score` reads; `None` means all of the block."""
        return 0

    def sinks_pinned(self) -> int:
        """Return how many of the very first tokens are never evicted."""
        return 0

    def recents_pinned(self, budget: int) -> int:
        """Return how many of the newest tokens are never evicted at this budget of a KV head."""
        return 0


@dataclass(frozen=True)
class WindowPolicy(Policy):
    """A policy that scores by the last `window` queries, and pins their tokens."""

    window: int = 32
    group: Group = "mean"  # how the scores of a KV head's query heads are combined

    small: ClassVar = {"window": 4}

    def __post_init__(self) -> None:
        self.require("window", self.window >= 1, "a number of queries, 1 or more")
        self.require("group", self.group in ("mean", "sum", "max"), "mean, sum or max")

    @property
    def queries_observed(self) -> int:
        return self.window

    def recents_pinned(self, budget: int) -> int:
        return min(self.window, budget)  # the cap wins over the window

    def require_kernel(self, kernel: int) -> None:
        """Refuse a `kernel` that `pool_in_time` cannot centre."""
        self.require("kernel", kernel % 2 == 1 and kernel > 0, "an odd number of tokens")


def over_group(scores: Tensor, group: Group) -> Tensor:
    """Combine the scores of the query heads of each KV head: [B, K, G, n] -> [B, K, n]."""
    if group == "max":
        return scores.amax(2)
    return scores.sum(2) if group == "sum" else scores.mean(2)


def pool_in_time(
    scores: Tensor, positions: Tensor, kernel: int, pool: str, num_tokens: int | Tensor, window: int
) -> Tensor:
    """Pool each slot's score with those of its neighbours in time; the newest tokens are left out.

    The newest tokens keep their scores and do not raise others': they get the most attention, and
    tokens would stay only for being next to them. Slots are unordered in memory, so neighbours are
    found by their positions.

    Args:
        scores: [B, K, ..., n].
        positions: [B, K, n].
        kernel: odd window length in tokens; 1 leaves the scores as they are.
        pool: 'max' or 'avg', which averages over neighbours that exist and are not left out.
        num_tokens: tokens read so far.
        window: how many of the newest are left out.
    """
    if kernel == 1:
        return scores
    wide = (*positions.shape[:2], *(1,) * (scores.dim() - 3), -1)
    order = positions.argsort(-1).view(wide)  # [B, K, ..., n]
    newest = (positions >= num_tokens - window).view(wide)
    filled = scores.masked_fill(newest, float("-inf") if pool == "max" else 0.0)
    in_time = filled.gather(-1, order.expand_as(scores))
    if pool == "max":
        rows = in_time.flatten(0, -2)[:, None]  # [rows, 1, n]
        rows = torch.nn.functional.max_pool1d(rows, kernel, stride=1, padding=kernel // 2)
        pooled = rows.view_as(scores)
    else:
        # Divided so, equal neighbours have equal means to the bit. A counted token counts itself.
        counted = _share((~newest).to(scores.dtype).gather(-1, order), kernel)
        pooled = _share(in_time, kernel) / counted.clamp(min=1 / kernel)
    pooled = torch.zeros_like(scores).scatter(-1, order.expand_as(scores), pooled)
    return torch.where(newest, scores, pooled)


def _share(in_time: Tensor, kernel: int) -> Tensor:
    """Sum [..., n] over `kernel` neighbours, 0 where there is none, and divide by `kernel`."""
    rows = in_time.flatten(0, -2)[:, None]  # [rows, 1, n]
    rows = torch.nn.functional.avg_pool1d(rows, kernel, stride=1, padding=kernel // 2)
    return rows.view_as(in_time)

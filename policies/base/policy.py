"""The contract of a policy, and the one helper that scores share.

A policy is a frozen dataclass in a file of its own; the file's name is the policy's name. Its
`score` is pure tensor code (no `.item()`, no data-dependent Python, no in-place writes), because
the same method is traced for ONNX and mirrored by a Triton kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvcap.policies.base.observation import Observation

ATTENTION_VIEWS = frozenset({"queries", "attention", "logits", "output"})
VIEWS = ATTENTION_VIEWS | {"keys", "values", "positions", "output_projection", "state"}


class PolicyError(ValueError):
    """A policy, one of its options, or a combination with a budget that cannot work."""


@dataclass(frozen=True)
class Policy:
    """Decides what every slot is worth. Subclasses add options as fields and define `score`."""

    observes: ClassVar[frozenset[str]] = frozenset()
    """What `score` reads: names of `Observation` attributes. The runtime keeps nothing else."""

    paper: ClassVar[str] = ""
    """Where the formula comes from."""

    formula: ClassVar[str] = ""
    """The formula in one line, shown by `kvcap policies`."""

    evicts: ClassVar[bool] = True
    """False only for `full`, which refuses instead."""

    state: ClassVar[Mapping[str, torch.dtype]] = {}
    """Per-slot memory [B, K, n] that moves with its slot: name -> dtype."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Further names for this policy with other options."""

    def score(self, seen: Observation) -> Tensor:
        """Worth of every slot, higher is kept. Shape [B, K, n], float32."""
        raise NotImplementedError

    def update(self, seen: Observation) -> dict[str, Tensor]:
        """New values of `state`, [B, K, n] each, computed after every block before `score`."""
        return {}

    @property
    def queries_observed(self) -> int | None:
        """How many of the last queries `score` reads; `None` means every query of the block."""
        return 0

    def sinks_pinned(self) -> int:
        """How many of the very first tokens are never evicted."""
        return 0

    def recents_pinned(self, budget: int) -> int:
        """How many of the newest tokens are never evicted at this budget (slots per KV head)."""
        return 0

    @property
    def needs_queries(self) -> bool:
        """Whether it must see inside attention, which stock attention functions do not allow."""
        return bool(self.observes & ATTENTION_VIEWS)

    def options(self) -> dict[str, Any]:
        """The options and their values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def require(self, name: str, ok: bool, expected: str) -> None:
        """Raise `PolicyError` unless option `name` is `ok`, saying what was got and expected."""
        if not ok:
            policy = type(self).__module__.rsplit(".", 1)[-1]
            got = getattr(self, name)
            raise PolicyError(f"{policy}: {name}={got!r} will not work; expected {expected}")


def pool_in_time(scores: Tensor, positions: Tensor, kernel: int, pool: str) -> Tensor:
    """1-D pooling over the slots in time order, same length out.

    Slots lie unordered in memory, so neighbours are found through their positions.

    Args:
        scores: [B, K, ..., n].
        positions: [B, K, n].
        kernel: odd window length in tokens; 1 leaves the scores as they are.
        pool: 'max' or 'avg' (borders average over what exists).
    """
    if kernel == 1:
        return scores
    order = positions.argsort(-1)  # [B, K, n]
    order = order.view(*order.shape[:2], *(1,) * (scores.dim() - 3), -1).expand_as(scores)
    rows = scores.gather(-1, order).flatten(0, -2)[:, None]  # [rows, 1, n]
    if pool == "max":
        rows = torch.nn.functional.max_pool1d(rows, kernel, stride=1, padding=kernel // 2)
    else:
        rows = torch.nn.functional.avg_pool1d(
            rows, kernel, stride=1, padding=kernel // 2, count_include_pad=False
        )
    return torch.zeros_like(scores).scatter(-1, order, rows.view_as(scores))

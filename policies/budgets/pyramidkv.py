"""PyramidKV: gives many slots to the first layers, few to the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcap.policies.base import LayerBudget, Preset, apportion


@dataclass(frozen=True)
class PyramidKV(LayerBudget):
    """Lets the slots of a layer fall linearly, from the first layer to the last.

    Besides its pinned slots the first layer gets `2R - R//β` and the last `R//β`; `R` is what the
    pins leave of the budget. Every layer keeps at least one slot that is not pinned. PyramidKV,
    https://arxiv.org/abs/2406.02069.
    """

    beta: int = 20

    paper: ClassVar = "PyramidKV, arXiv 2406.02069"
    formula: ClassVar = "slots fall linearly from 2R - R//β to R//β, R = N - pinned"
    when: ClassVar = "as a baseline: the first layers get most of the slots"
    presets: ClassVar = {"pyramidkv": Preset("snapkv+pyramidkv")}

    def __post_init__(self) -> None:
        self.require("beta", self.beta >= 1, "a number, 1 (uniform) or more")

    def split(self, budget: int, layers: int, pinned: int) -> list[int]:
        free = budget - pinned
        if free <= 0:
            return [budget] * layers
        least = max(1, int(free // self.beta))
        steps = range(layers - 1, -1, -1) if layers > 1 else [1]
        return [pinned + least + extra for extra in apportion(steps, layers * (free - least))]

"""OBCache: weighs a token by what pruning it does to attention's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvcap.policies.base import Observation, Preset, Saliency


@dataclass(frozen=True)
class OBCache(Saliency):
    """Replaces attention by an estimate of how far pruning a token moves attention's output.

    `value = A²·‖v‖²`, `key = (A·z)²·‖v - a‖²`, `joint = 2·A²·z·(‖v‖² - v·a) + value + key`.
    OBCache, https://arxiv.org/abs/2510.07651, Eq. 4-6. The paper adds the heads of a group up (Eq.
    33-35); their mean is proportional to that. `joint` can be negative.
    """

    mode: Literal["value", "key", "joint"] = "joint"

    observes: ClassVar = frozenset({"keys", "values", "queries", "attention", "logits", "output"})
    paper: ClassVar = "OBCache, arXiv 2510.07651, Eq. 4-6"
    formula: ClassVar = "in place of A_tj: 2 A² z (|v|² - v·a) + A² |v|² + (A z)² |v - a|²"
    when: ClassVar = "to score by attention without calibration, at twice the time of snapkv"
    presets: ClassVar = {
        "obcache": Preset("snapkv+obcache"),
        "obcache-h2o": Preset("h2o+obcache", {"recent": 0.25, "sink_tokens": 4}),
        "obcache-tova": Preset("tova+obcache", {"sink_tokens": 4}),
    }

    def __post_init__(self) -> None:
        self.require("mode", self.mode in ("value", "key", "joint"), "value, key or joint")

    def weigh(self, obs: Observation) -> Tensor:
        v, attention = obs.values.float(), obs.attention  # [B, K, n, D], [B, K, G, w, n]
        squares = v.square().sum(-1)[:, :, None, None]  # [B, K, 1, 1, n]
        if self.mode == "value":
            return attention.square() * squares
        a = obs.output  # [B, K, G, w, D]
        twice = torch.matmul(2 * a.flatten(2, 3), v.mT).view_as(attention)  # [B, K, G, w, n], 2 v·a
        distance = (a.square().sum(-1, keepdim=True) + squares - twice).clamp(min=0)
        if self.mode == "key":
            return (attention * obs.logits).square() * distance
        # `joint` with A² and z taken out of its terms: a CPU waits for memory at every operation.
        inner = 2 * squares - twice + obs.logits * distance
        return attention.square() * (squares + obs.logits * inner)

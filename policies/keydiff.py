"""KeyDiff: evicts the keys that look most like all the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvcap.policies.base import Observation, Policy, Preset


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Scores a token by how little its key resembles the anchor, the mean of the held keys.

    `score_j = -cos(k_j, μ)`, `μ` the anchor. KeyDiff, https://arxiv.org/abs/2504.15364, Eq. 7-8 and
    Fig. 3; the metrics are those of Tables 15-16, and `recent` is the sliding window of Table 14.
    If slots hold latents (MLA, which the paper leaves to future work), the slot is the key; with
    `expand` every query head's own keys are scored, and their scores averaged.
    """

    anchor: Literal["mean", "unit_mean", "median", "pairwise"] = "mean"
    metric: Literal["cosine", "dot", "euclidean"] = "cosine"
    recent: float = 0.0  # fraction of the budget reserved for the newest tokens
    expand: bool = False  # of latents, score the keys that they expand to

    observes: ClassVar = frozenset({"keys"})
    paper: ClassVar = "KeyDiff, arXiv 2504.15364, Eq. 7-8"
    formula: ClassVar = "-cos(k_j, mean of held keys)"
    when: ClassVar = "to reproduce the paper; to chat, take keydiff-window"
    presets: ClassVar = {
        "keydiff-window": Preset(
            "keydiff",
            {"recent": 0.2},
            "where facts matter more than flow: the most distinct keys stay, and the newest tokens",
        ),
    }

    def __post_init__(self) -> None:
        anchors, metrics = (
            ("mean", "unit_mean", "median", "pairwise"),
            ("cosine", "dot", "euclidean"),
        )
        self.require("anchor", self.anchor in anchors, f"one of {', '.join(anchors)}")
        self.require("metric", self.metric in metrics, f"one of {', '.join(metrics)}")
        self.require("expand", self.expand in (True, False), "True or False")
        self.require("recent", 0 <= self.recent < 1, "a fraction of the budget, 0 to below 1")

    @property
    def compares_pairs(self) -> bool:
        return self.anchor == "pairwise"

    def recents_pinned(self, budget: int) -> int:
        return int(self.recent * budget)

    def score(self, obs: Observation) -> Tensor:
        if self.expand and obs.expansion is not None:
            heads = obs.expansion.each_head_keys(obs.keys.float())  # one at a time, for memory
            total = torch.stack([self._score(keys) for keys in heads])
            return total.mean(0)
        return self._score(obs.keys.float())  # a float16 mean over thousands of keys loses bits

    def _score(self, keys: Tensor) -> Tensor:
        """Return scores [B, K, n] of keys [B, K, n, D]."""
        if self.anchor == "pairwise":  # Eq. 7, O(n²)
            return -self._similarity(keys[..., :, None, :], keys[..., None, :, :]).mean(-1)
        if self.anchor == "median":
            anchor = keys.median(dim=-2, keepdim=True).values
        else:
            anchor = (normalize(keys, dim=-1) if self.anchor == "unit_mean" else keys).mean(
                dim=-2, keepdim=True
            )
        return -self._similarity(keys, anchor)

    def _similarity(self, a: Tensor, b: Tensor) -> Tensor:
        if self.metric == "dot":
            return (a * b).sum(-1)
        if self.metric == "euclidean":
            distance: Tensor = torch.linalg.vector_norm(a - b, dim=-1)
            return -distance
        # Lengths divide the products: no copies of all keys at length 1, and operations that every
        # exporter has.
        length_a = torch.linalg.vector_norm(a, dim=-1).clamp_min(1e-8)
        length_b = torch.linalg.vector_norm(b, dim=-1).clamp_min(1e-8)
        if self.anchor == "pairwise":
            products = (a * b).sum(-1)
        else:
            products = torch.matmul(b, a.mT).squeeze(-2)
        cosine: Tensor = products / (length_a * length_b)
        return cosine

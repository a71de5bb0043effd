"""CUR: keeps tokens whose key and value are both large among their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcap.policies.base import Observation, Policy


@dataclass(frozen=True)
class Cur(Policy):
    """Scores a token by the shares of its key and its value in the squares of their neighbours.

    `score_j = ‖k_j‖² / Σ_i ‖k_i‖² · ‖v_j‖² / Σ_i ‖v_i‖²`. The held tokens are cut in time order
    into runs of `window`, and `i` goes over the run that has `j`; with `window=0`, over all held
    tokens. CurDKV, https://arxiv.org/abs/2509.15038, whose leverage scores these approximate, as
    kvpress's `CURPress` does by default: without random projection, the first 4 tokens kept.
    """

    mode: Literal["product", "mean", "key", "value"] = "product"
    window: int = 16
    sinks: int = 4

    observes: ClassVar = frozenset({"keys", "values", "positions"})
    paper: ClassVar = "CurDKV, arXiv 2509.15038, as kvpress approximates it"
    formula: ClassVar = "share of |k_j|² times share of |v_j|² among neighbours in time"
    when: ClassVar = "as a baseline: it looks at nothing but the lengths of keys and values"
    small: ClassVar = {"window": 4, "sinks": 2}

    def __post_init__(self) -> None:
        modes = ("product", "mean", "key", "value")
        self.require("mode", self.mode in modes, "product, mean, key or value")
        self.require("window", self.window >= 0, "a number of tokens, or 0 for all that are held")
        self.require("sinks", self.sinks >= 0, "a number of tokens, 0 or more")

    def sinks_pinned(self) -> int:
        return self.sinks

    def score(self, obs: Observation) -> Tensor:
        if self.mode == "key":
            return self._share(obs.keys, obs.positions)
        if self.mode == "value":
            return self._share(obs.values, obs.positions)
        key, value = (self._share(x, obs.positions) for x in (obs.keys, obs.values))
        return key * value if self.mode == "product" else (key + value) / 2

    def _share(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return each row's part of the squares of its run, [B, K, n], of rows [B, K, n, D]."""
        squares = rows.float().square().sum(-1)  # [B, K, n]
        least = torch.finfo(torch.float32).tiny
        if self.window == 0:
            return squares / squares.sum(-1, keepdim=True).clamp(min=least)
        order, n = positions.argsort(-1), positions.shape[-1]
        runs = (n + self.window - 1) // self.window
        in_time = pad(squares.gather(-1, order), (0, self.window - 1))[..., : runs * self.window]
        by_run = in_time.unflatten(-1, (-1, self.window))  # [B, K, runs, window]
        share = (by_run / by_run.sum(-1, keepdim=True).clamp(min=least)).flatten(-2)[..., :n]
        return torch.zeros_like(squares).scatter(-1, order, share)

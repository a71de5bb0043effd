"""LagKV: keeps tokens whose keys and values stand out from those of the tokens after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcap.policies.base import Observation, Policy
from kvcap.policies.base.order import ranks


@dataclass(frozen=True)
class LagKV(Policy):
    """Scores a token within its partition, by the range of the next partition's keys and values.

    The held tokens behind the sinks are cut in time order into partitions of `lag`. With `min` and
    `max` of each channel over partition `p+1`, `std` over channels and softmax over the tokens of
    `p`: `s_j = softmax(std((k_j - min) / (max - min))) + the same of v_j`, and `score_j` is the
    rank of `s_j` in its partition over `lag`. LagKV, https://arxiv.org/abs/2504.04704, the score of
    its section on the method. The last whole partition has no next one: it and what is newer score
    highest, so that the newest stay. Published code never scores a kept token again and keeps
    equally many of every partition, which no fixed number of slots can hold. Here the held tokens
    are partitioned and scored again after every block; evicted once, the kept sets are the same.
    The paper has a lag of 128 and 16 sinks. A lag of 32 keeps as much of a text's flow, and facts
    in fewer slots (docs/quality.md); sinks are 0, as the runtime pins a conversation's first
    tokens.
    """

    lag: int = 32  # tokens of a partition
    sinks: int = 0  # first tokens that are pinned and no part of a partition

    observes: ClassVar = frozenset({"keys", "values", "positions"})
    paper: ClassVar = "LagKV, arXiv 2504.04704"
    formula: ClassVar = "rank in its part of std((k_j - min) / (max - min)) of the next, and of v_j"
    when: ClassVar = (
        "first: the flow of a text as by a window of the newest tokens, and facts that stand out"
    )
    small: ClassVar = {"lag": 4, "sinks": 2}

    def __post_init__(self) -> None:
        self.require("lag", self.lag >= 2, "a number of tokens, 2 or more")
        self.require("sinks", self.sinks >= 0, "a number of tokens, 0 or more")

    def sinks_pinned(self) -> int:
        return self.sinks

    def score(self, obs: Observation) -> Tensor:
        return self.scored(obs, ranks)

    def scored(self, obs: Observation, rank: Callable[[Tensor], Tensor]) -> Tensor:
        slots = obs.positions.shape[-1]
        in_time = obs.positions.argsort(-1)  # [B, K, n]
        sinks = (obs.positions < self.sinks).sum(-1, keepdim=True)  # [B, K, 1]
        # Some places beyond the last token, so that there are two partitions whatever is held.
        count = (slots // self.lag + 2) * self.lag
        token_index = torch.arange(count, device=in_time.device)  # [P·lag]
        chosen = in_time.gather(-1, (sinks + token_index).clamp(max=slots - 1))  # [B, K, P·lag]
        deviation = self._stand_out(obs.keys, chosen) + self._stand_out(obs.values, chosen)
        index = torch.empty_like(in_time).scatter_(
            -1, in_time, token_index[:slots].expand_as(in_time)
        )
        index = index - sinks  # [B, K, n], below 0 for sinks
        scores = rank(deviation).flatten(2).gather(-1, index.clamp(min=0)) / self.lag  # [B, K, n]
        last = ((slots - sinks) // self.lag - 1) * self.lag  # where the last whole one begins
        return scores.masked_fill((index < 0) | (index >= last), 1.0)

    def _stand_out(self, states: Tensor, chosen: Tensor) -> Tensor:
        """Return how far each of `chosen` [B, K, P·lag] stands out of the next one. [B, K, P, lag].

        The first partition follows the last one.
        """
        batch, heads = (torch.arange(n, device=chosen.device) for n in chosen.shape[:2])
        parts = states[batch[:, None, None], heads[:, None], chosen]  # [B, K, P·lag, D], a copy
        parts = parts.float().unflatten(-2, (-1, self.lag))  # [B, K, P, lag, D]
        low = parts.amin(-2, keepdim=True).roll(-1, 2)
        range_ = parts.amax(-2, keepdim=True).roll(-1, 2) - low
        # In place and by two sums, as `std` of strided numbers takes ten times as long.
        parts.sub_(low).mul_(1 / range_.clamp(min=1e-8))
        total, length = parts.sum(-1), torch.linalg.vector_norm(parts, dim=-1)
        size = parts.shape[-1]
        variance: Tensor = (length * length - total * total / size) / (size - 1)
        return variance.clamp(min=0).sqrt().softmax(-1)

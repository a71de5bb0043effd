"""StreamingLLM: keeps the first tokens and the newest ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvcap.policies.base import Observation, Policy


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keeps the first `sinks` tokens and the `N - sinks` newest.

    StreamingLLM, https://arxiv.org/abs/2309.17453 ('Sink' in KeyDiff).
    """

    sinks: int = 4

    observes: ClassVar = frozenset({"positions"})
    paper: ClassVar = "StreamingLLM, arXiv 2309.17453"
    formula: ClassVar = "position_j, the first sinks pinned"
    when: ClassVar = "as a baseline, or where only the newest text matters: it forgets all between"
    small: ClassVar = {"sinks": 2}

    def __post_init__(self) -> None:
        self.require("sinks", self.sinks >= 0, "a number of tokens, 0 or more")

    def sinks_pinned(self) -> int:
        return self.sinks

    def score(self, obs: Observation) -> Tensor:
        # Ages are small where positions of a long conversation are beyond float32's integers.
        return (obs.positions - obs.num_tokens).float()

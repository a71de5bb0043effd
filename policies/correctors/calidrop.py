"""CaliDrop: adds what evicted tokens would have, as a similar query found it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvcap.policies.base import Corrector, Preset


@dataclass(frozen=True)
class CaliDrop(Corrector):
    """Adds attention over evicted tokens to the output, remembered from a similar earlier query.

    CaliDrop, Alg. 1. `C_q` is the query that attended to the evicted tokens last, and `ρ` its
    cosine with the current query. If `ρ < θ1`, the query attends to the evicted tokens again. If
    `ρ > θ2`, it uses what `C_q` got from them. In between, nothing is added. The two attentions are
    merged by log-sum-exp. Evicted tokens are kept where `store` says, for each KV head at most
    `calibration_size` of the highest scores (Fig. 3c); the cap counts them. In the paper they are
    on the host, and a GPU waits for every copy; on the device they take its memory and no time.
    """

    theta1: float = 0.7
    theta2: float = 0.85
    calibration_size: int = 512  # tokens per KV head and layer
    store: str = "device"  # the model's, or "host", or a directory, for a file mapped into memory

    observes: ClassVar = frozenset({"queries", "keys", "values"})
    paper: ClassVar = "CaliDrop, Alg. 1"
    formula: ClassVar = "merge(Att(q, kept), Att(C_q, evicted)) by log-sum-exp"
    when: ClassVar = (
        "where memory beside the cache can keep what was evicted, the device's or the host's "
        "(store=host)"
    )
    placing: ClassVar = frozenset({"store"})
    small: ClassVar = {"calibration_size": 20}
    presets: ClassVar = {
        "calidrop": Preset("snapkv+calidrop", {"kernel": 5, "pool": "avg"}),
        "calidrop-h2o": Preset("h2o+calidrop"),
        "calidrop-streaming_llm": Preset("streaming_llm+calidrop", {"sinks": 32}),
    }

    def __post_init__(self) -> None:
        self.require("theta1", -1 <= self.theta1 <= 1, "a cosine, -1 to 1")
        self.require("theta2", -1 <= self.theta2 <= 1, "a cosine, -1 to 1")
        self.require("calibration_size", self.calibration_size >= 1, "a number of tokens")
        self.require("store", bool(self.store), "'device', 'host' or a directory")

    @property
    def size(self) -> int:
        return self.calibration_size

    @property
    def place(self) -> str:
        return self.store

    def decide(self, query: Tensor, cached: Tensor) -> tuple[Tensor, Tensor]:
        rho = cosine_similarity(query.float(), cached.float(), dim=-1)  # [B, H, T]
        anew = rho < self.theta1
        return anew, anew | (rho > self.theta2)

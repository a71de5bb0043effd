"""Captures queries, keys and values of every layer on a text, with nothing evicted.

The checks of the papers' claims start here; what they do with it is in `bench/` and `analyze/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvcap.pocket.corpus import filler
from kvcap.policies import Eviction, Observation, Policy
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.cache.cache import BudgetCache


@dataclass(frozen=True)
class Probe(Policy):
    """Remembers what every layer observed, in order; never evicts."""

    found: list[Observation] = field(default_factory=list)

    observes: ClassVar = frozenset({"keys", "values", "positions", "queries", "output_projection"})
    evicts: ClassVar = False
    state: ClassVar = {"probe": torch.float32}  # a policy without state has nothing to update

    @property
    def queries_observed(self) -> None:
        """Return None, which asks for every query of the block."""
        return

    def update(self, obs: Observation) -> dict[str, Tensor]:
        """Remember the observation, and change no state."""
        projection = obs.output_projection
        if projection is not None:
            obs = replace(obs, output_projection=projection.detach())
        self.found.append(obs)
        return {"probe": obs.state["probe"]}

    def score(self, obs: Observation) -> Tensor:
        """Refuse to score, as nothing is evicted."""
        raise NotImplementedError


class PlainProbe(Probe):
    """A probe that reads no output projections, which quantised and adapted models do not show."""

    observes: ClassVar = Probe.observes - {"output_projection"}


def capture(model: Any, ids: Tensor, projections: bool = True) -> list[Observation]:
    """Read `ids` [B, n] in one block; return the n keys, values and queries of each capped layer.

    Raises:
        UnsupportedModel: `projections` are asked for, and weights are quantised or adapted.
    """
    probe, length = (Probe if projections else PlainProbe)(), ids.shape[1]
    cache = BudgetCache(model.config, length, length, Eviction(probe), positions="true")
    BlockLoop(model, cache, graphs=False).read(ids)  # a graph would not ask the probe again
    return probe.found


def pocket_layers(texts: int, tokens: int) -> Iterator[list[Observation]]:
    """Yield pocket's layers in float32, for one filler text of `tokens` tokens after another."""
    runtime = Runtime.from_pretrained(dtype="float32", device="cpu")
    for seed in range(texts):
        sentences = filler(Random(f"captured/{seed}"))
        parts = (runtime.tokenizer(f"{s} ", add_special_tokens=False) for s in sentences)
        ids = list(islice(chain.from_iterable(part["input_ids"] for part in parts), tokens))
        yield capture(runtime.model, torch.tensor([ids]))


def until(
    whole: Observation, tokens: int, window: int | None, budget: int | None = None
) -> Observation:
    """Return the observation of a policy after the first `tokens` tokens, read in one block.

    Args:
        whole: as captured.
        tokens: of the text.
        window: how many of the last queries are seen; None: all.
        budget: slots per KV head that are to stay; all by default.
    """
    assert whole.queries is not None
    first = 0 if window is None else max(0, tokens - window)
    return replace(
        whole,
        keys=whole.keys[:, :, :tokens],
        values=whole.values[:, :, :tokens],
        positions=whole.positions[:, :, :tokens],
        queries=whole.queries[:, :, first:tokens],
        num_tokens=tokens,
        new=tokens,
        budget=tokens if budget is None else budget,
        state={},
    )


def on_cpu(obs: Observation) -> Observation:
    """Copy an observation to the CPU, without what a policy keeps."""
    names = ("keys", "values", "positions", "queries", "sinks", "output_projection")
    moved = {name: x.cpu() for name in names if (x := getattr(obs, name)) is not None}
    return replace(obs, **moved, state={})


def windows(
    whole: Observation, tokens: int, window: int | None, chunk: int = 128
) -> Iterator[Observation]:
    """Yield observations of the last `window` queries of `tokens` tokens, `chunk` at a time.

    So that no attention matrix is larger than `[B, H, chunk, tokens]`. Each piece has the slots
    that its queries may see, and no more.
    """
    first = 0 if window is None else max(0, tokens - window)
    for start in range(first, tokens, chunk):
        stop = min(start + chunk, tokens)
        yield until(whole, stop, stop - start)


def removal_error(obs: Observation) -> Tensor:
    """Return `(A_tj / (1 - A_tj))² · ‖a_t - v_j‖²`: how far `a_t` moves when token j alone goes.

    Squared; DropKV's Lemma 1. Shape [B, K, G, w, n].
    """
    a, v = obs.output, obs.values.float()[:, :, None]  # [B, K, G, w, D], [B, K, 1, n, D]
    squares = a.square().sum(-1, keepdim=True) + v.square().sum(-1)[..., None, :]
    distance = (squares - 2 * torch.matmul(a, v.mT)).clamp(min=0)
    odds = obs.attention / (1 - obs.attention).clamp(min=1e-7)
    error: Tensor = odds.square() * distance
    return error

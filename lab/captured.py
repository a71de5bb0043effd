"""Captures queries, keys and values of every layer on a text, with nothing evicted.

Benchmarks and analyses (`bench/`, `analyze/`) check the papers' claims on these observations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvcap.pocket.prose import filler
from kvcap.policies import Eviction, Observation, Policy
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.cache.cache import BudgetCache


@dataclass(frozen=True)
class Probe(Policy):
    """A policy that records what every layer observes, and never evicts."""

    observed: list[Observation] = field(default_factory=list)  # observations in the order of layers

    observes: ClassVar = frozenset({"keys", "values", "positions", "queries", "output_projection"})
    evicts: ClassVar = False
    state: ClassVar = {"probe": torch.float32}  # a policy without state has nothing to update

    @property
    def queries_observed(self) -> None:
        """Return None, which asks for every query of the block."""
        return

    def update(self, obs: Observation) -> dict[str, Tensor]:
        """Record the observation, and change no state."""
        projection = obs.output_projection
        if projection is not None:
            obs = replace(obs, output_projection=projection.detach())
        self.observed.append(obs)
        return {"probe": obs.state["probe"]}

    def score(self, obs: Observation) -> Tensor:
        """Refuse to score, as nothing is evicted."""
        raise NotImplementedError


class PlainProbe(Probe):
    """A probe without output projections, which quantised and adapted models do not have."""

    observes: ClassVar = Probe.observes - {"output_projection"}


def capture(model: Any, ids: Tensor, projections: bool = True) -> list[Observation]:
    """Read `ids` [B, n] in one block; return the n keys, values and queries of each capped layer.

    Raises:
        UnsupportedModel: `projections` are wanted, and weights are quantised or adapted.
    """
    probe, length = (Probe if projections else PlainProbe)(), ids.shape[1]
    cache = BudgetCache(model.config, length, length, Eviction(probe), positions="true")
    BlockLoop(model, cache, graphs=False).read(ids)  # a replayed graph would not call the probe
    return probe.observed


def pocket_layers(texts: int, tokens: int) -> Iterator[list[Observation]]:
    """Yield the observations of pocket's layers in float32, for each of `texts` filler texts."""
    runtime = Runtime.from_pretrained(dtype="float32", device="cpu")
    for seed in range(texts):
        sentences = filler(Random(f"captured/{seed}"))
        parts = (runtime.tokenizer(f"{s} ", add_special_tokens=False) for s in sentences)
        ids = list(islice(chain.from_iterable(part["input_ids"] for part in parts), tokens))
        yield capture(runtime.model, torch.tensor([ids]))


def until(
    whole: Observation, tokens: int, window: int | None, budget: int | None = None
) -> Observation:
    """Return what a policy observes after the first `tokens` tokens, read in one block.

    Args:
        whole: the captured observation.
        tokens: number of tokens.
        window: how many of the last queries are observed; None: all.
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
    """Copy an observation to the CPU, without the policy's state."""
    names = ("keys", "values", "positions", "queries", "output_projection")
    moved = {name: x.cpu() for name in names if (x := getattr(obs, name)) is not None}
    sinks = obs.rule.sinks
    rule = obs.rule if sinks is None else obs.rule._replace(sinks=sinks.cpu())
    return replace(obs, **moved, rule=rule, state={})


def windows(
    whole: Observation, tokens: int, window: int | None, chunk: int = 128
) -> Iterator[Observation]:
    """Yield observations of the last `window` queries of `tokens` tokens, `chunk` at a time.

    No attention matrix is larger than `[B, H, chunk, tokens]` then. Each observation has only the
    slots that its queries may see.
    """
    first = 0 if window is None else max(0, tokens - window)
    for start in range(first, tokens, chunk):
        stop = min(start + chunk, tokens)
        yield until(whole, stop, stop - start)


def removal_error(obs: Observation) -> Tensor:
    """Return `(A_tj / (1 - A_tj))² · ‖a_t - v_j‖²`, [B, K, G, w, n].

    It is the squared change of the output `a_t` if token j alone is evicted (DropKV's Lemma 1).
    """
    a, v = obs.output, obs.values.float()[:, :, None]  # [B, K, G, w, D], [B, K, 1, n, D]
    squares = a.square().sum(-1, keepdim=True) + v.square().sum(-1)[..., None, :]
    distance = (squares - 2 * torch.matmul(a, v.mT)).clamp(min=0)
    odds = obs.attention / (1 - obs.attention).clamp(min=1e-7)
    error: Tensor = odds.square() * distance
    return error

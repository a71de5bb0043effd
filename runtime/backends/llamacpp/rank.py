"""Ranks a conversation's tokens by a policy, since llama.cpp's cells hold a token in all layers.

A policy scores each layer and KV head as elsewhere; a token's rank is the mean of its scores.
PyTorch is imported only for policies that compute with keys or values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.backends.arrays import in_spans
from kvcap.runtime.backends.llamacpp.context import LayerCells
from kvcap.runtime.cache.regions import Region, tiers_of
from kvcap.runtime.errors import PlanInfeasible, UnsupportedModel
from kvcap.runtime.types import FULL, PINS, Span
from kvcap.sinks import sinks_beside

DEFAULT = "streaming_llm"
"""Names the policy used where nobody names one; docs/llamacpp.md has the measurements."""
NEWEST = "streaming_llm"
NEWEST_SINKS = 4  # StreamingLLM's own
MOST = 1 << 30  # slots
CELLS = frozenset({"keys", "values"})
READS = CELLS | {"positions"}
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Ranking:
    """A ranking that says which tokens stay: the newest, or all of them. It needs no PyTorch."""

    name: str = NEWEST
    options: Mapping[str, Any] = field(default_factory=dict)
    """Holds the options it was made with, pins among them."""

    @property
    def evicts(self) -> bool:
        """Return whether any token ever leaves."""
        return self.name != FULL

    @property
    def reads(self) -> Set[str]:
        """Return which of keys and values the ranking reads, of which copies are made."""
        return frozenset()

    def pins(self, budget: int, spans: Sequence[Span] = ()) -> tuple[int, int]:
        """Return how many first and how many newest tokens are never evicted."""
        if not self.evicts:
            return 0, 0
        sinks, recents = (self.options.get(name) or 0 for name in PINS)
        return max(NEWEST_SINKS, sinks), max(1, recents)

    def kept(
        self,
        tokens: Indices,
        seen: int,
        budget: int,
        spans: Sequence[Span],
        layers: Callable[[], Sequence[LayerCells]],
        regions: Sequence[Region] = (),
    ) -> Mask:
        """Return which of the held tokens stay, `budget` of them. Bool [n].

        Args:
            tokens: their places in the conversation [n], ascending.
            seen: tokens read so far.
            budget: how many stay.
            spans: pinned tokens.
            layers: returns keys and values of the capped layers.
            regions: parts of the conversation that leave before or after others.
        """
        stays = pinned(tokens, seen, self.pins(budget, spans), spans)
        tiers = np.array(tiers_of(tokens.tolist(), regions))
        scores = self.scores(tokens, seen, budget, spans, layers)
        scores = np.where(tiers == 0, scores, tokens)  # within a region the newer stay
        # A stable sort: of equal scores the newer stay, as everywhere.
        order = np.lexsort((scores, tiers, stays))
        stays[order[len(tokens) - budget :]] = True
        return stays

    def scores(
        self,
        tokens: Indices,
        seen: int,
        budget: int,
        spans: Sequence[Span],
        layers: Callable[[], Sequence[LayerCells]],
    ) -> NDArray[Any]:
        """Return a number [n] for each token; those of the highest stay. See `kept`."""
        return tokens


@dataclass(frozen=True)
class PolicyRanking(Ranking):
    """A ranking by the mean of a policy's scores over all layers and KV heads.

    Args:
        eviction: the policy, as `kvcap.policies.load_policy` returns it.

    Raises:
        UnsupportedModel: it looks at what the library does not show, or keeps unequal heads.
    """

    eviction: Any = None

    def __post_init__(self) -> None:
        if not runs(self.eviction):
            others = sorted(self.eviction.observes - READS)
            why = (
                f"looks at {', '.join(others)}" if others else "gives heads or layers other shares"
            )
            raise UnsupportedModel(
                f"policy {self.name!r} {why}, and llama.cpp shows keys and values, and holds a "
                "token in all layers or none; use streaming_llm, keydiff-window or lagkv, or "
                "--backend torch"
            )

    @property
    def reads(self) -> Set[str]:
        """Return which of keys and values scores are computed from."""
        observed: Set[str] = self.eviction.observes & CELLS
        return observed

    def pins(self, budget: int, spans: Sequence[Span] = ()) -> tuple[int, int]:
        """Return how many first and how many newest tokens are never evicted."""
        eviction = self.eviction.with_sinks(budget)
        sinks, recents = eviction.sinks(), max(1, eviction.recents(budget))
        if eviction.sinks_yield:
            own = eviction.policy.sinks_pinned()
            sinks = max(own, sinks_beside(spans, sinks, budget - recents))
        return sinks, recents

    def scores(
        self,
        tokens: Indices,
        seen: int,
        budget: int,
        spans: Sequence[Span],
        layers: Callable[[], Sequence[LayerCells]],
    ) -> NDArray[Any]:
        """Return the mean of each token's scores in all layers and KV heads."""
        import torch

        from kvcap.policies import Observation

        total, positions = torch.zeros(len(tokens)), torch.tensor(tokens)
        none = torch.empty(1, 1, len(tokens), 0)
        cells = layers() if self.reads else [None]
        for layer, own in enumerate(cells):
            keys = values = none
            if own is not None:
                keys = torch.from_numpy(own.keys())[None]
            if own is not None and "values" in self.reads:
                values = torch.from_numpy(own.values())[None]
            seen_by_policy = Observation(
                keys=keys,
                values=values,
                positions=positions.expand(1, keys.shape[1], -1),
                num_tokens=seen,
                budget=budget,
                layer=layer,
                pinned_spans=tuple(spans),
            )
            total += self.eviction.score(seen_by_policy)[0].mean(0)
        return (total / len(cells)).numpy()


def runs(eviction: Any) -> bool:
    """Return whether llama.cpp can run a policy: it shows all that is observed, of whole tokens."""
    return not eviction.observes - READS and len(eviction.components) == 1


def pinned(tokens: Indices, seen: int, pins: tuple[int, int], spans: Sequence[Span]) -> Mask:
    """Return which of the held tokens are never evicted. Bool [n]."""
    sinks, recents = pins
    return (tokens < sinks) | (tokens >= seen - recents) | in_spans(tokens, spans)


def ranking_of(name: str | None, options: Mapping[str, Any]) -> Ranking:
    """Return the ranking of a policy with its options, and how many tokens are pinned.

    Raises:
        PolicyError, UnsupportedModel: there is no such policy, or llama.cpp cannot run it.
        PlanInfeasible: pins below 0.
    """
    name = name or DEFAULT
    pins = {key: options[key] for key in PINS if options.get(key) is not None}
    if any(value < 0 for value in pins.values()):
        raise PlanInfeasible(f"{pins}: pins are counted in tokens, 0 or more")
    if name in (NEWEST, FULL) and not options.keys() - set(PINS):
        return Ranking(name, options)
    from kvcap.policies import load_policy

    eviction = load_policy(name, **options)
    return PolicyRanking(str(eviction.name), options, eviction)


def least_budget(ranking: Ranking) -> int:
    """Return the fewest slots under which a ranking's pins leave one that can be evicted."""
    return bisect_left(range(1, MOST), True, key=lambda n: sum(ranking.pins(n)) <= n) + 1


def usable_policies() -> dict[str, list[str]]:
    """Return the policies that llama.cpp can run, each with the names of its options."""
    from dataclasses import fields

    from kvcap.policies import load_policy, policies

    usable = {}
    for name in policies():
        eviction = load_policy(name)
        if runs(eviction):
            usable[name] = [*(option.name for option in fields(eviction.policy)), *PINS]
    return usable

"""Ranks a conversation's tokens by a policy, since llama.cpp's cells hold a token in all layers.

A policy scores each layer and KV head as elsewhere; a token's rank is the mean of its scores.
PyTorch is imported only for policies that compute with keys or values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.backends.llamacpp.context import LayerCells
from kvcap.runtime.cache.regions import Region, tiers_of
from kvcap.runtime.errors import PlanInfeasible, UnsupportedModel
from kvcap.runtime.types import FULL, PINS, SINKS, Span
from kvcap.sinks import sinks_beside

DEFAULT = "streaming_llm"
"""Names the policy used where nobody names one; docs/llamacpp.md has the measurements."""
NEWEST = "streaming_llm"
NEWEST_SINKS = 4  # StreamingLLM's own
READS = frozenset({"keys", "values", "positions"})
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Ranking(Protocol):
    """A protocol of objects that say which tokens stay."""

    @property
    def name(self) -> str:
        """Return the policy's name."""

    @property
    def evicts(self) -> bool:
        """Return whether any token ever leaves."""

    @property
    def reads_cells(self) -> bool:
        """Return whether `kept` looks at keys or values, which are then copied for it."""

    @property
    def reads_values(self) -> bool:
        """Return whether `kept` looks at values, channel by channel."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Return the options it was made with."""

    def pins(self, budget: int, spans: Sequence[Span] = ()) -> tuple[int, int]:
        """Return how many first and how many newest tokens are never evicted."""

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


@dataclass(frozen=True)
class NewestRanking:
    """A ranking that keeps the newest tokens, or all of them. It needs no PyTorch."""

    name: str = NEWEST
    sinks: int | None = None  # None: StreamingLLM's own
    recents: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    reads_cells = reads_values = False

    @property
    def evicts(self) -> bool:
        """Return whether any token ever leaves."""
        return self.name != FULL

    def pins(self, budget: int, spans: Sequence[Span] = ()) -> tuple[int, int]:
        """Return how many first and how many newest tokens are never evicted."""
        if not self.evicts:
            return 0, 0
        return max(NEWEST_SINKS, self.sinks or 0), max(1, self.recents)

    def kept(
        self,
        tokens: Indices,
        seen: int,
        budget: int,
        spans: Sequence[Span],
        layers: Callable[[], Sequence[LayerCells]],
        regions: Sequence[Region] = (),
    ) -> Mask:
        """Return which of the held tokens stay: pinned ones, and the newest of the others."""
        found = pinned(tokens, seen, self.pins(budget, spans), spans)
        others = np.flatnonzero(~found)
        if regions:
            tiers = tiers_of(tokens[others].tolist(), regions)
            others = others[np.argsort(tiers, kind="stable")]
        found[others[max(0, len(others) - (budget - int(found.sum()))) :]] = True
        return found


@dataclass(frozen=True)
class PolicyRanking:
    """A ranking by the mean of a policy's scores over all layers and KV heads.

    Args:
        eviction: the policy, as `kvcap.policies.load_policy` returns it.

    Raises:
        UnsupportedModel: it looks at what the library does not show, or keeps unequal heads.
    """

    eviction: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    evicts = True

    def __post_init__(self) -> None:
        others = sorted(self.eviction.observes - READS)
        if others or len(self.eviction.components) > 1:
            why = (
                f"looks at {', '.join(others)}" if others else "gives heads or layers other shares"
            )
            raise UnsupportedModel(
                f"policy {self.name!r} {why}, and llama.cpp shows keys and values, and holds a "
                "token in all layers or none; use streaming_llm, keydiff-window or lagkv, or "
                "--backend torch"
            )

    @property
    def name(self) -> str:
        """Return the policy's name."""
        return str(self.eviction.name)

    @property
    def reads_cells(self) -> bool:
        """Return whether scores are computed from keys or values."""
        return bool(self.eviction.observes & {"keys", "values"})

    @property
    def reads_values(self) -> bool:
        """Return whether scores are computed from values."""
        return "values" in self.eviction.observes

    def pins(self, budget: int, spans: Sequence[Span] = ()) -> tuple[int, int]:
        """Return how many first and how many newest tokens are never evicted."""
        eviction = self.eviction.with_sinks(budget)
        sinks, recents = eviction.sinks(), max(1, eviction.recents(budget))
        if eviction.sinks_yield:
            own = eviction.policy.sinks_pinned()
            sinks = max(own, sinks_beside(spans, sinks, budget - recents))
        return sinks, recents

    def kept(
        self,
        tokens: Indices,
        seen: int,
        budget: int,
        spans: Sequence[Span],
        layers: Callable[[], Sequence[LayerCells]],
        regions: Sequence[Region] = (),
    ) -> Mask:
        """Return which of the held tokens stay: pinned ones, and those of the highest score."""
        import torch

        from kvcap.policies import Observation
        from kvcap.policies.base.eviction import by_tier

        found = pinned(tokens, seen, self.pins(budget, spans), spans)
        total, count = torch.zeros(len(tokens)), 0
        empty = torch.empty(1, 1, len(tokens), 0)
        for layer, cells in enumerate(layers() if self.reads_cells else (None,)):
            heads = 1 if cells is None else cells.heads
            places = torch.from_numpy(tokens).expand(1, heads, -1)
            seen_by_policy = Observation(
                keys=empty if cells is None else torch.from_numpy(cells.keys())[None],
                values=torch.from_numpy(cells.values())[None]
                if cells is not None and self.reads_values
                else empty,
                positions=places,
                num_tokens=seen,
                budget=budget,
                layer=layer,
                pinned_spans=tuple(spans),
            )
            total += self.eviction.score(seen_by_policy)[0].mean(0)
            count += 1
        scores = by_tier(total / count, torch.from_numpy(tokens), regions)
        scores = scores.masked_fill(torch.from_numpy(found), float("inf"))
        # A stable sort: of equal scores the newer stay, as everywhere.
        order = scores.argsort(stable=True).numpy()
        found[order[len(tokens) - budget :]] = True
        return found


def pinned(tokens: Indices, seen: int, pins: tuple[int, int], spans: Sequence[Span]) -> Mask:
    """Return which of the held tokens are never evicted. Bool [n]."""
    sinks, recents = pins
    found: Mask = (tokens < sinks) | (tokens >= seen - recents)
    for start, stop in spans:
        found |= (tokens >= start) & (tokens < stop)
    return found


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
        return NewestRanking(name, pins.get(SINKS), pins.get(PINS[1], 0), dict(options))
    from kvcap.policies import load_policy

    return PolicyRanking(load_policy(name, **options), dict(options))


def least_budget(ranking: Ranking) -> int:
    """Return the fewest slots under which a ranking's pins leave one that can be evicted."""
    return next(n for n in range(1, 1 << 30) if sum(ranking.pins(n)) <= n)


def usable_policies() -> dict[str, list[str]]:
    """Return the policies that llama.cpp can run, each with the names of its options."""
    from dataclasses import fields

    from kvcap.policies import load_policy, policies

    found = {}
    for name in policies():
        eviction = load_policy(name)
        if not eviction.observes - READS and len(eviction.components) == 1:
            found[name] = [*(option.name for option in fields(eviction.policy)), *PINS]
    return found

"""Puts a policy and its companions together: scores, how the budget is spread, which slots go.

Order: score -> budget -> rescore -> select; the cache then evicts. Pins are a mask applied in
selection, never arithmetic on scores. Knows no cache and no model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from kvcap.policies.base.companions import Corrector, HeadBudget, LayerBudget, Rescorer, Saliency
from kvcap.policies.base.component import Component, PolicyError
from kvcap.policies.base.observation import Observation
from kvcap.policies.base.order import lowest
from kvcap.policies.base.policy import Policy
from kvcap.sinks import sinks_beside, usual_sinks

LOWEST = torch.finfo(torch.float32).min
TIERS = {-2: LOWEST, -1: LOWEST / 2, 1: -LOWEST / 4, 2: -LOWEST / 2, 3: float("inf")}
"""Holds the scores of a region's slots, by its tier; others are between them. 3 is pinned."""
MOST = 1 << 30  # slots of a head; above any budget
Score = Callable[[Policy, Observation], Tensor]
Update = Callable[[Component, Observation], Mapping[str, Tensor]]


def by_tier(scores: Tensor, positions: Tensor, regions: Iterable[tuple[int, int, int]]) -> Tensor:
    """Return scores [..., n] in which regions rank below or above all other slots, by their tier.

    Within a tier the newer slots stay.
    """
    for start, stop, tier in regions:
        inside = positions < stop
        if start:
            inside = inside & (positions >= start)
        scores = scores.masked_fill(inside, TIERS[tier])
    return scores


def eager_update(component: Component, obs: Observation) -> Mapping[str, Tensor]:
    """Return new state computed by the component's own PyTorch code."""
    return component.update(obs)


@dataclass(frozen=True)
class Eviction:
    """A policy with the companions that it is combined with, at most one of each kind.

    Raises:
        PolicyError: for a combination that cannot be run.
    """

    policy: Policy
    saliency: Saliency | None = None
    layer_budget: LayerBudget | None = None
    head_budget: HeadBudget | None = None
    rescorer: Rescorer | None = None
    corrector: Corrector | None = None
    name: str = ""
    sink_tokens: int | None = None  # pinned besides what the policy pins; None: see `with_sinks`
    recent_tokens: int = 0
    sinks_yield: bool = False  # `sink_tokens` are the usual ones, which give way to a user's pins

    def __post_init__(self) -> None:
        if (self.sink_tokens or 0) < 0 or self.recent_tokens < 0:
            raise PolicyError(
                f"sink_tokens={self.sink_tokens}, recent_tokens={self.recent_tokens}: "
                "pins are counted in tokens, 0 or more"
            )
        if not self.policy.evicts and len(self.components) > 1:
            raise PolicyError(f"{self.name or 'full'} never evicts, so it cannot be combined")
        if self.saliency is not None and "attention" not in self.policy.observes:
            raise PolicyError(
                f"{self.name or 'the policy'} does not score by attention, so a saliency has "
                "nothing to replace; use it with h2o, tova or snapkv"
            )
        if self.head_budget is not None and not self.policy.scores_heads_alone:
            raise PolicyError(
                f"{self.name or 'the policy'} scores the heads of a layer together, which cannot "
                "hold unequally many tokens then; use across=group"
            )
        if self.layers_move:
            if self.head_budget is not None:
                raise PolicyError(
                    "a layer budget that moves cannot be combined with a head budget; use "
                    "pyramidkv, whose layers are fixed"
                )
            if not self.policy.queries_observed:
                raise PolicyError(
                    "a layer budget that moves looks at a window of queries; use it with a "
                    "policy that has one, such as snapkv"
                )

    @cached_property
    def components(self) -> list[Component]:
        """Return the policy and its companions, in the order of the fields."""
        parts = (
            self.policy,
            self.saliency,
            self.layer_budget,
            self.head_budget,
            self.rescorer,
            self.corrector,
        )
        return [part for part in parts if part is not None]

    @cached_property
    def observes(self) -> frozenset[str]:
        """Return the names of everything that the components read."""
        return frozenset[str]().union(*(c.observes for c in self.components))

    @cached_property
    def state(self) -> Mapping[str, torch.dtype]:
        """Return the per-slot memory of all components."""
        return {name: dtype for c in self.components for name, dtype in c.state.items()}

    @cached_property
    def heads_move(self) -> bool:
        """Return whether slots move between the heads of a layer."""
        return self.head_budget is not None and self.head_budget.moves

    @cached_property
    def layers_move(self) -> bool:
        """Return whether slots move between layers."""
        return self.layer_budget is not None and self.layer_budget.moves

    def sinks(self) -> int:
        """Return how many first tokens of the conversation are never evicted."""
        return max(self.policy.sinks_pinned(), self.sink_tokens or 0)

    def with_sinks(self, budget: int, layers: int = 1, kv_heads: int = 1) -> Eviction:
        """Return the eviction as models are run by it: with `sink_tokens`, where None were given.

        Most models attend to their first tokens whatever is asked, and answer badly without them
        (StreamingLLM's attention sink). `kvcap.sinks` says how many are pinned at which budget:
        fewer than usual, or none, where a head would not hold them beside its other pins. They
        yield to what a user pins, too.
        """
        if self.sink_tokens is not None or not self.policy.evicts:
            return self.plain()
        for count in range(usual_sinks(budget - self.recents(budget)), 0, -1):
            eviction = replace(self, sink_tokens=count, sinks_yield=True)
            if eviction.holds(budget, layers, kv_heads):
                return eviction
        return self.plain()

    def plain(self) -> Eviction:
        """Return the eviction as its paper has it: `with_sinks` adds none."""
        return self if self.sink_tokens is not None else replace(self, sink_tokens=0)

    def recents(self, budget: int) -> int:
        """Return how many of the newest tokens are never evicted."""
        return max(self.policy.recents_pinned(budget), self.recent_tokens)

    def pins(self, budget: int) -> int:
        """Return how many slots of a head pinned tokens take."""
        return self.sinks() + self.recents(budget)

    def split(self, budget: int, layers: int) -> list[int]:
        """Return the slots per KV head for each layer, summing to `layers · budget`."""
        if self.layer_budget is None:
            return [budget] * layers
        split = self.layer_budget.split(budget, layers, self.pins(budget))
        assert sum(split) == budget * layers, "a layer budget must spread exactly what it was given"
        return split

    def allot(self, budget: int, layers: int, kv_heads: int) -> list[list[int]]:
        """Return every KV head's slots in every layer, [L][K], summing to `layers · K · budget`."""
        split = self.split(budget, layers)
        if self.head_budget is None:
            return [[slots] * kv_heads for slots in split]
        heads = self.head_budget.allot(split, kv_heads, self.pins(budget))
        assert sum(map(sum, heads)) == budget * layers * kv_heads, "heads must share what there is"
        return heads

    def check(self, budget: int, layers: int = 1, kv_heads: int = 1) -> None:
        """Refuse a budget (slots per KV head) under which a head holds no token or not its pins.

        Raises:
            PolicyError: naming the smallest budget that would work.
        """
        for slots in self._kept(budget, layers, kv_heads):
            if slots < 1:
                raise PolicyError(
                    f"a budget of {budget} slots cannot hold a token; use "
                    f"{self.least(layers, kv_heads)} or more"
                )
            if self.pins(slots) > slots:
                raise PolicyError(
                    f"{self.name or 'the policy'} pins {self.sinks()} sinks and "
                    f"{self.recents(slots)} recent tokens, more than the budget of {budget} slots; "
                    f"use a budget of at least {self.least(layers, kv_heads)} or pin fewer"
                )

    def least(self, layers: int = 1, kv_heads: int = 1) -> int:
        """Return the smallest budget (slots per KV head) that `check` accepts.

        Raises:
            PolicyError: none does, however large.
        """
        holds = partial(self.holds, layers=layers, kv_heads=kv_heads)
        smallest = bisect_left(range(1, MOST), True, key=holds) + 1  # larger budgets hold it too
        if smallest == MOST:
            raise PolicyError(
                f"{self.name or 'the policy'} pins {self.sinks()} sinks and all newest tokens, "
                "which no budget holds; pin fewer"
            )
        return smallest

    def holds(self, budget: int, layers: int, kv_heads: int) -> bool:
        """Return whether every head holds a token, and its pins."""
        kept = self._kept(budget, layers, kv_heads)
        return all(slots >= max(1, self.pins(slots)) for slots in kept)

    def _kept(self, budget: int, layers: int, kv_heads: int) -> list[int]:
        """Return the slots of every head of every layer."""
        return [slots for heads in self.allot(budget, layers, kv_heads) for slots in heads]

    def update(self, obs: Observation, by: Update = eager_update) -> dict[str, Tensor]:
        """Return new values of the state of all components, [B, K, n] each.

        `by` runs a component's own update.
        """
        values = dict(by(self._policy(obs), obs))
        for component in self.components[1:]:
            values |= by(component, obs)
        return values

    def score(self, obs: Observation, by: Score | None = None, *, finite: bool = True) -> Tensor:
        """Return the policy's scores, made finite if asked. Shape [B, K, n], float32.

        `by` runs the policy's own score; None: it is called.

        Raises:
            PolicyError: scores of another shape.
        """
        policy = self._policy(obs)
        scores = (policy.score(obs) if by is None else by(policy, obs)).float()
        if obs.positions is not None and scores.shape != obs.positions.shape:
            raise PolicyError(
                f"{self.name or type(self.policy).__name__}: score gave {list(scores.shape)}; "
                f"expected one number per slot, [B, K, n] = {list(obs.positions.shape)}"
            )
        return scores.nan_to_num(nan=LOWEST) if finite else scores

    def pinned(self, obs: Observation, pins: tuple[int, int] | None = None) -> Tensor:
        """Return which slots are never evicted. Bool [B, K, n].

        `pins` are those of `pins_of`, if they are known.
        """
        sinks, recents = pins or self.pins_of(obs)
        mask = (obs.positions < sinks) | (obs.positions >= obs.num_tokens - recents)
        for start, stop in obs.pinned_spans:
            mask = mask | ((obs.positions >= start) & (obs.positions < stop))
        return mask

    def pins_of(self, obs: Observation) -> tuple[int, int]:
        """Return how many first and how many newest tokens stay in the heads that are observed."""
        policy, spans = self._policy(obs), obs.pinned_spans
        recents = max(policy.recents_pinned(obs.budget), self.recent_tokens)
        sinks, own = self.sink_tokens or 0, policy.sinks_pinned()
        if spans and self.sinks_yield and sinks > own:
            sinks = sinks_beside(spans, sinks, obs.budget - recents)
        return max(own, sinks), recents

    def worth(self, scores: Tensor, pinned: Tensor | None, obs: Observation) -> Tensor:
        """Return the numbers to choose slots by: scores, rescored, +inf where pinned. [B, K, n].

        `obs.budget` slots of each head stay. `pinned` may be None where none are. Slots of a region
        are below or above those of all others, as its tier is.
        """
        if self.rescorer is not None:
            pins = torch.zeros_like(scores, dtype=torch.bool) if pinned is None else pinned
            scores = self.rescorer.rescore(scores, pins, obs).float().nan_to_num(nan=LOWEST)
        if obs.regions:
            scores = by_tier(scores, obs.positions, obs.regions)
        # All scores are finite, so that a pinned slot's +inf is above every one of them.
        return scores if pinned is None else scores.masked_fill(pinned, float("inf"))

    def choose(self, scores: Tensor, pinned: Tensor | None, obs: Observation, count: int) -> Tensor:
        """Return the `count` slots of each head to evict by their scores. [B, K, count], unordered.

        `obs.budget` slots of each head stay. Of slots with equal scores the older are evicted.
        """
        return lowest(self.worth(scores, pinned, obs), obs.positions, count)

    def select(self, obs: Observation, count: int) -> Tensor:
        """Score, then choose the `count` slots of each head to evict. [B, K, count], unordered."""
        return self.choose(self.score(obs), self.pinned(obs), obs, count)

    def _policy(self, obs: Observation) -> Policy:
        if self.head_budget is None:
            return self.policy
        return self.head_budget.policy_of(obs, self.policy)

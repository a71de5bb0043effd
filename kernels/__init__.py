"""Runs a policy's score by its Triton twin if there is one, else eagerly.

`score` and `update` replace a policy's own methods and return the same values. They run a twin if
one covers the policy's options and the shapes, and `choice.py` allows it. The environment variable
`KVCAP_KERNELS`, or `use`, decides that: `auto` (twins on CUDA), `eager` (never) or `triton` (on a
CPU too, by Triton's interpreter). Importing this imports no triton and initialises no device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcap.kernels import lagkv, pool, rows, window
from kvcap.kernels.arguments import Pins
from kvcap.kernels.choice import ready
from kvcap.kernels.choice import use as use
from kvcap.kernels.device import DTYPES
from kvcap.kernels.division import MOST_HEADS, Division, as_adakv, by_split
from kvcap.policies.andpro import AnDPro
from kvcap.policies.base import (
    Eviction,
    Group,
    HeadBudget,
    LayerBudget,
    Observation,
    Policy,
    Rescorer,
    over_group,
    pool_in_time,
)
from kvcap.policies.base.component import Component
from kvcap.policies.base.eviction import LOWEST
from kvcap.policies.budgets.adakv import AdaKV
from kvcap.policies.budgets.cake import CakeBudget
from kvcap.policies.cake import Cake
from kvcap.policies.dropkv import DropKV
from kvcap.policies.h2o import H2O
from kvcap.policies.keydiff import KeyDiff
from kvcap.policies.knorm import Knorm
from kvcap.policies.lagkv import LagKV
from kvcap.policies.random import Random
from kvcap.policies.rescorers.criticalkv import CriticalKV
from kvcap.policies.saliencies.obcache import OBCache
from kvcap.policies.snapkv import SnapKV
from kvcap.policies.streaming_llm import StreamingLLM
from kvcap.policies.tova import TOVA

MOST_HEAD_SIZE, MOST_GROUPS = 256, 32


class StoredKeys(NamedTuple):
    """Sums of keys from attention, and rotations of stored keys, which save KeyDiff a pass."""

    sums: Tensor | None
    """Holds sums of P parts of the keys as they were attended to, [B, K, P, D] float32."""
    rotation: tuple[Tensor, Tensor] | None
    """Holds how far the observation's keys must still be rotated back; None: not at all.

    It has shifts [B, K, n] int32, which are views of a pool if the keys are, and a table
    [span, 2, D/2] of cosines and sines.
    """


def score(policy: Policy, obs: Observation) -> Tensor:
    """Return the worth of every slot, [B, K, n] float32, as `policy.score(obs)` does."""
    return TWINS[type(policy)](policy, obs) if _by_twin(policy, obs) else policy.score(obs)


def uses_stored_keys(policy: Policy) -> bool:
    """Return whether `StoredKeys` save the policy's twin a pass over the keys."""
    return type(policy) is KeyDiff and (policy.metric, policy.anchor) == ("cosine", "mean")


def _by_twin(policy: Policy, obs: Observation) -> bool:
    return type(policy) in TWINS and ready(obs.keys) and _covers(policy, obs)


def update(component: Component, obs: Observation) -> dict[str, Tensor]:
    """Return new values of a component's state, as `component.update(obs)` does."""
    if type(component) is H2O and ready(obs.keys) and _covers(component, obs):
        return _h2o(component, obs)
    return component.update(obs)


def preference(budget: LayerBudget, obs: Observation) -> Tensor:
    """Return a layer's preference for slots, a scalar [], as `budget.preference(obs)` does."""
    queries = obs.queries
    if type(budget) is not CakeBudget or queries is None or obs.saliency is not None:
        return budget.preference(obs)
    heads = queries.shape[1] * queries.shape[0]
    covered = window.covers_cake(queries.shape[1] // obs.keys.shape[1], queries.shape[2])
    if not covered or not _by_twin(SnapKV(), obs):
        return budget.preference(obs)
    entropy = _total(obs, "entropy") / heads
    variance = _total(obs, "variance") / heads
    return budget.wanted(entropy, variance)


def _total(obs: Observation, kind: str) -> Tensor:
    """Return the sum of an epilogue over all slots, []."""
    scores = window.scores(obs, kind, "sum", epsilon=1.0)
    if obs.rows is not None:  # numbers behind a row's slots are arbitrary
        index = torch.arange(obs.rows.longest, device=scores.device)
        inside = index < obs.rows.lengths.view(*scores.shape[:2], 1)
        scores = torch.where(inside, scores, 0.0)
    return scores.sum()


def rescore(
    rescorer: Rescorer | None,
    scores: Tensor,
    pins: Pins,
    obs: Observation,
    budgets: Tensor,
    row_pins: Tensor,
) -> Tensor:
    """Return new scores of rows of unequal lengths, [B, K, n], as `rescorer.rescore` does.

    Args:
        rescorer: a `CriticalKV`, whose code runs here as it is; None leaves scores as they are.
        scores: [B, K, n], arbitrary behind a row's slots, as is the result.
        pins: pinned slots, besides those of `row_pins`.
        obs: the observation of the rows.
        budgets: slots of each row that stay, [B·K] int32.
        row_pins: how many first and newest tokens of each row stay, [B·K, 2] int32.
    """
    if rescorer is None:
        return scores
    assert obs.rows is not None
    batch, heads, slots = scores.shape
    rest = slots - obs.rows.lengths.view(batch, heads, 1)  # behind rows, pinned by their positions
    padded = replace(
        obs,
        budget=budgets.view(batch, heads, 1) + rest,  # type: ignore[arg-type]
        state={"output_norm": rows.padded(obs.state["output_norm"], obs.rows, batch)},
    )
    pinned = pins.of_rows(obs.positions, row_pins)
    return rescorer.rescore(scores.nan_to_num(nan=LOWEST), pinned, padded)


def divide(budget: HeadBudget, scores: Tensor, *arguments: Any) -> Division:
    """Share a layer's slots out among its heads, as `budget.split` does.

    `division.as_adakv` explains the other arguments.
    """
    if type(budget) is AdaKV and scores.shape[1] <= MOST_HEADS and ready(scores):
        return as_adakv(budget.fraction, scores, *arguments)
    return by_split(budget, scores, *arguments)


def covers_rows(eviction: Eviction) -> bool:
    """Return whether kernels compute all that an eviction needs of rows of unequal lengths."""
    policy, saliency, rescorer = eviction.policy, eviction.saliency, eviction.rescorer
    alone = H2O, Knorm, LagKV, Random, StreamingLLM
    if type(policy) not in (*TWINS, *alone) or type(policy) is Cake:
        return False
    if isinstance(policy, LagKV) and not lagkv.covers(policy):
        return False
    if isinstance(policy, KeyDiff) and not _covers_options(policy):
        return False
    if not policy.scores_heads_alone:
        return False
    if saliency is not None and type(saliency) is not OBCache:
        return False
    return rescorer is None or type(rescorer) is CriticalKV


def covers_layers(eviction: Eviction, groups: int) -> bool:
    """Return whether kernels compute all that an eviction needs if slots move between layers.

    Args:
        eviction: the eviction, with its layer budget.
        groups: query heads that share a KV head.
    """
    policy, saliency = eviction.policy, eviction.saliency
    if type(policy) not in TWINS or type(eviction.layer_budget) is not CakeBudget:
        return False
    if eviction.rescorer is not None or eviction.corrector is not None or eviction.state:
        return False
    if not policy.scores_heads_alone or saliency is not None:
        return False
    queries = policy.queries_observed
    return queries is not None and window.covers_cake(groups, queries)


def score_rows(policy: Policy, obs: Observation, stored: StoredKeys | None = None) -> Tensor:
    """Return `score` of rows of unequal lengths, [B, K, longest], arbitrary behind each row."""
    assert obs.rows is not None
    if isinstance(policy, KeyDiff):
        return _keydiff(policy, obs, stored)
    if type(policy) in TWINS:
        return TWINS[type(policy)](policy, obs)
    batch = len(obs.positions)
    if type(policy) is H2O:
        return rows.padded(obs.state["accumulated"], obs.rows, batch)
    if isinstance(policy, LagKV):
        layer = obs.keys[0, 0], obs.values[0, 0], obs.positions, obs.rows
        return lagkv.scores(*layer, policy.lag)
    if type(policy) is Knorm:
        each = replace(obs, keys=obs.keys[:1, :1])  # every row's view is of the whole pool
        return rows.padded(policy.score(each).flatten(), obs.rows, batch)
    return policy.score(obs)  # of a policy that reads positions alone


def update_rows(
    component: Component, obs: Observation, values: Tensor | None, before: Tensor
) -> None:
    """Update the state of heads of unequal lengths, in place.

    Args:
        component: the part of the eviction that keeps state.
        obs: the observation of the rows.
        values: values of the new tokens [B, K, T, D], if the component reads them.
        before: slots of each row before the new tokens, [B·K] int32.
    """
    assert obs.rows is not None
    if type(component) is H2O:
        state, kind = obs.state["accumulated"], _kind(obs)
        assert kind is not None
        drawn = window.scores(obs, kind, component.group)
        rows.put(rows.padded(state, obs.rows, len(drawn)) + drawn, state, obs.rows)
    elif type(component) is CriticalKV:
        assert values is not None
        none = {"output_norm": values.new_empty(*values.shape[:2], 0, dtype=torch.float32)}
        block = replace(obs, keys=values, values=values, new=values.shape[2], state=none)
        norms = component.update(block)["output_norm"]
        rows.put(norms.contiguous(), obs.state["output_norm"], obs.rows, before)


def _covers(policy: Policy, obs: Observation) -> bool:
    """Return whether this policy's twin computes its options, the saliency and the shapes."""
    keys, queries = obs.keys, obs.queries
    if keys.dtype not in DTYPES or keys.shape[-1] > MOST_HEAD_SIZE or keys.stride(-1) != 1:
        return False
    if obs.rule.further:
        return False
    if isinstance(policy, KeyDiff):
        expands = policy.expand and obs.expansion is not None
        return _covers_options(policy) and not expands
    if isinstance(policy, TOVA) and policy.across != "group":
        return False
    if isinstance(policy, Cake) and queries is not None:
        groups = queries.shape[1] // keys.shape[1]
        if obs.saliency is not None or not window.covers_cake(groups, queries.shape[2]):
            return False
    return (
        queries is not None
        and _kind(obs) is not None
        and queries.shape[1] // keys.shape[1] <= MOST_GROUPS
        and obs.values.shape == keys.shape  # they differ if slots hold latents
        and all(x.dtype == keys.dtype and x.stride(-1) == 1 for x in (queries, obs.values))
        and obs.positions.stride(-1) == 1
    )


def _covers_options(policy: KeyDiff) -> bool:
    return policy.metric == "cosine" and policy.anchor in ("mean", "unit_mean")


def _kind(obs: Observation) -> str | None:
    """Return the epilogue that computes `obs.weight`, None if there is none."""
    if obs.saliency is None:
        return "attention"
    return obs.saliency.mode if type(obs.saliency) is OBCache else None


def _dropkv(policy: Policy, obs: Observation) -> Tensor:
    assert isinstance(policy, DropKV)
    cost = window.scores(
        obs, "dropkv", policy.group, epsilon=policy.epsilon, rounded=policy.bf16_ratio
    )
    return _pooled(cost, obs, policy, policy.pool)


def _andpro(policy: Policy, obs: Observation) -> Tensor:
    assert isinstance(policy, AnDPro)
    return window.scores(obs, "andpro", policy.group)


def _snapkv(policy: Policy, obs: Observation) -> Tensor:
    assert isinstance(policy, SnapKV)
    kind = _kind(obs)
    assert kind is not None
    if policy.kernel == 1 or (policy.pool == "avg" and policy.group != "max"):
        # The mean over heads and pooling commute; the mean comes first, so that less is pooled.
        return _pooled(window.scores(obs, kind, policy.group), obs, policy, policy.pool)
    scores = _pooled(window.scores(obs, kind, None), obs, policy, policy.pool)
    return over_group(scores, policy.group)


def _pooled(scores: Tensor, obs: Observation, policy: Cake | DropKV | SnapKV, by: str) -> Tensor:
    """Return `pool_in_time` of scores, by its kernels if they cover the shapes."""
    covered = pool.covers(scores, obs.positions, policy.kernel)
    pooling = pool.pool_in_time if covered else pool_in_time
    return pooling(scores, obs.positions, policy.kernel, by, obs.num_tokens, policy.window)


def _cake(policy: Policy, obs: Observation) -> Tensor:
    assert isinstance(policy, Cake)
    group: Group | None = None if policy.group == "max" else policy.group
    scores = window.scores(obs, "cake", group, epsilon=policy.gamma)
    scores = _pooled(scores, obs, policy, "avg")
    return over_group(scores, policy.group) if group is None else scores


def _tova(policy: Policy, obs: Observation) -> Tensor:
    assert isinstance(policy, TOVA)
    kind = _kind(obs)
    assert kind is not None
    assert obs.queries is not None
    attended = None if obs.attended is None else obs.attended[:, :, -1:]
    last = replace(obs, queries=obs.queries[:, :, -1:], attended=attended)
    return window.scores(last, kind, policy.group)


def _h2o(policy: Policy, obs: Observation) -> dict[str, Tensor]:
    assert isinstance(policy, H2O)
    kind = _kind(obs)
    assert kind is not None
    return {"accumulated": obs.state["accumulated"] + window.scores(obs, kind, policy.group)}


def _keydiff(policy: Policy, obs: Observation, stored: StoredKeys | None = None) -> Tensor:
    from kvcap.kernels import keydiff

    assert isinstance(policy, KeyDiff)
    unit = policy.anchor == "unit_mean"
    if stored is not None and stored.rotation is not None:
        assert stored.sums is not None
        return keydiff.scores_turned(obs.keys, *stored.rotation, stored.sums, obs.rows)
    sums = None if unit or stored is None else stored.sums
    return keydiff.scores(obs.keys, unit=unit, key_sums=sums, rows=obs.rows)


TWINS: dict[type[Policy], Callable[[Policy, Observation], Tensor]] = {
    AnDPro: _andpro,
    Cake: _cake,
    DropKV: _dropkv,
    KeyDiff: _keydiff,
    SnapKV: _snapkv,
    TOVA: _tova,
}
"""Maps policies to the twins of their scores; H2O has a twin of its state alone, see `update`."""

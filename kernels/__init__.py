"""Runs a policy's score by its Triton twin where there is one, else eagerly.

`score` and `update` take the place of a policy's own and give the same values: by a twin where one
covers the policy's options and the shapes and `choice.py` wants it, else eagerly. The environment
variable `KVCAP_KERNELS`, or `use`, overrides: `auto` (on CUDA), `eager` (never) or `triton` (on a
CPU too, by Triton's interpreter). Importing this imports no triton and initialises no device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from kvcap.kernels import pool, window
from kvcap.kernels.choice import ready
from kvcap.kernels.choice import use as use
from kvcap.kernels.device import DTYPES
from kvcap.policies.andpro import AnDPro
from kvcap.policies.base import Observation, Policy, over_group, pool_in_time
from kvcap.policies.dropkv import DropKV
from kvcap.policies.h2o import H2O
from kvcap.policies.keydiff import KeyDiff
from kvcap.policies.saliencies.obcache import OBCache
from kvcap.policies.snapkv import SnapKV
from kvcap.policies.tova import TOVA

MOST_HEAD_SIZE, MOST_GROUPS = 256, 32


class StoredKeys(NamedTuple):
    """What attention found out about keys as they are stored, which spares KeyDiff a pass."""

    sums: Tensor | None
    """[B, K, P, D] float32: sums of P parts of the keys as they were attended to."""
    rotation: tuple[Tensor, Tensor] | None
    """By which the observation's keys are yet to be rotated back: shifts [B, K, n] int32, and a
    table [span, 2, D/2] of cosines and sines. None: they are as attention saw them."""


def score(policy: Policy, seen: Observation, stored: StoredKeys | None = None) -> Tensor:
    """Worth of every slot, as `policy.score(seen)` has it. Shape [B, K, n], float32."""
    if type(policy) is KeyDiff and stored is not None and _by_twin(policy, seen):
        return _keydiff(policy, seen, stored)
    assert stored is None or stored.rotation is None, "only KeyDiff's twin rotates keys itself"
    return TWINS[type(policy)](policy, seen) if _by_twin(policy, seen) else policy.score(seen)


def uses_stored_keys(policy: Policy) -> bool:
    """Whether `StoredKeys` spare the policy's twin a pass over the keys."""
    return type(policy) is KeyDiff and (policy.metric, policy.anchor) == ("cosine", "mean")


def _by_twin(policy: Policy, seen: Observation) -> bool:
    return type(policy) in TWINS and ready(seen.keys) and _covers(policy, seen)


def update(policy: Policy, seen: Observation) -> dict[str, Tensor]:
    """New values of the policy's state, as `policy.update(seen)` has them."""
    if type(policy) is H2O and ready(seen.keys) and _covers(policy, seen):
        return _h2o(policy, seen)
    return policy.update(seen)


def _covers(policy: Policy, seen: Observation) -> bool:
    """Whether the twin of this policy knows its options, the saliency and the shapes."""
    keys, queries = seen.keys, seen.queries
    if keys.dtype not in DTYPES or keys.shape[-1] > MOST_HEAD_SIZE or keys.stride(-1) != 1:
        return False
    if isinstance(policy, KeyDiff):
        return policy.metric == "cosine" and policy.anchor in ("mean", "unit_mean")
    if isinstance(policy, TOVA) and policy.across != "group":
        return False
    return (
        queries is not None
        and _kind(seen) is not None
        and queries.shape[1] // keys.shape[1] <= MOST_GROUPS
        and all(x.dtype == keys.dtype and x.stride(-1) == 1 for x in (queries, seen.values))
        and seen.positions.stride(-1) == 1
    )


def _kind(seen: Observation) -> str | None:
    """The epilogue that makes `seen.weight`, if there is one."""
    if seen.saliency is None:
        return "attention"
    return seen.saliency.mode if type(seen.saliency) is OBCache else None


def _dropkv(policy: Policy, seen: Observation) -> Tensor:
    assert isinstance(policy, DropKV)
    cost = window.scores(
        seen, "dropkv", policy.group, epsilon=policy.epsilon, rounded=policy.bf16_ratio
    )
    return _pooled(cost, seen, policy)


def _andpro(policy: Policy, seen: Observation) -> Tensor:
    assert isinstance(policy, AnDPro)
    return window.scores(seen, "andpro", policy.group)


def _snapkv(policy: Policy, seen: Observation) -> Tensor:
    assert isinstance(policy, SnapKV)
    kind = _kind(seen)
    assert kind is not None
    if policy.kernel == 1 or (policy.pool == "avg" and policy.group != "max"):
        # Averages commute: the heads first, so that there is less to pool.
        return _pooled(window.scores(seen, kind, policy.group), seen, policy)
    return over_group(_pooled(window.scores(seen, kind, None), seen, policy), policy.group)


def _pooled(scores: Tensor, seen: Observation, policy: DropKV | SnapKV) -> Tensor:
    """`pool_in_time`, by its kernels where they cover it."""
    covered = pool.covers(scores, seen.positions, policy.kernel)
    pooling = pool.pool_in_time if covered else pool_in_time
    return pooling(scores, seen.positions, policy.kernel, policy.pool, seen.seen, policy.window)


def _tova(policy: Policy, seen: Observation) -> Tensor:
    assert isinstance(policy, TOVA)
    kind = _kind(seen)
    assert kind is not None
    assert seen.queries is not None
    last = replace(seen, queries=seen.queries[:, :, -1:])
    return window.scores(last, kind, policy.group)


def _h2o(policy: Policy, seen: Observation) -> dict[str, Tensor]:
    assert isinstance(policy, H2O)
    kind = _kind(seen)
    assert kind is not None
    return {"accumulated": seen.state["accumulated"] + window.scores(seen, kind, policy.group)}


def _keydiff(policy: Policy, seen: Observation, stored: StoredKeys | None = None) -> Tensor:
    from kvcap.kernels import keydiff

    assert isinstance(policy, KeyDiff)
    unit = policy.anchor == "unit_mean"
    if stored is not None and stored.rotation is not None:
        assert stored.sums is not None
        return keydiff.scores_turned(seen.keys, *stored.rotation, stored.sums)
    sums = None if unit or stored is None else stored.sums
    return keydiff.scores(seen.keys, unit=unit, key_sums=sums)


TWINS: dict[type[Policy], Callable[[Policy, Observation], Tensor]] = {
    AnDPro: _andpro,
    DropKV: _dropkv,
    KeyDiff: _keydiff,
    SnapKV: _snapkv,
    TOVA: _tova,
}
"""The policies whose scores have a twin; of H2O it is the state that has one, see `update`."""

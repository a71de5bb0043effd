"""KeyDiff's cosine in forms that a device computes faster than the formula read literally.

    stateless        unit keys (LpNormalization) times the unit anchor; nothing is kept
    inverse_norms    1/|k| of every slot is kept: one pass for the anchor, one for the products
    running_anchor   1/|k| of every slot and the sum of all keys are kept: one pass

All give the policy's own scores, in float32 whatever the cache's type: squares and sums of real
keys leave float16's range, and cosines of keys that share a large channel differ by less than
float16 can tell apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcap.export.forms import Named, Traced, float32
from kvcap.export.portable import unit
from kvcap.export.ports import PORTS, Port, following, kept, made
from kvcap.policies import Eviction, Observation
from kvcap.policies.keydiff import KeyDiff


def forms(eviction: Eviction) -> tuple[type[Traced], ...]:
    """The forms there are for this policy: cosine to a mean."""
    policy = eviction.policy
    fits = isinstance(policy, KeyDiff) and policy.metric == "cosine"
    if fits and policy.anchor in ("mean", "unit_mean"):  # type: ignore[attr-defined]
        return (Stateless, InverseNorms, RunningAnchor)
    return ()


class Stateless(Traced):
    """`-unit(K) · unit(mean)`: standard operations, zero-safe, no norm is ever squared out."""

    name = "stateless"

    @property
    def units(self) -> bool:
        """Whether the anchor is the mean of unit keys."""
        policy = self.eviction.policy
        assert isinstance(policy, KeyDiff)
        return policy.anchor == "unit_mean"

    def score(self, given: Named, obs: Observation) -> Tensor:
        """Worth of every slot, [B, K, n] float32."""
        keys = float32(given["keys"])
        units = unit(keys)
        mean = (units if self.units else keys).mean(-2, keepdim=True)
        return -_products(units, mean)


class InverseNorms(Stateless):
    """`-(K · unit(mean)) / |k|` with `1/|k|` kept per slot."""

    name = "inverse_norms"
    update_inputs: tuple[str, ...] = ("new_keys",)

    def inputs(self) -> list[Port]:
        """Keys and their inverse norms."""
        return [*super().inputs(), PORTS["inverse_norms"]]

    @property
    def slot_state(self) -> tuple[str, ...]:
        """The norms move with their keys."""
        return ("inverse_norms",)

    def score(self, given: Named, obs: Observation) -> Tensor:
        """Worth of every slot, [B, K, n] float32."""
        keys, inverse = float32(given["keys"]), given["inverse_norms"]
        return -_products(keys, self.anchor(keys, given)) * inverse

    def anchor(self, keys: Tensor, given: Named) -> Tensor:
        """What keys are compared with, of any length. [B, K, 1, D]."""
        if self.units:
            return torch.matmul(given["inverse_norms"][..., None, :], keys)
        return keys.mean(-2, keepdim=True)

    def cached(self, given: Named) -> dict[str, Tensor]:
        """The norms of the slots' keys."""
        return {"inverse_norms": _inverse_norms(given["keys"])}

    def update_outputs(self) -> list[Port]:
        """Norms of the arriving keys."""
        return [made("inverse_norms")]

    def update(self, given: Named) -> list[Tensor]:
        """Norms of the arriving keys, [B, K, T]."""
        return [_inverse_norms(given["new_keys"])]


class RunningAnchor(InverseNorms):
    """`-(K · unit(sum)) / |k|`, norms and sum kept; the sum follows what arrives and what goes."""

    name = "running_anchor"
    update_inputs = ("new_keys", "gone_keys", "anchor")

    def inputs(self) -> list[Port]:
        """Keys, their inverse norms and their sum."""
        return [*super().inputs(), PORTS["anchor"]]

    def anchor(self, keys: Tensor, given: Named) -> Tensor:
        """The sum that is kept. [B, K, 1, D]."""
        return given["anchor"][:, :, None]

    def kept_state(self, given: Named, keys: Tensor) -> list[tuple[Port, Tensor]]:
        """The sum of what stays, anew: it cannot drift."""
        return [(kept(PORTS["anchor"]), self._sum(keys))]

    def cached(self, given: Named) -> dict[str, Tensor]:
        """Norms and sum of the slots' keys."""
        return {**super().cached(given), "anchor": self._sum(given["keys"])}

    def update_outputs(self) -> list[Port]:
        """Norms of what arrives, and the sum after it."""
        return [*super().update_outputs(), following(PORTS["anchor"])]

    def update(self, given: Named) -> list[Tensor]:
        """Norms of the arriving keys [B, K, T] and the sum [B, K, D]."""
        change = self._sum(given["new_keys"]) - self._sum(given["gone_keys"])
        return [*super().update(given), given["anchor"] + change]

    def _sum(self, keys: Tensor) -> Tensor:
        """Of keys [B, K, n, D] or their unit vectors, [B, K, D] float32."""
        keys = float32(keys)
        return (unit(keys) if self.units else keys).sum(-2)


def _products(keys: Tensor, anchor: Tensor) -> Tensor:
    """`unit(anchor) · k` of [B, K, n, D] and [B, K, 1, D], as [B, K, n].

    In this order, since ONNX Runtime reads transposed keys along their rows, 3.5 times as fast.
    """
    return torch.matmul(unit(anchor), keys.mT).squeeze(-2)


def _inverse_norms(keys: Tensor) -> Tensor:
    """`1/|k|`, [B, K, n] float32. Clamped, as exporters drop a small `+ eps`."""
    norms: Tensor = torch.linalg.vector_norm(float32(keys), dim=-1)
    return norms.clamp_min(1e-8).reciprocal()

"""Puts a policy's score into a graph: as traced, or in a form that a device computes faster.

`form_of` is the one place where a form is chosen. A form says which inputs it takes and what they
become; select and gather are the same for all. KeyDiff's cosine has three forms beside the traced:

    stateless        unit keys (LpNormalization) times the unit anchor; nothing is kept
    inverse_norms    1/|k| of every slot is kept: one pass for the anchor, one for the products
    running_anchor   1/|k| of every slot and the sum of all keys are kept: one pass

They give the policy's own scores, in float32 whatever the cache's type: squares and sums of real
keys leave float16's range, and cosines of keys that share a large channel differ by less than
float16 can resolve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kvcap.export.graphs.formulations import TRACED
from kvcap.export.graphs.portable import unit
from kvcap.export.graphs.ports import PORTS, Port, kept_port, new_port, next_port, ports_of
from kvcap.export.graphs.shape import Shape
from kvcap.policies import Eviction, Observation
from kvcap.policies.keydiff import KeyDiff
from kvcap.runtime.errors import NotExportable

Named = Mapping[str, Tensor]


class Traced:
    """A form that is the policy's own `score`, traced; its casts to float32 are in the graph.

    Args:
        eviction: policy, saliency and rescorer; nothing else of it is in a graph.
        shape: of the layer.
    """

    name = TRACED  # one of FORMULATIONS
    update_inputs: tuple[str, ...] = ()

    def __init__(self, eviction: Eviction, shape: Shape) -> None:
        self.eviction, self.shape = eviction, shape
        self.ports = ports_of(eviction.state)
        if "output_norm" in eviction.state:
            self.update_inputs = ("new_values", "output_projection")

    def inputs(self) -> list[Port]:
        """Return the ports that scoring may take; the exporter drops those that go unused."""
        reads = self.eviction.policy.observes
        if self.eviction.saliency is not None:
            reads = reads | self.eviction.saliency.observes
        if (rescorer := self.eviction.rescorer) is not None:
            # A rescorer with state reads values only as they arrive, in the update graph.
            reads = reads | (
                rescorer.observes & {"positions"} if rescorer.state else rescorer.observes
            )
        names: list[str] = [name for name in ("keys", "values") if name in reads]
        if reads & {"positions", "queries"}:
            names += ["positions", "seen"]
        names += ["queries"] * ("queries" in reads)
        return [self.ports[name] for name in (*names, *self.eviction.state)]

    @property
    def slot_state(self) -> tuple[str, ...]:
        """Return the names of state that moves with its slots."""
        return tuple(self.eviction.state)

    def observe(self, given: Named) -> Observation:
        """Make the policy's observation, with its state updated where the graph does that."""
        shape = self.shape
        obs = Observation(
            keys=given.get("keys"),  # type: ignore[arg-type]  # not declared, so not read
            values=given.get("values"),  # type: ignore[arg-type]
            positions=given.get("positions"),  # type: ignore[arg-type]
            num_tokens=given.get("seen"),  # type: ignore[arg-type]
            budget=given.get("budget", shape.budget),  # type: ignore[arg-type]
            queries=given.get("queries"),
            scaling=shape.scale,
            softcap=shape.softcap,
            state={name: given[name] for name in self.slot_state},
            saliency=self.eviction.saliency,
        )
        obs.state = {**obs.state, **self.eviction.policy.update(obs)}
        return obs

    def score(self, given: Named, obs: Observation) -> Tensor:
        """Compute the worth of every slot, [B, K, n] float32."""
        return self.eviction.policy.score(obs)

    def next_state(self, obs: Observation) -> dict[str, tuple[Port, Tensor]]:
        """Return the state that scoring updated: {name: (port, tensor)}."""
        names = self.eviction.policy.state
        return {name: (next_port(self.ports[name]), obs.state[name]) for name in names}

    def kept_state(self, given: Named, keys: Tensor) -> list[tuple[Port, Tensor]]:
        """Return state that is not per slot, made from the kept keys [B, K, N, D]."""
        return []

    def cached(self, given: Named) -> dict[str, Tensor]:
        """Compute the state that this form keeps of slots from their keys, for tests and checks."""
        return {}

    def update_outputs(self) -> list[Port]:
        """Return the output ports of the update graph."""
        return [new_port("output_norm")] if self.update_inputs else []

    def update(self, given: Named) -> list[Tensor]:
        """Compute the state of the arriving tokens, by the component that keeps it."""
        values, rescorer = given["new_values"], self.eviction.rescorer
        assert rescorer is not None
        obs = Observation(
            keys=values,
            values=values,
            positions=values,
            num_tokens=0,
            budget=0,
            new=values.shape[2],
            state={"output_norm": values[..., 0].float()},
            output_projection=given["output_projection"],
        )
        return [rescorer.update(obs)["output_norm"]]


class Stateless(Traced):
    """A form, `-unit(K) · unit(mean)`, that is zero-safe: no norm is ever squared out."""

    name = "stateless"

    @property
    def units(self) -> bool:
        """Return whether the anchor is the mean of unit keys."""
        policy = self.eviction.policy
        assert isinstance(policy, KeyDiff)
        return policy.anchor == "unit_mean"

    def score(self, given: Named, obs: Observation) -> Tensor:
        """Compute the worth of every slot, [B, K, n] float32."""
        keys = float32(given["keys"])
        units = unit(keys)
        mean = (units if self.units else keys).mean(-2, keepdim=True)
        return -_products(units, mean)


class InverseNorms(Stateless):
    """A form, `-(K · unit(mean)) / |k|`, that keeps `1/|k|` per slot."""

    name = "inverse_norms"
    update_inputs: tuple[str, ...] = ("new_keys",)

    def inputs(self) -> list[Port]:
        """Return the ports of keys and their inverse norms."""
        return [*super().inputs(), PORTS["inverse_norms"]]

    @property
    def slot_state(self) -> tuple[str, ...]:
        """Return the name of the norms, which move with their keys."""
        return ("inverse_norms",)

    def score(self, given: Named, obs: Observation) -> Tensor:
        """Compute the worth of every slot, [B, K, n] float32."""
        keys, inverse = float32(given["keys"]), given["inverse_norms"]
        return -_products(keys, self.anchor(keys, given)) * inverse

    def anchor(self, keys: Tensor, given: Named) -> Tensor:
        """Compute what keys are compared with, of any length. [B, K, 1, D]."""
        if self.units:
            return torch.matmul(given["inverse_norms"][..., None, :], keys)
        return keys.mean(-2, keepdim=True)

    def cached(self, given: Named) -> dict[str, Tensor]:
        """Compute the norms of the slots' keys."""
        return {"inverse_norms": _inverse_norms(given["keys"])}

    def update_outputs(self) -> list[Port]:
        """Return the port of the arriving keys' norms."""
        return [new_port("inverse_norms")]

    def update(self, given: Named) -> list[Tensor]:
        """Compute the norms of the arriving keys, [B, K, T]."""
        return [_inverse_norms(given["new_keys"])]


class RunningAnchor(InverseNorms):
    """A form, `-(K · unit(sum)) / |k|`, that keeps norms and sum; the sum follows every slot."""

    name = "running_anchor"
    update_inputs = ("new_keys", "gone_keys", "anchor")

    def inputs(self) -> list[Port]:
        """Return the ports of keys, their inverse norms and their sum."""
        return [*super().inputs(), PORTS["anchor"]]

    def anchor(self, keys: Tensor, given: Named) -> Tensor:
        """Return the sum that is kept, [B, K, 1, D]."""
        return given["anchor"][:, :, None]

    def kept_state(self, given: Named, keys: Tensor) -> list[tuple[Port, Tensor]]:
        """Compute the sum of what stays anew, so that it cannot drift."""
        return [(kept_port(PORTS["anchor"]), self._sum(keys))]

    def cached(self, given: Named) -> dict[str, Tensor]:
        """Compute the norms and the sum of the slots' keys."""
        return {**super().cached(given), "anchor": self._sum(given["keys"])}

    def update_outputs(self) -> list[Port]:
        """Return the ports of the norms of what arrives, and of the sum after it."""
        return [*super().update_outputs(), next_port(PORTS["anchor"])]

    def update(self, given: Named) -> list[Tensor]:
        """Compute the norms of the arriving keys [B, K, T] and the sum [B, K, D]."""
        change = self._sum(given["new_keys"]) - self._sum(given["gone_keys"])
        return [*super().update(given), given["anchor"] + change]

    def _sum(self, keys: Tensor) -> Tensor:
        """Sum keys [B, K, n, D] or their unit vectors to [B, K, D] float32."""
        keys = float32(keys)
        return (unit(keys) if self.units else keys).sum(-2)


def _products(keys: Tensor, anchor: Tensor) -> Tensor:
    """Return `unit(anchor) · k` of [B, K, n, D] and [B, K, 1, D], as [B, K, n].

    In this order, since ONNX Runtime reads transposed keys along their rows, 3.5 times as fast.
    """
    return torch.matmul(unit(anchor), keys.mT).squeeze(-2)


def _inverse_norms(keys: Tensor) -> Tensor:
    """Return `1/|k|`, [B, K, n] float32, clamped, as exporters drop a small `+ eps`."""
    norms: Tensor = torch.linalg.vector_norm(float32(keys), dim=-1)
    return norms.clamp_min(1e-8).reciprocal()


def float32(tensor: Tensor) -> Tensor:
    """Convert a float16 tensor to float32; leave others as they are."""
    return tensor.float() if tensor.dtype == torch.float16 else tensor


def graph_part(eviction: Eviction) -> Eviction:
    """Return the part of an eviction that a layer's graph can hold.

    It is policy, saliency, rescorer and pins.
    """
    return replace(eviction, layer_budget=None, head_budget=None, corrector=None)


def forms_of(eviction: Eviction) -> dict[str, type[Traced]]:
    """Return the forms there are for a policy, by name; more than one for a cosine to a mean."""
    policy = eviction.policy
    found: list[type[Traced]] = [Traced]
    if (
        isinstance(policy, KeyDiff)
        and policy.metric == "cosine"
        and policy.anchor in ("mean", "unit_mean")
    ):
        found += [Stateless, InverseNorms, RunningAnchor]
    return {form.name: form for form in found}


def form_of(eviction: Eviction, shape: Shape, name: str | None = None) -> Traced:
    """Return the form called `name`, or the one that is safe in float16 and needs no state.

    Raises:
        NotExportable: the policy has no score or no such form, or it rescores by other state.
    """
    if not eviction.policy.evicts:
        raise NotExportable(
            f"{eviction.name or 'full'} never evicts: it has no score to export; "
            "kvcap policies lists those that do"
        )
    if eviction.rescorer is not None and set(eviction.rescorer.state) - {"output_norm"}:
        raise NotExportable(
            f"{eviction.name} rescores by state that no graph brings up to date "
            f"({', '.join(eviction.rescorer.state)}); export its base without the rescorer"
        )
    forms = forms_of(eviction)
    if name is None:
        name = "stateless" if "stateless" in forms else TRACED
    if name not in forms:
        raise NotExportable(
            f"{eviction.name} has no formulation {name!r}; known for it: {', '.join(forms)}"
        )
    return forms[name](eviction, shape)

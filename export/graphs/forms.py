"""Puts a policy's score into a graph: as traced, or in a form that a device computes faster.

`form_of` is the one place where a form is chosen. A form lists its inputs and computes scores and
state from them; selecting and gathering are the same for all forms. KeyDiff's cosine has three
forms besides the traced one:

    stateless        unit keys (LpNormalization) times the unit anchor; nothing is kept
    inverse_norms    1/|k| of every slot is kept: one pass for the anchor, one for the products
    running_anchor   1/|k| of every slot and the sum of all keys are kept: one pass

They compute the policy's own scores, in float32 whatever the cache's type: squares and sums of real
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
from kvcap.policies.base import Logits
from kvcap.policies.keydiff import KeyDiff
from kvcap.runtime.errors import NotExportable

Tensors = Mapping[str, Tensor]


class Traced:
    """A form that traces the policy's own `score`, with its casts to float32.

    Args:
        eviction: the eviction, of which the graph has policy, saliency and rescorer.
        shape: the layer's sizes.
    """

    name = TRACED  # one of FORMULATIONS
    update_inputs: tuple[str, ...] = ()

    def __init__(self, eviction: Eviction, shape: Shape) -> None:
        self.eviction, self.shape = eviction, shape
        self.ports = ports_of(eviction.state)
        if "output_norm" in eviction.state:
            self.update_inputs = ("new_values", "output_projection")

    def inputs(self) -> list[Port]:
        """Return the input ports of scoring; the exporter drops those that go unused."""
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
        """Return the names of the state that a slot keeps when it moves."""
        return tuple(self.eviction.state)

    def observe(self, feeds: Tensors) -> Observation:
        """Make the policy's observation, with the policy's state updated for this block."""
        shape = self.shape
        obs = Observation(
            keys=feeds.get("keys"),  # type: ignore[arg-type]  # not declared, so not read
            values=feeds.get("values"),  # type: ignore[arg-type]
            positions=feeds.get("positions"),  # type: ignore[arg-type]
            num_tokens=feeds.get("seen"),  # type: ignore[arg-type]
            budget=feeds.get("budget", shape.budget),  # type: ignore[arg-type]
            queries=feeds.get("queries"),
            rule=Logits(shape.scale, shape.softcap),
            state={name: feeds[name] for name in self.slot_state},
            saliency=self.eviction.saliency,
        )
        obs.state = {**obs.state, **self.eviction.policy.update(obs)}
        return obs

    def score(self, feeds: Tensors, obs: Observation) -> Tensor:
        """Compute the worth of every slot, [B, K, n] float32."""
        return self.eviction.policy.score(obs)

    def next_state(self, obs: Observation) -> dict[str, tuple[Port, Tensor]]:
        """Return the state that scoring updated, and its output ports, by name."""
        names = self.eviction.policy.state
        return {name: (next_port(self.ports[name]), obs.state[name]) for name in names}

    def kept_state(self, feeds: Tensors, keys: Tensor) -> list[tuple[Port, Tensor]]:
        """Compute state of a whole head from its kept keys [B, K, N, D]."""
        return []

    def cached(self, feeds: Tensors) -> dict[str, Tensor]:
        """Compute from keys the state that a runtime would hold, as inputs of checks."""
        return {}

    def update_outputs(self) -> list[Port]:
        """Return the output ports of the update graph."""
        return [new_port("output_norm")] if self.update_inputs else []

    def update(self, feeds: Tensors) -> list[Tensor]:
        """Compute the state of the arriving tokens, by the rescorer that keeps it."""
        values, rescorer = feeds["new_values"], self.eviction.rescorer
        assert rescorer is not None
        obs = Observation(
            keys=values,
            values=values,
            positions=values,
            num_tokens=0,
            budget=0,
            new=values.shape[2],
            state={"output_norm": values[..., 0].float()},
            output_projection=feeds["output_projection"],
        )
        return [rescorer.update(obs)["output_norm"]]


class Stateless(Traced):
    """A form that computes `-unit(K) · unit(mean)`; keys of zeros and float16 are safe."""

    name = "stateless"

    @property
    def units(self) -> bool:
        """Return whether the anchor is the mean of unit keys."""
        policy = self.eviction.policy
        assert isinstance(policy, KeyDiff)
        return policy.anchor == "unit_mean"

    def score(self, feeds: Tensors, obs: Observation) -> Tensor:
        """Compute the worth of every slot, [B, K, n] float32."""
        keys = float32(feeds["keys"])
        units = unit(keys)
        mean = (units if self.units else keys).mean(-2, keepdim=True)
        return -_products(units, mean)


class InverseNorms(Stateless):
    """A form that computes `-(K · unit(mean)) / |k|` and keeps `1/|k|` per slot."""

    name = "inverse_norms"
    update_inputs: tuple[str, ...] = ("new_keys",)

    def inputs(self) -> list[Port]:
        """Return the ports of keys and their inverse norms."""
        return [*super().inputs(), PORTS["inverse_norms"]]

    @property
    def slot_state(self) -> tuple[str, ...]:
        """Return the name of the norms, which move with their keys."""
        return ("inverse_norms",)

    def score(self, feeds: Tensors, obs: Observation) -> Tensor:
        """Compute the worth of every slot, [B, K, n] float32."""
        keys, inverse = float32(feeds["keys"]), feeds["inverse_norms"]
        return -_products(keys, self.anchor(keys, feeds)) * inverse

    def anchor(self, keys: Tensor, feeds: Tensors) -> Tensor:
        """Compute the direction that keys are compared with, [B, K, 1, D], of any length."""
        if self.units:
            return torch.matmul(feeds["inverse_norms"][..., None, :], keys)
        return keys.mean(-2, keepdim=True)

    def cached(self, feeds: Tensors) -> dict[str, Tensor]:
        """Compute the inverse norms of the slots' keys."""
        return {"inverse_norms": _inverse_norms(feeds["keys"])}

    def update_outputs(self) -> list[Port]:
        """Return the port of the arriving keys' inverse norms."""
        return [new_port("inverse_norms")]

    def update(self, feeds: Tensors) -> list[Tensor]:
        """Compute the inverse norms of the arriving keys, [B, K, T]."""
        return [_inverse_norms(feeds["new_keys"])]


class RunningAnchor(InverseNorms):
    """A form that computes `-(K · unit(sum)) / |k|` and keeps `1/|k|` and the sum of all keys."""

    name = "running_anchor"
    update_inputs = ("new_keys", "gone_keys", "anchor")

    def inputs(self) -> list[Port]:
        """Return the ports of keys, their inverse norms and their sum."""
        return [*super().inputs(), PORTS["anchor"]]

    def anchor(self, keys: Tensor, feeds: Tensors) -> Tensor:
        """Return the sum of all keys, which the runtime keeps, [B, K, 1, D]."""
        return feeds["anchor"][:, :, None]

    def kept_state(self, feeds: Tensors, keys: Tensor) -> list[tuple[Port, Tensor]]:
        """Sum the kept keys again, so that rounding errors do not add up."""
        return [(kept_port(PORTS["anchor"]), self._sum(keys))]

    def cached(self, feeds: Tensors) -> dict[str, Tensor]:
        """Compute the inverse norms and the sum of the slots' keys."""
        return {**super().cached(feeds), "anchor": self._sum(feeds["keys"])}

    def update_outputs(self) -> list[Port]:
        """Return the ports of the arriving keys' inverse norms, and of the sum after the block."""
        return [*super().update_outputs(), next_port(PORTS["anchor"])]

    def update(self, feeds: Tensors) -> list[Tensor]:
        """Compute the arriving keys' inverse norms [B, K, T] and the sum after them [B, K, D]."""
        change = self._sum(feeds["new_keys"]) - self._sum(feeds["gone_keys"])
        return [*super().update(feeds), feeds["anchor"] + change]

    def _sum(self, keys: Tensor) -> Tensor:
        """Sum keys [B, K, n, D] or their unit vectors to [B, K, D] float32."""
        keys = float32(keys)
        return (unit(keys) if self.units else keys).sum(-2)


def _products(keys: Tensor, anchor: Tensor) -> Tensor:
    """Return `unit(anchor) · k` [B, K, n] for keys [B, K, n, D] and an anchor [B, K, 1, D].

    The anchor is the left factor, as ONNX Runtime then reads keys along their rows: 3.5 times as
    fast.
    """
    return torch.matmul(unit(anchor), keys.mT).squeeze(-2)


def _inverse_norms(keys: Tensor) -> Tensor:
    """Return `1/|k|`, [B, K, n] float32; norms are clamped, as exporters drop a small `+ eps`."""
    norms: Tensor = torch.linalg.vector_norm(float32(keys), dim=-1)
    return norms.clamp_min(1e-8).reciprocal()


def float32(tensor: Tensor) -> Tensor:
    """Convert a float16 tensor to float32; leave others as they are."""
    return tensor.float() if tensor.dtype == torch.float16 else tensor


def graph_part(eviction: Eviction) -> Eviction:
    """Return an eviction without its parts that no layer's graph has: budgets and corrector."""
    return replace(eviction, layer_budget=None, head_budget=None, corrector=None)


def forms_of(eviction: Eviction) -> dict[str, type[Traced]]:
    """Return the forms of a policy, by name; only KeyDiff's cosine to a mean has several."""
    policy = eviction.policy
    forms: list[type[Traced]] = [Traced]
    if (
        isinstance(policy, KeyDiff)
        and policy.metric == "cosine"
        and policy.anchor in ("mean", "unit_mean")
    ):
        forms += [Stateless, InverseNorms, RunningAnchor]
    return {form.name: form for form in forms}


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

"""How a policy's score is put into a graph: as traced, or in a form that a device computes faster.

`form_of` is the one place where a form is chosen. A form says which inputs it takes and what they
become; select and gather are the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kvcap.export.formulations import TRACED
from kvcap.export.ports import Port, following, made, ports_of
from kvcap.export.shape import Shape
from kvcap.policies import Eviction, Observation
from kvcap.runtime.errors import NotExportable

Named = Mapping[str, Tensor]


class Traced:
    """The policy's own `score`, traced; its casts to float32 are in the graph.

    Args:
        eviction: policy, saliency and rescorer; nothing else of it is in a graph.
        shape: of the layer.
    """

    name = TRACED  # of FORMULATIONS, as all names of forms
    update_inputs: tuple[str, ...] = ()

    def __init__(self, eviction: Eviction, shape: Shape) -> None:
        self.eviction, self.shape = eviction, shape
        self.ports = ports_of(eviction.state)
        if "output_norm" in eviction.state:
            self.update_inputs = ("new_values", "output_projection")

    def inputs(self) -> list[Port]:
        """What scoring may take; the exporter drops those that the graph does not use."""
        reads = self.eviction.policy.observes
        if self.eviction.saliency is not None:
            reads = reads | self.eviction.saliency.observes
        if (rescorer := self.eviction.rescorer) is not None:
            # One with state reads values only when they arrive, in the update graph.
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
        """State that moves with its slots."""
        return tuple(self.eviction.state)

    def observe(self, given: Named) -> Observation:
        """What the policy sees, its state brought up to date where the graph does that."""
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
        """Worth of every slot, [B, K, n] float32."""
        return self.eviction.policy.score(obs)

    def next_state(self, obs: Observation) -> dict[str, tuple[Port, Tensor]]:
        """State that scoring brought up to date: {name: (port, tensor)}."""
        names = self.eviction.policy.state
        return {name: (following(self.ports[name]), obs.state[name]) for name in names}

    def kept_state(self, given: Named, keys: Tensor) -> list[tuple[Port, Tensor]]:
        """State that is not per slot, made from the kept keys [B, K, N, D]."""
        return []

    def cached(self, given: Named) -> dict[str, Tensor]:
        """The state this form keeps of slots, from their keys. For tests and verification."""
        return {}

    def update_outputs(self) -> list[Port]:
        """What the update graph returns."""
        return [made("output_norm")] if self.update_inputs else []

    def update(self, given: Named) -> list[Tensor]:
        """State of the arriving tokens, by the component that keeps it."""
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


def graph_part(eviction: Eviction) -> Eviction:
    """What of an eviction a graph of one layer can hold: policy, saliency, rescorer and pins."""
    return replace(eviction, layer_budget=None, head_budget=None, corrector=None)


def form_of(eviction: Eviction, shape: Shape, name: str | None = None) -> Traced:
    """The form called `name`, or the one that is safe in float16 and needs no state.

    Raises:
        NotExportable: the policy has no score or no such form, or it rescores by other state.
    """
    from kvcap.export import keydiff

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
    known: list[type[Traced]] = [Traced, *keydiff.forms(eviction)]
    forms = {form.name: form for form in known}
    if name is None:
        name = "stateless" if "stateless" in forms else TRACED
    if name not in forms:
        raise NotExportable(
            f"{eviction.name} has no formulation {name!r}; known for it: {', '.join(forms)}"
        )
    return forms[name](eviction, shape)


def float32(tensor: Tensor) -> Tensor:
    """In float32, or in float64 where it is that already."""
    return tensor.float() if tensor.dtype == torch.float16 else tensor

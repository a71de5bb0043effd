"""Defines graphs as modules that are traced: score, evict (score, select, gather) and update.

Selection follows `Eviction`: pins are a mask, a rescorer comes after the score. `evicted` is the
one place that selects, for a layer's graph and for a whole decoder.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvcap.export.graphs.forms import Named, Traced
from kvcap.export.graphs.portable import Portable
from kvcap.export.graphs.ports import PORTS, Port, kept_port, scores_port, sizes
from kvcap.policies import Observation
from kvcap.runtime.errors import NotExportable


class StageGraph(nn.Module):
    """A module that computes one stage of a form; tensors follow `inputs` and `outputs`."""

    def __init__(self, form: Traced) -> None:
        super().__init__()
        self.form = form
        self.inputs: list[Port] = form.inputs()

    @property
    def sizes(self) -> dict[str, int | None]:
        """Return the size of every axis, None where open."""
        return sizes(self.form.shape, self.form.eviction.policy.queries_observed)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs from inputs, in their order."""
        with Portable():
            found = self.compute({p.name: t for p, t in zip(self.inputs, tensors, strict=True)})
        return tuple(tensor for _, tensor in found)

    def outputs(self, given: Named) -> list[Port]:
        """Return the ports of the outputs for these inputs."""
        return [port for port, _ in self.compute(given)]

    def compute(self, given: Named) -> list[tuple[Port, Tensor]]:
        """Compute the outputs by their ports."""
        raise NotImplementedError


class Score(StageGraph):
    """Scores of the slots; where there is a rescorer, rescored for a budget that is an input."""

    stage = "score"

    def __init__(self, form: Traced) -> None:
        super().__init__(form)
        if form.eviction.rescorer is not None:
            self.inputs += [PORTS["pinned"], PORTS["budget"]]

    def compute(self, given: Named) -> list[tuple[Port, Tensor]]:
        """Compute scores, and the state that scoring brought up to date."""
        form, obs = self.form, self.form.observe(given)
        scores = form.score(given, obs)
        if form.eviction.rescorer is not None:
            scores = form.eviction.rescorer.rescore(scores, given["pinned"], obs)
        return [(scores_port(), scores), *form.next_state(obs).values()]


class Evict(StageGraph):
    """A graph that scores, selects and gathers the budget's slots, in the order they lay.

    The policy's own pins for this budget are in the graph, others come in by `pinned`. If there are
    fewer slots than the budget, all stay.
    """

    stage = "evict"

    def __init__(self, form: Traced) -> None:
        super().__init__(form)
        scoring = {port.name: port for port in self.inputs}
        first = {name: PORTS[name] for name in ("keys", "values", "positions", "seen")}
        self.inputs = [*{**first, **scoring}.values(), PORTS["pinned"]]

    def compute(self, given: Named) -> list[tuple[Port, Tensor]]:
        """Compute everything a slot has, of the slots that stay."""
        form, obs = self.form, self.form.observe(given)
        worth = self.worth(given, obs)
        stays = torch.sym_min(worth.shape[-1], form.shape.budget)
        keep = survivors(worth, given["positions"], stays)  # [B, K, N]
        slots = {"keys", "values", "positions", *form.slot_state}
        state = {name: tensor for name, (_, tensor) in form.next_state(obs).items()}
        rows = rows_of(keep, worth.shape[-1])
        found = [
            (kept_port(port), take({**given, **state}[port.name], rows, keep))
            for port in self.inputs
            if port.name in slots
        ]
        index = Port("slot", "int32", PORTS["positions"].axes, "slots", "where it lay")
        return [
            *found,
            (kept_port(index), keep.to(torch.int32)),
            *form.kept_state(given, found[0][1]),
        ]

    def decided(self, given: Named) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the worth by which slots stay [B, K, n], and the state that scoring updated.

        `given` has the form's inputs and `pinned`.
        """
        obs = self.form.observe(given)
        with Portable():
            worth = self.worth(given, obs)
        state = {name: tensor for name, (_, tensor) in self.form.next_state(obs).items()}
        return worth, state

    def worth(self, given: Named, obs: Observation) -> Tensor:
        """Return the worth by which slots stay [B, K, n]: scores, with pins above all."""
        form, eviction, pinned = self.form, self.form.eviction, given["pinned"]
        scores = eviction.score(obs, by=lambda _, obs: form.score(given, obs))
        if eviction.pins(form.shape.budget):
            pinned = pinned | eviction.pinned(obs)
        return eviction.worth(scores, pinned, obs)


class Update(StageGraph):
    """A graph that computes the state of arriving tokens, for forms that keep some."""

    stage = "update"

    def __init__(self, form: Traced) -> None:
        super().__init__(form)
        if not form.update_inputs:
            raise NotExportable(
                f"{form.eviction.name} in its formulation {form.name} keeps no state between "
                "blocks, so there is nothing to update; choose --stage score or evict"
            )
        self.inputs = [PORTS[name] for name in form.update_inputs]

    def compute(self, given: Named) -> list[tuple[Port, Tensor]]:
        """Compute the new state."""
        return list(zip(self.form.update_outputs(), self.form.update(given), strict=True))


STAGES: dict[str, type[StageGraph]] = {"score": Score, "evict": Evict, "update": Update}


def evicted(worth: Tensor, positions: Tensor, stays: int) -> Tensor:
    """Select the slots of each head that go, all but the `stays` that are worth most, in no order.

    They are few when one token arrives. Of equal ones the older go, as `policies.base.order` has
    it.

    Args:
        worth: [B, K, n].
        positions: [B, K, n] int32.
        stays: 1 to n.

    Returns:
        Slots [B, K, n - stays].
    """
    count = worth.shape[-1] - stays
    lowest = worth.topk(count + 1, dim=-1, largest=False, sorted=False).values
    least = lowest.amax(-1, keepdim=True)  # of those that stay
    equal = torch.where(worth == least, positions, torch.iinfo(torch.int32).max)
    age = torch.where(worth < least, -1, equal)
    return age.topk(count, dim=-1, largest=False, sorted=False).indices


def survivors(worth: Tensor, positions: Tensor, stays: int) -> Tensor:
    """Select the `stays` slots of each head that `evicted` leaves, in the order they lie in.

    Slots that lie in time order stay so: then a slot's index is its rank. [B, K, stays], ascending.
    """
    slots = worth.shape[-1]
    gone = evicted(worth, positions, stays)
    keep = torch.ones_like(worth, dtype=torch.int64)
    keep = keep.scatter(-1, gone, torch.zeros_like(gone))  # [B, K, n]
    here, older = torch.arange(slots).expand_as(keep), keep.cumsum(-1)  # survivors up to a slot
    # Where each slot goes: survivors to the front, the others behind, so that no place is taken
    # twice, which ONNX leaves undefined.
    place = torch.where(keep > 0, older - 1, stays + here - older)
    return here.scatter(-1, place, here)[..., :stays]


def rows_of(keep: Tensor, slots: int) -> Tensor:
    """Return the indices [B, K, N] of slots as rows of all heads' slots laid out flat, [B·K·N]."""
    heads = torch.arange(keep.shape[0] * keep.shape[1]).view(*keep.shape[:2], 1)
    return (keep + heads * slots).flatten()


def take(tensor: Tensor, rows: Tensor, keep: Tensor) -> Tensor:
    """Gather rows of [B, K, n, ...] as a flat list, which runtimes do several times faster."""
    return tensor.flatten(0, 2).index_select(0, rows).view(*keep.shape, *tensor.shape[3:])

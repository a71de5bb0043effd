"""Defines the modules that graphs are traced from: score, evict and update.

Evict scores, selects and gathers. Selection follows `Eviction`: pins are a mask, and a rescorer
comes after the score. `evicted` is the one place that selects, for the graph of a layer and of a
whole decoder.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvcap.export.graphs.forms import Tensors, Traced
from kvcap.export.graphs.portable import Portable
from kvcap.export.graphs.ports import PORTS, Port, kept_port, scores_port, sizes
from kvcap.policies import Observation
from kvcap.runtime.errors import NotExportable


class StageGraph(nn.Module):
    """A module that computes one stage of a form, from tensors in the order of `inputs`."""

    def __init__(self, form: Traced) -> None:
        super().__init__()
        self.form = form
        self.inputs: list[Port] = form.inputs()

    @property
    def sizes(self) -> dict[str, int | None]:
        """Return the size of every axis, None if it is open."""
        return sizes(self.form.shape, self.form.eviction.policy.queries_observed)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs, in the order of `outputs`."""
        with Portable():
            outputs = self.compute({p.name: t for p, t in zip(self.inputs, tensors, strict=True)})
        return tuple(tensor for _, tensor in outputs)

    def outputs(self, feeds: Tensors) -> list[Port]:
        """Return the ports of the outputs, by computing them for these inputs."""
        return [port for port, _ in self.compute(feeds)]

    def compute(self, feeds: Tensors) -> list[tuple[Port, Tensor]]:
        """Compute the outputs from inputs by name; return each with its port."""
        raise NotImplementedError


class Score(StageGraph):
    """A graph that scores slots; a rescorer, if any, takes the budget as another input."""

    stage = "score"

    def __init__(self, form: Traced) -> None:
        super().__init__(form)
        if form.eviction.rescorer is not None:
            self.inputs += [PORTS["pinned"], PORTS["budget"]]

    def compute(self, feeds: Tensors) -> list[tuple[Port, Tensor]]:
        """Compute scores, and the state that scoring updated."""
        form, obs = self.form, self.form.observe(feeds)
        scores = form.score(feeds, obs)
        if form.eviction.rescorer is not None:
            scores = form.eviction.rescorer.rescore(scores, feeds["pinned"], obs)
        return [(scores_port(), scores), *form.next_state(obs).values()]


class Evict(StageGraph):
    """A graph that scores, selects and gathers the slots of the budget, which keep their order.

    The policy's own pins for this budget are in the graph; the input `pinned` has further ones. If
    there are fewer slots than the budget, all stay.
    """

    stage = "evict"

    def __init__(self, form: Traced) -> None:
        super().__init__(form)
        scoring = {port.name: port for port in self.inputs}
        first = {name: PORTS[name] for name in ("keys", "values", "positions", "seen")}
        self.inputs = [*{**first, **scoring}.values(), PORTS["pinned"]]

    def compute(self, feeds: Tensors) -> list[tuple[Port, Tensor]]:
        """Gather keys, values, positions and state of the slots that stay."""
        form, obs = self.form, self.form.observe(feeds)
        worth = self.worth(feeds, obs)
        stays = torch.sym_min(worth.shape[-1], form.shape.budget)
        keep = survivors(worth, feeds["positions"], stays)  # [B, K, N]
        slots = {"keys", "values", "positions", *form.slot_state}
        state = {name: tensor for name, (_, tensor) in form.next_state(obs).items()}
        rows = rows_of(keep, worth.shape[-1])
        kept = [
            (kept_port(port), take({**feeds, **state}[port.name], rows, keep))
            for port in self.inputs
            if port.name in slots
        ]
        index = Port("slot", "int32", PORTS["positions"].axes, "slots", "where it lay")
        return [
            *kept,
            (kept_port(index), keep.to(torch.int32)),
            *form.kept_state(feeds, kept[0][1]),
        ]

    def decided(self, feeds: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the worth by which slots stay [B, K, n], and the state that scoring updated.

        Args:
            feeds: the form's inputs and `pinned`, by name.
        """
        obs = self.form.observe(feeds)
        with Portable():
            worth = self.worth(feeds, obs)
        state = {name: tensor for name, (_, tensor) in self.form.next_state(obs).items()}
        return worth, state

    def worth(self, feeds: Tensors, obs: Observation) -> Tensor:
        """Return the worth by which slots stay [B, K, n]: their scores, and more if pinned."""
        form, eviction, pinned = self.form, self.form.eviction, feeds["pinned"]
        scores = eviction.score(obs, by=lambda _, obs: form.score(feeds, obs))
        if eviction.pins(form.shape.budget):
            pinned = pinned | eviction.pinned(obs)
        return eviction.worth(scores, pinned, obs)


class Update(StageGraph):
    """A graph that computes the state of arriving tokens, for forms that keep state."""

    stage = "update"

    def __init__(self, form: Traced) -> None:
        super().__init__(form)
        if not form.update_inputs:
            raise NotExportable(
                f"{form.eviction.name} in its formulation {form.name} keeps no state between "
                "blocks, so there is nothing to update; choose --stage score or evict"
            )
        self.inputs = [PORTS[name] for name in form.update_inputs]

    def compute(self, feeds: Tensors) -> list[tuple[Port, Tensor]]:
        """Compute the state of the arriving tokens."""
        return list(zip(self.form.update_outputs(), self.form.update(feeds), strict=True))


STAGES: dict[str, type[StageGraph]] = {"score": Score, "evict": Evict, "update": Update}


def evicted(worth: Tensor, positions: Tensor, stays: int) -> Tensor:
    """Select the slots of each head that go: all but the `stays` with the highest worth.

    Selecting those that go is cheap, as they are few when one token arrives. Of equal slots the
    older ones go, as in `policies.base.order`.

    Args:
        worth: worth of the slots [B, K, n]; higher stays.
        positions: their positions [B, K, n] int32.
        stays: slots of each head that stay, 1 to n.

    Returns:
        Indices of the slots that go [B, K, n - stays], in no order.
    """
    count = worth.shape[-1] - stays
    lowest = worth.topk(count + 1, dim=-1, largest=False, sorted=False).values
    least = lowest.amax(-1, keepdim=True)  # least worth of the slots that stay
    equal = torch.where(worth == least, positions, torch.iinfo(torch.int32).max)
    age = torch.where(worth < least, -1, equal)
    return age.topk(count, dim=-1, largest=False, sorted=False).indices


def survivors(worth: Tensor, positions: Tensor, stays: int) -> Tensor:
    """Return the indices of the slots that `evicted` leaves, [B, K, stays], ascending.

    Slots in time order stay in time order, so that a slot's index is its rank.
    """
    slots = worth.shape[-1]
    leaving = evicted(worth, positions, stays)
    keep = torch.ones_like(worth, dtype=torch.int64)
    keep = keep.scatter(-1, leaving, torch.zeros_like(leaving))  # [B, K, n]
    here, older = torch.arange(slots).expand_as(keep), keep.cumsum(-1)  # survivors up to a slot
    # Survivors move to the front and the others behind them: every place is written once, as ONNX
    # leaves undefined which of two writes wins.
    target = torch.where(keep > 0, older - 1, stays + here - older)
    return here.scatter(-1, target, here)[..., :stays]


def rows_of(keep: Tensor, slots: int) -> Tensor:
    """Return indices of slots [B, K, N] as rows [B·K·N] of a list of all heads' slots."""
    heads = torch.arange(keep.shape[0] * keep.shape[1]).view(*keep.shape[:2], 1)
    return (keep + heads * slots).flatten()


def take(tensor: Tensor, rows: Tensor, keep: Tensor) -> Tensor:
    """Gather slots of a tensor [B, K, n, ...], as [B, K, N, ...].

    Args:
        tensor: a property of all slots.
        rows: the slots as rows of a flat list, which runtimes gather several times faster.
        keep: the slots [B, K, N], for their shape.
    """
    return tensor.flatten(0, 2).index_select(0, rows).view(*keep.shape, *tensor.shape[3:])

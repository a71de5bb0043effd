"""Compares a graph's outputs with the policy's own code, and both with float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvcap.export.graphs.forms import Traced
from kvcap.export.graphs.portable import Float64
from kvcap.export.graphs.stages import Evict, Score, StageGraph, Update
from kvcap.policies import Observation
from kvcap.policies.base.order import ranks
from kvcap.runtime.errors import ShapeError

RTOL = 2e-5  # error allowed in float32, relative to the largest value
# Factor of eager's own error that is allowed: where scores are ill-conditioned, such as attention
# that all goes to one outlier, sums in another order have errors several times as large.
OWN = 8
# Beside that, error of numbers that are ranked, relative to the largest: they may differ by little.
TIE = 2.0**-21
OVERLAP = 0.9  # least overlap with the slots kept in float64, relative to eager's overlap
HUGE = 1e30  # a score this large is a rescorer's mark of a slot that stays, and is not compared

Tensors = Mapping[str, Tensor]


class Difference(NamedTuple):
    """The difference of a graph's outputs from eager's; `CheckedCase` explains the fields."""

    error: float
    allowed: float
    overlap: float
    misses: int
    finite: bool
    ok: bool


def compared(graph: StageGraph, feeds: Tensors, outputs: Tensors) -> Difference:
    """Compare the outputs of a graph with eager's for the same inputs.

    Args:
        graph: the module that was exported.
        feeds: the inputs, by name.
        outputs: the outputs of the exported graph, by name.

    Raises:
        ShapeError: an output has another shape, or a kept slot is not whole.
    """
    ref = Reference.of(graph, feeds)
    finite = all(bool(x.isfinite().all()) for x in outputs.values() if x.is_floating_point())
    differences = [(0.0, 0.0)]
    for name, value, expected, precise in _pairs(graph, outputs, ref):
        _same_shape(name, value, expected)
        differences.append(difference(ref.without_ties(name, value), expected, precise))
    error, allowed = max(differences, key=lambda pair: pair[0] / pair[1] if pair[1] else 0.0)
    overlap, reachable, misses = _selection(graph, feeds, outputs, ref)
    same = misses == 0 and overlap >= OVERLAP * reachable
    ok = finite and error <= allowed and (same or overlap == 1)
    return Difference(error, allowed, overlap, misses, finite, ok)


class Reference(NamedTuple):
    """The outputs that a graph should have, and by how much ties let them differ.

    Where scores are ranks, numbers that are equal but for rounding may have each other's.
    """

    eager: (
        Tensors  # of the policy's own code; where its ranks differ by ties only, those of `exact`
    )
    exact: Tensors  # in float64
    below: Tensors  # how much less each may be than `exact` by ties; what has no ranks is missing
    above: Tensors  # how much more

    @classmethod
    def of(cls, graph: StageGraph, feeds: Tensors) -> Reference:
        """Compute them for the inputs `feeds`."""
        numbers: list[Tensor] = []  # that were ranked: in float32, then in float64

        def noted(scores: Tensor) -> Tensor:
            numbers.append(scores)
            return ranks(scores)

        eager, exact = reference(graph, feeds, noted), truth(graph, feeds, noted)
        if not numbers:
            return cls(eager, exact, {}, {})
        own, precise = numbers
        near = difference(own, own, precise, TIE)[1]
        low, high = (truth(graph, feeds, partial(_rank, near=x)) for x in (-near, near))
        below = {n: (low[n] - x).nan_to_num(0.0).clamp(max=0) for n, x in exact.items()}
        above = {n: (high[n] - x).nan_to_num(0.0).clamp(min=0) for n, x in exact.items()}
        raw = cls(eager, exact, below, above)
        return raw._replace(eager={n: raw.without_ties(n, x) for n, x in eager.items()})

    def without_ties(self, name: str, value: Tensor) -> Tensor:
        """Return an output less the part of its difference from `exact` that ties explain."""
        if name not in self.below:
            return value
        difference = value.double() - self.exact[name]
        return value - difference.clamp(self.below[name], self.above[name])

    def range(self, name: str) -> tuple[Tensor, Tensor, float]:
        """Return the least and the most that ties let an output be, and the error beside that."""
        eager, exact = self.eager[name], self.exact[name]
        low, high = (eager + x.get(name, 0) for x in (self.below, self.above))
        return low, high, difference(eager, eager, exact)[1]


def _rank(numbers: Tensor, near: float) -> Tensor:
    """Return the highest rank that rounding by `near` may give each number; below 0 the lowest."""
    before = numbers[..., None, :] <= numbers[..., None] + near  # [..., n, n]
    return before.sum(-1) - (1 if near >= 0 else 0)


def _pairs(
    graph: StageGraph, outputs: Tensors, ref: Reference
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Yield the name, value, eager value and float64 value of outputs that are computed.

    Outputs that are only moved to other slots are checked by `_moved`.
    """
    for name, value in outputs.items():
        if name in ref.eager:
            yield name, value, ref.eager[name], ref.exact[name]
    if isinstance(graph, Evict):
        index = outputs["kept_slot"].long()
        for name in graph.form.eviction.policy.state:
            expected, exact = (x[name].gather(-1, index) for x in (ref.eager, ref.exact))
            yield name, outputs[f"kept_{name}"], expected, exact
        for port, total in graph.form.kept_state({}, outputs["kept_keys"]):
            yield port.name, outputs[port.name], total, total


def _selection(
    graph: StageGraph, feeds: Tensors, outputs: Tensors, ref: Reference
) -> tuple[float, float, int]:
    """Compare kept slots; score graphs are compared by the better half of their slots.

    Returns:
        The share of kept slots that are among float64's best, the same share for eager, and how
        many slots are kept or evicted against eager.
    """
    if isinstance(graph, Evict):
        name, index = "worth", outputs["kept_slot"].long()
        slots = ref.eager[name].shape[-1]
        _moved(graph, feeds, outputs, index, min(slots, graph.form.shape.budget))
    elif "scores" in ref.eager:
        name = "scores"
        half = max(1, outputs[name].shape[-1] // 2)
        index = outputs[name].nan_to_num().topk(half, dim=-1).indices
    else:
        return 1.0, 1.0, 0
    worth, exact = ref.eager[name], ref.exact[name]
    own = worth.topk(index.shape[-1], dim=-1).indices
    best = exact + ref.above.get(name, 0)
    return (
        _overlap(index, exact, best),
        _overlap(own, exact, best),
        _misses(index, name, ref),
    )


class RankedForm(Traced):
    """A form that computes the policy's own scores, with ranks taken by `rank`."""

    def __init__(self, form: Traced, rank: Callable[[Tensor], Tensor]) -> None:
        super().__init__(form.eviction, form.shape)
        self.rank = rank

    def score(self, feeds: Tensors, obs: Observation) -> Tensor:
        """Compute the worth of every slot, [B, K, n] float32."""
        return self.eviction.policy.scored(obs, self.rank)


def reference(
    graph: StageGraph, feeds: Tensors, rank: Callable[[Tensor], Tensor] = ranks
) -> dict[str, Tensor]:
    """Compute the expected outputs: scores by the policy's own code, other state by the form."""
    form = graph.form
    plain = RankedForm(form, rank)
    if isinstance(graph, Evict):
        obs = plain.observe(feeds)
        state = {name: tensor for name, (_, tensor) in plain.next_state(obs).items()}
        return {**state, "worth": Evict(plain).worth(feeds, obs)}
    if isinstance(graph, Update):
        names = [port.name for port in form.update_outputs()]
        return dict(zip(names, form.update(feeds), strict=True))
    return {port.name: tensor for port, tensor in Score(plain).compute(feeds)}


def truth(
    graph: StageGraph, feeds: Tensors, rank: Callable[[Tensor], Tensor] = ranks
) -> dict[str, Tensor]:
    """Compute `reference` in float64."""
    doubled = {k: v.double() if v.is_floating_point() else v for k, v in feeds.items()}
    with Float64():
        return reference(graph, doubled, rank)


def difference(
    value: Tensor, eager: Tensor, truth: Tensor, rtol: float = RTOL
) -> tuple[float, float]:
    """Return the largest difference from eager and the allowed one, without marks and pins."""
    value, eager, truth = value.double(), eager.double(), truth.double()
    plain = (truth.abs() < HUGE) & (eager.abs() < HUGE)
    if not bool(plain.all()):  # rounding may have moved a mark to a slot of nearly equal worth
        plain &= value.abs() < HUGE
    if not bool(plain.any()):
        return 0.0, 0.0
    scale = float(truth[plain].abs().amax())
    own = float((eager - truth)[plain].abs().amax())
    return float((value - eager)[plain].abs().amax()), rtol * scale + OWN * own + 1e-12


def _misses(index: Tensor, name: str, ref: Reference) -> int:
    """Count slots that are kept or evicted although their worth says otherwise, ties apart."""
    low, high, near = ref.range(name)
    stays = torch.zeros_like(low, dtype=torch.bool).scatter(-1, index, True)
    if int(stays.sum()) != index.numel():
        return index.numel()  # a slot kept twice
    least = ref.eager[name].topk(index.shape[-1], dim=-1).values[..., -1:]
    wrong = (stays & (high < least - near)) | (~stays & (low > least + near))
    return int(wrong.sum())


def _overlap(index: Tensor, exact: Tensor, best: Tensor) -> float:
    """Return the share of kept slots that are, or by ties may be, among the best in float64."""
    least = exact.topk(index.shape[-1], dim=-1).values[..., -1:]
    tied = 1e-12 * least.abs().nan_to_num(posinf=0.0)
    return float((best.gather(-1, index) >= least - tied).double().mean())


def _moved(
    graph: Evict,
    feeds: Tensors,
    outputs: Tensors,
    index: Tensor,
    count: int,
) -> None:
    """Check that keys, values, positions and state moved with their slots.

    Raises:
        ShapeError: not `count` slots are kept, or something did not move with its slot.
    """
    if index.shape[-1] != count:
        raise ShapeError(f"the graph keeps {index.shape[-1]} slots of {count}")
    for name in ("keys", "values", "positions", *graph.form.slot_state):
        if name in graph.form.eviction.policy.state:
            continue  # the graph updates state before it evicts
        whole, kept = feeds[name], outputs[f"kept_{name}"]
        at = index.view(*index.shape, *(1,) * (whole.dim() - 3))
        at = at.expand(*index.shape, *whole.shape[3:])
        if not torch.equal(whole.gather(2, at), kept):
            raise ShapeError(f"kept_{name} is not {name} of the slots that kept_slot names")


def _same_shape(name: str, value: Tensor, expected: Tensor) -> None:
    if value.shape != expected.shape:
        raise ShapeError(
            f"{name} has shape {tuple(value.shape)}, expected is {tuple(expected.shape)}"
        )

"""Compares a graph's outputs with the policy's own code, and both with float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kvcap.export.graphs.forms import Traced
from kvcap.export.graphs.portable import Float64
from kvcap.export.graphs.stages import Evict, Score, StageGraph, Update
from kvcap.runtime.errors import ShapeError

RTOL = 2e-5  # error allowed in float32, relative to the largest value
OWN = 8  # how many times eager's own error is allowed, as sums in another order err by several
# times as much where scores are ill-conditioned, such as attention that one outlier takes whole
OVERLAP = 0.9  # least overlap with the slots kept in float64, relative to eager's overlap
HUGE = 1e30  # from here on a score is a rescorer's mark of slots that stay, and is not compared

Found = Mapping[str, Tensor]


class Difference(NamedTuple):
    """A difference that says how far outputs are from those expected; see `CheckedCase`."""

    error: float
    allowed: float
    overlap: float
    misses: int
    finite: bool
    ok: bool


def compared(graph: StageGraph, given: Found, got: Found, rtol: float = RTOL) -> Difference:
    """Compare the outputs of a graph for the inputs `given`.

    Args:
        graph: what was exported.
        given: its inputs.
        got: its outputs.
        rtol: of the largest value, what the arithmetic may err by.

    Raises:
        ShapeError: an output of another shape.
    """
    eager, exact = reference(graph, given), truth(graph, given)
    finite = all(bool(x.isfinite().all()) for x in got.values() if x.is_floating_point())
    found = [(0.0, 0.0)]
    for name, value, expected, precise in _pairs(graph, got, eager, exact):
        _same_shape(name, value, expected)
        found.append(difference(value, expected, precise, rtol))
    error, allowed = max(found, key=lambda pair: pair[0] / pair[1] if pair[1] else 0.0)
    overlap, reachable, misses = _selection(graph, given, got, eager, exact, rtol)
    same = misses == 0 and overlap >= OVERLAP * reachable
    ok = finite and error <= allowed and (same or overlap == 1)
    return Difference(error, allowed, overlap, misses, finite, ok)


def _pairs(
    graph: StageGraph, got: Found, eager: Found, truth: Found
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Yield every output that is computed, not moved: its name, itself, eager's, float64's."""
    for name, value in got.items():
        if name in eager:
            yield name, value, eager[name], truth[name]
    if isinstance(graph, Evict):
        index = got["kept_slot"].long()
        for name in graph.form.eviction.policy.state:
            expected, exact = (found[name].gather(-1, index) for found in (eager, truth))
            yield name, got[f"kept_{name}"], expected, exact
        for port, total in graph.form.kept_state({}, got["kept_keys"]):
            yield port.name, got[port.name], total, total


def _selection(
    graph: StageGraph, given: Found, got: Found, eager: Found, truth: Found, rtol: float
) -> tuple[float, float, int]:
    """Share of kept slots that are float64's, eager's share, how many are wrong against eager."""
    if isinstance(graph, Evict):
        worth, exact, index = eager["worth"], truth["worth"], got["kept_slot"].long()
        _moved(graph, given, got, index, min(worth.shape[-1], graph.form.shape.budget), rtol)
    elif "scores" in eager:
        worth, exact = eager["scores"], truth["scores"]
        half = max(1, worth.shape[-1] // 2)
        index = got["scores"].nan_to_num().topk(half, dim=-1).indices
    else:
        return 1.0, 1.0, 0
    _, near = difference(worth, worth, exact, rtol)
    own = worth.topk(index.shape[-1], dim=-1).indices
    return _overlap(index, exact), _overlap(own, exact), _misses(index, worth, near)


def reference(graph: StageGraph, given: Found) -> dict[str, Tensor]:
    """Compute what eager code gives: scores or worth by the policy itself, the rest by the form."""
    form = graph.form
    plain = Traced(form.eviction, form.shape)
    if isinstance(graph, Evict):
        obs = plain.observe(given)
        found = {name: tensor for name, (_, tensor) in plain.next_state(obs).items()}
        return {**found, "worth": Evict(plain).worth(given, obs)}
    if isinstance(graph, Update):
        names = [port.name for port in form.update_outputs()]
        return dict(zip(names, form.update(given), strict=True))
    return {port.name: tensor for port, tensor in Score(plain).compute(given)}


def truth(graph: StageGraph, given: Found) -> dict[str, Tensor]:
    """Compute `reference` in float64."""
    doubled = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    with Float64():
        return reference(graph, doubled)


def difference(value: Tensor, eager: Tensor, truth: Tensor, rtol: float) -> tuple[float, float]:
    """Return the largest difference to eager, and what is allowed; marks and pins aside."""
    value, eager, truth = value.double(), eager.double(), truth.double()
    plain = (truth.abs() < HUGE) & (eager.abs() < HUGE)
    if not bool(plain.all()):  # rounding may have moved a mark to a slot of nearly equal worth
        plain &= value.abs() < HUGE
    if not bool(plain.any()):
        return 0.0, 0.0
    scale = float(truth[plain].abs().amax())
    own = float((eager - truth)[plain].abs().amax())
    return float((value - eager)[plain].abs().amax()), rtol * scale + OWN * own + 1e-12


def _misses(index: Tensor, worth: Tensor, near: float) -> int:
    """Count slots that are kept or given up against `worth`, by more than `near`."""
    stays = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, index, True)
    if int(stays.sum()) != index.numel():
        return index.numel()  # a slot kept twice
    least = worth.topk(index.shape[-1], dim=-1).values[..., -1:]
    wrong = (stays & (worth < least - near)) | (~stays & (worth > least + near))
    return int(wrong.sum())


def _overlap(index: Tensor, exact: Tensor) -> float:
    """Share of the kept slots that are among the best in float64, ties included."""
    least = exact.topk(index.shape[-1], dim=-1).values[..., -1:]
    tied = 1e-12 * least.abs().nan_to_num(posinf=0.0)
    return float((exact.gather(-1, index) >= least - tied).double().mean())


def _moved(graph: Evict, given: Found, got: Found, index: Tensor, count: int, rtol: float) -> None:
    """Check that everything a slot has moved with it; to the bit, or as float16 holds it.

    Raises:
        ShapeError: other than the budget's slots, or something that did not move with its slot.
    """
    if index.shape[-1] != count:
        raise ShapeError(f"the graph keeps {index.shape[-1]} slots of {count}")
    for name in ("keys", "values", "positions", *graph.form.slot_state):
        if name in graph.form.eviction.policy.state:
            continue  # the graph updates state before it evicts
        whole, kept = given[name], got[f"kept_{name}"]
        at = index.view(*index.shape, *(1,) * (whole.dim() - 3))
        at = at.expand(*index.shape, *whole.shape[3:])
        moved = whole.gather(2, at)
        if whole.dtype == torch.float32 and rtol > RTOL:
            moved, kept = moved.half(), kept.half()
        if not torch.equal(moved, kept):
            raise ShapeError(f"kept_{name} is not {name} of the slots that kept_slot names")


def _same_shape(name: str, value: Tensor, expected: Tensor) -> None:
    if value.shape != expected.shape:
        raise ShapeError(
            f"{name} has shape {tuple(value.shape)}, expected is {tuple(expected.shape)}"
        )

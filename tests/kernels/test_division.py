"""A layer's slots shared out between its heads by kernels, beside Ada-KV's own tensor code."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, pytestmark  # noqa: F401

from kvcap import kernels
from kvcap.kernels import division
from kvcap.kernels.arguments import Pins
from kvcap.policies.base import RowRanges
from kvcap.policies.budgets.adakv import AdaKV

SEEN = 9000


def layer(batch, heads, longest, average, *, ties=0, due=True, seed=0):
    """Scores, positions and numbers of rows, of which some hold more than they may have."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(batch, heads, longest, generator=g)
    if ties:
        scores = (scores * ties).round() / ties
    scores[..., ::7] = float("nan")
    positions = torch.stack(
        [torch.randperm(longest + 40, generator=g)[:longest] for _ in range(batch * heads)]
    )
    positions = positions.view(batch, heads, longest).int()
    lengths = torch.randint(longest // 3, longest + 1, (batch * heads,), generator=g)
    targets = lengths - (3 if due else 0)
    block = 5
    room = average + block
    starts = torch.arange(batch * heads + 1) * room + 11
    row_pins = torch.randint(0, 4, (batch * heads, 2), generator=g)
    numbers = [x.int().to(DEVICE) for x in (starts, lengths, row_pins, targets)]
    rows = RowRanges(numbers[0], numbers[1], longest)
    return scores.to(DEVICE), positions.to(DEVICE), rows, numbers[2], numbers[3], average, block


CASES = [
    ((1, 2, 40, 20), {}),
    ((1, 8, 100, 60), {"ties": 1}),
    ((3, 5, 33, 20), {"ties": 2, "seed": 1}),
    ((2, 3, 50, 49), {"seed": 2}),
    ((1, 4, 300, 90), {"ties": 1, "seed": 3}),
    ((2, 8, 41, 14), {"ties": 1, "seed": 4}),  # pins take most of it
    ((2, 3, 30, 20), {"due": False}),
    ((1, 3, 3000, 1500), {"ties": 3, "seed": 5}),
]


@pytest.mark.parametrize("spans", [(), ((3, 9), (20, 22))])
@pytest.mark.parametrize("safeguard", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(("sizes", "more"), CASES)
@pytest.mark.parametrize("at_once", [division.MOST_AT_ONCE, 32])
def test_heads_get_what_their_own_code_gives(sizes, more, safeguard, spans, at_once, monkeypatch):
    monkeypatch.setattr(division, "MOST_AT_ONCE", at_once)
    scores, positions, rows, row_pins, targets, average, block = layer(*sizes, **more)
    budget = AdaKV(safeguard=safeguard)
    # Newest tokens that stay are among those that are held.
    pins = Pins(sizes[2] + 40, spans)
    given = scores, positions, pins, rows, row_pins, targets, average, block
    expected = division.by_split(budget, *given)
    with kernels.use("triton"):
        shares = kernels.divide(budget, *given)
    for name, one, other in zip(shares._fields, shares, expected, strict=True):
        assert one.tolist() == other.tolist(), name
    kept = shares.kept.view(sizes[0], -1)
    if more.get("due", True):
        assert (kept <= rows.lengths.view(sizes[0], -1)).all()
        assert (shares.budgets.view(sizes[0], -1).sum(-1) == sizes[1] * average).all()


@pytest.mark.parametrize("choice", ["eager", "triton"])
def test_a_budget_of_ones_own_divides_by_its_own_code(choice):
    class Mine(AdaKV):
        def split(self, scores, pinned, positions, lengths, budget):
            return (lengths - 1).long()

    given = list(layer(1, 3, 30, 30))
    with kernels.use(choice):
        shares = kernels.divide(Mine(), *given[:2], Pins(SEEN, ()), *given[2:])
    assert shares.kept.tolist() == (given[2].lengths - 1).tolist()

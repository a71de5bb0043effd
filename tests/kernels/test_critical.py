"""CriticalKV over rows of a pool against its own code, in triton's interpreter too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreted import DEVICE, pytestmark  # noqa: F401
from twins import ints, randn

from kvcap import kernels
from kvcap.kernels.arguments import Pins
from kvcap.policies.base import Observation, RowRanges
from kvcap.policies.rescorers.criticalkv import CriticalKV


def observed(batch, heads, slots, seed=0, budget=20, spans=()):
    """An observation of slots of which some are worth the same."""
    g = torch.Generator().manual_seed(seed)
    ages = [torch.randperm(2 * slots, generator=g)[:slots] for _ in range(batch * heads)]
    positions = torch.stack(ages).view(batch, heads, slots).int().to(DEVICE)
    keys = randn(batch, heads, slots, 4, seed=seed)
    norm = randn(batch, heads, slots, seed=seed + 1).abs()
    obs = Observation(
        keys,
        keys,
        positions,
        2 * slots,
        budget,
        queries=randn(batch, heads, 3, 4),
        state={"output_norm": norm},
        pinned_spans=spans,
    )
    scores = (randn(batch, heads, slots, seed=seed + 2) * 3).round() / 3  # many are equal
    return obs, scores


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(
    ("batch", "heads", "slots", "budget", "pins", "spans"),
    [(1, 2, 41, 40, (0, 0), ()), (2, 3, 60, 30, (4, 8), ((30, 37),)),
     (1, 1, 2500, 2000, (1, 32), ()), (1, 1, 9, 4, (0, 9), ())],
)  # fmt: skip
def test_rescored_as_by_its_own_code(batch, heads, slots, budget, pins, spans, alpha):
    obs, scores = observed(batch, heads, slots, budget=budget, spans=spans)
    sinks, recents = pins
    pinned = (obs.positions < sinks) | (obs.positions >= obs.num_tokens - recents)
    for start, stop in spans:
        pinned |= (obs.positions >= start) & (obs.positions < stop)
    rescorer = CriticalKV(alpha=alpha)
    expected = rescorer.rescore(scores, pinned, obs)
    count = batch * heads  # rows of a pool, the last one first
    starts = ints([slots * (count - 1 - i) for i in range(count)])
    norm = obs.state["output_norm"].flatten(0, 1).flip(0).flatten()
    rows = RowRanges(starts, ints([slots] * count), slots)
    rescored = kernels.rescore(
        rescorer,
        scores,
        Pins(obs.num_tokens, spans),
        replace(obs, rows=rows, state={"output_norm": norm}),
        ints([budget] * count),
        ints([pins] * count),
    )
    torch.testing.assert_close(rescored[~pinned], expected[~pinned], rtol=1e-6, atol=1e-7)


def test_slots_behind_a_row_play_no_part():
    """Slots behind a row hold arbitrary scores, and positions above all others."""
    lengths, slots, budget, pins = [40, 33, 22], 40, 20, (4, 8)
    obs, scores = observed(1, len(lengths), slots, budget=budget)
    rescorer, norm = CriticalKV(), obs.state["output_norm"]
    positions, given = obs.positions.clone(), scores.clone()
    for head, length in enumerate(lengths):
        positions[:, head, length:] = (1 << 30) + torch.arange(slots - length, device=DEVICE)
        given[:, head, length:] = float("nan")
    rescored = kernels.rescore(
        rescorer,
        given,
        Pins(obs.num_tokens, ()),
        replace(
            obs,
            positions=positions,
            rows=RowRanges(ints([0, slots, 2 * slots]), ints(lengths), slots),
            state={"output_norm": norm.flatten()},
        ),
        ints([budget] * len(lengths)),
        ints([pins] * len(lengths)),
    )
    for head, length in enumerate(lengths):
        own = slice(None), slice(head, head + 1), slice(length)
        ages = obs.positions[own]
        pinned = (ages < pins[0]) | (ages >= obs.num_tokens - pins[1])
        alone = replace(obs, keys=obs.keys[own], positions=ages, state={"output_norm": norm[own]})
        expected = rescorer.rescore(scores[own], pinned, alone)
        torch.testing.assert_close(rescored[own][~pinned], expected[~pinned])

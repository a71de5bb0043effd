"""LagKV's scores of rows by the kernel, beside the policy's own code."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, pytestmark  # noqa: F401

from kvcap.kernels import lagkv
from kvcap.policies.base import Observation, Rows
from kvcap.policies.lagkv import LagKV

BEHIND = 1 << 30


@pytest.mark.parametrize(
    ("lengths", "size", "lag", "dtype"),
    [
        ([40, 7, 90, 33], 8, 4, torch.float32),
        ([64, 65, 63, 1], 80, 32, torch.float32),
        ([200, 3], 64, 100, torch.bfloat16),
        ([31, 32, 96], 24, 5, torch.float16),
    ],
)
def test_rows_score_as_each_alone(lengths, size, lag, dtype):
    g, room = torch.Generator().manual_seed(3), max(lengths) + 5
    pool = torch.randn(2, len(lengths) * room + 3, size, generator=g).to(DEVICE, dtype)
    positions = torch.stack([torch.randperm(4000, generator=g)[:room] for _ in lengths]).int()
    starts = torch.arange(len(lengths)) * room + 3
    padded = positions.clone()
    for row, n in enumerate(lengths):
        padded[row, n:] = BEHIND + torch.arange(room - n)
    rows = Rows(starts.int().to(DEVICE), torch.tensor(lengths).int().to(DEVICE), room)
    found = lagkv.scores(*pool, padded[None].to(DEVICE), rows, lag)
    for row, n in enumerate(lengths):
        begin = int(starts[row])
        keys, values = (x[begin : begin + n][None, None].float() for x in pool)
        places = positions[row, :n][None, None].to(DEVICE)
        expected = LagKV(lag=lag).score(Observation(keys, values, places, 4000, n))
        torch.testing.assert_close(found[0, row, :n], expected[0, 0], rtol=0, atol=1e-6)


def test_options_that_are_covered():
    assert lagkv.covers(LagKV())
    assert not lagkv.covers(LagKV(sinks=4))
    assert not lagkv.covers(LagKV(lag=200))

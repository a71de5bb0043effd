"""Ways to attend over heads that hold unequally many tokens; by triton's interpreter on a CPU."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, pytestmark  # noqa: F401

from kvcap.lab.bench import ragged
from kvcap.policies.base import Logits
from kvcap.runtime.attention.functions import attend_rows


@pytest.mark.parametrize("length", [1, 3])
def test_all_ways_attend_alike(length):
    held = [5, 40, 9, 64, 30, 65, 12, 7]
    segments = ragged._segments(held, length, DEVICE, torch.float32, 4)
    query, pool = torch.randn(1, ragged.HEADS, length, ragged.SIZE).to(DEVICE), segments[0].pool
    expected = ragged.heads(query, segments)
    row_table = ragged.rows_of(segments)
    assert row_table.starts[-1] == len(pool.keys)
    for output in (
        attend_rows(query, pool.keys, pool.values, row_table, Logits(ragged.SCALING)),
        ragged.padded(query, segments),
    ):
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)

"""Times attention over heads that hold unequally many tokens, to find the fastest way.

'uniform': one call over heads of equal lengths, as the baseline. 'heads': one call per head over
its true length. 'rows': kvcap's kernel, which reads all heads in place with one launch (CUDA).
'padded': all heads are copied to the length of the longest and masked, which would need more than
the cache's fixed bytes. The runtime uses rows if it can, else heads. Reads `budgets`, `block_size`,
`repeats`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.measure import percentiles, seconds
from kvcap.evals.reports import device_name
from kvcap.kernels import decode
from kvcap.kernels.choice import ready
from kvcap.policies.base import Logits, RowRanges
from kvcap.runtime.attention.functions import attend, attend_rows
from kvcap.runtime.cache.pool import Segment, SlotPool

HEADS, KV_HEADS, SIZE = 32, 8, 128
SCALING = SIZE**-0.5
SHARES = (0.3, 0.3, 0.5, 0.6, 0.8, 1.2, 1.8, 2.5)  # shares of the budget by AdaKV on pocket
DEFAULTS = {"budgets": (1024, 4096)}
COLUMNS = ("way", "device", "dtype", "budget", "block", "ms", "ratio", "error")


def run(options: BenchmarkOptions) -> Result:
    """Time one layer's attention, in ms, with the largest difference from 'heads'."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = (torch.float32, torch.bfloat16)
    rows: list[dict[str, Any]] = []
    for dtype, budget, length in product(dtypes, options.budgets, (1, options.block_size)):
        rows += _measure(device, dtype, budget, length, options)
    sizes: dict[str, Any] = {
        "device": device_name(device),
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_size": SIZE,
        "shares": SHARES,
    }
    return Result("ragged", COLUMNS, rows, sizes)


def _measure(
    device: str, dtype: torch.dtype, budget: int, length: int, options: BenchmarkOptions
) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    uniform = _segments([budget] * KV_HEADS, length, device, dtype, options.block_size)
    ragged = _segments([int(x * budget) for x in SHARES], length, device, dtype, options.block_size)
    query = torch.randn(1, HEADS, length, SIZE, generator=generator).to(device, dtype)
    ways: dict[str, Callable[[], Tensor]] = {
        "uniform": lambda: _uniform(query, uniform),
        "heads": lambda: heads(query, ragged),
        "padded": lambda: padded(query, ragged),
    }
    pool = ragged[0].pool
    if ready(query) and decode.covers(query, pool.keys, pool.values, KV_HEADS):
        row_table = rows_of(ragged)
        ways["rows"] = lambda: attend_rows(
            query, pool.keys, pool.values, row_table, Logits(SCALING)
        )
    expected, base = heads(query, ragged), None
    rows = []
    for way, call in ways.items():

        def timed(call: Callable[[], Tensor] = call) -> None:
            call()
            if device == "cuda":
                torch.cuda.synchronize()

        timed()
        error = 0.0 if way == "uniform" else float((call().float() - expected.float()).abs().max())
        times = percentiles([seconds(timed) * 1000 for _ in range(20 * options.repeats)])
        base = base or times
        rows.append(
            {
                "way": way,
                "device": device,
                "dtype": str(dtype).removeprefix("torch."),
                "budget": budget,
                "block": length,
                "ms": times,
                "ratio": times["p50"] / base["p50"],
                "error": error,
            }
        )
    return rows


def rows_of(segments: list[Segment]) -> RowRanges:
    """Return first slots and lengths of the heads, for kernels."""
    starts = [*(s.start for s in segments), segments[-1].start + segments[-1].slots]
    held = [s.held for s in segments]
    device = segments[0].pool.keys.device
    where, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, held))
    return RowRanges(where, lengths, max(held))


def _segments(
    held: list[int], length: int, device: str, dtype: torch.dtype, block: int
) -> list[Segment]:
    """Make heads with `held` tokens each, of which the last `length` are those of a block."""
    pool = SlotPool(sum(held) + KV_HEADS * block, SIZE, dtype, device)
    segments, start = [], 0
    for head, budget in enumerate(held):
        segments.append(Segment(pool, start, budget, block, head=head, layer_heads=KV_HEADS))
        segments[-1].held = budget + length
        start += segments[-1].slots
    pool.keys.normal_()
    pool.values.normal_()
    return segments


def _uniform(query: Tensor, segments: list[Segment]) -> Tensor:
    first = segments[0]
    whole = Segment(first.pool, 0, first.budget, first.block, heads=KV_HEADS)
    whole.held = first.held
    return attend(query, whole.keys, whole.values, Logits(SCALING))


def heads(query: Tensor, segments: list[Segment]) -> Tensor:
    """Attend by one call per head."""
    out = torch.empty_like(query)
    for s in segments:
        s.rows_of(out).copy_(attend(s.rows_of(query), s.keys, s.values, Logits(SCALING)))
    return out


def padded(query: Tensor, segments: list[Segment]) -> Tensor:
    """Attend with all heads copied to the length of the longest, and masked."""
    length, longest = query.shape[2], max(s.held for s in segments)
    keys = query.new_zeros(1, KV_HEADS, longest, SIZE)
    values = torch.zeros_like(keys)
    visible = torch.zeros(1, KV_HEADS, length, longest, dtype=torch.bool, device=query.device)
    for s in segments:
        keys[:, s.head, : s.held] = s.keys[:, 0]
        values[:, s.head, : s.held] = s.values[:, 0]
        mask = torch.ones(length, s.held, dtype=torch.bool, device=query.device)
        visible[:, s.head, :, : s.held] = mask.tril(s.held - length)
    mask = visible.repeat_interleave(HEADS // KV_HEADS, 1)
    return scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=SCALING, enable_gqa=True
    )

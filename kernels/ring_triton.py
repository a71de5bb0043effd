# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines the Triton function of `kernels/ring.py`, which imports this when needed."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens", "count"])
def push(
    ring,  # [B, H, LENGTH, SIZE] integers, contiguous
    shift,  # [B, K, LENGTH], contiguous
    queries,  # [B, H, T, SIZE] integers
    tokens,  # T
    count,  # [] int32, tokens that are no fillers, or None: all
    query_b,
    query_h,
    query_t,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LENGTH: tl.constexpr,
    LENGTH_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
):
    """Append to one query head's ring, and for the first of a group to its KV head's shifts."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    i, d = tl.arange(0, LENGTH_PAD), tl.arange(0, SIZE_PAD)[None, :]
    inside = i < LENGTH
    taken = tokens
    if count is not None:
        taken = tl.load(count)
    old = i + taken  # place in the ring, or in the block behind it, of the query that moves to i
    new = (old - LENGTH).to(tl.int64)
    wide = inside[:, None] & (d < SIZE)
    to = ring + row * (LENGTH * SIZE) + d
    source = queries + batch * query_b + head * query_h + new[:, None] * query_t + d
    before = tl.load(to + old[:, None] * SIZE, wide & (old < LENGTH)[:, None], 0)
    arrived = tl.load(source, wide & (old >= LENGTH)[:, None], 0)
    shifts = shift + row // GROUP * LENGTH
    mine = i < tl.where(row % GROUP == 0, LENGTH, 0)
    moved = tl.load(shifts + old, mine & (old < LENGTH), 0)
    tl.debug_barrier()  # all of the ring is read before any of it is written
    tl.store(to + i[:, None] * SIZE, tl.where((old < LENGTH)[:, None], before, arrived), wide)
    tl.store(shifts + i, moved, mine)

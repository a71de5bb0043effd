# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Scores slots by a window of queries, without a matrix of window times slots in memory.

It takes two passes over keys and values. `forward` splits the slots into parts, and writes each
part's output, largest logit and sum of exponentials; `merge` combines the parts. `score` reads keys
and values again from the end, as the GPU's cache still holds those read last, and sums over the
window what an epilogue computes of every attention weight `p = A_tj`. Without atomics, two runs are
equal to the bit. Knows no policy; triton is imported when first needed.

Letters are those of `Observation`. A tile has `N` slots and `R = GP·WB` rows: the `WB` queries of a
block in time of each of `GP` query heads, both padded to powers of two. If query heads are summed
and there are many queries, the heads of a time are neighbouring rows instead, without padding. If
attention's output is known, the first pass computes none.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from kvcap.kernels.device import Target, multiprocessors, power_of_two, seen_and_clock, target
from kvcap.policies.base import Group, Observation

OF_HEADS = ("cake", "variance")
"""Names the epilogues that need all queries of a query head."""
NEEDS_OUTPUT = ("dropkv", "andpro", "key", "joint")
"""Names the epilogues that read attention's output `a`; 'attention', 'value' and CAKE's do not."""
MANY_ROWS = 512  # queries of a KV head; with more, a program mostly reads queries
MOST_ROWS = 128  # queries of a KV head that a program has at once, if `a` is not needed
NARROW = 32  # queries that it has at once if `a` is needed, or if there are many
ROOMY = 128 * 1024  # bytes of shared memory for a program; with less, it has fewer queries


class Cut(NamedTuple):
    """A division of the work of one pass into programs."""

    WB: int  # queries of a block in time, padded; rows of a block, if heads are neighbouring rows
    blocks: int  # number of blocks in time
    N: int  # slots of a tile
    chunk: int  # slots of a part, a multiple of N
    parts: int


class Tiling(NamedTuple):
    """A division of the work of one call into tiles."""

    DP: int  # head size, padded
    GP: int  # query heads of a group, padded
    heads: int  # query heads of a group, if those of a time are neighbouring rows; else 0
    forward: Cut
    score: Cut  # its programs loop over all blocks in time
    warps: int
    stages: int


@lru_cache
def tiling(
    rows: int,
    G: int,
    w: int,
    n: int,
    D: int,
    itemsize: int,
    kind: str,
    group: Group | None,
    sms: int,
    gpu: Target | None = None,
    attended: bool = False,
) -> Tiling:
    """Return sizes of tiles by a few rules, measured on an H200 and an H100.

    On GPUs with less shared memory the sizes are small enough to compile.

    Args:
        rows: `B·K`, KV heads of all sequences.
        G: query heads of each.
        w: queries.
        n: slots.
        D: head size.
        itemsize: bytes of a key's element.
        kind: the epilogue.
        group: see `scores`.
        sms: multiprocessors.
        gpu: the GPU of the tensors; None on a CPU.
        attended: whether attention's output is known, if the epilogue needs it.
    """
    DP, GP = power_of_two(D, 16), power_of_two(G)
    many, output = GP * w > MANY_ROWS, kind in NEEDS_OUTPUT
    # If query heads are summed, they may be rows in any order.
    added = group in ("sum", "mean") and kind not in OF_HEADS
    small = gpu is not None and gpu.shared_memory < ROOMY
    narrow = min(NARROW, max(16, 8192 // (DP * itemsize))) if small and output else NARROW
    N = max(16, min(128, 16384 // (DP * itemsize)))

    def cut(width: int, blocks: int, N: int, most: int, at_once: int, programs: int) -> Cut:
        chunk = -(-max(most * N, -(-n // max(1, at_once // programs))) // N) * N
        return Cut(width, blocks, N, chunk, -(-n // chunk))

    # As many programs as fit on the multiprocessors, so that all start and end together.
    if many and added:
        wide = N if small else min(128, 2 * N)
        few = -(-G * w // narrow)
        score = cut(narrow, few, wide, 1, 2 * sms, rows)
        if attended or not output:
            return Tiling(DP, 1, G, cut(narrow, few, wide, 1, 2 * sms, rows * few), score, 4, 2)
        blocks = -(-G * w // (2 * NARROW))
        forward = cut(2 * NARROW, blocks, N, 2, sms, rows * blocks)
        return Tiling(DP, 1, G, forward, score, 4, 2)
    most = (2 * narrow if many and not small else narrow) if output else MOST_ROWS
    if small and not output and kind not in OF_HEADS:
        most = min(most, 32768 // (DP * itemsize))
    WB = max(min(power_of_two(w), max(1, most // GP)), 16 // GP)
    blocks = -(-w // WB)
    at_once = sms if many and output else 2 * sms
    forward, score = (cut(WB, blocks, N, 2, at_once, x) for x in (rows * blocks, rows))
    stages = 2 if many or small or (output and blocks > 1) else 3
    return Tiling(DP, GP, 0, forward, score, 4, stages)


def parts_of_output(kind: str, itemsize: int) -> int:
    """Return how many numbers of `itemsize` bytes represent a number of `a`, as their sum.

    `|a - v|²` is a small difference of large numbers if a query attends to one slot, and three
    numbers of 16 bits represent a float32 exactly. In 'joint', where `|v|²` is added, two suffice.
    """
    if kind not in NEEDS_OUTPUT or itemsize == 4:
        return int(kind in NEEDS_OUTPUT)
    return 2 if kind == "joint" else 3


def covers_cake(groups: int, queries: int) -> bool:
    """Return whether a program can have all queries of a KV head at once, for `OF_HEADS`."""
    return (
        power_of_two(groups) * max(power_of_two(queries), 16 // power_of_two(groups)) <= MOST_ROWS
    )


def scores(
    obs: Observation,
    kind: str,
    group: Group | None,
    *,
    epsilon: float = 0.0,
    rounded: bool = False,
) -> Tensor:
    """Return the sum of an epilogue over the observed queries, for every slot.

    Args:
        obs: queries, keys, values and positions; their last stride is 1. With `rows`, keys and
            values are [B, K, slots, D] views of a pool, and positions [B, K, longest].
        kind: the epilogue: 'dropkv', 'andpro', 'attention', 'value', 'key' or 'joint'; 'entropy',
            `-p ln p`; and if `covers_cake`, 'variance', `epsilon` times the variance over a query
            head's queries, or 'cake', that plus the mean.
        group: how the query heads of a KV head are combined; None: not at all.
        epsilon: see 'variance'; for 'dropkv', the epsilon of its ratio.
        rounded: whether 'dropkv' rounds `p` to bfloat16.

    Returns:
        [B, K, n], or [B, K, G, n] without `group`; float32.
    """
    from kvcap.kernels.launch import empty, launch
    from kvcap.kernels.window_triton import forward, merge, score

    q, k, v, positions = obs.queries, obs.keys, obs.values, obs.positions
    assert q is not None
    (B, K, n, D), w, device = (*positions.shape, k.shape[3]), q.shape[2], k.device
    starts, lengths = (None, None) if obs.rows is None else obs.rows[:2]
    G, capped = q.shape[1] // K, obs.rule.softcap is not None
    attended = (
        obs.attended.to(k.dtype) if kind in NEEDS_OUTPUT and obs.attended is not None else None
    )
    output = kind in NEEDS_OUTPUT and attended is None
    sms = multiprocessors(device)
    if obs.rows is not None:  # rows share the pool's slots, so programs are as for equal rows
        sms = min(sms * 4, -(-sms * B * K * n // k.shape[2]))
    has_output = attended is not None
    t = tiling(B * K, G, w, n, D, k.element_size(), kind, group, sms, target(device), has_output)
    first, second = t.forward, t.score
    R, rows = t.GP * first.WB, B * K * first.blocks
    a_parts = parts_of_output(kind, k.element_size()) if output else 0
    out = empty(B, K, n, device=device) if group else empty(B, K, G, n, device=device)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *positions.stride()[:2])
    shape, scale = (
        (K, G, w, n, *seen_and_clock(obs.num_tokens, device)),
        (float(obs.rule.scale), float(obs.rule.softcap or 0)),
    )
    sizes, options = (D, t.DP, t.heads, t.GP), {"num_warps": t.warps, "num_stages": t.stages}
    begins = tuple(x.data_ptr() % 16 for x in (q, k, v, positions))
    static = (K, G, sizes, t.warps, t.stages, capped)
    key = (device, k.dtype, positions.dtype, begins, strides, static, starts is None)
    part_sums = empty(2 * rows * first.parts * R, device=device)
    part = empty(rows * first.parts * R * t.DP if output else 0, device=device)
    sums = empty((3 if output else 2) * rows * R, device=device)
    scratch = empty(a_parts, rows * R * t.DP, device=device, dtype=k.dtype)
    a = scratch if attended is None else attended
    variant = (first.WB, first.N, capped, output)
    launch(
        forward,
        (first.parts, B * K, first.blocks),
        (key, variant),
        (
            q,
            k,
            v,
            positions,
            starts,
            lengths,
            part,
            part_sums,
            *strides,
            *shape,
            first.chunk,
            *scale,
            *sizes,
            *variant,
        ),
        **options,
    )
    sinks = None if obs.rule.sinks is None else obs.rule.sinks.float().contiguous()
    beside = None if sinks is None else sinks.data_ptr() % 16
    padded = power_of_two(first.parts)
    at_once = min(R, max(1, 2048 // (padded * (t.DP if output else 1))))
    merged = (R, first.WB, t.heads, t.DP, padded, at_once, a_parts)
    launch(
        merge,
        (rows, R // at_once, 1),
        (device, merged, k.dtype, beside),
        (part, part_sums, scratch, sums, sinks, first.parts, K, G, first.blocks, *merged),
        num_warps=2,
    )
    epilogue = (
        second.WB,
        second.N,
        second.blocks > 1,
        has_output,
        kind,
        group or "",
        max(a_parts, has_output),
        capped,
        rounded,
    )
    of_a = a.stride()[:3] if has_output else (0, 0, 0)
    begins = sums.data_ptr() % 16, a.data_ptr() % 16
    launch(
        score,
        (second.parts, B * K, 1),
        (key, begins, of_a, epilogue),
        (
            q,
            k,
            v,
            positions,
            starts,
            lengths,
            a,
            sums,
            out,
            *strides,
            *of_a,
            *shape,
            second.chunk,
            *scale,
            epsilon,
            second.blocks,
            first.blocks * R,
            *sizes,
            *epilogue,
        ),
        **options,
    )
    return out

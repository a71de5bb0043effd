# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""Scores slots by a window of queries, without holding a matrix of window times slots.

Two passes over keys and values: `forward` splits the slots, and each part leaves its output, the
largest logit and the sum of exponentials; `merge` puts the parts together; `score` reads keys and
values once more, from the end, where the cache of the chip still holds them, and adds up over the
window what one epilogue makes of every `p = A_tj`. No atomics: two runs are equal to the bit. Knows
no policy; triton is imported when first needed.

Letters as in `Observation`, and of a tile: `N` slots, `R = GP·WB` rows, the `WB` queries of a block
in time of each of `GP` query heads (both padded to powers of two).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from kvcap.kernels.device import address, multiprocessors, power_of_two, told
from kvcap.policies.base import Group, Observation

NEEDS_OUTPUT = ("dropkv", "andpro", "key", "joint")
"""Epilogues that read `a`; `attention`, `value` and those that CAKE has do not."""
MANY_ROWS = 512  # queries of a KV head; with more, reading them is most of what a program does
MOST_ROWS = 128  # queries of a KV head that a program has at once, where `a` is not needed


class Tiling(NamedTuple):
    """How the work of one call is cut."""

    DP: int  # head size, padded
    GP: int  # query heads of a group, padded
    WB: int  # queries of a block in time, padded
    blocks: int  # of those
    N: int  # slots of a tile
    chunk: int  # slots of a part of `forward`, a multiple of N
    parts: int
    score_chunk: int  # likewise of `score`, whose programs do all blocks in time
    score_parts: int
    warps: int
    stages: int


@lru_cache
def tiling(
    rows: int, G: int, w: int, n: int, D: int, itemsize: int, output: bool, sms: int
) -> Tiling:
    """Sizes by a few rules, measured on an H200.

    Args:
        rows: `B·K`, the KV heads there are.
        G: query heads of each.
        w: queries.
        n: slots.
        D: head size.
        itemsize: bytes of a key's element.
        output: whether `a` is needed, which takes registers.
        sms: multiprocessors.
    """
    DP, GP = power_of_two(D, 16), power_of_two(G)
    many = GP * w > MANY_ROWS
    most = (64 if many else 32) if output else MOST_ROWS
    WB = max(min(power_of_two(w), max(1, most // GP)), 16 // GP)
    blocks = -(-w // WB)
    N = max(16, min(128, 16384 // (DP * itemsize)))
    # All programs start at once and end together. Two fit on a multiprocessor, of those with many
    # rows and `a` one.
    at_once = sms if many and output else 2 * sms
    chunk, score_chunk = (
        -(-max(2 * N, -(-n // max(1, at_once // programs))) // N) * N
        for programs in (rows * blocks, rows)
    )
    stages = 2 if many or (output and blocks > 1) else 3
    return Tiling(
        DP, GP, WB, blocks, N, chunk, -(-n // chunk), score_chunk, -(-n // score_chunk), 4, stages
    )  # fmt: skip


def parts_of_output(kind: str, itemsize: int) -> int:
    """How many numbers of `itemsize` bytes stand for one of `a`, whose sum it is.

    `|a - v|²` is a small difference of large numbers where a query looks at one slot, and three
    numbers of 16 bits hold a float32 whole. In 'joint' it stands beside `|v|²`, for which two do.
    """
    if kind not in NEEDS_OUTPUT or itemsize == 4:
        return int(kind in NEEDS_OUTPUT)
    return 2 if kind == "joint" else 3


def covers_cake(groups: int, queries: int) -> bool:
    """Whether a program has all queries of a KV head at once, as 'cake' and 'variance' need."""
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
    """Sum of an epilogue over the observed queries.

    Args:
        obs: queries, keys, values and positions, whatever their strides but the last. With `rows`
            keys and values are [B, K, slots, D] views of a pool, and positions [B, K, longest].
        kind: the epilogue: 'dropkv', 'andpro', 'attention', 'value', 'key' or 'joint'; 'entropy',
            `-p ln p`; where `covers_cake`, 'variance' over the queries of each query head times
            `epsilon`, or 'cake', the mean besides.
        group: how the query heads of a KV head are put together; None: not at all.
        epsilon: of the ratio of 'dropkv'.
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
    G, output, capped = q.shape[1] // K, kind in NEEDS_OUTPUT, obs.softcap is not None
    sms = multiprocessors(device)
    if obs.rows is not None:  # rows share the pool's slots: as many programs as for equal rows
        sms = min(sms * 4, -(-sms * B * K * n // k.shape[2]))
    t = tiling(B * K, G, w, n, D, k.element_size(), output, sms)
    R, rows = t.GP * t.WB, B * K * t.blocks
    part_sums = empty(2 * rows * t.parts * R, device=device)
    part = empty(rows * t.parts * R * t.DP if output else 0, device=device)
    sums = empty((3 if output else 2) * rows * R, device=device)
    a_parts = parts_of_output(kind, k.element_size())
    a = empty(a_parts, rows * R * t.DP, device=device, dtype=k.dtype)
    out = empty(B, K, n, device=device) if group else empty(B, K, G, n, device=device)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *positions.stride()[:2])
    shape, scale = (
        (K, G, w, n, *told(obs.num_tokens, device)),
        (float(obs.scaling), float(obs.softcap or 0)),
    )
    sizes, options = (D, t.DP, t.GP, t.WB, t.N), {"num_warps": t.warps, "num_stages": t.stages}
    begins = tuple(address(x) % 16 for x in (q, k, v, positions))
    sinks = None if obs.sinks is None else obs.sinks.float().contiguous()
    beside = None if sinks is None else address(sinks) % 16
    static = (K, G, sizes, t.warps, t.stages, output, capped)
    key = (device, k.dtype, positions.dtype, begins, strides, static, starts is None)
    launch(
        forward, (t.parts, B * K, t.blocks), key,
        (q, k, v, positions, starts, lengths, part, part_sums, *strides, *shape, t.chunk, *scale,
         *sizes, capped, output), **options,
    )  # fmt: skip
    padded = power_of_two(t.parts)
    at_once = min(R, max(1, 2048 // (padded * (t.DP if output else 1))))
    launch(
        merge, (rows, R // at_once, 1), (device, R, t.WB, t.DP, padded, a_parts, k.dtype, beside),
        (part, part_sums, a, sums, sinks, t.parts, K, G, t.blocks,
         R, t.WB, t.DP, padded, at_once, a_parts), num_warps=2,
    )  # fmt: skip
    variant = (t.blocks > 1, kind, group or "", a_parts, capped, rounded)
    launch(
        score, (t.score_parts, B * K, 1), (key, variant),
        (q, k, v, positions, starts, lengths, a, sums, out, *strides, *shape, t.score_chunk,
         *scale, epsilon, t.blocks, *sizes, *variant), **options,
    )  # fmt: skip
    return out

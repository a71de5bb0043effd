# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines the Triton functions of `kernels/lagkv.py`, which imports this when needed."""

import triton
import triton.language as tl


@triton.jit
def _stand_out(x, mine, its, in_mine, in_its, d, inside, SIZE: tl.constexpr):
    """Return how far tokens lie outside the next partition's range, in shares of 1, [L].

    `x` is [slots, D]; `mine` and `its` [L] are the slots of the partition and of the next one.
    """
    next_part = in_its[:, None] & inside
    its_at = x + its.to(tl.int64)[:, None] * SIZE + d
    low = tl.min(tl.load(its_at, next_part, float("inf")).to(tl.float32), 0)[None, :]
    high = tl.max(tl.load(its_at, next_part, float("-inf")).to(tl.float32), 0)[None, :]
    width = tl.maximum(tl.where(inside, high - low, 1.0), 1e-8)
    part = in_mine[:, None] & inside
    own = tl.load(x + mine.to(tl.int64)[:, None] * SIZE + d, part, 0.0).to(tl.float32)
    own = tl.where(part, (own - tl.where(inside, low, 0.0)) * (1.0 / width), 0.0)
    total, squares = tl.sum(own, 1), tl.sum(own * own, 1)
    variance = (squares - total * total / SIZE) / (SIZE - 1)
    spread = tl.sqrt(tl.maximum(variance, 0.0))
    weights = tl.where(in_mine, tl.exp(spread - tl.max(tl.where(in_mine, spread, 0.0), 0)), 0.0)
    return weights / tl.sum(weights, 0)


@triton.jit(do_not_specialize=["slots"])
def score_partition(
    keys,  # [slots of the pool, SIZE]
    values,  # likewise
    order,  # [B·K, n] float32, the slots of a row in time order
    starts,  # [B·K or more] int32
    lengths,  # [B·K] int32
    out,  # [B·K, n]
    slots,  # n
    lag,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    LAG_PAD: tl.constexpr,
):
    """Write the scores of one partition: ranks within it, or 1 in a row's last whole partition."""
    row = tl.program_id(1).to(tl.int64)
    held, begin = tl.load(lengths + row), tl.program_id(0) * lag
    i, d = tl.arange(0, LAG_PAD), tl.arange(0, SIZE_PAD)[None, :]
    in_mine = (i < lag) & (begin + i < held)
    in_its = (i < lag) & (begin + lag + i < held)
    order += row * slots + begin
    mine = tl.load(order + i, in_mine, 0.0).to(tl.int32)
    score = tl.full([LAG_PAD], 1.0, tl.float32)
    if begin < (held // lag - 1) * lag:
        its, first = tl.load(order + lag + i, in_its, 0.0).to(tl.int32), tl.load(starts + row)
        inside = d < SIZE
        deviation = _stand_out(keys, first + mine, first + its, in_mine, in_its, d, inside, SIZE)
        deviation += _stand_out(values, first + mine, first + its, in_mine, in_its, d, inside, SIZE)
        worth = tl.where(in_mine, deviation, float("inf"))
        below = worth[None, :] < worth[:, None]
        before = (worth[None, :] == worth[:, None]) & (i[None, :] < i[:, None])
        score = tl.sum((below | before).to(tl.int32), 1).to(tl.float32) / lag
    tl.store(out + row * slots + mine, score, in_mine)

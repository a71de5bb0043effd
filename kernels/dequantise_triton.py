# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""The triton functions of `kernels/dequantise.py`, which imports this when it is first needed."""

import triton
import triton.language as tl


@triton.jit
def _numbers(q, scale, low, mean, d, used, SIZE: tl.constexpr, BITS: tl.constexpr,
             GROUP: tl.constexpr):  # fmt: skip
    """The numbers `d` [1, P] of some slots, float32 [N, P], where `used` [N, P].

    `q`, `scale` and `low` point at the slots [N, 1], `mean` at the head's.
    """
    if BITS == 8:
        x = tl.load(q + d, used, 0).to(tl.float32)
        x = x * tl.load(scale + d * 0, used, 0.0).to(tl.float32)
    else:
        high = d >= SIZE // 2
        four = tl.load(q + tl.where(high, d - SIZE // 2, d), used, 0).to(tl.int32)
        x = (tl.where(high, four >> 4, four) & 15).to(tl.float32)
        x = x * tl.load(scale + d // GROUP, used, 0.0).to(tl.float32)
        x += tl.load(low + d // GROUP, used, 0.0).to(tl.float32)
    if mean is not None:
        x += tl.load(mean + d + tl.zeros_like(x).to(tl.int32), used, 0.0)
    return x


@triton.jit(do_not_specialize=["slots"])
def read_slots(
    q,  # [B, K, n, D or D/2]
    scale,  # [B, K, n] or [B, K, n, D/GROUP]
    low,  # likewise, or None
    mean,  # [B, K, D] or None
    shift,  # [B, K, n]
    table,  # [span, 2, HALF]
    out,  # [B, K, n, D], contiguous
    slots,  # n
    q_b, q_h, q_n,
    scale_b, scale_h, scale_n,
    low_b, low_h, low_n,
    shift_b, shift_h, shift_n,
    mean_b, mean_h,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,  # pairs that rotate; 0: none
    HALF_PAD: tl.constexpr,
    STEP: tl.constexpr,  # from the first number of a pair to that of the next
    MATE: tl.constexpr,  # to the second number of a pair
    REST: tl.constexpr,  # dimensions behind the rotated ones
    REST_PAD: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # numbers that share a scale
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of slots of one KV head."""
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = (n < slots)[:, None]
    q += batch * q_b + head * q_h + n[:, None] * q_n
    scale += batch * scale_b + head * scale_h + n[:, None] * scale_n
    if low is not None:
        low += batch * low_b + head * low_h + n[:, None] * low_n
    if mean is not None:
        mean += batch * mean_b + head * mean_h
    target = out + (row * slots + n[:, None]) * SIZE
    if HALF > 0:
        i = tl.arange(0, HALF_PAD)[None, :]
        inside = used & (i < HALF)
        rank = -tl.load(shift + batch * shift_b + head * shift_h + n * shift_n, n < slots, 0)
        turn = table + rank.to(tl.int64)[:, None] * (2 * HALF) + i
        cos = tl.load(turn, inside, 0.0).to(tl.float32)
        sin = tl.load(turn + HALF, inside, 0.0).to(tl.float32)
        a = _numbers(q, scale, low, mean, i * STEP, inside, SIZE, BITS, GROUP)
        b = _numbers(q, scale, low, mean, i * STEP + MATE, inside, SIZE, BITS, GROUP)
        tl.store(target + i * STEP, (a * cos - b * sin).to(out.dtype.element_ty), inside)
        tl.store(target + MATE + i * STEP, (b * cos + a * sin).to(out.dtype.element_ty), inside)
    if REST > 0:
        j = tl.arange(0, REST_PAD)[None, :]
        behind = used & (j < REST)
        x = _numbers(q, scale, low, mean, j + 2 * HALF, behind, SIZE, BITS, GROUP)
        tl.store(target + 2 * HALF + j, x.to(out.dtype.element_ty), behind)

# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines the Triton functions of `kernels/dequantise.py`, which imports it when first needed."""

import triton
import triton.language as tl


@triton.jit
def _numbers(q, scale, low, mean, d, used, SIZE: tl.constexpr, BITS: tl.constexpr,
             GROUP: tl.constexpr):  # fmt: skip
    """Return the numbers `d` [1, P] of some slots where `used` [N, P]; float32 [N, P].

    `q`, `scale` and `low` point at the slots [N, 1], `mean` at the mean of their row.
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


@triton.jit(do_not_specialize=["scale", "low", "mean", "shift", "starts", "lengths", "to"])
def read_slots(
    q,  # [slots, D or D/2]
    scale,  # [slots] or [slots, D/GROUP]
    low,  # likewise, or None
    mean,  # [B·K, D] or None
    shift,  # [slots]
    table,  # [span, 2, HALF]
    out,  # [room, D]
    starts, lengths,  # [B·K] int32
    to,  # [B·K] int32, where each row begins in `out`
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
    """Dequantise a block of slots of one row into `out`, and rotate what rotates."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = n < tl.load(lengths + row)
    used, slot = held[:, None], (tl.load(starts + row).to(tl.int64) + n)[:, None]
    GROUPS: tl.constexpr = SIZE // GROUP
    q += slot * (SIZE if BITS == 8 else SIZE // 2)
    scale += slot * GROUPS
    if low is not None:
        low += slot * GROUPS
    if mean is not None:
        mean += row * SIZE
    target = out + (tl.load(to + row).to(tl.int64) + n)[:, None] * SIZE
    if HALF > 0:
        i = tl.arange(0, HALF_PAD)[None, :]
        inside = used & (i < HALF)
        rank = -tl.load(shift + slot, used, 0)  # [BLOCK, 1]
        turn = table + rank.to(tl.int64) * (2 * HALF) + i
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

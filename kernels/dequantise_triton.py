# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines the Triton functions of `kernels/dequantise.py`, which imports this when first needed."""

import triton
import triton.language as tl


@triton.jit
def _numbers(
    q, scale, low, mean, d, used, SIZE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr
):
    """Return the numbers of indices `d` [1, P] of some slots, float32 [N, P], where `used` [N, P].

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


@triton.jit
def _copy(
    q,
    scale,
    low,
    mean,
    shift,
    table,
    out,
    slot,
    target,
    used,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    STEP: tl.constexpr,
    MATE: tl.constexpr,
    REST_PAD: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Dequantise slots [N, 1], and rotate their first 2·HALF numbers, into places [N, 1] of `out`.

    Slots that are not `used` are left out. `mean` points at the mean of the row.
    """
    REST: tl.constexpr = SIZE - 2 * HALF
    GROUPS: tl.constexpr = SIZE // GROUP
    q += slot * (SIZE if BITS == 8 else SIZE // 2)
    scale += slot * GROUPS
    if low is not None:
        low += slot * GROUPS
    to = out + target * SIZE
    if HALF > 0:
        i = tl.arange(0, HALF_PAD)[None, :]
        inside = used & (i < HALF)
        rank = -tl.load(shift + slot, used, 0)  # [N, 1]
        turn = table + rank.to(tl.int64) * (2 * HALF) + i
        cos = tl.load(turn, inside, 0.0).to(tl.float32)
        sin = tl.load(turn + HALF, inside, 0.0).to(tl.float32)
        a = _numbers(q, scale, low, mean, i * STEP, inside, SIZE, BITS, GROUP)
        b = _numbers(q, scale, low, mean, i * STEP + MATE, inside, SIZE, BITS, GROUP)
        tl.store(to + i * STEP, (a * cos - b * sin).to(out.dtype.element_ty), inside)
        tl.store(to + MATE + i * STEP, (b * cos + a * sin).to(out.dtype.element_ty), inside)
    if REST > 0:
        j = tl.arange(0, REST_PAD)[None, :]
        behind = used & (j < REST)
        x = _numbers(q, scale, low, mean, j + 2 * HALF, behind, SIZE, BITS, GROUP)
        tl.store(to + 2 * HALF + j, x.to(out.dtype.element_ty), behind)


# These arguments differ between layers; specialising them would compile the kernel for each.
_UNSPECIALISED = [
    "keys",
    "key_scale",
    "key_low",
    "values",
    "value_scale",
    "value_low",
    "mean",
    "shift",
    "starts",
    "lengths",
    "to",
]


@triton.jit(do_not_specialize=_UNSPECIALISED)
def read_slots(
    keys,
    key_scale,  # [slots, D or D/2], [slots] or [slots, D/GROUP]
    key_low,  # shaped as key_scale, or None
    values,
    value_scale,
    value_low,  # shaped as those of keys
    mean,  # [B·K, D] or None
    shift,  # [slots]
    table,  # [span, 2, HALF]
    out_keys,
    out_values,  # [room, D]
    starts,
    lengths,  # [B·K] int32
    to,  # [B·K] int32, the first slot of each row in out_keys and out_values
    SIZE: tl.constexpr,
    HALF: tl.constexpr,  # pairs that rotate; 0: none
    HALF_PAD: tl.constexpr,
    STEP: tl.constexpr,  # from the first number of a pair to that of the next
    MATE: tl.constexpr,  # to the second number of a pair
    REST_PAD: tl.constexpr,  # at least the dimensions behind the rotated ones
    SIZE_PAD: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr,  # numbers that share a scale
    VALUE_BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Dequantise a block of slots of one row: keys, or values in the second half of the grid."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = (n < tl.load(lengths + row))[:, None]
    slot = (tl.load(starts + row).to(tl.int64) + n)[:, None]
    target = (tl.load(to + row).to(tl.int64) + n)[:, None]
    if tl.program_id(2) == 0:
        if mean is not None:
            mean += row * SIZE
        _copy(
            keys,
            key_scale,
            key_low,
            mean,
            shift,
            table,
            out_keys,
            slot,
            target,
            used,
            SIZE,
            HALF,
            HALF_PAD,
            STEP,
            MATE,
            REST_PAD,
            KEY_BITS,
            KEY_GROUP,
        )
    else:
        _copy(
            values,
            value_scale,
            value_low,
            None,
            None,
            None,
            out_values,
            slot,
            target,
            used,
            SIZE,
            0,
            1,
            1,
            0,
            SIZE_PAD,
            VALUE_BITS,
            VALUE_GROUP,
        )

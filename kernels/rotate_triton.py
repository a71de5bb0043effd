# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines the Triton function of `kernels/rotate.py`, which imports this when needed."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["slots", "shift", "starts", "lengths", "shift_b", "shift_h"])
def rotate(
    x,  # [B, K, n, D]
    shift,  # [B, K, n]
    table,  # [span, 2, HALF]
    out,  # [B, K, n, D], contiguous
    starts,
    lengths,  # [B·K] int32, where rows lie in `x` [n, D]; or None
    slots,  # n, slots of each row of `out`
    x_b,
    x_h,
    x_n,
    shift_b,
    shift_h,
    shift_n,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    STEP: tl.constexpr,  # from the first number of a pair to that of the next
    MATE: tl.constexpr,  # to the second number of a pair
    REST: tl.constexpr,  # dimensions behind the rotated ones
    REST_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,  # may be launched before `x` is written
):
    """Rotate some slots of one KV head."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    x += batch * x_b + head * x_h
    shift += batch * shift_b + head * shift_h
    held = slots
    if starts is not None:
        held, first = tl.load(lengths + row), tl.load(starts + row).to(tl.int64)
        x += first * x_n
        shift += first * shift_n
    i, j = tl.arange(0, HALF_PAD)[None, :], tl.arange(0, REST_PAD)[None, :]
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = n < held
    source = x + n[:, None] * x_n
    target = out + (row * slots + n[:, None]) * SIZE
    back = tl.load(shift + n * shift_n, used, 0).to(tl.int64)
    inside = used[:, None] & (i < HALF)
    turn = table + back[:, None] * (2 * HALF) + i
    cos = tl.load(turn, inside, 0.0).to(tl.float32)
    sin = tl.load(turn + HALF, inside, 0.0).to(tl.float32)
    a = tl.load(source + i * STEP, inside, 0.0).to(tl.float32)
    b = tl.load(source + MATE + i * STEP, inside, 0.0).to(tl.float32)
    tl.store(target + i * STEP, (a * cos + b * sin).to(out.dtype.element_ty), inside)
    tl.store(target + MATE + i * STEP, (b * cos - a * sin).to(out.dtype.element_ty), inside)
    if REST > 0:
        behind = used[:, None] & (j < REST)
        kept = tl.load(source + 2 * HALF + j, behind, 0.0)
        tl.store(target + 2 * HALF + j, kept, behind)

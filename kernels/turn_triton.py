# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Triton functions that rotate halves of rows as they are read, for the kernels that do so."""

import triton
import triton.language as tl


@triton.jit
def halves(x, real, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """Halves of rows at x [N, 1] that are `real`, two of [N, HALF_PAD]."""
    place = tl.arange(0, HALF_PAD)[None, :]
    inside = real & (place < HALF)
    return tl.load(x + place, inside, 0.0), tl.load(x + HALF + place, inside, 0.0)


@triton.jit
def made(x, WIDEN: tl.constexpr = False):
    """The 16-bit numbers x as they are, made once: the compiler takes them for another program's.

    What is used by a product and by a sum it would else compute twice, each time in the layout
    that the use asks for, and read twice from shared memory, with many conflicts. `WIDEN`: not in
    triton's interpreter.
    """
    if WIDEN or x.dtype.primitive_bitwidth != 16:
        return x
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
    )


@triton.jit
def turned(a, b, cos, sin):
    """Halves rotated by angles, rounded to their type as a rotated copy would be."""
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    return (wide_a * cos - wide_b * sin).to(a.dtype), (wide_b * cos + wide_a * sin).to(b.dtype)


@triton.jit
def turned_in_steps(a, b, cos, sin):
    """Halves rotated by angles as PyTorch does it: products and sums are rounded to their type.

    But for one product of each sum, which a compiler may add without rounding it first.
    """
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    new_a = (wide_a * cos).to(a.dtype).to(tl.float32) - (wide_b * sin).to(a.dtype).to(tl.float32)
    new_b = (wide_b * cos).to(b.dtype).to(tl.float32) + (wide_a * sin).to(b.dtype).to(tl.float32)
    return new_a.to(a.dtype), new_b.to(b.dtype)


@triton.jit
def turned_by(
    a, b,
    back,  # [N] integers
    table,  # [span, 2, HALF]
    held,  # [N], which there are
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Halves of rows [N, HALF_PAD], rotated back by so many positions."""
    at = table + back.to(tl.int64)[:, None] * (2 * HALF)
    cos, sin = halves(at, held[:, None], HALF, HALF_PAD)
    a, b = turned(a, b, cos, -sin)
    return made(a, WIDEN), made(b, WIDEN)


@triton.jit
def _of_groups(
    side,  # [slots, SIZE/GROUP]
    slot,
    held,
    SECOND: tl.constexpr,  # the half is the second
    SIZE: tl.constexpr,
    HALF_PAD: tl.constexpr,
    GROUP: tl.constexpr,
):
    """What the numbers of one half of vectors share with their groups, float32 [N, HALF_PAD]."""
    HALF: tl.constexpr = SIZE // 2
    side += slot[:, None] * (SIZE // GROUP)
    if HALF == HALF_PAD and HALF % GROUP == 0:  # of each group it is read once
        COUNT: tl.constexpr = HALF // GROUP
        g = tl.arange(0, COUNT)[None, :] + SECOND * COUNT
        each = tl.load(side + g, held[:, None], 0.0).to(tl.float32)
        each = tl.broadcast_to(each[:, :, None], [slot.shape[0], COUNT, GROUP])
        found = tl.reshape(each, [slot.shape[0], HALF])
    else:
        i = tl.arange(0, HALF_PAD)[None, :]
        inside = held[:, None] & (i < HALF)
        found = tl.load(side + (i + SECOND * HALF) // GROUP, inside, 0.0).to(tl.float32)
    return found


@triton.jit
def quantised_halves(
    q,  # [slots, SIZE] in 8 bits, [slots, SIZE/2] in 4
    scale,  # [slots] in 8 bits, [slots, SIZE/GROUP] in 4
    low,  # likewise, or None
    first,  # slot of a row
    slot,  # [N] behind it
    held,  # [N], which there are
    SIZE: tl.constexpr,
    HALF_PAD: tl.constexpr,
    GROUP: tl.constexpr,  # numbers that share a scale; 0: all, in 8 bits
):
    """Halves of vectors of 8 or 4 bits, two of [N, HALF_PAD] float32."""
    HALF: tl.constexpr = SIZE // 2
    # A thread reads 8 numbers of a row, as it does of what they are rotated by.
    i = tl.max_contiguous(tl.arange(0, HALF_PAD)[None, :], [1, 8])
    inside = held[:, None] & (i < HALF)
    if GROUP == 0:
        at = q + first * SIZE + slot[:, None] * SIZE + i
        a, b = tl.load(at, inside, 0).to(tl.float32), tl.load(at + HALF, inside, 0).to(tl.float32)
        by = tl.load(scale + first + slot, held, 0.0).to(tl.float32)[:, None]
        a, b = a * by, b * by
    else:
        both = tl.load(q + first * HALF + slot[:, None] * HALF + i, inside, 0)
        scale += first * (SIZE // GROUP)
        low += first * (SIZE // GROUP)
        a, b = (both & 15).to(tl.float32), (both >> 4).to(tl.float32)
        a = a * _of_groups(scale, slot, held, False, SIZE, HALF_PAD, GROUP)
        b = b * _of_groups(scale, slot, held, True, SIZE, HALF_PAD, GROUP)
        a += _of_groups(low, slot, held, False, SIZE, HALF_PAD, GROUP)
        b += _of_groups(low, slot, held, True, SIZE, HALF_PAD, GROUP)
    return a, b


@triton.jit
def turned_on(
    a, b,
    ranks,  # [N] integers
    table,  # [span, 2, HALF]
    held,  # [N], which there are
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):  # fmt: skip
    """Halves of unrotated rows [N, HALF_PAD], rotated on to their ranks."""
    at = table + ranks.to(tl.int64)[:, None] * (2 * HALF)
    cos, sin = halves(at, held[:, None], HALF, HALF_PAD)
    return turned(a, b, cos, sin)

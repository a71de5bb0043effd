# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines Triton functions that rotate halves of rows as they are read."""

import triton
import triton.language as tl


@triton.jit
def halves(x, real, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """Load both halves [N, HALF_PAD] of the rows at x [N, 1] that are `real`."""
    index = tl.arange(0, HALF_PAD)[None, :]
    inside = real & (index < HALF)
    return tl.load(x + index, inside, 0.0), tl.load(x + HALF + index, inside, 0.0)


@triton.jit
def made(x, WIDEN: tl.constexpr = False):
    """Return the 16-bit numbers x unchanged, but hide from the compiler how they were computed.

    Otherwise it would compute numbers that a product and a sum both use twice, once in the layout
    of each, and read them twice from shared memory, with many bank conflicts. `WIDEN` turns this
    off, for Triton's interpreter.
    """
    if WIDEN or x.dtype.primitive_bitwidth != 16:
        return x
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
    )


@triton.jit
def turned(a, b, cos, sin):
    """Return halves rotated by angles, rounded to their type as a rotated copy would be."""
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    return (wide_a * cos - wide_b * sin).to(a.dtype), (wide_b * cos + wide_a * sin).to(b.dtype)


@triton.jit
def turned_by(
    a,
    b,
    back,  # [N] integers
    table,  # [span, 2, HALF]
    held,  # [N], whether a row exists
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Return halves of rows [N, HALF_PAD], rotated back by `back` positions."""
    at = table + back.to(tl.int64)[:, None] * (2 * HALF)
    cos, sin = halves(at, held[:, None], HALF, HALF_PAD)
    a, b = turned(a, b, cos, -sin)
    return made(a, WIDEN), made(b, WIDEN)

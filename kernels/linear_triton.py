# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines the Triton function of `kernels/linear.py`, which imports this when needed."""

import triton
import triton.language as tl


@triton.jit
def _tile(base, first, columns, inside, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Load columns of a program's rows from `first` on: [ROWS, COLUMNS]."""
    i = first + tl.arange(0, COLUMNS)[None, :]
    if EVEN:
        return tl.load(base + i)
    return tl.load(base + i, inside[:, None] & (i < columns), 0.0)


@triton.jit
def _add(
    total,
    squares,
    w,
    x,
    gain,
    first,
    columns,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Add the products and squares of some more columns.

    Columns that a thread reads at once are summed, as a sum per column would fill its registers.
    """
    i = first + tl.arange(0, COLUMNS)
    v = (tl.load(x + i) if EVEN else tl.load(x + i, i < columns, 0.0)).to(tl.float32)
    if gain is not None:
        squares += tl.sum(tl.reshape(v * v, [COLUMNS // SHARE, SHARE]), 1)
        g = tl.load(gain + i) if EVEN else tl.load(gain + i, i < columns, 0.0)
        v *= g.to(tl.float32)
    y = w.to(tl.float32) * v[None, :]
    total += tl.sum(tl.reshape(y, [y.shape[0], COLUMNS // SHARE, SHARE]), 2)
    return total, squares


@triton.jit(do_not_specialize=["rows", "epsilon"])
def dot(
    x,  # [I]
    out,  # [O]
    weight,  # [O, I]; GATED: [2·O, I], gates first
    bias,  # [O], or None
    gain,  # [I], or None
    plus,  # [O], or None
    rows,  # O
    columns,  # I
    stride,
    epsilon,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARE: tl.constexpr,  # columns that a thread reads at once
    EVEN: tl.constexpr,  # nothing to mask
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,  # may be launched before `x` is written
):
    """Multiply some rows of a matrix by the norm of `x`, then add a bias, gate, and add `plus`."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.arange(0, ROWS)
    if GATED:  # two rows side by side are a gate and what it gates
        o = tl.program_id(0) * (ROWS // 2) + row // 2
        inside = o < rows
        o += row % 2 * rows
    else:
        o = tl.program_id(0) * ROWS + row
        inside = o < rows
    base = weight + o.to(tl.int64)[:, None] * stride
    # Weights do not depend on `x`, so the first are loaded before it is written.
    w = _tile(base, 0, columns, inside, COLUMNS, EVEN)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([ROWS, COLUMNS // SHARE], tl.float32)
    squares = tl.zeros([COLUMNS // SHARE], tl.float32)
    total, squares = _add(total, squares, w, x, gain, 0, columns, COLUMNS, EVEN, SHARE)
    for first in tl.range(COLUMNS, columns, COLUMNS, num_stages=3):
        w = _tile(base, first, columns, inside, COLUMNS, EVEN)
        total, squares = _add(total, squares, w, x, gain, first, columns, COLUMNS, EVEN, SHARE)
    y = tl.sum(total, 1)
    if gain is not None:
        y *= tl.rsqrt(tl.sum(squares, 0) / columns + epsilon)
    if bias is not None:
        y += tl.load(bias + o, inside, 0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(y, [ROWS // 2, 2]))
        y = gate / (1 + tl.exp(tl.minimum(-gate, 80.0))) * up  # no overflow
        o = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        inside = o < rows
    if plus is not None:
        y += tl.load(plus + o, inside, 0.0).to(tl.float32)
    tl.store(out + o, y.to(out.dtype.element_ty), inside)

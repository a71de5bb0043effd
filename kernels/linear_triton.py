# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""The triton function of `kernels/linear.py`, which imports this when it is first needed."""

import triton
import triton.language as tl


@triton.jit
def dot(
    weight,  # [O, I]
    x,  # [I]
    bias,  # [O], or None
    out,  # [O]
    rows,  # O
    columns,  # I
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,  # nothing to mask
):
    """Some rows of the matrix times `x`."""
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = o < rows
    base = weight + o.to(tl.int64)[:, None] * stride
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, columns, COLUMNS, num_stages=3):
        i = start + tl.arange(0, COLUMNS)
        if EVEN:
            w, v = tl.load(base + i[None, :]), tl.load(x + i)
        else:
            w = tl.load(base + i[None, :], inside[:, None] & (i < columns)[None, :], 0.0)
            v = tl.load(x + i, i < columns, 0.0)
        total += w.to(tl.float32) * v.to(tl.float32)[None, :]
    y = tl.sum(total, 1)
    if bias is not None:
        y += tl.load(bias + o, inside, 0.0).to(tl.float32)
    tl.store(out + o, y.to(out.dtype.element_ty), inside)

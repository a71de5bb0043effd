# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""The triton function of `kernels/linear.py`, which imports this when it is first needed."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "rows_1", "rows_2"])
def dot(
    x,  # [I]
    out,  # [O + O_1 + O_2]
    weight,  # [O, I]
    weight_1, weight_2,  # likewise, or None
    bias,  # [O], or None
    bias_1, bias_2,  # likewise
    rows, rows_1, rows_2,  # O; 0: no such matrix
    columns,  # I
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,  # nothing to mask
    OVERLAP: tl.constexpr,  # launched before what makes `x` has ended
):  # fmt: skip
    """Some rows of a matrix times `x`."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    # `and` would compile what follows where there is no matrix.
    if weight_1 is not None:  # noqa: SIM102
        if tile >= tl.cdiv(rows, ROWS):
            tile -= tl.cdiv(rows, ROWS)
            out += rows
            rows = rows_1
            weight = weight_1
            if bias is not None:
                bias = bias_1
            if weight_2 is not None:  # noqa: SIM102
                if tile >= tl.cdiv(rows, ROWS):
                    tile -= tl.cdiv(rows, ROWS)
                    out += rows
                    rows = rows_2
                    weight = weight_2
                    if bias is not None:
                        bias = bias_2
    o = tile * ROWS + tl.arange(0, ROWS)
    inside = o < rows
    base = weight + o.to(tl.int64)[:, None] * stride
    i = tl.arange(0, COLUMNS)
    # Weights do not wait for `x`: their first are on their way before it is there.
    if EVEN:
        w = tl.load(base + i[None, :])
    else:
        w = tl.load(base + i[None, :], inside[:, None] & (i < columns)[None, :], 0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + i) if EVEN else tl.load(x + i, i < columns, 0.0)
    total = w.to(tl.float32) * v.to(tl.float32)[None, :]
    for start in tl.range(COLUMNS, columns, COLUMNS, num_stages=3):
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

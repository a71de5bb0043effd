# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines the Triton functions of `kernels/elementwise.py`, which imports this when needed.

Numbers are rounded to the tensors' type after every operation, as PyTorch's own operations do.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["epsilon"])
def add_norm(
    x,  # [rows, N, D]
    y,  # [rows, N, D], contiguous, or None
    total,  # [rows, N, D], contiguous, is written: x + y; or None
    out,  # [rows, N, D], contiguous, is written
    gain,  # [N or 1, D]
    x_row,
    x_head,
    gain_head,
    size,  # D
    epsilon,
    HEADS: tl.constexpr,  # N
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,  # may be launched before `x` is written
):
    """Write the norm of one head of one row, and the sum before it."""
    i = tl.arange(0, BLOCK)
    inside = i < size
    row = tl.program_id(0).to(tl.int64)
    head = row % HEADS
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    g = tl.load(gain + head * gain_head + i, inside, 0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + row // HEADS * x_row + head * x_head + i, inside, 0.0).to(tl.float32)
    if y is not None:
        v += tl.load(y + row * size + i, inside, 0.0).to(tl.float32)
        v = v.to(out.dtype.element_ty)
        tl.store(total + row * size + i, v, inside)
        v = v.to(tl.float32)
    v *= tl.rsqrt(tl.sum(v * v, 0) / size + epsilon)
    v = g * v.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + i, v.to(out.dtype.element_ty), inside)


@triton.jit
def _rounded(x, like):
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def rotate(
    query,  # [B, H, T, D]
    key,  # [B, K, T, D]
    cos,  # [B, T, D]
    sin,  # [B, T, D]
    query_out,  # [B, T, H, D], contiguous
    key_out,  # [B, T, K, D], contiguous
    tokens,  # T
    query_b,
    query_h,
    query_t,
    key_b,
    key_h,
    key_t,
    cos_b,
    cos_t,
    sin_b,
    sin_t,
    HEADS: tl.constexpr,  # H
    KV_HEADS: tl.constexpr,  # K
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,  # may be launched before its inputs are written
):
    """Rotate one head of one token's query or key."""
    i = tl.arange(0, HALF_PAD)
    inside = i < HALF
    row = tl.program_id(0).to(tl.int64)
    batch, token, head = row // tokens, row % tokens, tl.program_id(1)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if head < HEADS:
        source = query + batch * query_b + head * query_h + token * query_t
        target = query_out + (row * HEADS + head) * (2 * HALF)
    else:
        head -= HEADS
        source = key + batch * key_b + head * key_h + token * key_t
        target = key_out + (row * KV_HEADS + head) * (2 * HALF)
    a = tl.load(source + i, inside, 0.0).to(tl.float32)
    b = tl.load(source + HALF + i, inside, 0.0).to(tl.float32)
    c = cos + batch * cos_b + token * cos_t + i
    s = sin + batch * sin_b + token * sin_t + i
    first_c = tl.load(c, inside, 0.0).to(tl.float32)
    first_s = tl.load(s, inside, 0.0).to(tl.float32)
    then_c = tl.load(c + HALF, inside, 0.0).to(tl.float32)
    then_s = tl.load(s + HALF, inside, 0.0).to(tl.float32)
    first = _rounded(a * first_c, query_out) - _rounded(b * first_s, query_out)
    then = _rounded(b * then_c, query_out) + _rounded(a * then_s, query_out)
    tl.store(target + i, first.to(query_out.dtype.element_ty), inside)
    tl.store(target + HALF + i, then.to(query_out.dtype.element_ty), inside)


@triton.jit
def gate(
    gates,  # [rows, I]
    up,  # [rows, I]
    out,  # [rows, I], contiguous
    gates_row,
    up_row,
    size,  # I
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,  # may be launched before its inputs are written
):
    """Write some columns of `silu(gates) · up` for one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(gates + row * gates_row + i, inside, 0.0).to(tl.float32)
    y = tl.load(up + row * up_row + i, inside, 0.0).to(tl.float32)
    x = _rounded(x / (1 + tl.exp(tl.minimum(-x, 80.0))), out)  # the bound avoids overflow
    tl.store(out + row * size + i, (x * y).to(out.dtype.element_ty), inside)

# mypy: allow-untyped-calls, disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Defines the Triton functions of `kernels/append.py`, which imports this when first needed."""

import triton
import triton.language as tl

# These arguments differ between layers; specialising them would compile the kernel for each.
_UNSPECIALISED = ["to_positions", *(f"aux_{i}" for i in range(6)), "length", "starts", "lengths"]


@triton.jit
def clear(slot, inside, aux_0, aux_1, aux_2, aux_3, aux_4, aux_5):
    """Store zeros into auxiliary tensors, integers or None, at slots [N] that are `inside`."""
    zero = tl.zeros(slot.shape, tl.int8)
    if aux_0 is not None:
        tl.store(aux_0 + slot, zero.to(aux_0.dtype.element_ty), inside)
    if aux_1 is not None:
        tl.store(aux_1 + slot, zero.to(aux_1.dtype.element_ty), inside)
    if aux_2 is not None:
        tl.store(aux_2 + slot, zero.to(aux_2.dtype.element_ty), inside)
    if aux_3 is not None:
        tl.store(aux_3 + slot, zero.to(aux_3.dtype.element_ty), inside)
    if aux_4 is not None:
        tl.store(aux_4 + slot, zero.to(aux_4.dtype.element_ty), inside)
    if aux_5 is not None:
        tl.store(aux_5 + slot, zero.to(aux_5.dtype.element_ty), inside)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def write(
    keys,  # [b, k, T, D]
    values,  # likewise
    positions,  # [T]
    to_keys,
    to_values,  # [slots, SIZE]
    to_positions,  # [slots]
    aux_0,
    aux_1,
    aux_2,
    aux_3,
    aux_4,
    aux_5,  # [slots] integers, or None
    length,  # T
    starts,  # [B·K] int32, each row's first slot
    lengths,  # [B·K] int32, each row's slots before the block
    key_b,
    key_h,
    key_t,
    value_b,
    value_h,
    value_t,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,  # the kernel that reads the slots may be launched before this one ends
):
    """Write some tokens of one KV head into the slots behind those in use."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = t < length
    d = tl.arange(0, SIZE_PAD)[None, :]
    wide = inside[:, None] & (d < SIZE)
    key = tl.load(keys + batch * key_b + head * key_h + t[:, None] * key_t + d, wide)
    value = tl.load(values + batch * value_b + head * value_h + t[:, None] * value_t + d, wide)
    slot = (tl.load(starts + row) + tl.load(lengths + row)).to(tl.int64) + t
    tl.store(to_keys + slot[:, None] * SIZE + d, key, wide)
    tl.store(to_values + slot[:, None] * SIZE + d, value, wide)
    tl.store(to_positions + slot, tl.load(positions + t, inside), inside)
    clear(slot, inside, aux_0, aux_1, aux_2, aux_3, aux_4, aux_5)

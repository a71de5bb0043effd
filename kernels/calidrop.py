# mypy: allow-untyped-calls, disable-error-code="import-untyped"
"""What CaliDrop does beside attention, in a launch or two: corrects it, and takes evicted slots in.

The eager code takes some forty small kernels for the one and thirty for the other, in every layer.
Decisions are the same; what is remembered is summed in float32 throughout. Nothing is read by the
host, so that a CUDA graph replays it. Knows tensors only; triton is imported when first needed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvcap.kernels.arguments import strides
from kvcap.kernels.decode import LOG2_E
from kvcap.kernels.device import DTYPES, able, bits, power_of_two
from kvcap.kernels.evict import COUNTS, MOST_COUNT
from kvcap.kernels.launch import run

MOST_SIZE = 256
ROWS = 16  # queries that a program corrects


def covers(query: Tensor, keys: Tensor) -> bool:
    """Whether the kernels can work on these here: on CUDA, or on a CPU in triton's interpreter.

    Args:
        query: [B, H, T, D], or [B, H, 1, D] of those remembered.
        keys: [B, K, n, D] of evicted tokens, or of those about to be.
    """
    if not able(query) or query.dtype not in DTYPES or query.shape[-1] > MOST_SIZE:
        return False
    alike = query.dtype == keys.dtype and query.device == keys.device
    return alike and query.stride(-1) == keys.stride(-1) == 1


def correct(
    query: Tensor,
    held: tuple[Tensor, Tensor],
    fresh: tuple[Tensor, Tensor],
    remembered: tuple[Tensor, Tensor, Tensor],
    counts: Tensor,
    theta1: float,
    theta2: float,
) -> Tensor:
    """Merge what evicted tokens add into attention, and remember the last query that asked anew.

    A query asks anew where its cosine with the remembered one is below `theta1`, or nothing is
    remembered; it is corrected by what is remembered where the cosine is above `theta2`.

    Args:
        query: [B, H, T, D].
        held: attention over what is held, changed in place [B, H, T, D], and its log-sum-exp
            [B, H, T] float32, contiguous.
        fresh: the same over the evicted tokens.
        remembered: a query [B, H, 1, D], what it got from evicted tokens [B, H, 1, D] float32, and
            the log-sum-exp [B, H, 1] float32, -inf where nothing is; parts of contiguous tensors
            of a layer, changed in place.
        counts: [B, H, 2] int64, likewise: grow by the tokens, where `query` is one, and by how
            many of them asked anew.
        theta1: see above.
        theta2: likewise.

    Returns:
        The corrected attention, which is that of `held`.
    """
    from kvcap.kernels.calidrop_triton import correct_tokens, remember_last

    (out, lse), (other, other_lse), (known_query, known_out, known_lse) = held, fresh, remembered
    batch, heads, tokens, size = query.shape
    rows = 1 if tokens == 1 else ROWS
    tiles = -(-tokens // rows)
    asked = None  # in one tile the last is found at once
    if tiles > 1:
        asked = torch.empty(batch * heads, tokens, dtype=torch.int8, device=query.device)
    known = {"known_query": known_query, "known_out": known_out, "known_lse": known_lse}
    where = {
        **known, **strides("bht", query=query, other=other), "known_heads": known_lse.stride(0),
        "tokens": tokens, "HEADS": heads, "SIZE": size, "SIZE_PAD": power_of_two(size, 16),
    }  # fmt: skip
    with torch.cuda.device_of(query):
        run(
            correct_tokens, (tiles, batch * heads),
            query, out, lse, other, other_lse, asked, counts=counts, **where,
            **strides("bht", out=out), theta1=float(theta1), theta2=float(theta2), ROWS=rows,
            num_warps=4,
        )  # fmt: skip
        if asked is not None:
            run(remember_last, (batch * heads,), query, other, other_lse, asked, **where,
                BLOCK=1024, num_warps=4)  # fmt: skip
    return out


def remember(
    remembered: tuple[Tensor, Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    scaling: float,
    softcap: float | None,
) -> None:
    """Add tokens that are evicted to what queries remembered of those before, where they did.

    Args:
        remembered: as in `correct`.
        keys: [B, K, n, D] as attention saw them.
        values: [B, K, n, D].
        slots: [B, K, e] which go, the last stride 1.
        scaling: of the logits.
        softcap: of the logits.
    """
    from kvcap.kernels.calidrop_triton import add_evicted

    query, out, lse = remembered
    batch, heads, _, size = query.shape
    factor = scaling * LOG2_E if softcap is None else 2 * scaling / softcap * LOG2_E
    block = min(128, power_of_two(slots.shape[-1], 32))  # each step waits for the one before
    with torch.cuda.device_of(query):
        run(
            add_evicted, (batch * heads,),
            query, out, lse, keys, values, slots, known_heads=lse.stride(0), count=slots.shape[-1],
            factor=factor, softcap=(softcap or 0.0) * LOG2_E, **strides("bh", slot=slots),
            **strides("bhn", key=keys, value=values), HEADS=heads, GROUP=heads // keys.shape[1],
            SIZE=size, SIZE_PAD=power_of_two(size, 16), SOFTCAP=softcap is not None, BLOCK=block,
            num_warps=block // 8,
        )  # fmt: skip


def covers_taking(count: int) -> bool:
    """Whether `take` can take so many slots of a row."""
    return count <= MOST_COUNT


def take(
    slots: Tensor,
    part: tuple[int, int],
    scores: Tensor,
    source: Mapping[str, Tensor],
    stored: Mapping[str, Tensor],
    held: int,
    grows: bool,
) -> None:
    """Copy slots that are about to be given up behind those that are stored.

    Shifts of tokens stored before grow by the number of older ones among `slots`.

    Args:
        slots: [B, K, e], all that go, the last stride 1.
        part: first and behind the last of those to copy.
        scores: [B, K, n] of all slots, NaN counts as the lowest.
        source: keys, values [B, K, n, D], positions and perhaps shift [B, K, n] int32: views of
            slots that lie row behind row.
        stored: the same of the store, and scores, [B, K, capacity, ...].
        held: slots of a stored row that are in use.
        grows: whether the shifts of those grow.
    """
    from kvcap.kernels.calidrop_triton import take_slots

    (batch, heads, count), (first, stop) = slots.shape, part
    size, shift = source["keys"].shape[-1], source.get("shift")
    olds = -(-held // 32) if grows and shift is not None else 0
    with torch.cuda.device_of(slots):
        run(
            take_slots, (olds - (first - stop) // 16, batch * heads),
            slots, scores, *(bits(source[name]) for name in ("keys", "values")),
            source["positions"], shift, *(bits(stored[name]) for name in ("keys", "values")),
            stored["positions"], None if shift is None else stored["shift"], stored["score"],
            olds=olds, first=first, stop=stop, count=count, held=held, heads=heads,
            capacity=source["positions"].stride(1), room=stored["positions"].stride(1),
            **strides("bh", slot=slots), **strides("bhn", score=scores),
            COUNT_PAD=next(n for n in COUNTS if count <= n),
            SIZE=size, SIZE_PAD=power_of_two(size, 16), num_warps=4,
        )  # fmt: skip

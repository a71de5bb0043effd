"""Holds weights in 4 bits, in the order that PyTorch's product of few tokens reads."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvcap.runtime.models.packed_matrix import (
    ROUNDED,
    TILE,
    PackedMatrix,
    Rows,
    parameter,
    scale_in,
)
from kvcap.runtime.models.rounding import Rounding, nearest, steps_of, zeros_of

GROUP = 32  # numbers of a row that share a scale and a zero
LARGEST = 118  # of a row in 8 bits, that 4 bits are spread to: their own rounding comes on top


class Int4Matrix(PackedMatrix):
    """4 bits, with a scale and a zero for every `GROUP` numbers: `w = row · m · (q - z)`.

    `m` and `z` are integers, so that `m · (q - z)` is what a row has in 8 bits (two levels of
    scales: QServe, https://arxiv.org/abs/2405.04532). PyTorch's product of few tokens reads
    `w = scale · (q - 8) + zero`. Rows are padded to `TILE`, columns to `GROUP`.
    """

    few = 16
    rounding: ClassVar = Rounding(4, symmetric=False)

    def _make(self, dtype: torch.dtype, device: Any) -> None:
        held, groups = self.rows + -self.rows % TILE, self.padded // GROUP
        self.numbers = parameter((held, self.padded // 2), torch.uint8, device)
        self.scale = parameter((groups, held, 2), dtype, device)  # and the zero
        self.row = parameter((held,), dtype, device)

    @torch.no_grad()
    def fill(self, rows: Rows) -> None:
        """Round all weights, piece by piece."""
        for start, stop in self.pieces(ROUNDED):
            weight = rows(start, stop).float()
            weight = functional.pad(self._padded(weight), (0, 0, 0, -len(weight) % TILE))
            part = slice(start, start + len(weight))
            row = scale_in(weight.abs().amax(-1) / LARGEST, self.row.dtype)
            q, m, z = _round_groups(weight.unflatten(-1, (-1, GROUP)) / row.float()[:, None, None])
            scale = (m * row.float()[:, None]).to(row.dtype)  # [n, K / GROUP]
            self.row[part] = row
            self.scale[:, part] = torch.stack((scale, (8 - z) * scale), -1).transpose(0, 1)
            self.numbers[part] = _pack(q.flatten(-2).int())

    def product_of_few(self, x: Tensor) -> Tensor:
        """Return products [T, N] with packed numbers as they are, of unrounded tokens."""
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        found: Tensor = product(x, self.numbers, GROUP, self.scale)
        return found[:, : self.rows]

    def integers(self, start: int, stop: int) -> Tensor:
        """Return rows in 8 bits as columns [K, stop - start]."""
        order, end = row_order(), stop + -stop % TILE
        half = order.size // 2
        packed = self.numbers[start:end].view(-1, self.padded // GROUP, GROUP, half)
        m, zeros = self._multipliers(start, end)
        found = torch.empty(self.padded, end - start, dtype=torch.int8, device=packed.device)
        places = found.view(-1, GROUP, len(packed), 2, half)
        low = torch.bitwise_and(packed, 15), torch.bitwise_right_shift(packed, 4)
        for i, q in enumerate(low):  # [blocks, groups, GROUP, half]; sums may overflow on the way
            to = places[:, :, :, i].permute(2, 0, 1, 3)
            torch.addcmul(zeros[:, :, None, i], q.view(torch.int8), m[:, :, None, i], out=to)
        if not order.is_sorted:
            found = found.view(self.padded, -1, 2 * half)[..., order.places].flatten(1)
        return found[:, : stop - start]

    def _multipliers(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return `m` and `-m · z` of every group, rows as packed: [blocks, groups, 2, half]."""
        order = row_order()
        scale, zero = self.scale[:, start:end].float().unbind(-1)  # [groups, n]
        m = (scale / self.row[start:end].float()).round_()
        zeros = (zero / scale).round_().sub_(8).mul_(m)  # (8 - z) - 8 = -z
        both = torch.stack((m, zeros)).to(torch.int16).to(torch.int8)  # modulo 256
        both = both.view(2, len(scale), -1, order.size)
        if not order.is_sorted:
            both = both[..., order.rows]
        first, second = both.unflatten(-1, (2, -1)).transpose(1, 2).unbind(0)
        return first, second

    @property
    def row_scales(self) -> Tensor:
        """Return what an integer of each row is worth [N]."""
        return self.row[: self.rows]

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the weights of some rows [..., K]."""
        order = row_order()
        size, place = order.size, order.places[ids % order.size]
        blocks = self.numbers.view(-1, self.padded, size // 2)
        q = blocks[ids // size, :, place % (size // 2)]  # [..., K] both halves
        q = torch.where(place[..., None] < size // 2, q & 15, q >> 4)
        scale, zero = self.scale[:, ids].movedim(0, -2).unsqueeze(-2).unbind(-1)  # [..., g, 1]
        found = (q.to(torch.int8) - 8).unflatten(-1, (-1, GROUP))
        return torch.addcmul(zero, found.to(scale.dtype), scale).flatten(-2)[..., : self.columns]


class RowOrder(NamedTuple):
    """A list of how rows lie in a block: those of its bytes' low halves, then of the high ones."""

    rows: Tensor  # the row at each place
    places: Tensor  # the place of each row
    is_sorted: bool  # rows lie in their own order

    @property
    def size(self) -> int:
        """Return rows of a block."""
        return len(self.rows)


@functools.cache
def row_order() -> RowOrder:
    """Return how this build packs rows: in blocks of as many as its vectors hold, found by a trial.

    A block is, for each column, as many bytes as half its rows, each with two rows' numbers.

    Raises:
        NotImplementedError: it packs in another way.
    """
    rows, columns = torch.arange(TILE)[:, None], torch.arange(2)
    labels = (rows % 16 + 0 * columns, rows // 16 + 0 * columns, 0 * rows + columns)
    low, high, column = (_pack(label).flatten() for label in labels)
    half = int((column != 0).int().argmax())  # bytes of the first column
    parts = ((a & 15) + 16 * (b & 15) for a, b in ((low, high), (low >> 4, high >> 4)))
    found = torch.cat([part[:half] for part in parts]).long()
    if found.sort().values.tolist() != list(range(2 * half)) or half == 0 or TILE % (2 * half):
        raise NotImplementedError("it packs four bits in an order that is not known")
    places = found.argsort()
    return RowOrder(found, places, bool((found == places).all()))


def _pack(numbers: Tensor) -> Tensor:
    """Pack numbers [n, K] from 0 to 15 as PyTorch's product of few tokens reads them: [n, K/2]."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 1)
    return packed


def _round_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round groups [n, g, GROUP] of at most `LARGEST` to `m · (q - z)`, `q` from 0 to 15.

    Of the two `m` about the group's range, the one with the smaller error.
    """
    step = steps_of(weight, Int4Matrix.rounding)[0]  # at most 2 · LARGEST / 15, below 16
    tried = []
    for m in (step.ceil().clamp_(min=1), step.floor().clamp_(min=1)):
        z = zeros_of(weight, m, Int4Matrix.rounding)
        q = nearest(weight, m, z, Int4Matrix.rounding)
        tried.append((q, m, z, (q - z).mul_(m).sub_(weight).square_().sum(-1, keepdim=True)))
    one, other = tried
    less = other[-1] < one[-1]
    q, m, z = (torch.where(less, b, a) for a, b in zip(one[:3], other[:3], strict=True))
    return q, m[..., 0], z[..., 0]

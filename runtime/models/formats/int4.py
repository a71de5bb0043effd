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
    RowReader,
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
    def fill(self, rows: RowReader) -> None:
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
        products: Tensor = product(x, self.numbers, GROUP, self.scale)
        return products[:, : self.rows]

    def integers(self, start: int, stop: int) -> Tensor:
        """Return rows in 8 bits as columns [K, stop - start]."""
        order, end = row_order(), stop + -stop % TILE
        half = order.size // 2
        packed = self.numbers[start:end].view(-1, self.padded // GROUP, GROUP, half)
        m, zeros = self._multipliers(start, end)
        columns = torch.empty(self.padded, end - start, dtype=torch.int8, device=packed.device)
        target = columns.view(-1, GROUP, len(packed), 2, half)
        low = torch.bitwise_and(packed, 15), torch.bitwise_right_shift(packed, 4)
        for i, q in enumerate(low):  # [panels, groups, GROUP, half]; sums may overflow on the way
            to = target[:, :, :, i].permute(2, 0, 1, 3)
            torch.addcmul(zeros[:, :, None, i], q.view(torch.int8), m[:, :, None, i], out=to)
        if not order.is_sorted:
            columns = columns.view(self.padded, -1, 2 * half)[..., order.inverse].flatten(1)
        return columns[:, : stop - start]

    def _multipliers(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return `m` and `-m · z` of every group, rows as packed: [panels, groups, 2, half]."""
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
        """Return the scale of each row's integers [N]."""
        return self.row[: self.rows]

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the weights of some rows [..., K]."""
        order = row_order()
        size, row = order.size, order.inverse[ids % order.size]
        panels = self.numbers.view(-1, self.padded, size // 2)
        q = panels[ids // size, :, row % (size // 2)]  # [..., K] both halves
        q = torch.where(row[..., None] < size // 2, q & 15, q >> 4)
        scale, zero = self.scale[:, ids].movedim(0, -2).unsqueeze(-2).unbind(-1)  # [..., g, 1]
        integers = (q.to(torch.int8) - 8).unflatten(-1, (-1, GROUP))
        return torch.addcmul(zero, integers.to(scale.dtype), scale).flatten(-2)[..., : self.columns]


class RowOrder(NamedTuple):
    """An order of a panel's rows: those in the low halves of its bytes, then the others."""

    rows: Tensor  # the row at each place
    inverse: Tensor  # the place of each row
    is_sorted: bool  # rows lie in their own order

    @property
    def size(self) -> int:
        """Return how many rows a panel has."""
        return len(self.rows)


@functools.cache
def row_order() -> RowOrder:
    """Return the order in which this build of PyTorch packs rows into a panel, found by a trial.

    A panel has as many rows as the build's vectors hold: for each column half as many bytes, each
    with the numbers of two rows.

    Raises:
        NotImplementedError: it packs in another way.
    """
    rows, columns = torch.arange(TILE)[:, None], torch.arange(2)
    labels = (rows % 16 + 0 * columns, rows // 16 + 0 * columns, 0 * rows + columns)
    low, high, column = (_pack(label).flatten() for label in labels)
    half = int((column != 0).int().argmax())  # bytes of the first column
    parts = ((a & 15) + 16 * (b & 15) for a, b in ((low, high), (low >> 4, high >> 4)))
    order = torch.cat([part[:half] for part in parts]).long()
    if order.sort().values.tolist() != list(range(2 * half)) or half == 0 or TILE % (2 * half):
        raise NotImplementedError("it packs four bits in an order that is not known")
    inverse = order.argsort()
    return RowOrder(order, inverse, bool((order == inverse).all()))


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
    first, other = tried
    less = other[-1] < first[-1]
    q, m, z = (torch.where(less, b, a) for a, b in zip(first[:3], other[:3], strict=True))
    return q, m[..., 0], z[..., 0]

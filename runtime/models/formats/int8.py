"""Holds weights in 8 bits."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from kvcap.runtime.models.packed_matrix import ROUNDED, PackedMatrix, RowReader, parameter, scale_in
from kvcap.runtime.models.rounding import Rounding


class Int8Matrix(PackedMatrix):
    """8 bits, with a scale for each row: `w = scale · q`."""

    few = 4
    # Twice as many numbers share a scale as in 4 bits: products of a token take a fifth less time,
    # and weights differ by 0.6 % of their size instead of 0.5 %.
    rounding: ClassVar = Rounding(8, block=64)

    def _make(self, dtype: torch.dtype, device: Any) -> None:
        self.numbers = parameter((self.rows, self.padded), torch.int8, device)
        self.scale = parameter((self.rows,), dtype, device)

    @torch.no_grad()
    def fill(self, rows: RowReader) -> None:
        """Round all weights, piece by piece."""
        for start, stop in self.pieces(ROUNDED):
            part = slice(start, stop)
            weight = self._padded(rows(start, stop).float())
            scale = scale_in(weight.abs().amax(-1) / 127, self.scale.dtype)
            self.scale[part] = scale
            rounded = (weight / scale.float()[:, None]).round_().clamp_(-127, 127)
            self.numbers[part] = rounded.to(torch.int8)

    def product_of_few(self, x: Tensor) -> Tensor:
        """Return products [T, N] with packed numbers as they are, of unrounded tokens."""
        return torch._weight_int8pack_mm(x, self.numbers, self.scale)

    def integers(self, start: int, stop: int) -> Tensor:
        """Return rows as columns [K, stop - start]."""
        return self.numbers[start:stop].t()

    @property
    def row_scales(self) -> Tensor:
        """Return the scale of each row's integers [N]."""
        return self.scale

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the weights of some rows [..., K]."""
        return (self.numbers[ids] * self.scale[ids][..., None])[..., : self.columns]

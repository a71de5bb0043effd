"""Defines a matrix in fewer bits, multiplied on a CPU; each file of `formats` is one kind.

A few tokens are multiplied by the packed numbers as they are: what is read is what decides the time
of a token. Many are rounded to 8 bits, each token by a scale of its own, and multiplied as integers
(`torch._int_mm`), fewer bits being spread to 8 a piece at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvcap.runtime.models.rounding import Rounding

TILE = 64  # rows that are packed together, or a multiple of them
WIDTH = 32  # numbers that a product reads at once
ROUNDED = 1 << 20  # weights that are rounded at once, each of which takes some 28 bytes meanwhile
SPREAD = 1 << 21  # and that are spread to 8 bits at once, of 3 bytes

RowReader = Callable[[int, int], Tensor]  # of a matrix, from one row to another


class PackedMatrix(nn.Module):
    """A matrix [N, K] in fewer bits, empty until it is filled.

    Args:
        rows: `N`, numbers of a result.
        columns: `K`, numbers of a token.
        dtype: of tokens and results, and so of scales.
        device: where it is held.
    """

    few: ClassVar[int]  # tokens up to which packed numbers are multiplied as they are
    rounding: ClassVar[Rounding | None] = None  # of exports of this type; None: there are none

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: Any = None) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns
        self._make(dtype, device)

    def _make(self, dtype: torch.dtype, device: Any) -> None:
        """Allocate all that is held."""
        raise NotImplementedError

    def fill(self, rows: RowReader) -> None:
        """Round all weights, piece by piece."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return the products [T, N] of tokens [T, K]."""
        if len(x) == 0:
            return x.new_empty(0, self.rows)
        x = self._padded(x.contiguous())
        return self.product_of_few(x) if len(x) <= self.few else self._product_of_many(x)

    def _padded(self, x: Tensor) -> Tensor:
        more = self.padded - self.columns
        return functional.pad(x, (0, more)) if more else x

    @property
    def padded(self) -> int:
        """Return a token's numbers with zeros behind: PyTorch's products read whole vectors."""
        return self.columns + -self.columns % WIDTH

    def pieces(self, weights: int) -> Iterator[tuple[int, int]]:
        """Return where pieces of about so many weights begin and end, in rows."""
        step = max(TILE, weights // self.padded // TILE * TILE)
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)

    def product_of_few(self, x: Tensor) -> Tensor:
        """Return products [T, N] with packed numbers as they are, of unrounded tokens."""
        raise NotImplementedError

    def integers(self, start: int, stop: int) -> Tensor:
        """Return rows in 8 bits, times `row_scale` the weights, as columns [K, stop - start].

        Args:
            start: a multiple of `TILE`.
            stop: likewise, or the end.
        """
        raise NotImplementedError

    @property
    def row_scales(self) -> Tensor:
        """Return the scale of each row's integers [N]."""
        raise NotImplementedError

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the weights of some rows [..., K]."""
        raise NotImplementedError

    def _product_of_many(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).float().div_(127)  # [T, 1]
        scale.masked_fill_(scale == 0, 1)
        rounded = (x / scale).round_().to(torch.int8)  # in float32, as scales are
        out, scales = x.new_empty(len(x), self.rows), self.row_scales.float()
        for start, stop in self.pieces(SPREAD):
            sums = torch._int_mm(rounded, self.integers(start, stop))  # [T, n] int32
            out[:, start:stop] = torch.mul(sums, scale).mul_(scales[start:stop])
        return out


def scale_in(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales in the type that they are held in, 1 where there is nothing to scale."""
    scale = scale.to(dtype)
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def parameter(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> nn.Parameter:
    """Return a parameter of this shape that is not filled, nor trained."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

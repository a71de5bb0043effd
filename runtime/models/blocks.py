"""Unpacks the blocks of a GGUF file to integers, scales and offsets, without rounding.

A block has some numbers of a row, which share scales. Knows the layouts of llama.cpp's
`ggml-common.h`; reads no file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

K_BLOCK = 256  # numbers of a block of the K types


class Digits(NamedTuple):
    """Rows as `scale · q + offset`, a scale and an offset for every `size` numbers."""

    q: Tensor  # [n, K] int8
    scale: Tensor  # [n, K / size] float32
    offset: Tensor  # likewise


class BlockKind(NamedTuple):
    """A description of how a type of tensors packs its numbers."""

    numbers: int  # of a block
    nbytes: int  # of it
    size: int  # numbers that share a scale
    low: int  # `q` is `h · low + l` with h from -8 to 7, l from 0 to `low - 1`
    unpack: Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]

    @property
    def shifted(self) -> bool:
        """Return whether its scales have offsets beside them."""
        return self.unpack(torch.zeros(1, self.nbytes, dtype=torch.uint8))[2] is not None

    def digits(self, rows: Tensor) -> Digits:
        """Unpack rows [n, bytes] uint8."""
        blocks = rows.reshape(-1, self.nbytes)
        q, scale, offset = self.unpack(blocks)
        scale = scale.reshape(len(rows), -1)
        offset = torch.zeros_like(scale) if offset is None else offset.reshape(len(rows), -1)
        return Digits(q.to(torch.int8).reshape(len(rows), -1), scale, offset)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return a float16 of every block [b, 1] as float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves of bytes [b, n], and then the high ones [b, 2 · n] int16."""
    return torch.cat((packed & 15, packed >> 4), -1).to(torch.int16)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Return a bit for every number [b, 32] of four bytes."""
    bits = blocks[:, start : start + 4, None] >> torch.arange(8, dtype=torch.uint8)
    return ((bits & 1) << 4).flatten(1)


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    return _nibbles(blocks[:, 2:]) - 8, _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 4:]) - 8, scale, _half(blocks, 2) + 8 * scale


def _q5_0(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    return (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)) - 16, _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = _half(blocks, 0)
    q = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)) - 16
    return q, scale, _half(blocks, 2) + 16 * scale


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    return blocks[:, 2:].view(torch.int8), _half(blocks, 0), None


def _k_scales(blocks: Tensor, middle: int) -> tuple[Tensor, Tensor]:
    """Return scales and offsets [b, 8] of the groups of 32, around a `q` of 0 that was `middle`."""
    one, two, both = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scale = torch.cat((one & 63, (both & 15) | ((one >> 2) & 48)), -1) * _half(blocks, 0)
    least = torch.cat((two & 63, (both >> 4) | ((two >> 2) & 48)), -1) * _half(blocks, 2)
    return scale, middle * scale - least


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = _nibbles(blocks[:, 16:].unflatten(1, (4, 32)))
    return q - 8, *_k_scales(blocks, 8)


def _q5_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32)
    high = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return (q | (high << 4)) - 16, *_k_scales(blocks, 16)


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).view(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts) & 3
    scale = blocks[:, 192:208].view(torch.int8) * _half(blocks, 208)
    return (low | (high << 4)) - 32, scale, None


BLOCKS = {
    "Q4_0": BlockKind(32, 18, 32, 1, _q4_0),
    "Q4_1": BlockKind(32, 20, 32, 1, _q4_1),
    "Q5_0": BlockKind(32, 22, 32, 2, _q5_0),
    "Q5_1": BlockKind(32, 24, 32, 2, _q5_1),
    "Q8_0": BlockKind(32, 34, 32, 16, _q8_0),
    "Q4_K": BlockKind(K_BLOCK, 144, 32, 1, _q4_k),
    "Q5_K": BlockKind(K_BLOCK, 176, 32, 2, _q5_k),
    "Q6_K": BlockKind(K_BLOCK, 210, 16, 4, _q6_k),
}
"""Holds how each type packs its numbers, by llama.cpp's names."""

"""Defines how slots hold keys and values: in the model's own type, or quantised to 8 or 4 bits.

A token's key and value are quantised once, when they arrive. When their slot moves, their bytes and
their scales, which lie in side tensors of the pool, are copied, so that errors never add up. A
reader gets a copy in the model's own type.

    int8   q = round(x / s), s = max |x| / 127 of a vector                      D + 2 bytes
    int4   q = round((x - l) / s), l = min x, s = (max x - l) / 15 of a group   D/2 + 4 D/32 bytes

Scales `s` and least numbers `l` are float16, and `q` is made with them as they are stored. A group
is 32 neighbouring numbers, or the largest divisor of D below. Byte i of an int4 vector holds
number i in its low bits and number i + D/2 in its high ones. Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from kvcap.runtime.errors import PlanInfeasible

KvDtype = Literal["int8", "int8-int4", "int4"]
GROUP = 32  # the most numbers of an int4 vector that share a scale

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Numbers(NamedTuple):
    """A way to quantise vectors, each of which becomes bytes and numbers of side tensors."""

    shapes: Callable[[int], Shapes]
    """Returns shape and type of each tensor's part of a vector of so many numbers, by name."""
    quantise: Callable[[Tensor], dict[str, Tensor]]
    """Turns vectors [..., D] into tensors [..., *shape] by name."""
    dequantise: Callable[[Mapping[str, Tensor], Tensor, Tensor | None], None]
    """Writes numbers [..., n, D] back into a float32 tensor, plus a vector [..., D] if given."""
    weigh: Callable[[Mapping[str, Tensor], Tensor], Tensor]
    """Sums vectors by weights [..., r, n] to [..., r, D]; scales of 8 bits go into weights."""


@dataclass(frozen=True)
class SlotFormat:
    """A choice of how slots hold keys and values; None: in the model's own type."""

    keys: Numbers | None = None
    values: Numbers | None = None
    name: KvDtype | None = None

    @classmethod
    def of(cls, name: str | None) -> SlotFormat:
        """Return the format that `--kv-dtype` names; None: in the model's own type.

        Raises:
            PlanInfeasible: there is none of that name.
        """
        if name is None:
            return cls()
        if name not in get_args(KvDtype):
            raise PlanInfeasible(
                f"kv_dtype={name!r}: slots hold keys and values as {', '.join(get_args(KvDtype))} "
                "(keys and values, or each), or as the model's own numbers where it is left out"
            )
        keys, _, values = name.partition("-")
        return cls(NUMBERS[keys], NUMBERS[values or keys], name)  # type: ignore[arg-type]

    @cached_property
    def quantised(self) -> bool:
        """Return whether slots hold quantised numbers."""
        return self.name is not None

    @property
    def summary(self) -> str:
        """Return words for a summary, such as ', int8 slots'; '' for the model's own type."""
        return f", {self.name} slots" if self.name else ""

    def shapes(self, size: int, dtype: torch.dtype) -> Shapes:
        """Return shape and type of a slot's tensors by name: 'keys', 'values', then side tensors.

        Args:
            size: `D`, numbers of a key.
            dtype: the model's type.
        """
        both = {"key": self.keys, "value": self.values}
        vectors, sides = Shapes(), Shapes()
        for name, numbers in both.items():
            if numbers is None:
                vectors[f"{name}s"] = (size,), dtype
                continue
            for part, shape in numbers.shapes(size).items():
                if part:
                    sides[f"{name}_{part}"] = shape
                else:
                    vectors[f"{name}s"] = shape
        return {**vectors, **sides}

    def written(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Return the tensors to write for keys and values [..., D], by the names of `shapes`."""
        found = dict[str, Tensor]()
        if self.keys is not None and self.keys is self.values:  # at once, in half the operations
            both = self.keys.quantise(torch.stack((keys.float(), values.float())))
            for i, name in enumerate(("key", "value")):
                found |= {
                    f"{name}_{part}" if part else f"{name}s": x[i] for part, x in both.items()
                }
            return found
        for name, numbers, x in (("key", self.keys, keys), ("value", self.values, values)):
            if numbers is None:
                found[f"{name}s"] = x
                continue
            for part, tensor in numbers.quantise(x).items():
                found[f"{name}_{part}" if part else f"{name}s"] = tensor
        return found

    @staticmethod
    def parts(name: str, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Pick from `named` the bytes of 'key' or 'value', under '', and its side tensors."""
        head = f"{name}_"
        sides = {key.removeprefix(head): x for key, x in named.items() if key.startswith(head)}
        return {"": named[f"{name}s"], **sides}


def group_of(size: int) -> int:
    """Return how many numbers of an int4 vector of `size` share a scale."""
    return next(n for n in range(min(GROUP, size), 0, -1) if size % n == 0)


def _shapes_8(size: int) -> Shapes:
    return {"": ((size,), torch.int8), "scale": ((), torch.float16)}


def _quantise_8(x: Tensor) -> dict[str, Tensor]:
    x = x.float()
    scale = (x.abs().amax(-1) / 127).half()
    q = (x / _divisor(scale)[..., None]).round_().clamp_(-127, 127)
    return {"": q.to(torch.int8), "scale": scale}


def _dequantise_8(parts: Mapping[str, Tensor], out: Tensor, plus: Tensor | None = None) -> None:
    scale = parts["scale"].float()[..., None]
    out.copy_(parts[""])
    if plus is None:
        out.mul_(scale)
    else:
        torch.addcmul(plus[..., None, :], out, scale, out=out)


def _shapes_4(size: int) -> Shapes:
    groups = (size // group_of(size),)
    return {
        "": ((size // 2,), torch.uint8),
        "scale": (groups, torch.float16),
        "low": (groups, torch.float16),
    }


def _quantise_4(x: Tensor) -> dict[str, Tensor]:
    groups = x.float().unflatten(-1, (-1, group_of(x.shape[-1])))  # [..., D/32, 32]
    least, most = groups.aminmax(dim=-1)
    low = least.half()
    scale = ((most - low.float()) / 15).half()
    q = (groups - low.float()[..., None]).div_(_divisor(scale)[..., None]).round_().clamp_(0, 15)
    a, b = q.flatten(-2).to(torch.uint8).chunk(2, dim=-1)
    return {"": a | (b << 4), "scale": scale, "low": low}


def _weigh_8(parts: Mapping[str, Tensor], weights: Tensor) -> Tensor:
    return torch.matmul(weights * parts["scale"].float()[..., None, :], parts[""].float())


def _dequantise_4(parts: Mapping[str, Tensor], out: Tensor, plus: Tensor | None = None) -> None:
    packed, scale, low = parts[""], parts["scale"].float(), parts["low"].float()
    half = packed.shape[-1]
    out[..., :half], out[..., half:] = packed & 15, packed >> 4
    groups = out.unflatten(-1, (scale.shape[-1], -1))  # a view
    groups.mul_(scale[..., None]).add_(low[..., None])
    if plus is not None:
        out.add_(plus[..., None, :])


def _weigh_4(parts: Mapping[str, Tensor], weights: Tensor) -> Tensor:
    packed = parts[""]
    out = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], device=packed.device)
    _dequantise_4(parts, out)  # products by group would take longer
    return torch.matmul(weights, out)


def _divisor(scale: Tensor) -> Tensor:
    """Return a scale that can be divided by: 1 for 0, where all that is divided is 0, too."""
    return scale.float().masked_fill_(scale == 0, 1.0)


NUMBERS = {
    "int8": Numbers(_shapes_8, _quantise_8, _dequantise_8, _weigh_8),
    "int4": Numbers(_shapes_4, _quantise_4, _dequantise_4, _weigh_4),
}

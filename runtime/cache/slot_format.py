"""Defines how slots hold keys and values: in the model's own type, or quantised to fewer bits.

A token's key and value are quantised once, when they arrive. When their slot moves, their bytes and
their scales, which lie in side tensors of the pool, are copied, so that errors never add up. A
reader gets a copy in the model's own type. `formats` has the types. Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvcap.runtime.cache.formats import CHOICES, numbers_of
from kvcap.runtime.cache.slot_numbers import Numbers, Shapes
from kvcap.runtime.errors import PlanInfeasible


@dataclass(frozen=True)
class SlotFormat:
    """A choice of how slots hold keys and values; None: in the model's own type."""

    keys: Numbers | None = None
    values: Numbers | None = None
    name: str | None = None

    @classmethod
    def of(cls, name: str | None) -> SlotFormat:
        """Return the format that `--kv-dtype` names; None: in the model's own type.

        Raises:
            PlanInfeasible: there is none of that name.
        """
        if name is None:
            return cls()
        if name not in CHOICES:
            raise PlanInfeasible(
                f"kv_dtype={name!r}: slots hold keys and values as {', '.join(CHOICES)} "
                "(keys and values, or each), or as the model's own numbers where it is left out"
            )
        keys, _, values = name.partition("-")
        return cls(numbers_of(keys), numbers_of(values or keys), name)

    @cached_property
    def quantised(self) -> bool:
        """Return whether slots hold quantised numbers."""
        return self.name is not None

    @property
    def types(self) -> tuple[Numbers, ...]:
        """Return the types of quantised keys and values."""
        return tuple(x for x in (self.keys, self.values) if x is not None)

    @property
    def unrotated(self) -> bool:
        """Return whether keys are held without their rotation alone, at compact positions."""
        return self.keys is not None and self.keys.unrotated

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
        tensors = dict[str, Tensor]()
        if self.keys is not None and self.keys is self.values:  # at once, in half the operations
            both = self.keys.quantise(torch.stack((keys.float(), values.float())))
            for i, name in enumerate(("key", "value")):
                tensors |= {
                    f"{name}_{part}" if part else f"{name}s": x[i] for part, x in both.items()
                }
            return tensors
        for name, numbers, x in (("key", self.keys, keys), ("value", self.values, values)):
            if numbers is None:
                tensors[f"{name}s"] = x
                continue
            for part, tensor in numbers.quantise(x).items():
                tensors[f"{name}_{part}" if part else f"{name}s"] = tensor
        return tensors

    @staticmethod
    def parts(name: str, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Pick from `named` the bytes of 'key' or 'value', under '', and its side tensors."""
        head = f"{name}_"
        sides = {key.removeprefix(head): x for key, x in named.items() if key.startswith(head)}
        return {"": named[f"{name}s"], **sides}

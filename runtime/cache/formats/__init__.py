"""Finds the types in which slots hold quantised numbers: a file here is a type, named as the file.

A name ends in its bits. `--kv-dtype` takes a type, or two: keys in one, values in one of fewer
bits. PyTorch is imported only with a type, not for the names.
"""

from __future__ import annotations

import re
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcap.runtime.cache.slot_numbers import Numbers


def _bits(name: str) -> int:
    (digits,) = re.findall(r"\d+$", name)
    return int(digits)


NAMES = tuple(
    sorted((x.stem for x in Path(__file__).parent.glob("[a-z]*.py")), key=lambda x: (-_bits(x), x))
)
CHOICES = tuple(
    a if a == b else f"{a}-{b}" for a, b in product(NAMES, NAMES) if a == b or _bits(a) > _bits(b)
)
"""Lists what `--kv-dtype` takes: 'int8', 'int8-int4' (keys in 8 bits, values in 4) and so on."""


def numbers_of(name: str) -> Numbers:
    """Return the type of this name, one of `NAMES`."""
    numbers: Numbers = import_module(f"{__name__}.{name}").NUMBERS
    return numbers

"""Finds the types of weights in few bits: a file here is a type, and `--weights` takes its name.

It defines one `PackedMatrix`. PyTorch is imported only with a type, not for the names.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcap.runtime.models.packed_matrix import PackedMatrix

NAMES = tuple(
    sorted((x.stem for x in Path(__file__).parent.glob("[a-z]*.py")), reverse=True)  # int8, int4
)


def matrix_of(name: str) -> type[PackedMatrix]:
    """Return the class of matrices of a type.

    Raises:
        ValueError: there is no such type; names those there are.
    """
    if name not in NAMES:
        raise ValueError(f"weights={name!r}: PyTorch runs weights of {' or '.join(NAMES)}")
    module = import_module(f"{__name__}.{name}")
    from kvcap.runtime.models.packed_matrix import PackedMatrix

    kinds = [
        x for x in vars(module).values() if isinstance(x, type) and issubclass(x, PackedMatrix)
    ]
    return next(x for x in kinds if x.__module__ == module.__name__)

"""Carries the blocks of a GGUF file into a graph's: no weight is rounded a second time.

Numbers of 4 bits stay so, those of 5 to 8 bits become 8; scales and offsets become float32. Knows
the types of such files; no graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kvcap.export.weights import ROWS, Packed, Rounding, below, joined
from kvcap.runtime.errors import NotExportable
from kvcap.runtime.models.blocks import BLOCKS
from kvcap.runtime.models.checkpoint import GgufCheckpoint
from kvcap.runtime.models.gguf import PLAIN, is_gguf

FLOATS = ("BF16", *PLAIN)  # types of weights that a graph has as floats


def rounding_in_file(kind: str) -> Rounding:
    """Return how a graph rounds what lies in a file's blocks of this type."""
    blocks = BLOCKS[kind]
    return Rounding(4 if blocks.low == 1 else 8, block=blocks.size, shifted=blocks.shifted)


class FileBlocks(Mapping[str, Packed]):
    """The matrices of a GGUF file as a graph has them, each read when it is asked for.

    Args:
        weights: of the file, by their names in the graph.

    Raises:
        NotExportable: blocks are of a type that a graph does not have.
    """

    def __init__(self, weights: GgufCheckpoint) -> None:
        self.weights = weights
        kinds = {name: weights.kind(name) for name in weights}
        if unknown := sorted(set(kinds.values()).difference(BLOCKS, FLOATS)):
            raise NotExportable(
                f"the file has weights in {', '.join(unknown)}, which a graph would have to round "
                f"again; give a file of {', '.join(BLOCKS)}, or export by --dtype int8"
            )
        self.roundings = {name: rounding_in_file(x) for name, x in kinds.items() if x in BLOCKS}

    @classmethod
    def of(cls, where: str, model: Any, within: str) -> FileBlocks:
        """Return the matrices of a file.

        Args:
            where: the file.
            model: made from its config.
            within: put before the model's names, as the graph has them.

        Raises:
            NotExportable: it is no such file, or its matrices are not the model's own.
        """
        if not is_gguf(where):
            raise NotExportable(
                f"{where!r} is no GGUF file, whose blocks a graph could have as they are; export "
                "it by --dtype int8 or int4"
            )
        found = GgufCheckpoint.of(where, model, torch.float32, within)
        if found is None:
            raise NotExportable(
                f"weights of {where!r} cannot stay in their blocks, as transformers puts this "
                "family's together again; export it by --dtype int8 or int4"
            )
        return cls(found)

    def __getitem__(self, name: str) -> Packed:
        rounding, blocks = self.roundings[name], BLOCKS[self.weights.kind(name)]
        rows, columns = self.weights.shape(name)
        step, parts = max(1, ROWS // columns), list[Packed]()
        for start in range(0, rows, step):
            read = self.weights.blocks(name, start, min(rows, start + step))
            q, scale, offset = blocks.digits(read)
            numbers = (q.to(torch.int16) + rounding.middle).unflatten(1, (-1, rounding.block))
            part = joined(numbers, scale[..., None], scale, rounding)
            parts.append(part._replace(offsets=offset if rounding.shifted else None))
        return below(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.roundings)

    def __len__(self) -> int:
        return len(self.roundings)

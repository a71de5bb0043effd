"""Makes training rows of running text: the files of a folder, cut at random places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import IterableDataset

from kvcap.lab.pocket.rows import Stage
from kvcap.lab.pocket.vocabulary import BOS

Tokens = np.ndarray[Any, np.dtype[np.uint16]]
SUFFIXES = (".md", ".txt")


def read(folder: Path) -> list[str]:
    """Return the texts of a folder's ``.txt`` and ``.md`` files, by name.

    Raises:
        ValueError: there are none.
    """
    files = sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES)
    if not files:
        raise ValueError(f"{str(folder)!r} holds no file that ends in {' or '.join(SUFFIXES)}")
    return [file.read_text("utf-8") for file in files]


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> Tokens:
    """Return the token ids of all texts one after another, each behind the token that begins it."""
    begin = tokenizer.token_to_id(BOS)
    rows = (chain([begin], encoding.ids) for encoding in tokenizer.encode_batch_fast(list(texts)))
    return np.fromiter(chain.from_iterable(rows), dtype=np.uint16)


class Windows(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Batches of ``tokens`` ids, shape (rows, length), from random places of a long text.

    Each comes with zeros of its shape, as no token is marked. Batch ``i`` depends on the seed and
    ``i`` alone.

    Raises:
        ValueError: the text is shorter than the longest row.
    """

    def __init__(self, ids: Tokens, stages: list[Stage], tokens: int, seed: int) -> None:
        longest = max(max(stage.lengths) for stage in stages)
        if len(ids) < longest:
            raise ValueError(f"the text has {len(ids):,} tokens, and rows have {longest:,}")
        self.ids, self.stages, self.tokens, self.seed = ids, stages, tokens, seed

    def __len__(self) -> int:
        return sum(stage.tokens // self.tokens for stage in self.stages)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        plan = [stage for stage in self.stages for _ in range(stage.tokens // self.tokens)]
        for i, stage in enumerate(plan):
            rng = Random(f"{self.seed}/{i}")
            length = rng.choices(stage.lengths, stage.shares)[0]
            starts = [
                rng.randrange(len(self.ids) - length + 1)
                for _ in range(max(1, self.tokens // length))
            ]
            rows = np.stack([self.ids[start : start + length] for start in starts])
            batch = torch.from_numpy(rows.astype(np.int32))
            yield batch, torch.zeros_like(batch)

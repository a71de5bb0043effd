"""Makes training rows: conversations as token ids, packed to one length, with token weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import IterableDataset, get_worker_info

from kvcap.lab.pocket.corpus import conversation, facts
from kvcap.lab.pocket.tasks import chat_about, paste_about
from kvcap.lab.pocket.vocabulary import ASSISTANT, render

Ids = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Stage:
    """A stretch of training that reads ``tokens`` tokens in rows of ``lengths``, by ``shares``."""

    tokens: int
    lengths: tuple[int, ...]
    shares: tuple[float, ...]
    marked: bool = False  # rows of `marked_row`, for the survival loss


def encode(tokenizer: Tokenizer, rng: Random, tokens: int) -> list[int]:
    """Return the token ids of one conversation of about ``tokens`` tokens."""
    ids: list[int] = tokenizer.encode(render(conversation(rng, tokens))).ids
    return ids


def row(tokenizer: Tokenizer, rng: Random, length: int) -> Ids:
    """Return ``length`` token ids: a conversation that nearly fills the row, then short ones.

    The first conversation is drawn again, smaller, if it came out too long, since its questions
    stand at the end. The last one may be cut. One row in five holds conversations of any size.
    """
    target = length * rng.uniform(0.8, 0.98)
    if length > 256 and rng.random() < 0.2:
        target = 2 ** rng.uniform(6, np.log2(target))
    ids = encode(tokenizer, rng, int(target))
    while len(ids) > length:
        target *= 0.85
        ids = encode(tokenizer, rng, int(target))
    while len(ids) < length:
        ids += encode(tokenizer, rng, int(2 ** rng.uniform(5, 9)))
    return np.array(ids[:length], dtype=np.int32)


def marked_row(tokenizer: Tokenizer, rng: Random, length: int) -> tuple[Ids, Ids]:
    """Return a row that opens with a few facts' conversation, and 1 where a token tells a fact."""
    make = rng.choice((chat_about, chat_about, paste_about))
    share = 0.95
    while True:
        known = facts(rng, rng.randint(1, 8))
        text = render(make(rng, int(length * share * rng.uniform(0.9, 1)), known))
        encoding = tokenizer.encode(text)
        if len(encoding.ids) <= length:
            break
        share *= 0.9
    marks = np.zeros(length, dtype=np.int32)
    low = text.lower()
    for fact in known:
        begin = low.index(fact.key.lower())
        end = low.index(fact.value.lower(), begin + len(fact.key)) + len(fact.value)
        if end - begin <= len(fact.key) + len(fact.value) + 4:
            first, last = encoding.char_to_token(begin), encoding.char_to_token(end - 1)
            assert first is not None
            assert last is not None
            # the full stop counts: without it, no one would know where the value ends
            marks[first : last + 2] = 1
    ids = list(encoding.ids)
    while len(ids) < length:
        ids += encode(tokenizer, rng, int(2 ** rng.uniform(5, 9)))
    return np.array(ids[:length], dtype=np.int32), marks


class Batches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Batches of ``tokens`` ids, shape (rows, length), through the stages of a curriculum.

    Each comes with a tensor of that shape that is 1 where a token tells a fact; it is 0
    everywhere except in marked stages, where half the batches have such marks.

    Batch ``i`` depends on the seed and ``i`` alone, so the number of workers does not matter.
    """

    def __init__(self, tokenizer: str, stages: list[Stage], tokens: int, seed: int) -> None:
        self.tokenizer, self.stages, self.tokens, self.seed = tokenizer, stages, tokens, seed

    def __len__(self) -> int:
        return sum(stage.tokens // self.tokens for stage in self.stages)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        tokenizer = Tokenizer.from_file(self.tokenizer)
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        plan = [stage for stage in self.stages for _ in range(stage.tokens // self.tokens)]
        for i in range(first, len(plan), step):
            rng = Random(f"{self.seed}/{i}")
            length = rng.choices(plan[i].lengths, plan[i].shares)[0]
            rows = range(max(1, self.tokens // length))
            if plan[i].marked and i % 2:
                ids, marks = zip(*(marked_row(tokenizer, rng, length) for _ in rows), strict=True)
            else:
                ids = tuple(row(tokenizer, rng, length) for _ in rows)
                marks = tuple(np.zeros_like(each) for each in ids)
            yield torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(marks))


def weights(ids: torch.Tensor, special: int, assistant: int, digits: torch.Tensor) -> torch.Tensor:
    """Return the loss weight of each next token, shape (rows, length - 1).

    50 for a digit that the assistant says, 15 for its other tokens and the end of its turn, 1
    for everything else. ``special`` is how many special tokens there are (ids below it),
    ``digits`` a bool tensor over the vocabulary.
    """
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    latest = torch.where(ids < special, positions, 0).cummax(1).values
    from_assistant = (ids.gather(1, latest) == assistant)[:, :-1]
    weight = torch.where(digits[ids[:, 1:]], 50.0, 15.0)
    return torch.where(from_assistant, weight, 1.0)


def digit_table(tokenizer: Tokenizer) -> torch.Tensor:
    """Return a bool tensor over the vocabulary that marks the ten digits."""
    table = torch.zeros(tokenizer.get_vocab_size(), dtype=torch.bool)
    table[[tokenizer.token_to_id(digit) for digit in "0123456789"]] = True
    return table


def assistant_id(tokenizer: Tokenizer) -> int:
    """Return the id of the token that opens an assistant turn."""
    token: int | None = tokenizer.token_to_id(ASSISTANT)
    assert token is not None, "not a pocket tokenizer"
    return token

"""Measures the perplexity of a long text under eviction (OBCache, Figure 4); asks nothing.

The text is generated prose, or pieces of a user's file (`perplexity:FILE`), and is read without a
chat template.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import islice
from random import Random
from typing import Any

from kvcap.evals.quality.prompts import Sample
from kvcap.lab.quality.tasks import Task
from kvcap.pocket.prose import filler
from kvcap.runtime.files import read_plain

MAX_NEW_TOKENS = 0
UNIT = "perplexity"
PLACED = False
MOST = 1 << 28  # most bytes of a file


def make(rng: Random, tokenizer: Any, length: int, depth: float) -> Sample:
    """Make generated prose; `depth` is not used."""
    sentences, text, ids = filler(rng), "", list[int]()
    while len(ids) < length:  # all are tokenized again, as tokens depend on the text before them
        text = " ".join([*([text] if text else []), *islice(sentences, 1 + length // 8)])
        ids = _encode(tokenizer, text)
    return _sample(tokenizer, length, ids)


def from_file(path: str) -> Task:
    """Return the task of a file's text.

    Raises:
        ValueError: there is no such file, or it is empty, or no text.
    """
    return _File(path)


class _File:
    """A task that reads the text of a file."""

    MAX_NEW_TOKENS, UNIT, PLACED = MAX_NEW_TOKENS, UNIT, PLACED

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            given = read_plain(path, MOST)
            self.text = given.decode("utf-8-sig")
        except (OSError, ValueError) as error:
            raise ValueError(f"perplexity:{path}: no text can be read there ({error})") from error
        if not self.text.strip():
            raise ValueError(f"perplexity:{path}: the file is empty; give one with text")
        self.digest = sha256(given).hexdigest()[:16]
        """Identifies the file's content; cells measured on other content are other cells."""
        self._ids: tuple[Any, list[int]] | None = None  # last tokenizer, and its tokens of the file

    def make(self, rng: Random, tokenizer: Any, length: int, depth: float) -> Sample:
        """Return a piece of the text; `depth` 0 is the first one possible, 1 the last."""
        if self._ids is None or self._ids[0] is not tokenizer:
            self._ids = tokenizer, _encode(tokenizer, self.text)
        ids = self._ids[1]
        if len(ids) < length:
            raise ValueError(
                f"perplexity:{self.path} has {len(ids):,} tokens, and {length:,} were requested; "
                f"give --lengths {len(ids)} or less, or a longer text"
            )
        start = int(depth * (len(ids) - length))
        return _sample(tokenizer, length, ids[start : start + length])

    def score(self, sample: Sample, reply: str) -> float:
        """Fail, as it is never called for a task that asks nothing."""
        raise NotImplementedError


def _sample(tokenizer: Any, length: int, ids: list[int]) -> Sample:
    """Return a sample of the first `length` tokens, after the tokenizer's opening token."""
    if length < 2:
        raise ValueError(f"a length of {length} tokens is too short; 2 are needed")
    begin = tokenizer.bos_token_id
    opens = begin is not None and tokenizer("a")["input_ids"][:1] == [begin]
    ids = [*([begin] if opens else []), *ids][:length]
    return Sample(tokenizer.decode(ids), "", (), chat=False, ids=tuple(ids))


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids

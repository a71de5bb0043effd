"""Ranks what a user told by how near it is in meaning to a question that has none of its words.

The vectors are the model's own: a word is the sum of the rows of its tokens in the embedding table.
Nothing is kept of them but their mean and their covariance, by which they become comparable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.recall.settings import WIDEST
from kvcap.runtime.recall.store import EMPTY, rarity, terms

Vectors = NDArray[np.float32]
SAMPLED, FIRST, PIECE = 8192, 256, 512  # frequent tokens, behind bytes and special ones; at a time
COMMON, TEXTS = 3, 8  # directions that all texts share, if there are so many texts for each


class Meaning:
    """A measure of how near texts are in meaning, by the rows of a model's embedding table.

    Args:
        rows: gives the table's rows of some tokens, [n, d].
        encode: gives the tokens of a text.
        vocabulary: how many rows the table has; the first ones belong to frequent tokens.
    """

    def __init__(
        self,
        rows: Callable[[Sequence[int]], Vectors],
        encode: Callable[[str], list[int]],
        vocabulary: int,
    ) -> None:
        self._rows, self._encode, self._vocabulary = rows, encode, vocabulary

    @cached_property
    def _plain(self) -> tuple[Vectors, Vectors]:
        """Return the mean row [d], and a matrix [d, d] that makes rows equally long each way.

        Most rows of a table point the same way, and would all be alike.
        """
        sampled = range(min(FIRST, self._vocabulary // 2), min(FIRST + SAMPLED, self._vocabulary))
        pieces = [sampled[at : at + PIECE] for at in range(0, len(sampled), PIECE)]
        mean = sum(self._cut(piece).sum(0, dtype=np.float64) for piece in pieces) / len(sampled)
        spread = np.zeros((len(mean), len(mean)), np.float32)
        for piece in pieces:
            apart = (self._cut(piece) - mean).astype(np.float32)
            spread += apart.T @ apart
        spread += np.eye(len(mean), dtype=np.float32) * (1e-3 * spread.trace() / len(mean) + 1e-12)
        root = np.linalg.cholesky(spread)
        return mean.astype(np.float32), np.linalg.inv(root).T

    def _cut(self, ids: Sequence[int]) -> Vectors:
        return self._rows(ids)[:, :WIDEST]

    def _words(self, words: Sequence[str]) -> Vectors:
        """Return the vector of each word, [n, d] of length 1."""
        mean, matrix = self._plain
        found = np.empty((len(words), len(mean)), np.float32)
        for place, word in enumerate(words):
            found[place] = (self._cut(self._encode(f" {word}")) - mean).sum(0)
        return unit(found @ matrix)

    def likeness(self, question: str, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return how near each text is to a question, -1 to 1.

        Rare words count more, as they do where passages are found by words; what all texts have in
        common does not (smooth inverse frequency, Arora et al. 2017).
        """
        said, asked = [telling(one) for one in texts], telling(question)
        if not asked or not any(said):
            return np.zeros(len(texts), np.float32)
        known = sorted({*asked, *chain.from_iterable(said)})
        having = Counter(chain.from_iterable(map(set, said)))
        weights = np.array([[rarity(having[word], len(said))] for word in known], np.float32)
        place = {word: i for i, word in enumerate(known)}
        vectors = self._words(known) * weights
        own = unit(np.stack([vectors[[place[x] for x in one]].sum(0) for one in (asked, *said)]))
        shared = min(COMMON, len(texts) // TEXTS)
        ways = np.linalg.svd(own[1:], full_matrices=False)[2][:shared]
        own = unit(own - own @ ways.T @ ways)
        return np.asarray(own[1:] @ own[0], np.float32)


def telling(text: str) -> list[str]:
    """Return the words of a text but for those that name no subject."""
    return [word.lower() for word in terms(text) if word.lower() not in EMPTY]


def unit(vectors: Vectors) -> Vectors:
    """Return vectors of length 1; zeros stay zeros."""
    found: Vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-9)
    return found

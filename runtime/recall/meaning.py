"""Ranks a user's statements by likeness to a question in meaning, if they share no words.

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
        """Return the mean row [d], and a matrix [d, d] that gives rows equal variance each way.

        Most rows of a table point the same way, and would all be alike.
        """
        sampled = range(min(FIRST, self._vocabulary // 2), min(FIRST + SAMPLED, self._vocabulary))
        pieces = [sampled[at : at + PIECE] for at in range(0, len(sampled), PIECE)]
        mean = sum(self._cut(piece).sum(0, dtype=np.float64) for piece in pieces) / len(sampled)
        spread = np.zeros((len(mean), len(mean)), np.float32)
        for piece in pieces:
            centred = (self._cut(piece) - mean).astype(np.float32)
            spread += centred.T @ centred
        spread += np.eye(len(mean), dtype=np.float32) * (1e-3 * spread.trace() / len(mean) + 1e-12)
        root = np.linalg.cholesky(spread)
        return mean.astype(np.float32), np.linalg.inv(root).T

    def _cut(self, ids: Sequence[int]) -> Vectors:
        return self._rows(ids)[:, :WIDEST]

    def _words(self, words: Sequence[str]) -> Vectors:
        """Return the vector of each word, [n, d] of length 1."""
        mean, matrix = self._plain
        vectors = np.empty((len(words), len(mean)), np.float32)
        for index, word in enumerate(words):
            vectors[index] = (self._cut(self._encode(f" {word}")) - mean).sum(0)
        return unit(vectors @ matrix)

    def likeness(self, question: str, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return how near each text is to a question, -1 to 1.

        Rare words count more, as they do where passages are found by words; what all texts have in
        common does not (smooth inverse frequency, Arora et al. 2017).
        """
        words_by_text, question_words = [telling(words) for words in texts], telling(question)
        if not question_words or not any(words_by_text):
            return np.zeros(len(texts), np.float32)
        vocabulary = sorted({*question_words, *chain.from_iterable(words_by_text)})
        having = Counter(chain.from_iterable(map(set, words_by_text)))
        weights = np.array(
            [[rarity(having[word], len(words_by_text))] for word in vocabulary], np.float32
        )
        index_of = {word: i for i, word in enumerate(vocabulary)}
        vectors = self._words(vocabulary) * weights
        own = unit(
            np.stack(
                [
                    vectors[[index_of[x] for x in words]].sum(0)
                    for words in (question_words, *words_by_text)
                ]
            )
        )
        shared = min(COMMON, len(texts) // TEXTS)
        ways = np.linalg.svd(own[1:], full_matrices=False)[2][:shared]
        own = unit(own - own @ ways.T @ ways)
        return np.asarray(own[1:] @ own[0], np.float32)


def telling(text: str) -> list[str]:
    """Return the words of a text, without words that name no subject."""
    return [word.lower() for word in terms(text) if word.lower() not in EMPTY]


def unit(vectors: Vectors) -> Vectors:
    """Return vectors of length 1; zeros stay zeros."""
    units: Vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-9)
    return units

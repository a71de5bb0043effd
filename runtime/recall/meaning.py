"""Ranks a user's statements by likeness to a question in meaning, if they share no words.

The vectors are the model's own: a word is the sum of the rows of its tokens in the embedding table.
Nothing is kept of them but their mean and their covariance, by which they become comparable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from math import log1p

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.recall.asking import may_answer
from kvcap.runtime.recall.settings import WIDEST
from kvcap.runtime.recall.store import EMPTY, rarity, terms

Vectors = NDArray[np.float32]
SAMPLED, FIRST, PIECE = 4096, 256, 512  # frequent tokens, behind bytes and special ones; at a time
USUAL = 2000  # tokens of a table so frequent that a word of one says little
SOUGHT = 1.5  # standard deviations of likeness that a time, a number or a name adds, if asked for
SHARPNESS = 0.1  # of a likeness between words: the lower, the more only the nearest word counts


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

    def _words(self, words: Sequence[str]) -> tuple[Vectors, Vectors]:
        """Return the vector of each word, [n, d] of length 1, and how rare it is in any text [n].

        Tokens are numbered by how frequent they are; words of several tokens are rarer than all.
        """
        mean, matrix = self._plain
        vectors, rare = np.empty((len(words), len(mean)), np.float32), np.empty(len(words))
        for index, word in enumerate(words):
            tokens = self._encode(f" {word}")
            vectors[index] = (self._cut(tokens) - mean).sum(0)
            rare[index] = log1p((tokens[0] + 1 if len(tokens) == 1 else self._vocabulary) / USUAL)
        return unit(vectors @ matrix), rare.astype(np.float32)

    def likeness(self, question: str, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return how near each text is to a question: about 0 to 1.

        Each word of the question is looked for by itself, and found in any word near it: the
        logarithm of its probability, if a text's words are translated into others by their
        likeness. Rare words count more, as they do where passages are found by words. Texts that
        have what is asked for, such as a number, are nearer.
        """
        words_by_text, question_words = [telling(words) for words in texts], telling(question)
        near = np.zeros(len(texts), np.float32)
        if not question_words or not any(words_by_text):
            return near
        vocabulary = sorted(set(chain(question_words, *words_by_text)))
        index_of = {word: i for i, word in enumerate(vocabulary)}
        having = Counter(chain.from_iterable(map(set, words_by_text)))
        rows = [index_of[word] for word in question_words]
        vectors, rare = self._words(vocabulary)
        weights = rare[rows] * [rarity(having[word], len(texts)) for word in question_words]
        translated = np.exp(vectors[rows] @ vectors.T / SHARPNESS)  # [question's words, all]
        for i, words in enumerate(words_by_text):
            if words:
                nearness = translated[:, [index_of[word] for word in words]].mean(1)
                near[i] = SHARPNESS * (weights @ np.log(nearness)) / weights.sum()
        near[may_answer(question, texts)] += SOUGHT * near.std()
        return near


def telling(text: str) -> list[str]:
    """Return the words of a text, without words that name no subject."""
    return [word.lower() for word in terms(text) if word.lower() not in EMPTY]


def unit(vectors: Vectors) -> Vectors:
    """Return vectors of length 1; zeros stay zeros."""
    units: Vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-9)
    return units

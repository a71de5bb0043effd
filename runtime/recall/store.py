"""Keeps the passages of a conversation in a full-text index of SQLite, in this process's memory.

Passages are found by the words of a question, rare ones first. Some scripts have no spaces between
words; their letters are indexed in pairs. The text itself is not kept: a passage is a span of
tokens, which the conversation knows. Knows no tokenizer and no model.
"""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from math import log
from typing import Any, NamedTuple

from kvcap.runtime.recall.settings import PAGE, PAGES, STORE_BYTES
from kvcap.runtime.types import Span

MOST_WORDS = 64  # of a question; more would only repeat what others say
COMMON, FEW = 0.2, 32  # words of more passages than this share, and than so many, are left out
LEAST_WEIGHT = 0.4  # of a passage's words: that of one which half of all passages have
# Marks of vowels are no letters for Python: those from Arabic to Sinhala scripts are named here.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
# Words of English questions that name no subject, however rare they are in a conversation. What
# says little in other languages is known by how many passages have it.
EMPTY = frozenset((
    "a", "about", "according", "again", "all", "also", "am", "an", "and", "any", "are", "as",
    "ask", "at", "be", "been", "but", "by", "can", "could", "describe", "detail", "details",
    "did", "do", "does", "ever", "exactly", "explain", "find", "for", "forgot", "forgotten",
    "from", "get", "give", "had", "has", "have", "he", "hello", "help", "her", "here", "hi",
    "him", "his", "how", "i", "if", "in", "is", "it", "its", "just", "kindly", "know", "let",
    "like", "list", "look", "many", "may", "me", "mean", "mentioned", "might", "more", "much",
    "my", "need", "no", "not", "now", "of", "ok", "okay", "on", "once", "one", "or", "our",
    "please", "question", "questions", "quote", "recall", "remember", "remind", "repeat", "said",
    "say", "shall", "she", "should", "show", "so", "some", "something", "such", "sure", "tell",
    "tells", "than", "thank", "thanks", "that", "the", "their", "them", "then", "there", "these",
    "they", "think", "this", "those", "to", "today", "told", "too", "up", "us", "very", "want",
    "was", "we", "were", "what", "when", "where", "which", "who", "whom", "whose", "why", "will",
    "with", "wonder", "would", "write", "yes", "you", "your",
))  # fmt: skip
MARKS = "\u0300-\u036f\u0591-\u05c7\u0610-\u065f\u0670\u06d6-\u06ed\u0900-\u0dff"
WORD = f"[{UNSPACED}]+|(?:[^\\W_{UNSPACED}]|[{MARKS}])+"  # compiled with the first text
IS_UNSPACED = f"[{UNSPACED}]"


class Match(NamedTuple):
    """A passage that has words of a question."""

    span: Span
    score: float  # how much of the question's words it has, by their weights: 0 to 1
    has: Mapping[str, float] = {}  # each of these words, with its part of the score


class PassageStore:
    """An index that finds passages by their words.

    >>> store = PassageStore()
    >>> store.add((0, 90), "The code of the vault is 7421.")
    >>> store.add((48, 140), "It rained all day in Lisbon.")
    >>> [one.span for one in store.search("which code has the vault?")]
    [(0, 90)]

    Args:
        limit: bytes that it may take; beyond them the oldest passages are dropped.
    """

    def __init__(self, limit: int = STORE_BYTES) -> None:
        self.limit = limit
        self.dropped = 0
        """Holds how many passages were dropped for want of room since it was last cleared."""
        # A fifth is for what SQLite holds beside its pages: their headers and what lies between.
        self._pages = max(PAGES, limit // PAGE) * 4 // 5
        self.nbytes = 0
        """Holds the exact bytes of the index's pages, in use or not; any thread may read it."""
        self._database: sqlite3.Connection | None = None  # made for the first passage

    def add(self, span: Span, text: str) -> None:
        """Index a passage by the words of its text."""
        row = (*span, " ".join(terms(text)))
        try:
            self._insert([row])
        except sqlite3.OperationalError as error:
            if "full" not in str(error):
                raise
            self._drop_older_half()
            self._insert([row])

    def search(self, words: str, count: int = 64) -> list[Match]:
        """Return the passages with the largest shares of a question's words, the best first.

        A word weighs the more the fewer passages have it: `log(1 + (N - n + 0.5) / (n + 0.5))` of
        `N` passages and the `n` that do. What is written as one, such as 'red-fox' or '3.14', also
        counts as a whole. Of equal passages the newest comes first; those are left out that have
        none but common words.
        """
        query_words = [word.lower() for word in [*terms(words), *joined(words)]]
        query_words = list(dict.fromkeys(word for word in query_words if word not in EMPTY))
        if self._database is None or not query_words:
            return []
        everything = self._all("SELECT count(*) FROM passages_docsize")[0][0]
        most = max(FEW, int(COMMON * everything))
        total, having = 0.0, defaultdict[int, dict[str, float]](dict)
        for word in query_words[:MOST_WORDS]:
            # Quoted, a word is no operator of FTS5.
            rows = self._all(
                "SELECT rowid FROM passages WHERE passages MATCH ? LIMIT ?", f'"{word}"', most + 1
            )
            if len(rows) > most:
                continue  # it says next to nothing, and would be looked up in most passages
            weight = rarity(len(rows), everything)
            total += weight
            for (row,) in rows:
                having[row][word] = weight
        sums = {row: sum(has.values()) for row, has in having.items()}
        enough = [row for row, weight in sums.items() if weight >= LEAST_WEIGHT]
        best = nlargest(count, enough, key=lambda row: (round(sums[row] / total, 2), row))
        shares = ({word: share / total for word, share in having[row].items()} for row in best)
        return [
            Match(self._span(row), sums[row] / total, has)
            for row, has in zip(best, shares, strict=True)
        ]

    def _all(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._opened().execute(query, values).fetchall()

    def _span(self, row: int) -> Span:
        ((start, stop),) = self._all("SELECT start, stop FROM passages WHERE rowid = ?", row)
        return start, stop

    def clear(self) -> None:
        """Forget everything, and give its memory back."""
        if self._database is not None:
            self._database.close()
        self._database, self.dropped, self.nbytes = None, 0, 0

    def _opened(self) -> sqlite3.Connection:
        if self._database is None:
            # A server answers from one thread after another, never from two at once.
            database = sqlite3.connect(":memory:", check_same_thread=False)
            database.execute(f"PRAGMA page_size = {PAGE}")
            database.execute(f"PRAGMA max_page_count = {self._pages}")
            database.execute(
                "CREATE VIRTUAL TABLE passages USING fts5(start UNINDEXED, stop UNINDEXED, words, "
                "tokenize = \"porter unicode61 remove_diacritics 2 categories 'L* N* Co M*'\")"
            )
            self._database = database
        return self._database

    def _insert(self, rows: Sequence[tuple[int, int, str]]) -> None:
        with self._opened() as database:
            database.executemany("INSERT INTO passages(start, stop, words) VALUES (?, ?, ?)", rows)
        (pages,) = database.execute("PRAGMA page_count").fetchone()
        self.nbytes = PAGE * pages

    def _drop_older_half(self) -> None:
        """Make room by building a new index: deleting from a full one takes pages of its own."""
        kept = self._opened().execute("SELECT start, stop, words FROM passages ORDER BY rowid")
        rows = kept.fetchall()
        half, dropped = (len(rows) + 1) // 2, self.dropped
        self.clear()
        self.dropped = dropped + half
        self._insert(rows[half:])


def rarity(having: int, everything: int) -> float:
    """Return the weight of a word that so many passages have: the square of BM25's.

    So that several common words weigh less than a rare one.
    """
    return log(1 + (everything - having + 0.5) / (having + 0.5)) ** 2


def terms(text: str) -> Iterator[str]:
    """Yield the words of a text, and pairs of letters where a script has no spaces.

    >>> list(terms("Don't NEAR(x) 東京都へ"))
    ['Don', 't', 'NEAR', 'x', '東京', '京都', '都へ']
    """
    for word in re.findall(WORD, text):
        if len(word) > 1 and re.match(IS_UNSPACED, word):
            yield from _pairs(word)
        else:
            yield word


def joined(text: str) -> Iterator[str]:
    """Yield words joined by punctuation, such as a path, as phrases for FTS5.

    >>> list(joined("Is the red-fox at /tmp/3.14, or not?"))
    ['red fox', 'tmp 3 14']
    """
    for chunk in text.split():
        words = re.findall(WORD, chunk)
        if len(words) > 1 and not re.search(IS_UNSPACED, chunk):
            yield " ".join(words)


def _pairs(letters: str) -> Iterable[str]:
    return (letters[i : i + 2] for i in range(len(letters) - 1))

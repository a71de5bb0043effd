"""Chooses the evicted text that a message asks about, and writes it in front of the message.

A conversation that evicts may have forgotten what a message asks for. Its text is still known by
the ids of its tokens; the passages that share the most words with the message are read once more,
as part of it, and are evicted again in time like any other tokens. The cache never holds more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvcap.runtime.errors import PinsTooLarge
from kvcap.runtime.recall.segments import TextEnds, next_cut, question_start, segment_length
from kvcap.runtime.recall.settings import STORE_BYTES, RecallSettings
from kvcap.runtime.recall.store import PassageStore
from kvcap.runtime.types import KeptTokens, Span

LEAST = 0.2  # share of a question's words that a passage must have; below it they agree by chance
NEAR_BEST = 0.85  # least share of words, relative to the best passage's; weaker ones are left out
MOSTLY = 0.5  # a passage of whose slots more than this share is held is not read again
BEFORE, BETWEEN, AFTER = "(Earlier in this conversation:\n", "\n...\n", ")\n\n"


class Passage(NamedTuple):
    """A part of a conversation that was read again, or could be."""

    span: Span  # tokens [start, stop), as they were first read
    text: str
    score: float  # how much of the question's words it has, by their weights: 0 to 1


class Cache(Protocol):
    """A protocol of the part of a conversation's cache that recall uses."""

    @property
    def pinned_spans(self) -> Sequence[Span]:
        """Return the spans of tokens that are never evicted."""

    def kept_tokens(self) -> Sequence[KeptTokens]:
        """Return the tokens that every layer holds."""

    def pinned_with(self, spans: Sequence[Span]) -> list[Span]:
        """Return all spans once these are pinned, too, or raise `PinsTooLarge`."""

    def set_pins(self, spans: Sequence[Span]) -> None:
        """Pin exactly these spans."""


class Recall:
    """A finder of the evicted text of one conversation that its messages ask about.

    Args:
        tokenizer: of the model.
        encode: gives the token ids of a text that follows another.
        budget: slots per KV head and layer.
        store: bytes that were planned for the index; 0: none were, and nothing is recalled.
    """

    def __init__(
        self,
        tokenizer: Any,
        encode: Callable[[str], list[int]],
        budget: int,
        store: int = STORE_BYTES,
    ) -> None:
        self._budget = budget
        self.set(RecallSettings(None if store else 0, store))
        self.spans: list[Span] = []
        """Holds the spans of recalled text: where it was read again, not where it came from."""
        self.passages: list[Passage] = []
        """Holds the passages read again for the last message, in the order of the text."""
        self._pins: list[Span] = []  # of the answer in hand
        self._tokenizer, self._encode = tokenizer, encode
        self._ends = TextEnds(tokenizer)

    def set(self, settings: RecallSettings) -> None:
        """Set how much is read again from now on; the index is built anew."""
        self._limit = settings.limit(self._budget)
        self._longest = segment_length(self._limit)  # tokens of a segment of the index
        self.store = PassageStore(settings.store_bytes)
        self._start = 0  # where the segment begins that is being indexed
        self._before: int | None = None  # start of the one before it, with which it is a passage
        self.settings = settings
        """Holds the settings asked for, from which the limit at this budget follows."""

    @property
    def limit(self) -> int:
        """Return how many tokens are read again for a message, at most; 0: none ever are.

        It is never more than there are slots.
        """
        return self._limit

    @limit.setter
    def limit(self, tokens: int) -> None:
        if tokens < 0:
            raise ValueError(f"recall of {tokens} tokens will not work; use 0 (off) or more")
        self.settings = self.settings._replace(tokens=tokens)
        self._limit = self.settings.limit(self._budget)
        if tokens and segment_length(self._limit) != self._longest:
            self._longest = segment_length(self._limit)
            self._forget_beyond(0)  # passages of another length are indexed with the next search

    def begin(self, seen: int) -> None:
        """Forget what lies beyond the first `seen` tokens, as after the cache was emptied."""
        self.passages, self._pins = [], []
        self._forget_beyond(seen)
        self.spans = [(start, min(stop, seen)) for start, stop in self.spans if start < seen]

    def place(self, ids: Sequence[int], first: int, stop: int) -> int:
        """Return where text is read again in a message: in front of its question.

        Args:
            ids: tokens of the message, and of what the chat template writes around it.
            first: the first one of its text.
            stop: the first one behind its text.
        """
        return question_start(ids, first, stop, self._ends)

    def find(
        self, question: str, ids: Sequence[int], kept: Sequence[KeptTokens] | None = None
    ) -> list[Passage]:
        """Return the passages that a question asks about, best first, of which no two overlap.

        Args:
            question: a text.
            ids: every token that was read; below 0 are unknown ones.
            kept: what the cache holds, to leave out passages that it mostly does; None: all count.
        """
        self.index(ids)
        held = None if kept is None else held_shares(kept, len(ids))
        found = list[Passage]()
        ranked = self.store.search(question)
        least = max(LEAST, NEAR_BEST * ranked[0].score) if ranked else 0
        for (start, stop), score in ranked:
            if score < least:
                break
            if held is not None and mostly_held(held, (start, stop)):
                continue
            if all(stop <= one.span[0] or one.span[1] <= start for one in found):
                found.append(Passage((start, stop), self._text(ids[start:stop]), score))
        return found

    def read_again(
        self, question: Sequence[int], ids: Sequence[int], kept: Sequence[KeptTokens], place: int
    ) -> list[int]:
        """Return the tokens to read in front of a question: none, or at most `limit`.

        Args:
            question: its tokens.
            ids: every token that was read; below 0 are unknown ones.
            kept: what the cache holds of them.
            place: where the returned tokens will stand among all that was read.
        """
        chosen, tokens = list[Passage](), list[int]()
        for one in self.find(self._text(question), ids, kept):
            more = sorted([*chosen, one])
            written = self._encode(BEFORE + BETWEEN.join(x.text.strip() for x in more) + AFTER)
            if len(written) > self.limit:
                break
            chosen, tokens = more, written
        self.passages = chosen
        if tokens:
            self.spans.append((place, place + len(tokens)))
        return tokens

    def insert(
        self,
        cache: Cache,
        question: Sequence[int],
        ids: Sequence[int],
        place: int,
        pins: Sequence[Span] = (),
    ) -> list[int]:
        """Return the tokens to read in front of a question; pin them and it until `release`.

        A policy that knows no question would evict at once what was recalled for it. It would also
        evict the question: one that keeps distinct keys takes the words of the question for copies
        of those that were recalled. Where no head has the slots for both, recalled text is pinned
        alone; where none has them for that, it is only read.

        Args:
            cache: holds the conversation.
            question: its tokens.
            ids: every token that the cache has read; below 0 are unknown ones.
            place: where the returned tokens will stand among all that was read.
            pins: what is pinned of the tokens that are to be read, as if nothing was recalled.
        """
        found = self.read_again(question, ids, cache.kept_tokens(), place)
        if found:
            moved, stop = with_gap(pins, place, len(found)), place + len(found)
            for own in ([(place, stop + len(question))], [(place, stop)], []):
                with suppress(PinsTooLarge):
                    cache.set_pins(cache.pinned_with([*moved, *own]))
                    self._pins = own
                    break
        return found

    def release(self, cache: Cache) -> None:
        """Let what was pinned for an answer be evicted like any other text."""
        if self._pins:
            cache.set_pins(self.lasting(cache.pinned_spans))
            self._pins = []

    def lasting(self, pins: Sequence[Span]) -> list[Span]:
        """Return the pins that stay once the current answer is written."""
        return [span for span in pins if span not in self._pins]

    def clear(self) -> None:
        """Forget the conversation."""
        self.begin(0)

    def index(self, ids: Sequence[int]) -> None:
        """Index the passages of the tokens that were read since the last time.

        A search does so as well; to do it before saves the next one the time.

        Args:
            ids: every token that was read; below 0 are unknown ones.
        """
        self._forget_beyond(len(ids))
        while (start := self._start) < len(ids):
            over = next((b for a, b in self.spans if a <= start < b), start)
            if over > start or ids[start] < 0:  # passages begin anew behind what is no text of it
                self._start, self._before = max(over, start + 1), None
                continue
            stop = next((a for a, _ in self.spans if a > start), len(ids))
            near = [token < 0 for token in ids[start : min(stop, start + self._longest)]]
            stop = start + near.index(True) if True in near else stop
            cut = next_cut(ids, start, stop, self._ends, self._longest)
            if cut is None and stop == len(ids):
                return  # more is to come
            if self._before is not None or cut is None:
                first = start if self._before is None else self._before
                self.store.add((first, cut or stop), self._text(ids[first : cut or stop]))
            self._before, self._start = start, cut or stop

    def _forget_beyond(self, seen: int) -> None:
        """Index everything anew if more than the first `seen` tokens are indexed."""
        if seen < self._start:
            self.store.clear()
            self._start, self._before = 0, None

    def _text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with a new line in place of special ones."""
        backend = self._tokenizer.backend_tokenizer
        runs = groupby(ids, self._special.__contains__)
        return "\n".join(backend.decode(list(run)) for special, run in runs if not special)

    @cached_property
    def _special(self) -> frozenset[int]:
        """Return the ids of special tokens, such as those that end a message."""
        known = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, added in known.items() if added.special)


def held_shares(kept: Sequence[KeptTokens], seen: int) -> list[float]:
    """Return how many of the first 0, 1, ... `seen` tokens the capped layers hold, on average."""
    heads = [np.asarray(row) for one in kept if one.capped for row in one.heads]
    if not heads:
        return [float(n) for n in range(seen + 1)]
    counts = np.bincount(np.concatenate(heads), minlength=seen)[:seen]
    return [0.0, *accumulate(counts / len(heads))]


def with_gap(spans: Sequence[Span], place: int, tokens: int) -> list[Span]:
    """Return where spans lie once so many tokens were inserted at a place.

    >>> with_gap([(0, 4), (2, 9), (6, 8)], 5, 10)
    [(0, 4), (2, 5), (15, 19), (16, 18)]
    """
    before = [(start, min(stop, place)) for start, stop in spans if start < place]
    after = [(max(start, place) + tokens, stop + tokens) for start, stop in spans if stop > place]
    return sorted(before + after)


def mostly_held(held: Sequence[float], span: Span) -> bool:
    """Return whether the cache has most of a span; `held` is what `held_shares` gives."""
    start, stop = span
    return held[stop] - held[start] > MOSTLY * (stop - start)

"""Chooses the evicted text that a message asks about, and writes it in front of the message.

A conversation that evicts may have forgotten what a message asks for. Its text is still known by
the ids of its tokens; the passages that share the most words with the message are read once more,
as part of it, and are evicted again in time like any other tokens. The cache never holds more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate, groupby, islice, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvcap.runtime.cache.pinned_slots import clipped, covered, merged
from kvcap.runtime.cache.regions import Regions
from kvcap.runtime.errors import PinsTooLarge
from kvcap.runtime.recall.asking import asks
from kvcap.runtime.recall.dialogue import USER, Dialogue
from kvcap.runtime.recall.meaning import Meaning
from kvcap.runtime.recall.segments import QUESTION, TextPieces, cuts, question_start, segment_length
from kvcap.runtime.recall.settings import STORE_BYTES, RecallSettings
from kvcap.runtime.recall.store import Match, PassageStore, terms
from kvcap.runtime.types import KeptTokens, Span

LEAST = 0.3  # share of a question's words that passages must have; below it they agree by chance
KEYWORDS = 0.8  # the same of a few words that ask by no form, such as "cellar code"
MOST_KEYWORDS = 6
ENOUGH = 0.6  # share of a question's words; passages with less are joined by some near in meaning
PART = 0.4  # what a passage must add to the words of others, relative to what the best one has
NEAR_BEST = 0.8  # passages that add nearly as much as the best one come with it
FOLLOWING = 0.3  # the same where a question follows from another, and asks more of its subject
FEW_WORDS = 5  # of a question that may follow from the one before it, such as "and its colour?"
NEAREST = 3  # passages, at most, where some are found by meaning: of more a small model takes any
FUSE = 10  # added to ranks before 1 / rank, so that the first few ranks are nearly equal
MOST_TOLD = 512  # of the newest passages of short messages are compared
MOSTLY = 0.5  # a passage of whose slots more than this share is held counts as held
NEWEST = 128  # tokens that were just said, and are not read again
# What is written before, between and behind passages. Some of those found by meaning are of no use,
# and a small model chooses better from a list. One passage in a list it answers again and again.
FRAME = "(Earlier in this conversation:\n", "\n...\n", ")\n\n"
FRAME_OF_MEANT = "Earlier in this conversation:\n- ", "\n- ", "\n\n"


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
        meaning: gives what says how near texts are in meaning, once a question needs it; None:
            passages are found by words alone.
    """

    def __init__(
        self,
        tokenizer: Any,
        encode: Callable[[str], list[int]],
        budget: int,
        store: int = STORE_BYTES,
        meaning: Callable[[], Meaning | None] = lambda: None,
    ) -> None:
        self._budget, self._meaning = budget, meaning
        self.set(RecallSettings(None if store else 0, store))
        self.spans: list[Span] = []
        """Holds the spans of recalled text: where it was read again, not where it came from."""
        self.passages: list[Passage] = []
        """Holds the passages read again for the last message, in the order in which they are."""
        self._pins: list[Span] = []  # of the answer in hand
        self.regions = Regions(budget)
        """Says which tokens are thoughts of the model, that nobody asks about; of the cache."""
        self._tokenizer, self._encode = tokenizer, encode

    @cached_property
    def _pieces(self) -> TextPieces:
        """Return a reader of the texts of tokens, made when it is first needed."""
        return TextPieces(self._tokenizer)

    @cached_property
    def dialogue(self) -> Dialogue:
        """Return a reader of the messages within token ids, made when it is first needed."""
        return Dialogue(self._tokenizer, self._pieces)

    def set(self, settings: RecallSettings) -> None:
        """Set how much is read again from now on; the index is built anew."""
        self._limit = settings.limit(self._budget)
        self._longest = segment_length(self._limit)  # tokens of a passage of the index
        self.store = PassageStore(settings.store_bytes)
        self._start = 0  # where the passage begins that is being indexed
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
        if type(tokens) is not int or tokens < 0:
            raise ValueError(
                f"recall of {tokens!r} tokens will not work; use a whole number, 0 (off) or more"
            )
        self.settings = self.settings._replace(tokens=tokens)
        self._limit = self.settings.limit(self._budget)
        if tokens and segment_length(self._limit) != self._longest:
            self._longest = segment_length(self._limit)
            self._forget_beyond(0)  # passages of another length are indexed with the next search

    def begin(self, seen: int) -> None:
        """Forget what lies beyond the first `seen` tokens, as after the cache was emptied."""
        self.passages, self._pins = [], []
        self._forget_beyond(seen)
        self.spans = clipped(self.spans, seen)

    def question_start(self, ids: Sequence[int], first: int, stop: int) -> int:
        """Return the index of a message's question, in front of which text is read again.

        Args:
            ids: tokens of the message, and of what the chat template writes around it.
            first: the first one of its text.
            stop: the first one behind its text.
        """
        return question_start(ids, first, stop, self._pieces)

    def search(self, words: str, ids: Sequence[int]) -> list[Passage]:
        """Return the passages that have some of these words, best first, held or not.

        Args:
            words: a text.
            ids: every token that was read; below 0 are unknown ones.
        """
        self.index(ids)
        return [self._passage(match, ids) for match in self.store.search(words)]

    def find(
        self, question: str, ids: Sequence[int], kept: Sequence[KeptTokens] | None = None
    ) -> list[Passage]:
        """Return the passages that a question needs, the most needed first.

        Args:
            question: a text, which stands behind what was read.
            ids: every token that was read; below 0 are unknown ones.
            kept: what the cache holds; where that is everything, or these passages are the newest
                text, there are none; None: all count.
        """
        return self._find(question, ids, kept)[0]

    def _find(
        self, question: str, ids: Sequence[int], kept: Sequence[KeptTokens] | None
    ) -> tuple[list[Passage], bool]:
        """Return what `find` does, and whether some of it is found by meaning."""
        self.index(ids)
        nothing = list[Passage](), False
        if kept is not None and holds_all(kept, len(ids) - covered(self.regions.dropped)):
            return nothing
        is_question, words = asks(question), len([*terms(question)])
        if not is_question and words > MOST_KEYWORDS:
            return nothing
        passages = self._needed(question, ids, LEAST if is_question else KEYWORDS)
        if is_question and not passages and words <= FEW_WORDS:
            before = self._asked_before(ids)
            passages = self._needed(f"{before} {question}", ids, LEAST, FOLLOWING) if before else []
        few, by_words = not passages or passages[0].score < ENOUGH, {x.span for x in passages}
        by_meaning = False
        if is_question and few and (meaning := self._meaning()) is not None:
            meant = self._meant(meaning, question, ids)
            if by_meaning := any(passage.span not in by_words for passage in meant):
                passages = fused(passages, meant)[:NEAREST]
        if kept is not None and all_newest(passages, len(ids)):
            return nothing
        return passages, by_meaning

    def _meant(self, meaning: Meaning, question: str, ids: Sequence[int]) -> list[Passage]:
        """Return the user's earlier statements that are nearest in meaning to a question.

        Only short messages count: a text that was pasted is asked about in its own words, and
        would hide what was told.
        """
        statements = [
            passage
            for passage in self._newest_statements(ids)
            if not all_newest([passage], len(ids))
        ]
        near = meaning.likeness(question, [passage.text for passage in statements])
        best = np.argsort(-near, kind="stable")[:NEAREST]
        return [statements[i]._replace(score=float(near[i])) for i in best if near[i] > 0]

    def _newest_statements(self, ids: Sequence[int]) -> list[Passage]:
        """Return the newest passages of the user's short messages, without questions."""
        passages = list[Passage]()
        for _, start, stop, role in self.dialogue.messages(ids):
            first = max([start, *(b for a, b in self.spans if start <= a and b <= stop)])
            if role == USER and stop - first <= QUESTION and len(passages) < MOST_TOLD:
                pieces = [self._pieces(token) for token in ids[first:stop]]
                for a, b in pairwise([0, *cuts(pieces, self._longest), len(pieces)]):
                    text = self._text(ids[first + a : first + b]).strip()
                    if text and not asks(text):
                        passages.append(Passage((first + a, first + b), text, 0))
        return passages

    def _needed(
        self, question: str, ids: Sequence[int], least: float, near: float = NEAR_BEST
    ) -> list[Passage]:
        """Return the passages that a question needs; none if they have too few of its words.

        Passages without a word beyond the question's are left out: they answer nothing.

        Args:
            question: a text.
            ids: every token that was read.
            least: the share of the question's words that the passages must have together.
            near: as for `needed`.
        """
        question_words, matches = {word.lower() for word in terms(question)}, list[Match]()
        for match in self.store.search(question):
            if any(
                word.lower() not in question_words
                for word in terms(self._text(ids[slice(*match.span)]))
            ):
                matches.append(match)
        matches = needed(matches, near)
        covered = {word: share for match in matches for word, share in match.has.items()}
        return (
            [self._passage(match, ids) for match in matches]
            if sum(covered.values()) >= least
            else []
        )

    def _passage(self, match: Match, ids: Sequence[int]) -> Passage:
        return Passage(match.span, self._text(ids[slice(*match.span)]), match.score)

    def read_again(
        self, question: Sequence[int], ids: Sequence[int], kept: Sequence[KeptTokens], at: int
    ) -> list[int]:
        """Return the tokens to read in front of a question: none, or at most `limit`.

        Args:
            question: its tokens.
            ids: every token that was read; below 0 are unknown ones.
            kept: what the cache holds of them.
            at: where the returned tokens will stand among all that was read.
        """
        chosen, tokens = list[Passage](), list[int]()
        passages, by_meaning = self._find(self._text(question), ids, kept)
        before, between, after = FRAME_OF_MEANT if by_meaning else FRAME
        for passage in passages:
            # Of facts that contradict each other the newest is read last; else the likeliest one.
            more = [passage, *chosen] if by_meaning else sorted([*chosen, passage])
            written = self._encode(before + between.join(x.text.strip() for x in more) + after)
            if len(written) <= self.limit:
                chosen, tokens = more, written
        self.passages = chosen
        if tokens:
            self.spans.append((at, at + len(tokens)))
        return tokens

    def insert(
        self,
        cache: Cache,
        question: Sequence[int],
        ids: Sequence[int],
        at: int,
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
            at: where the returned tokens will stand among all that was read.
            pins: what is pinned of the tokens that are to be read, as if nothing was recalled.
        """
        recalled = self.read_again(question, ids, cache.kept_tokens(), at)
        if recalled:
            moved, stop = with_gap(pins, at, len(recalled)), at + len(recalled)
            for own in ([(at, stop + len(question))], [(at, stop)], []):
                with suppress(PinsTooLarge):
                    cache.set_pins(cache.pinned_with([*moved, *own]))
                    self._pins = own
                    break
        return recalled

    def release(self, cache: Cache) -> None:
        """Unpin the text that was pinned for an answer."""
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
        no_text = merged([*self.spans, *self.regions.thoughts])
        while (start := self._start) < len(ids):
            over = next((b for a, b in no_text if a <= start < b), start)
            if over > start or not self.dialogue.is_text(ids[start]):
                self._start = max(over, start + 1)
                continue
            behind = next((a for a, _ in no_text if a > start), len(ids))
            stop = min(behind, self.dialogue.text_stop(ids, start))
            start, _ = self.dialogue.opening(ids, start)
            self._start = start
            for cut in cuts([self._pieces(token) for token in ids[start:stop]], self._longest):
                self._add(ids, start + cut)
            if stop == len(ids):
                return  # more is to come
            self._add(ids, stop)

    def _add(self, ids: Sequence[int], stop: int) -> None:
        """Index the passage that ends at `stop`."""
        text = self._text(ids[self._start : stop])
        if text and not text.isspace():
            self.store.add((self._start, stop), text)
        self._start = stop

    def _forget_beyond(self, seen: int) -> None:
        """Index everything anew if more than the first `seen` tokens are indexed."""
        if seen < self._start:
            self.store.clear()
            self._start = 0

    def _asked_before(self, ids: Sequence[int]) -> str:
        """Return the question of the user's message before the one being read, if it asked one."""
        users = (one for one in self.dialogue.messages(ids) if one.role == USER)
        before = [*islice(users, 2)][1:]
        if not before:
            return ""
        _, first, stop, _ = before[0]
        first = max([first, *(b for _, b in self.spans if b <= stop)])  # behind what was recalled
        text = self._text(ids[question_start(ids, first, stop, self._pieces) : stop])
        return text if asks(text) else ""

    def _text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with a new line for special tokens and roles."""
        texts = list[str]()
        for is_text, run in groupby(
            range(len(ids)), lambda index: self.dialogue.is_text(ids[index])
        ):
            if is_text:
                indices = list(run)
                start, _ = self.dialogue.opening(ids, indices[0])
                shown = list(ids[start : indices[-1] + 1])
                texts.append(self._tokenizer.backend_tokenizer.decode(shown))
        return "\n".join(texts)


def needed(matches: Sequence[Match], near: float = NEAR_BEST) -> list[Match]:
    """Return the passages that a question needs: for each of its parts the best, and equal ones.

    A part is what a passage has of the question's words and those chosen before it have not.

    >>> weights = ({"sister": 0.3, "live": 0.2}, {"live": 0.2}, {"cat": 0.3, "name": 0.2})
    >>> matches = [Match((i, i + 1), sum(has.values()), has) for i, has in enumerate(weights)]
    >>> [one.span for one in needed(matches)]
    [(0, 1), (2, 3)]

    Args:
        matches: passages, the best first.
        near: share of what the best one has of a part that an equal one must have.
    """
    chosen, covered, rest = list[Match](), set[str](), list(matches)

    def adds(match: Match) -> float:
        return sum(share for word, share in match.has.items() if word not in covered)

    while rest and matches[0].score and (most := max(map(adds, rest))) >= PART * matches[0].score:
        best = [match for match in rest if adds(match) >= near * most]
        chosen += best
        covered.update(*(match.has for match in best))
        rest = [match for match in rest if match not in best]
    return chosen


def holds_all(kept: Sequence[KeptTokens], seen: int) -> bool:
    """Return whether the capped layers hold all of the `seen` tokens, in all heads.

    >>> holds_all([KeptTokens(0, True, [np.arange(9)] * 2)], 9)
    True
    """
    return all(len(row) >= seen for layer in kept if layer.capped for row in layer.heads)


def all_newest(passages: Sequence[Passage], seen: int) -> bool:
    """Return whether all passages are of the last tokens of `seen` ones."""
    return all(passage.span[0] >= seen - NEWEST for passage in passages)


def fused(*orders: Sequence[Passage]) -> list[Passage]:
    """Return the passages of several orders in one, by the sum of their reciprocal ranks.

    >>> a, b, c = (Passage((i, i + 1), "", 0) for i in range(3))
    >>> [one.span[0] for one in fused([a, b], [c, b])]
    [1, 0, 2]
    """
    sums, by_span = defaultdict[Span, float](float), dict[Span, Passage]()
    for order in orders:
        for rank, passage in enumerate(order):
            sums[passage.span] += 1 / (FUSE + rank)
            by_span.setdefault(passage.span, passage)
    return sorted(by_span.values(), key=lambda one: -sums[one.span])


def held_shares(kept: Sequence[KeptTokens], seen: int) -> list[float]:
    """Return how many of the first 0 to `seen` tokens the capped heads hold on average."""
    heads = [np.asarray(row) for layer in kept if layer.capped for row in layer.heads]
    if not heads:
        return [float(n) for n in range(seen + 1)]
    counts = np.bincount(np.concatenate(heads), minlength=seen)[:seen]
    return [0.0, *accumulate(counts / len(heads))]


def with_gap(spans: Sequence[Span], at: int, tokens: int) -> list[Span]:
    """Return the spans once `tokens` tokens were inserted at the index `at`.

    >>> with_gap([(0, 4), (2, 9), (6, 8)], 5, 10)
    [(0, 4), (2, 5), (15, 19), (16, 18)]
    """
    before = clipped(spans, at)
    after = [(max(start, at) + tokens, stop + tokens) for start, stop in spans if stop > at]
    return sorted(before + after)


def mostly_held(held: Sequence[float], span: Span) -> bool:
    """Return whether the cache has most of a span; `held` is what `held_shares` gives."""
    start, stop = span
    return held[stop] - held[start] > MOSTLY * (stop - start)

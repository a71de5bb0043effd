"""Defines the protocols between a session and the backend that runs its model.

`Runtime` (PyTorch) and `OrtRuntime` (ONNX Runtime) are engines, and each has a loop of its own.
Token ids and logits are arrays of the backend's own kind, which a session only hands on. Imports
neither of the two.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.errors import MemoryCapExceeded, SessionBroken
from kvcap.runtime.planning.plan import MemoryPlan
from kvcap.runtime.recall.meaning import Meaning
from kvcap.runtime.recall.recall import Recall
from kvcap.runtime.recall.settings import STORE_BYTES
from kvcap.runtime.session.encoding import encode_with
from kvcap.runtime.types import ModelKind, OnFull, SlotUse, Span

MOST = 1000  # times as many slots as are needed: the largest budget that is tried as advice


class Engine(Protocol):
    """A protocol of backends that have loaded a model under a memory plan."""

    name: str
    tokenizer: Any
    plan: MemoryPlan

    @property
    def device_label(self) -> str:
        """Return the device and the type of numbers, as text for people."""

    @property
    def kind(self) -> ModelKind:
        """Return the model's family and size."""

    @property
    def trained_length(self) -> int:
        """Return the longest sequence, in tokens, that the model was trained on."""

    @property
    def vocabulary(self) -> int:
        """Return how many different tokens the model knows; its tokenizer may have more."""

    @property
    def meaning(self) -> Meaning | None:
        """Return a comparer of texts by the model's embedding table; None if it cannot be read."""

    @property
    def cap_bytes(self) -> int:
        """Return the cap of the cache in bytes: the one asked for, else what the slots need."""

    @property
    def generation(self) -> Any:
        """Return the model's own settings of generation, under transformers' names."""

    def session(
        self, system: str | None = None, *, seed: int | None = None, generation: Any = None
    ) -> Any:
        """Return a new conversation with a cache of its own."""

    def loop(self) -> Loop:
        """Return a loop over an empty cache of the planned size."""

    def reserve(self, conversations: int) -> int:
        """Allocate the caches of so many conversations, if the backend allocates them together.

        Returns:
            The bytes that each of them holds from now on; 0 where each allocates its own.
        """

    def rng(self, seed: int | None) -> Any:
        """Return a generator of random numbers, repeatable with a seed."""

    def sampler(self, generation: Any, rng: Any) -> TokenSampler:
        """Return a sampler with these settings and random numbers."""

    def token_ids(self, tokens: list[int]) -> Any:
        """Return token ids as an array [1, T]."""

    def append_token(self, history: Any, token: Any) -> Any:
        """Return the history [1, T] with the next token [1] behind it: [1, T + 1]."""

    def shared_rows(self, size: int) -> tuple[Any, str | None]:
        """Return a reader of one token of each of `size` sessions, or None and why there is none.

        See `TokenReader` in `batch.py`.
        """

    def with_policy_name(self, policy: str, options: dict[str, Any]) -> Engine:
        """Return an engine of this model and budget with another policy and the same pins."""

    def with_budget(self, tokens: int) -> Engine:
        """Return an engine of the same model and policy with so many slots per KV head and layer.

        Raises:
            PlanInfeasible, NotExportable: no such budget can be had.
        """

    def policies(self) -> Mapping[str, Sequence[str]]:
        """Return the policies that `with_policy_name` takes, with the names of their options."""

    def save(self, session: Any, path: str | os.PathLike[str]) -> None:
        """Write all that `session` needs to go on."""

    def restore(self, session: Any, path: str | os.PathLike[str]) -> None:
        """Turn `session` into the saved one, or refuse and leave it unchanged."""


def recall_of(engine: Engine, budget: int, store: int = STORE_BYTES) -> Recall:
    """Return a finder of a conversation's evicted text, by words and by the model's embeddings.

    Args:
        engine: that runs the model.
        budget: slots per KV head and layer.
        store: bytes of its index; 0: nothing is recalled.
    """
    tokenizer = engine.tokenizer
    encode = partial(encode_with, tokenizer, follows=True)
    return Recall(tokenizer, encode, budget, store, lambda: engine.meaning)


class TokenSampler(Protocol):
    """A protocol of objects that draw the next token."""

    @property
    def recipe(self) -> tuple[float, ...] | None:
        """Return the settings that tokens are drawn by, if no earlier token changes them.

        () means greedy. Samplers of the same recipe may draw together. None: earlier tokens count.
        """

    def next(
        self,
        logits: Any,
        history: Any,
        allowed: NDArray[np.bool_] | None = None,
        answer: Sequence[int] = (),
    ) -> Any:
        """Draw token ids [1] from logits [1, V], given the tokens so far [1, T].

        Only tokens that are `allowed`, a mask over the first ones of the vocabulary, are drawn;
        None: any. `penalties` apply to the tokens of the `answer` so far.
        """

    def logprobs(self, logits: Any, token: int, top: int) -> list[tuple[int, float]]:
        """Return log probabilities of `token` and the `top` likeliest ones, from logits [1, V].

        They are of the model's own distribution: temperature and other settings change nothing.
        """


@dataclass(frozen=True)
class CacheCopy:
    """A copy of a cache's content, from which a cache of the same kind goes on; see `Loop`.

    Bytes are those of its tensors, which are at most the cache's own.
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, Any] = field(repr=False)
    nbytes: int = 0


class Loop(ABC):
    """A reader that takes tokens into a capped cache, at most a block at a time.

    Args:
        cache: holds keys and values. It has `seen`, `held` and `spare` (tokens), `nbytes`,
            `used_bytes`, `recomputed`, `consistent`, `unread`, `pinned_spans`,
            `regions`, `sinks`, and `reset()`, `pin(spans)`, `pinned_with(spans)` and
            `kept_tokens()`.
        on_full: says whether tokens beyond the budget are evicted, or reading them is refused.
            'stop' means 'error' here, and ends an answer in a session.
        never: the policy's name, if it never evicts.
    """

    def __init__(self, cache: Any, on_full: OnFull = "evict", never: str | None = None) -> None:
        self.cache, self.on_full, self.never = cache, on_full, never
        self.peak_bytes: int = cache.nbytes  # the most storage the cache has held
        self.asynchronous = False
        """Says whether `read` returns before the device has computed what it read."""
        self.in_batch = False
        """Says whether a `Batch` reads the answer's tokens, between other sessions'."""

    @property
    @abstractmethod
    def execution(self) -> str:
        """Return how blocks are run, as text for people; empty if there is nothing to say."""

    @property
    def graph_bytes(self) -> int:
        """Return the bytes that captured CUDA graphs hold besides the cache."""
        return 0

    @property
    @abstractmethod
    def room(self) -> Room:
        """Return how many tokens the cache holds and how many still fit."""

    @property
    def may_be_full(self) -> bool:
        """Return whether tokens beyond the budget are refused, since nothing may be evicted."""
        return self.on_full != "evict" or self.never is not None

    @abstractmethod
    def next_length(self, batch: int, left: int) -> int:
        """Return how many of the `left` tokens of a prompt one `read` takes, at most."""

    @abstractmethod
    def read(self, ids: Any, need_logits: bool = True) -> Any:
        """Read one block [B, T]; return the last token's logits [B, V], if they are needed."""

    @abstractmethod
    def copied(self) -> CacheCopy:
        """Return a copy of the cache's content."""

    @abstractmethod
    def go_on_from(self, copy: CacheCopy) -> None:
        """Replace the cache's content by a copy of a cache of the same kind.

        What it pins stays as it is: a copy is of tokens that were read under the same pins.
        """

    @abstractmethod
    def drop(self, spans: Sequence[Span]) -> bool:
        """Free the slots of these tokens, [start, stop) in tokens read, as if they were evicted.

        Tokens behind them were read. Where heads hold unequally many of them, each frees as many as
        all can, the oldest first. Returns whether it can; if not, nothing is changed.
        """

    def launched(self) -> Callable[[], object]:
        """Return a function that waits until an asynchronous device has read everything.

        By default it returns at once.
        """
        return lambda: None

    def prefill(self, ids: Any, on_block: Callable[[int], None] | None = None) -> Any:
        """Read a prompt [B, T] block by block; return the last token's logits [B, V].

        A Ctrl-C takes effect between blocks, or between as many as a device reads in one go: what
        was read stays, and the cache stays whole.

        Args:
            ids: token ids.
            on_block: called then with the number of tokens read so far.

        Raises:
            MemoryCapExceeded: nothing may be evicted, and too many tokens; nothing is read.
        """
        last_logits = None
        for done, logits in self.blocks(ids):
            last_logits = logits
            if on_block is not None:
                on_block(done)
        assert last_logits is not None, "prefill of no tokens"
        return last_logits

    def blocks(self, ids: Any) -> Iterator[tuple[int, Any]]:
        """Read a prompt [B, T] as `prefill` does, one block for every step of the iterator.

        Yields:
            The number of tokens read so far, and after the last block the logits [B, V] of its last
            token; None before.

        Raises:
            MemoryCapExceeded: nothing may be evicted, and too many tokens; nothing is read.
        """
        batch, length = ids.shape
        self.check_room(length)
        done = 0
        while done < length:
            block = ids[:, done : done + self.next_length(batch, length - done)]
            done += block.shape[1]
            self.cache.regions.reading(self.cache.seen + block.shape[1])
            logits = self.read(block, need_logits=done == length)
            yield done, logits if done == length else None

    def check_room(
        self, tokens: int, answer: int = 0, *, emptied: bool = False, freed: int = 0
    ) -> None:
        """Refuse tokens that do not fit before any is read, where nothing may be evicted.

        Args:
            tokens: to be read next.
            answer: tokens that follow at most, for which an advised budget has room too.
            emptied: the cache is reset before they are read.
            freed: slots that are freed before they are read; see `drop`.

        Raises:
            MemoryCapExceeded: naming the budget that would do.
            SessionBroken: an earlier pass failed half-way; reset the cache.
        """
        if not emptied and not self.cache.consistent:
            raise SessionBroken(
                "an earlier forward pass failed half-way, so layers have read different tokens; "
                "reset the cache (in chat: /clear) and read again"
            )
        if self.may_be_full:
            room = self.room.emptied if emptied else self.room
            room = room._replace(held=room.held - freed, spare=room.spare + freed)
            room.check(tokens, answer, self.on_full)


class Room(NamedTuple):
    """A record of the tokens per KV head that a cache holds, and of how many still fit."""

    held: int
    spare: int  # tokens that fit before any head must evict
    budget: int  # slots, as the user gave them
    least: Callable[[int], int]  # the slots of the smallest head, by budget
    never: str | None = None  # the policy's name, if it never evicts

    @property
    def emptied(self) -> Room:
        """Return the room of the same cache once it is empty."""
        return self._replace(held=0, spare=self.least(self.budget))

    def check(self, tokens: int, answer: int, on_full: OnFull) -> None:
        """Refuse `tokens` that do not fit where nothing may be evicted; see `Loop.check_room`.

        Raises:
            MemoryCapExceeded: naming a budget in which the answer ends by itself.
        """
        if tokens <= self.spare or (on_full == "evict" and self.never is None):
            return
        if self.never is not None:
            why, advice = f"policy {self.never!r} never evicts", "choose a policy that evicts"
        else:
            why = f"nothing may be evicted (on-full is {on_full!r})"
            advice = "set on-full to 'evict'"
        if enough := self._enough(self.held + tokens + answer):
            also = f", which holds an answer of {answer:,} tokens too," if answer else ""
            advice = f"raise the budget to {enough:,}{also} or {advice}"
        raise MemoryCapExceeded(
            f"{why}: {SlotUse.of(self.held, self.budget)} are in use and {tokens:,} more "
            f"token{'s were' if tokens > 1 else ' was'} to be read; {advice}"
        )

    def _enough(self, needed: int) -> int | None:
        """Return the smallest budget in which every head holds so many tokens, or None."""
        budgets = range(needed, needed * MOST)
        index = bisect_left(budgets, needed, key=self.least)
        return budgets[index] if index < len(budgets) else None  # None: some heads never get more

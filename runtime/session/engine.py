"""The seam between a conversation and a backend: what a session needs of whatever runs the model.

`Runtime` (PyTorch) and `OrtRuntime` (ONNX Runtime) are engines, and each has a loop of its own.
Token ids and logits are arrays of the backend's own kind, which a session only hands on. Imports
neither of the two.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.errors import MemoryCapExceeded, SessionBroken
from kvcap.runtime.planning.plan import MemoryPlan
from kvcap.runtime.types import OnFull, SlotUse

MOST = 1000  # times as many slots as are needed: the largest budget that is tried as advice


class Engine(Protocol):
    """A loaded model under a memory plan."""

    name: str
    tokenizer: Any
    plan: MemoryPlan

    @property
    def device_label(self) -> str:
        """The device and the type of numbers, for people."""

    @property
    def trained_length(self) -> int:
        """The longest sequence, in tokens, that the model was trained on."""

    @property
    def vocabulary(self) -> int:
        """How many different tokens the model knows; its tokenizer may have more."""

    @property
    def cap_bytes(self) -> int:
        """The cap of the cache: the bytes that were asked for, else what the slots need."""

    @property
    def generation(self) -> Any:
        """The model's own settings of generation, under transformers' names."""

    def session(
        self, system: str | None = None, *, seed: int | None = None, generation: Any = None
    ) -> Any:
        """A new conversation with a cache of its own."""

    def loop(self) -> Loop:
        """A loop over an empty cache of the planned size."""

    def rng(self, seed: int | None) -> Any:
        """A generator of random numbers, repeatable with a seed."""

    def sampler(self, generation: Any, rng: Any) -> Sampler:
        """A sampler with these settings and random numbers."""

    def token_ids(self, tokens: list[int]) -> Any:
        """Token ids as an array [1, T]."""

    def append_token(self, history: Any, token: Any) -> Any:
        """The history [1, T] with the next token [1] behind it: [1, T + 1]."""

    def shared_rows(self, size: int) -> tuple[Any, str | None]:
        """Return what reads a token of so many sessions at once, or None and why nothing does.

        See `SharedRows` in `batch.py`.
        """

    def with_policy_name(self, policy: str, options: dict[str, Any]) -> Engine:
        """The same model and budget under another policy; tokens pinned by option stay pinned."""

    def with_budget(self, tokens: int) -> Engine:
        """The same model and policy with so many slots per KV head and layer.

        Raises:
            PlanInfeasible: no such budget can be had.
        """

    def policies(self) -> Mapping[str, Sequence[str]]:
        """The policies that `with_policy_name` takes, with the names of their options."""

    def save(self, session: Any, path: str | os.PathLike[str]) -> None:
        """Write everything that `session` needs to go on."""

    def restore(self, session: Any, path: str | os.PathLike[str]) -> None:
        """Make `session` the saved one, or refuse and leave it as it is."""


class Sampler(Protocol):
    """Draws the next token."""

    @property
    def recipe(self) -> tuple[float, ...] | None:
        """Return the settings it draws by, if no earlier token changes them; () means greedy.

        Samplers of one recipe may draw in one go. None: earlier tokens count.
        """

    def next(
        self,
        logits: Any,
        history: Any,
        allowed: NDArray[np.bool_] | None = None,
        said: Sequence[int] = (),
    ) -> Any:
        """Token ids [1] from logits [1, V], given the tokens so far [1, T].

        Only those are drawn that are `allowed`, of the first tokens of the vocabulary; None: any.
        Penalties of presence and frequency are of the tokens that the answer has `said`.
        """

    def logprobs(self, logits: Any, token: int, top: int) -> list[tuple[int, float]]:
        """Return the `token` and the `top` likeliest with log probabilities, of logits [1, V].

        By the model's own distribution: temperature and other settings change nothing.
        """


class Loop(ABC):
    """Reads tokens into a capped cache, at most a block at a time; each backend has its own.

    Args:
        cache: holds keys and values. It has `seen`, `held` and `spare` (tokens), `nbytes`,
            `used_bytes`, `recomputed`, `consistent`, `unread`, `pinned_spans`,
            `sinks`, and `reset()`, `pin(spans)`, `pinned_with(spans)` and `kept_tokens()`.
        on_full: what happens to tokens beyond the budget: they are evicted, or nothing ever is and
            reading them is refused. 'stop' is 'error' here, and ends an answer in a session.
        never: the policy's name, if it never evicts.
    """

    def __init__(self, cache: Any, on_full: OnFull = "evict", never: str | None = None) -> None:
        self.cache, self.on_full, self.never = cache, on_full, never
        self.peak_bytes: int = cache.nbytes  # the most storage the cache has held
        self.asynchronous = False
        """True where `read` returns before the device has computed what it read."""
        self.in_batch = False
        """True while a `Batch` reads an answer's tokens, and those of others between its blocks."""

    @property
    @abstractmethod
    def execution(self) -> str:
        """How blocks are run, for people; empty where there is nothing to say."""

    @property
    def graph_bytes(self) -> int:
        """Bytes that captured CUDA graphs hold beside the cache."""
        return 0

    @property
    @abstractmethod
    def room(self) -> Room:
        """Return what the cache holds and what still fits."""

    @property
    def may_be_full(self) -> bool:
        """Return whether tokens beyond the budget are refused, as nothing is evicted for them."""
        return self.on_full != "evict" or self.never is not None

    @abstractmethod
    def next_length(self, batch: int, left: int) -> int:
        """How many of the `left` tokens of a prompt one `read` takes, at most."""

    @abstractmethod
    def read(self, ids: Any, need_logits: bool = True) -> Any:
        """Read one block [B, T]; the last token's logits [B, V], if they are needed."""

    def launched(self) -> Callable[[], object]:
        """Return what waits until all that was read so far is computed, for asynchronous devices.

        By default it returns at once.
        """
        return lambda: None

    def prefill(self, ids: Any, on_block: Callable[[int], None] | None = None) -> Any:
        """Read a prompt [B, T] block by block; returns the last token's logits [B, V].

        A Ctrl-C takes effect between blocks, or between as many as a device reads in one go: what
        was read stays, and the cache stays whole.

        Args:
            ids: token ids.
            on_block: called then with the number of tokens read so far.

        Raises:
            MemoryCapExceeded: nothing may be evicted, and too many tokens; nothing is read.
        """
        found = None
        for done, logits in self.blocks(ids):
            found = logits
            if on_block is not None:
                on_block(done)
        assert found is not None, "prefill of no tokens"
        return found

    def blocks(self, ids: Any) -> Iterator[tuple[int, Any]]:
        """Read a prompt [B, T], a block for every step of the iterator, as `prefill` does.

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
            logits = self.read(block, need_logits=done == length)
            yield done, logits if done == length else None

    def check_room(self, tokens: int, answer: int = 0, *, emptied: bool = False) -> None:
        """Where nothing may be evicted, refuse tokens that do not fit before any is read.

        Args:
            tokens: to be read next.
            answer: tokens that follow at most, for which an advised budget has room too.
            emptied: the cache is reset before they are read.

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
            (self.room.emptied if emptied else self.room).check(tokens, answer, self.on_full)


class Room(NamedTuple):
    """What a cache holds and what still fits, in tokens per KV head and layer."""

    held: int
    spare: int  # tokens that fit before any head must evict
    budget: int  # slots, as the user gave them
    least: Callable[[int], int]  # the slots of the smallest head, by budget
    never: str | None = None  # the policy's name, if it never evicts

    @property
    def emptied(self) -> Room:
        """The room of the same cache once it is empty."""
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
        """The smallest budget in which every head holds so many tokens, if there is one."""
        found = range(needed, needed * MOST)
        place = bisect_left(found, needed, key=self.least)
        return found[place] if place < len(found) else None  # some heads never get more

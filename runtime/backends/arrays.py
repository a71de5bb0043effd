"""Defines what the backends share whose tokens and logits are arrays of NumPy.

ONNX Runtime and llama.cpp differ in what computes and in what a slot is. They draw tokens, pin,
recover from a failed pass and save alike.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvcap import __version__
from kvcap.runtime.backends.numpy_sampler import Generation, NumpySampler
from kvcap.runtime.cache.pinned_slots import clipped, merged
from kvcap.runtime.cache.regions import Regions
from kvcap.runtime.cache.settings import CacheSettings, check_size
from kvcap.runtime.errors import KvcapError, MemoryCapExceeded, SessionFileForeign
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.memory.cap_guard import CapGuard
from kvcap.runtime.planning.plan import MemoryPlan
from kvcap.runtime.session.batch import Batch
from kvcap.runtime.session.engine import CacheCopy, Loop
from kvcap.runtime.session.session import Session
from kvcap.runtime.types import EVICT_EVERY, Span
from kvcap.runtime.units import parse_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

    from kvcap.runtime.session.file import SessionFile

Ids = NDArray[np.int64]
Arrays = Mapping[str, NDArray[Any]]


def in_spans(tokens: NDArray[Any], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Return which tokens lie in one of the spans. Bool of their shape."""
    mask = np.zeros(tokens.shape, np.bool_)
    for start, stop in spans:
        mask |= (tokens >= start) & (tokens < stop)
    return mask


class ArrayEngine(ABC):
    """An engine on arrays of NumPy; see `Engine` in `session/engine.py`."""

    backend: ClassVar[str]
    """Holds the value of --backend that chooses it, which saved sessions name."""
    library_name: ClassVar[str]
    """Holds the name of the library, for people."""
    plan: MemoryPlan
    settings: CacheSettings
    name: str
    memory_cap: int | None

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Return how many different tokens the model knows."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return all that must agree for saved slots to be usable; the model is `fingerprint`."""

    @abstractmethod
    def _replanned(self, settings: CacheSettings) -> Self:
        """Return an engine of this model and policy under another plan, within the memory cap."""

    def with_budget(self, tokens: int) -> Self:
        """Return an engine of this model and policy with so many slots per KV head and layer.

        Raises:
            PlanInfeasible: below 1, fewer than the policy pins, or the process would pass its
                memory cap.
            NotExportable: an exported graph has another budget.
        """
        check_size("budget_tokens", tokens)
        return self._replanned(replace(self.settings, budget_tokens=tokens, kv_budget=None))

    @property
    def cap_bytes(self) -> int:
        """Return the cap of the cache in bytes: the one asked for, else what the slots need."""
        budget = self.settings.kv_budget
        return self.plan.cache_bytes if budget is None else parse_bytes(budget)

    @property
    def every(self) -> int:
        """Return after how many tokens of an answer it evicts."""
        return self.settings.evict_every or min(EVICT_EVERY, self.plan.block_size)

    def guard(self) -> CapGuard | None:
        """Return what holds the process to its cap, if it has one."""
        if self.memory_cap is None:
            return None
        block = self.plan.workspace + self.plan.logits
        return CapGuard(self.memory_cap, block, self.plan.block_size)

    def session(
        self, system: str | None = None, *, seed: int | None = None, generation: Any = None
    ) -> Session:
        """Return a new conversation with a cache of its own."""
        return Session(self, system, seed, generation)  # type: ignore[arg-type]  # the rest is there

    def batch(self, size: int) -> Batch:
        """Return a batch that answers up to `size` sessions, a token of each in turn or at once.

        Raises:
            PlanInfeasible: the size is below 1, or a memory cap plans for one session.
        """
        return Batch(self, size)

    def rng(self, seed: int | None) -> np.random.Generator:
        """Return a generator of random numbers, repeatable with a seed."""
        return np.random.Generator(np.random.PCG64(seed))

    def sampler(self, generation: Generation, rng: np.random.Generator) -> NumpySampler:
        """Return a sampler with these settings and random numbers."""
        return NumpySampler(generation, rng)

    def token_ids(self, tokens: list[int]) -> Ids:
        """Return token ids as an array [1, T]."""
        return np.array([tokens], np.int64)

    def append_token(self, history: Ids, token: Ids) -> Ids:
        """Return the history [1, T] with the next token [1] behind it: [1, T + 1]."""
        return np.concatenate((history, token[:, None]), axis=1)

    def save(self, session: Session, path: str | os.PathLike[str]) -> None:
        """Write everything that `session` needs to go on.

        Raises:
            SessionNotSaved: nothing was written; an earlier file is as it was.
        """
        from kvcap.runtime.session.file import write

        loop: Any = session.loop
        tensors, facts = loop.held()
        written = {
            "kvcap": __version__,
            "model": f"{self.name} ({self.library_name})",
            "revision": None,
            "backend": self.backend,
            **self.identity,
            **facts,
            "pinned_spans": session.recall.lasting(session.cache.pinned_spans),
            "conversation": session.conversation,
            "generation": asdict(session.generation),
            "draws": session.rng.bit_generator.state,
        }
        write(path, {name: [array] for name, array in tensors.items()}, written)

    def restore(self, session: Session, path: str | os.PathLike[str]) -> None:
        """Turn `session` into the saved one, or refuse and leave it unchanged.

        Raises:
            SessionFileCorrupt, SessionFileForeign, SessionFileNewer, PinsTooLarge: refused.
        """
        from kvcap.runtime.session import file as session_file

        with session_file.SessionFile(path, "np") as file:
            facts = session_file.checked_facts(file)
            self._check_identity(facts, str(path))
            session_file.check_conversation(file, self.vocabulary)
            conversation, cache = facts["conversation"], session.cache
            loop: Any = session.loop
            with file.corrupt_if_wrong():
                generation = Generation.of(session_file.generation_of(facts["generation"]))
                rng = self.rng(conversation["seed"])
                rng.bit_generator.state = facts["draws"]
                copy = loop.saved_in(file)
            spans = merged((a, b) for a, b in facts["pinned_spans"])
            cache.check_pins(spans)
            try:
                loop.take(copy, spans)
            except KvcapError as error:
                raise file.corrupt(f"{self.library_name} does not take it") from error
            session.generation = generation
            session.take_over(conversation, rng)

    def _check_identity(self, facts: Mapping[str, Any], path: str) -> None:
        """Refuse a file of another backend, model or setting.

        Raises:
            SessionFileForeign: saying what would load it.
        """
        if facts.get("backend") != self.backend:
            raise SessionFileForeign(
                f"{path!r} was saved by another backend (model {facts.get('model')!r}), and this "
                f"is {self.library_name}; load it with that model, and --backend "
                f"{facts.get('backend') or 'torch'}"
            )
        mine = self.identity
        if facts.get("fingerprint") != mine["fingerprint"]:
            raise SessionFileForeign(
                f"{path!r} was saved by another model, {facts.get('model')!r}; load it with that "
                "one"
            )
        for name, value in mine.items():
            if facts.get(name) != value:
                raise SessionFileForeign(
                    f"{path!r} was saved with {name} {facts.get(name)!r}, this is {value!r}; start "
                    "with the saved one"
                )


class ArrayCache(ABC):
    """A cache that knows what it has read and what is pinned; see `Loop` in `session/engine.py`.

    Args:
        budget: slots, of which some tokens may be told to leave before others.
    """

    consistent = True  # a pass reads a block in all layers, or fails and the cache is emptied
    recomputed: list[float] = []  # noqa: RUF012  # evicted tokens are not kept

    def __init__(self, budget: int) -> None:
        self.seen = 0
        self.pinned_spans: list[Span] = []
        self.regions = Regions(budget)
        self.unread: tuple[int, int] | None = None  # as in `BudgetCache`

    @abstractmethod
    def check_pins(self, spans: Sequence[Span]) -> None:
        """Refuse spans that do not fit beside the policy's own pins.

        Raises:
            PinsTooLarge: they do not.
        """

    def pin(self, spans: Sequence[Span]) -> None:
        """Pin these tokens, [start, stop) in tokens read or still to be read: never evict them.

        Raises:
            PinsTooLarge: they do not fit beside those pinned before; nothing is changed.
        """
        self.set_pins(self.pinned_with(spans))

    def pinned_with(self, spans: Sequence[Span], *, emptied: bool = False) -> list[Span]:
        """Return all pinned spans once `spans` are pinned too, or only these if it is `emptied`.

        Raises:
            PinsTooLarge: they do not fit.
        """
        # Tokens that were announced and then not read, as after a Ctrl-C, are not pinned.
        seen = 0 if emptied else self.seen
        pinned = [*clipped(self.pinned_spans, seen), *spans]
        self.check_pins(pinned)
        return pinned

    def set_pins(self, spans: Sequence[Span]) -> None:
        """Pin these spans and no others.

        Raises:
            PinsTooLarge: they do not fit.
        """
        self.check_pins(spans)
        self.pinned_spans = list(spans)

    def reset(self) -> None:
        """Forget the conversation; the buffers stay."""
        self.seen, self.pinned_spans, self.unread = 0, [], None


class ArrayLoop(Loop):
    """A loop over an `ArrayCache`; after each call it is within its budget.

    Args:
        cache: of the conversation.
        guard: holds the process to a cap, if there is one.
        never: the policy's name, if it never evicts.
    """

    def __init__(
        self, cache: ArrayCache, guard: CapGuard | None = None, never: str | None = None
    ) -> None:
        super().__init__(cache, never=never)
        self.guard = guard

    @abstractmethod
    def held(self) -> tuple[Arrays, dict[str, Any]]:
        """Return what the cache holds, to be saved: arrays, which may be views, and facts.

        Of the facts `seen` is how many tokens were read.
        """

    @abstractmethod
    def saved_in(self, file: SessionFile) -> CacheCopy:
        """Return what `held` returned, as a file has it, checked for this cache.

        Raises:
            KvcapError: the cache cannot take it.
            LookupError, TypeError, ValueError: no cache can be so.
        """

    def take(self, copy: CacheCopy, spans: Sequence[Span]) -> None:
        """Have the cache hold what a file has, with these pins, which fit; or leave it as it is.

        Raises:
            KvcapError: it was refused.
        """
        self.go_on_from(copy)
        self.cache.set_pins(spans)

    @contextmanager
    def reading(self, tokens: int) -> Iterator[None]:
        """Make sure that a block may be read, and forget everything if reading it fails.

        Raises:
            MemoryCapExceeded: before anything is read; or memory was refused half-way, then the
                cache is empty again.
        """
        self.check_room(tokens)
        if self.guard is not None:
            self.guard.check(tokens)
        try:
            with interrupts_deferred():
                yield
        except Exception as error:
            self.cache.reset()  # layers may hold different tokens
            if not isinstance(error, (MemoryCapExceeded, MemoryError)):
                raise
            raise MemoryCapExceeded(
                f"{error}, for a block of {tokens} tokens; what was held is forgotten, the "
                "conversation is read again with the next message"
            ) from error

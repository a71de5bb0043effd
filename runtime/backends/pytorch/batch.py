"""Answers several sessions at once: one pass through the model reads a token of each.

A model's weights are read once for all of them, which is most of what a token takes. Where
evictions have begun every session holds exactly its slots, however much it has read, so that all
fit into one cache: a session's slots are copied into a row of it while it answers, and back
afterwards. Knows sessions and caches; no policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvcap.runtime.backends.pytorch.cuda_graphs import steady, why_unsteady
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.errors import PlanInfeasible
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.session.decoding import Read

if TYPE_CHECKING:
    from kvcap.runtime.session.session import Session


class Progress(NamedTuple):
    """What a step brought one session: a piece of its answer, its end, or why it ended."""

    session: Session
    text: str = ""
    ended: bool = False
    error: Exception | None = None


@dataclass(eq=False)
class Answer:
    """An answer that is being written."""

    session: Session
    pieces: Generator[Any, Any, None]
    asked: Read | None = None  # the token that it wants read
    found: Any = None  # what came of it: logits [1, V], or the likeliest token
    row: int | None = None  # of the shared cache, where its session's slots are


class Batch:
    """Answers up to `size` sessions of a runtime at once; further ones wait for their turn.

    Prompts are read one after the other, each by its session's own cache, and so are tokens of a
    session that fills its budget yet, that has pinned messages, whose positions are true, or that
    `apart` concerns.

    >>> from kvcap import Runtime
    >>> runtime = Runtime.from_pretrained("pocket", kv_budget_tokens=64)
    >>> batch, sessions = runtime.batch(2), [runtime.session(), runtime.session()]
    >>> for session in sessions:
    ...     batch.add(session, session.send("Hello!"))
    >>> answers = {id(session): "" for session in sessions}
    >>> for session, text in batch:
    ...     answers[id(session)] += text
    >>> len(set(answers.values()))
    1

    Args:
        runtime: the `Runtime` whose sessions are answered.
        size: rows of the shared cache, each with as many slots as a session has.

    Raises:
        PlanInfeasible: no rows, or a memory cap, whose plan has one session.
    """

    def __init__(self, runtime: Any, size: int) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise PlanInfeasible(f"size={size!r}: use a whole number of sessions from 1")
        if runtime.memory_cap is not None:
            raise PlanInfeasible(
                "a memory cap plans for one session at a time; load the runtime with a KV budget "
                "instead of memory_cap to answer several at once"
            )
        self.runtime, self.size = runtime, size
        self._answers: list[Answer] = []
        self._waiting: deque[Answer] = deque()
        changes = runtime.plan.positions == "auto"  # and sessions that share rows have changed
        cache = runtime.new_cache(size, "compact" if changes else None)
        self.apart = _why_apart(cache)
        """Why tokens are read one session after the other; None: they are read at once."""
        self._rows = None if self.apart else Rows(runtime.model, cache, size)

    @property
    def nbytes(self) -> int:
        """Bytes of the shared cache and its CUDA graphs, beside the sessions' own."""
        return 0 if self._rows is None else self._rows.cache.nbytes + self._rows.loop.graph_bytes

    def add(self, session: Session, pieces: Iterator[str]) -> None:
        """Answer a session: `pieces` is what its `send`, `complete` or `regenerate` returned.

        Raises:
            ValueError: a session of another runtime, or one that is being answered.
        """
        if session.runtime is not self.runtime:
            raise ValueError("the session belongs to another runtime; add it to a batch of that")
        if any(session is answer.session for answer in (*self._answers, *self._waiting)):
            raise ValueError("the session is being answered; remove it, or wait for its end")
        if not isinstance(pieces, Generator):
            raise ValueError("pieces: give what the session's send() returned")
        self._waiting.append(Answer(session, pieces))

    def remove(self, session: Session) -> None:
        """Stop answering a session, as if its answer had been closed; others go on."""
        for answer in [*self._answers, *self._waiting]:
            if answer.session is session:
                self._end(answer)

    def __iter__(self) -> Iterator[tuple[Session, str]]:
        """Step until all answers have ended: each session with the next piece of its answer.

        Raises:
            Exception: what ended one of them; the others go on with the next iteration.
        """
        while self._answers or self._waiting:
            for found in self.step():
                if found.text:
                    yield found.session, found.text
                if found.error is not None:
                    raise found.error

    def step(self) -> list[Progress]:
        """Go on with every answer by about one token; an error ends its own answer only."""
        while self._waiting and len(self._answers) < self.size:
            answer = self._waiting.popleft()
            answer.session.read_together = True
            self._answers.append(answer)
        found: list[Progress] = []
        for answer in list(self._answers):
            found += self._proceed(answer)
        self._read([answer for answer in self._answers if answer.asked is not None])
        return found

    def _proceed(self, answer: Answer) -> Iterator[Progress]:
        """Go on until a token is to be read."""
        session, error = answer.session, None
        try:
            given, answer.found = answer.found, None
            answer.asked = None
            while True:
                made = answer.pieces.send(given)
                if isinstance(made, Read):
                    answer.asked = made
                    return
                given = None
                yield Progress(session, made)
        except StopIteration:
            pass
        except Exception as raised:
            error = raised
        self._end(answer)
        yield Progress(session, ended=True, error=error)

    def _end(self, answer: Answer) -> None:
        answer.session.read_together = False
        if answer.row is not None:
            answer.session.fetch_cache()
        answer.pieces.close()
        for those in (self._answers, self._waiting):
            if answer in those:
                those.remove(answer)

    def _read(self, answers: list[Answer]) -> None:
        """Read the token that each of these asks for."""
        together: list[Answer] = []
        for answer in answers:
            if answer.row is not None or self._joins(answer):
                together.append(answer)
                continue
            assert answer.asked is not None
            token = self.runtime.token_ids([answer.asked.token])
            answer.found = answer.session.loop.read(token)
        if together:
            assert self._rows is not None
            self._rows.read(together)

    def _joins(self, answer: Answer) -> bool:
        """Copy a session's slots into a row, if it can have one."""
        cache = answer.session.loop.cache
        rows = self._rows
        if rows is None or cache.pinned_spans or not steady(cache, 1):
            return False
        if not cache.compact_positions:  # 'auto' ones are true yet
            return False
        rows.join(answer)
        return True


class Rows:
    """One cache for several sessions that all hold as many slots.

    Slots know by a counter of tokens how old they are. Those of a row are moved to the rows' own
    counter as they come, first tokens that are never evicted excepted: policies ask how old a slot
    is, and whether it is one of those.
    """

    def __init__(self, model: Any, cache: BudgetCache, size: int) -> None:
        self.cache, self.size = cache, size
        self.loop = BlockLoop(model, cache, several=False)
        self.sinks = cache.eviction.sinks()
        self._named = {
            name: buffer.unflatten(0, (size, -1))
            for name, buffer in cache.allocation.buffers.items()
            if not name.startswith("rotation.")  # a table that all share
        }
        self._taken: dict[int, Answer] = {}
        self._ahead: dict[int, int] = {}  # of a row: the rows' counter minus its session's
        self._layers: dict[int, list[Any]] = {}  # of a row: those of its session's cache
        self._ids = torch.zeros(size, 1, dtype=torch.long, device=model.device)
        self.cache.enable_rotation()

    def join(self, answer: Answer) -> None:
        """Copy a session's slots into a free row; `Session.fetch_cache` copies them back."""
        session, own = answer.session, answer.session.loop.cache
        row = next(row for row in range(self.size) if row not in self._taken)
        with interrupts_deferred():
            if not self._taken or own.seen > self.cache.seen:
                self._count_from(max(own.seen, self.cache.seen))
            self._copy(row, own, into_row=True)
            self._ahead[row] = self.cache.seen - own.seen
            self._move(row, self._ahead[row])
            self._taken[row], self._layers[row] = answer, own.capped_layers
            answer.row = row
            session.cache_away = lambda: self._give_back(row)

    def read(self, answers: list[Answer]) -> None:
        """Read the token of each of these, which have rows; rows of others are changed as well.

        So whoever has a row must be read, or give it back.
        """
        left = [a for a in self._taken.values() if a not in answers]
        for answer in left:
            answer.session.fetch_cache()
        tokens = [0] * self.size
        for answer in answers:
            assert answer.row is not None
            assert answer.asked is not None
            tokens[answer.row] = answer.asked.token
        with interrupts_deferred():
            self._ids.copy_(torch.tensor(tokens)[:, None])
            logits = self.loop.read(self._ids)
            for answer in answers:
                for layer in self._layers[answer.row]:  # type: ignore[index]
                    layer.seen += 1
        greedy = any(answer.asked.likeliest for answer in answers if answer.asked)
        likeliest = logits.argmax(-1).tolist() if greedy else []
        for answer in answers:
            row, asked = answer.row, answer.asked
            assert row is not None
            assert asked is not None
            answer.found = likeliest[row] if asked.likeliest else logits[row : row + 1]

    def _give_back(self, row: int) -> None:
        """Copy a row's slots back into its session's cache, and free the row."""
        answer = self._taken[row]
        own = answer.session.loop.cache
        with interrupts_deferred():
            self._move(row, -self._ahead[row])
            self._copy(row, own, into_row=False)
            own.enable_rotation()
            answer.row = answer.session.cache_away = None
            del self._taken[row], self._ahead[row], self._layers[row]

    def _copy(self, row: int, own: BudgetCache, *, into_row: bool) -> None:
        theirs = own.allocation.buffers
        for name, rows in self._named.items():
            mine, its = rows[row], theirs[name].view(rows[row].shape)
            if into_row:
                mine.copy_(its)
            else:
                its.copy_(mine)

    def _move(self, row: int, by: int) -> None:
        """Let a row's tokens count `by` later, first ones that are never evicted excepted."""
        for name, rows in self._named.items():
            if by and name.endswith(".positions"):
                rows[row].add_((rows[row] >= self.sinks) * by)

    def _count_from(self, seen: int) -> None:
        """Have the rows' counter stand at `seen`, which is no less than before."""
        later = seen - self.cache.seen
        for row in self._taken:
            self._move(row, later)
            self._ahead[row] += later
        budgets = [[s.budget for s in layer.segments] for layer in self.cache.capped_layers]
        self.cache.counters = [(seen, held) for held in budgets]


def _why_apart(cache: BudgetCache) -> str | None:
    """Why sessions that hold such a cache cannot share one; None: they can."""
    if not cache.compact_positions:
        return "at true positions every session reads at a position of its own"
    if cache.evict_every > 1:
        return "sessions that evict every few tokens hold unequally many"
    if not cache.eviction.policy.evicts:
        return "nothing is evicted, so that sessions hold unequally many"
    if cache.eviction.layers_move:
        return "slots move between layers"
    if cache.eviction.heads_move:
        return "slots move between heads"
    return why_unsteady(cache)

"""Answers several sessions at once: reads one token of each per step, in one pass where it can.

Prompts are read block by block in between, so that a long one holds no answer up. Knows no library
that runs models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvcap.runtime.errors import PlanInfeasible
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.session.decoding import Pieces, Step

if TYPE_CHECKING:
    from kvcap.runtime.session.session import Session


class Progress(NamedTuple):
    """A record that a step gives of a session: a piece of its answer, its end, or an error.

    One without any of these says that a block of its prompt was read.
    """

    session: Session
    text: str = ""
    ended: bool = False
    error: Exception | None = None


@dataclass(eq=False)
class Answer:
    """An answer that is being written, with the token that it asks to be read."""

    session: Session
    steps: Generator[Step, Any, None]
    step: Step | None = None  # the step whose token is to be read; None while a prompt is read
    result: Any = None  # the result of reading it: logits [1, V], the next token, or an error

    @property
    def next_token(self) -> int | None:
        """Return the token to read next; None while it is not known yet."""
        step, result = self.step, self.result
        assert step is not None
        if result is None:
            return step.token
        is_token = isinstance(result, int) and step.ends is not None and result not in step.ends
        return result if is_token else None


class TokenReader(Protocol):
    """A protocol of objects that read one token of each of several sessions in one pass."""

    @property
    def nbytes(self) -> int:
        """Return the bytes that it holds, besides the sessions' own."""

    def fits(self, answer: Answer) -> bool:
        """Return whether a session's token can be read in such a pass, once it has joined."""

    def join(self, answer: Answer) -> None:
        """Prepare a session for the next pass; it may be given a row until it leaves."""

    @property
    def asynchronous(self) -> bool:
        """Return whether `begin` returns before its pass is computed, as on a GPU.

        Then the next one begins before text is made of what came of it.
        """

    def begin(self, answers: list[Answer], tokens: list[int]) -> Callable[[], list[Any]]:
        """Begin to read a token of each of these answers, which have joined.

        Returns a function that waits for the pass, to be called before the next pass begins. It
        returns for each token what `Step` asks for, or raises the reason why the tokens were not
        read. After an error no session is joined, and the sessions' caches are as before or empty.
        A session whose cache is fetched meanwhile has read its token.
        """


class Batch:
    """A batch that answers up to `size` sessions of a runtime at once; others wait for a place.

    A step reads one token of every answer, in one pass where it can, and then one block of one
    prompt, by its session's own cache. On a GPU sessions share a cache, in which each has a row,
    full or not, and the next pass begins before text is made of the last one, where it is certain
    what it is to read. On a CPU all are read in one pass, each over its own cache.

    Tokens are read one session after the other where `why_one_by_one` gives a reason, where a
    session is alone, and on a GPU for sessions with true positions, and with pins later than their
    first message that a rescorer asks for, or that first tokens yield to. So between two tokens of
    an answer lies at most one pass over one prompt: a block, or on a GPU as many whole blocks as go
    through the model at once.

    >>> from kvcap import Runtime
    >>> runtime = Runtime.from_pretrained("pocket", budget_tokens=64)
    >>> batch, sessions = runtime.batch(2), [runtime.session(), runtime.session()]
    >>> for session in sessions:
    ...     batch.add(session, session.send("Hello!"))
    >>> answers = {id(session): "" for session in sessions}
    >>> for session, text in batch:
    ...     answers[id(session)] += text
    >>> len(set(answers.values()))
    1

    Args:
        runtime: the `Runtime` or `OrtRuntime` whose sessions are answered.
        size: sessions that are answered at once, at most.

    Raises:
        PlanInfeasible: the size is below 1, or there is a memory cap, which plans for one session.
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
        self._paused: list[Answer] = []
        self._launched: Callable[[], object] = lambda: None  # waits for the last block of a prompt
        self._begun: tuple[list[Answer], Callable[[], list[Any]]] = [], list  # a pass over rows
        self._rows: TokenReader | None
        self._rows, self.why_one_by_one = runtime.shared_rows(size)
        """Says why tokens are read one session after the other; None: they are read in one pass."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the shared cache and its CUDA graphs, besides the sessions' own."""
        return 0 if self._rows is None else self._rows.nbytes

    def add(self, session: Session, pieces: Iterator[str]) -> None:
        """Answer a session: `pieces` is what its `send`, `complete` or `regenerate` returned.

        Raises:
            ValueError: a session of another runtime, or one that is being answered.
        """
        if session.runtime is not self.runtime:
            raise ValueError("the session belongs to another runtime; add it to a batch of that")
        if any(session is answer.session for answer in self._all):
            raise ValueError("the session is being answered; remove it, or wait for its end")
        if not isinstance(pieces, Pieces):
            raise ValueError("pieces: give what the session's send() returned")
        self._waiting.append(Answer(session, pieces.steps))

    def remove(self, session: Session) -> None:
        """Stop answering a session, as if its answer had been closed; others go on."""
        for answer in self._all:
            if answer.session is session:
                self._end(answer)

    def pause(self, session: Session) -> None:
        """Give a session's place to others until `resume`; its own cache holds it meanwhile."""
        for answer in [*self._answers, *self._waiting]:
            if answer.session is session:
                self._wait()
                session.fetch_cache()
                self._leave(answer)
                self._paused.append(answer)

    def resume(self, session: Session) -> None:
        """Go on with an answer that was paused, once there is a place."""
        for answer in self._paused[:]:
            if answer.session is session:
                self._paused.remove(answer)
                self._waiting.append(answer)

    def __iter__(self) -> Iterator[tuple[Session, str]]:
        """Step until all answers have ended; yield each session with the next piece of its answer.

        Raises:
            Exception: what ended one of them; the others go on with the next iteration.
        """
        while self._answers or self._waiting:
            for session, text, _, error in self.step():
                if text:
                    yield session, text
                if error is not None:
                    try:
                        raise error
                    finally:
                        del error  # its traceback refers to this frame: a cycle

    def step(self) -> list[Progress]:
        """Read a token of every answer and a block of one prompt; return the progress of each.

        Progress of a step never waits for what the next step reads. A prompt may wait one step,
        until the pass that others have begun is done. Each step reads a block of another prompt. An
        error ends only the answer in which it was raised.
        """
        while self._waiting and len(self._answers) < self.size:
            answer = self._waiting.popleft()
            answer.session.loop.in_batch = True
            self._answers.append(answer)
        answering = [answer for answer in self._answers if answer.step is not None]
        self._read(answering)
        progress: list[Progress] = []
        prompt = next((answer for answer in self._answers if answer.step is None), None)
        if prompt is not None:
            progress += self._proceed(prompt)  # a GPU reads it while the others go on
            earlier, self._launched = self._launched, prompt.session.loop.launched()
            earlier()  # wait, so that a prompt's blocks are not all launched ahead of the answers
            if prompt in self._answers:  # the next step reads another prompt
                self._answers.remove(prompt)
                self._answers.append(prompt)
        for answer in answering:
            if answer.result is not None:
                progress += self._proceed(answer)
        try:
            return progress
        finally:
            del progress  # the traceback of an error in it has this frame

    def _proceed(self, answer: Answer) -> Iterator[Progress]:
        """Go on with an answer until a block of its prompt was read, or it asks for a token."""
        session, steps, error, result = answer.session, answer.steps, None, answer.result
        answer.step = answer.result = None
        try:
            step = steps.send(result)
            while step.text:
                yield Progress(session, step.text)
                step = next(steps)
            if step.token is None:
                yield Progress(session)
            else:
                answer.step = step
            return
        except StopIteration:
            pass
        except Exception as raised:
            error = raised
        self._end(answer)
        try:
            yield Progress(session, ended=True, error=error)
        finally:
            del error, result  # their tracebacks refer to this frame: a cycle

    @property
    def _all(self) -> list[Answer]:
        return [*self._answers, *self._waiting, *self._paused]

    def _end(self, answer: Answer) -> None:
        answer.session.loop.in_batch = False
        answer.session.fetch_cache()
        answer.steps.close()
        self._leave(answer)

    def _leave(self, answer: Answer) -> None:
        for answers in (self._answers, self._waiting, self._paused):
            if answer in answers:
                answers.remove(answer)

    def _read(self, answers: list[Answer]) -> None:
        """Read the token that each of these answers asks for, and set its `result`.

        Where a pass has begun already, an answer may have to wait for the next one.
        """
        rows, shared, single = self._rows, list[Answer](), list[Answer]()
        for answer in answers:
            shares = rows is not None and rows.fits(answer)
            (shared if shares else single).append(answer)
        if len(shared) == 1 and not self._begun[0]:  # alone, its own cache costs less than rows
            shared[0].session.fetch_cache()
            single.append(shared.pop())
        for answer in single:
            if answer.result is None and answer not in self._begun[0]:
                try:
                    token = self.runtime.token_ids([answer.next_token])
                    answer.result = answer.session.loop.read(token)
                except Exception as error:
                    answer.result = error
        if not self._begun[0]:
            self._begin([answer for answer in shared if answer.result is None])
        self._wait()
        early = rows is not None and rows.asynchronous and len(shared) > 1
        if early and all(answer.next_token is not None for answer in shared):
            self._begin(shared)

    def _begin(self, answers: list[Answer]) -> None:
        """Begin a pass over rows that reads the next token of each of these answers."""
        rows, joined, tokens = self._rows, list[Answer](), list[int]()
        for answer in answers:
            assert rows is not None
            token = answer.next_token
            assert token is not None
            try:
                rows.join(answer)
            except Exception as error:
                answer.result = error
                continue
            joined.append(answer)
            tokens.append(token)
        if joined:
            assert rows is not None
            with interrupts_deferred():
                try:
                    self._begun = joined, rows.begin(joined, tokens)
                except Exception as error:
                    for answer in joined:
                        answer.result = error

    def _wait(self) -> None:
        """Wait for the pass that has begun, if any, and set `result` of its answers."""
        if not self._begun[0]:
            return
        with interrupts_deferred():
            (answers, wait), self._begun = self._begun, ([], list)
            try:
                for answer, result in zip(answers, wait(), strict=True):
                    answer.result = result
            except Exception as error:
                for answer in answers:
                    answer.result = error

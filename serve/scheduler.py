"""Answers the requests of many conversations by one thread that owns the model.

Each round of that thread reads one block of one prompt and a token of every answer
(`Batch.step`), hands the pieces to their readers, and gives places that became free to those who
wait, first come, first served. So the time between two tokens of an answer is at most that of one
block and one token of each of the others, whatever the prompts. Everything that takes longer (a
prompt is made, a session written to disk or read from it) is done meanwhile by other threads, one
after the other, for sessions that no answer is written of.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvcap.runtime.errors import (
    Busy,
    ConversationUnknown,
    KvcapError,
    ReaderTooSlow,
    TokenUnknown,
)
from kvcap.runtime.memory.free_memory import process_bytes, return_freed
from kvcap.runtime.recall.settings import DEFAULT, RecallSettings
from kvcap.runtime.session.logprobs import Logprob
from kvcap.runtime.session.session import Session
from kvcap.runtime.session.stats import FinishReason, Turn
from kvcap.runtime.session.tool_calls import Parsed
from kvcap.runtime.types import SlotUse
from kvcap.serve.contract import COUNTS, Ask, Figures, Piece, PromptProgress, Reply, Usage
from kvcap.serve.conversations import (
    Conversation,
    ConversationPool,
    begin,
    beginnings,
    blank,
    check,
    key_of,
    keys_of,
    recall_of,
    salt_of,
)
from kvcap.serve.model_facts import ModelFacts
from kvcap.serve.prefixes import SharedPrompts
from kvcap.serve.saved import ConversationFile, SavedConversations
from kvcap.serve.threads import by_a_thread
from kvcap.serve.tokens import decoded, encoded
from kvcap.serve.tool_calls import cut_call

if TYPE_CHECKING:
    from kvcap.serve.strip import Strip

LONG = 1 << 16  # letters of a long request; tokenising takes some 200 bytes a letter for a while
log = logging.getLogger("kvcap.serve")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Limits:
    """A set of limits on the requests that a server handles at once."""

    places: int = 64  # conversations in memory
    together: int = 8  # answers that are written at once
    waiting: int = 64  # requests in the queue
    waiting_letters: int = 16 << 20  # letters of all requests in the queue
    shared_prompts: int = 4  # copies of caches behind system prompts
    buffered: int = 256  # pieces of an answer that wait for their reader
    save_after_s: float = 5.0  # seconds until an idle conversation is written to disk
    grace_s: float = 5.0  # seconds until an unread answer ends if its place is wanted
    patience_s: float = 60.0  # seconds until an unread answer ends in any case


@dataclass(eq=False)
class Job:
    """A request that is being served. Fields belong to the worker unless said otherwise."""

    ask: Ask
    counts: Mapping[str, int]  # the request's `beginnings`
    loop: asyncio.AbstractEventLoop  # its reader's
    ready: asyncio.Event
    letters: int
    pieces: deque[Piece] = field(default_factory=deque)  # filled here, emptied by the reader
    hungry: bool = False  # the reader waits for a piece
    ended: bool = False  # no piece will be added
    cancelled: bool = False  # the reader is gone
    error: Exception | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    parsed: Parsed | None = None  # set if tools were offered
    session_id: str | None = None
    conversation: Conversation | None = None
    answer: Iterator[str] | None = None
    key: str = ""  # the conversation's key before this request
    seen: int = 0  # tokens that the conversation had read before this request
    begun: float = 0.0  # when its first block was begun
    opened: str | None = None  # the mark by which the prompt opened thoughts; None: not known yet
    echoed: bool = False  # the prompt was given to the reader
    noted: int = 0  # tokens whose log probabilities were sent
    paused: float | None = None  # when it began to wait for its reader; None: it does not wait

    def give(self, session: Session, text: str, likely: tuple[Logprob, ...] | None = None) -> None:
        """Give the reader a piece, with how many tokens the request has taken up to it."""
        turn = session.turn
        assert turn is not None
        kept = turn.reused_tokens
        prompt = kept + turn.prompt_tokens
        if self.opened is None:
            self.opened = "" if self.ask.messages is None else session.thoughts_opened
        self.pieces.append(Piece(text, likely, prompt, turn.completion_tokens, self.opened, kept))

    def give_progress(self, session: Session) -> None:
        """Tell the reader how much of the prompt is read, if it has heard all that came before."""
        turn = session.turn
        if turn is None or self.pieces:
            return
        total, kept = turn.reused_tokens + turn.prompt_tokens, turn.reused_tokens
        since = round(1000 * (time.monotonic() - self.begun))
        read = PromptProgress(total, kept + turn.copied_tokens, session.cache.seen, since)
        self.pieces.append(Piece("", prompt_tokens=total, progress=read))

    def give_prompt(self, session: Session) -> None:
        """Give the reader the prompt as the first piece, once."""
        if self.echoed:
            return
        self.echoed = True
        prompt, likely = self.ask.prompt, tuple(session.prompt_logprobs)
        assert prompt is not None
        if not isinstance(prompt, str):
            prompt = decoded(session.runtime.tokenizer, prompt)
        self.give(session, prompt, likely or None)

    def likely(self, session: Session) -> tuple[Logprob, ...] | None:
        """Return how likely the tokens of the newest piece were, if that was asked for."""
        logprobs = tuple(session.logprobs[self.noted :])
        self.noted += len(logprobs)
        return logprobs or None

    def end(self, reason: FinishReason, error: Exception | None = None) -> None:
        """Mark the job as ended: no more pieces come."""
        if not self.ended:
            self.finish_reason, self.error, self.ended = reason, error, True
            self.hungry = False
            _set_soon(self.loop, [self.ready])


def wake(jobs: Iterable[Job]) -> None:
    """Let the readers of these look that wait; an event loop is woken once for all of its own."""
    waiting = defaultdict[asyncio.AbstractEventLoop, list[asyncio.Event]](list)
    for job in jobs:
        if job.hungry:
            job.hungry = False
            waiting[job.loop].append(job.ready)
    for loop, events in waiting.items():
        _set_soon(loop, events)


def _set_soon(loop: asyncio.AbstractEventLoop, events: Sequence[asyncio.Event]) -> None:
    """Set events of a loop, from another thread."""

    def set_all() -> None:
        for event in events:
            event.set()

    with contextlib.suppress(RuntimeError):  # it has ended
        loop.call_soon_threadsafe(set_all)


class Watch(Protocol):
    """A watch that holds the process to its memory cap."""

    def has_room(self) -> bool:
        """Return whether one more session can be made."""

    def over(self, session: Session) -> None:
        """Check the cap before every block of a session that was made."""


class Answering(Reply):
    """A reply that gives a job's answer to one reader in its event loop."""

    def __init__(self, job: Job, scheduler: Scheduler) -> None:
        self._job, self._scheduler = job, scheduler

    def _take_end(self) -> None:
        """Say how the job ended, of which nothing more is read."""
        job = self._job
        self.session_id, self.parsed = job.session_id, job.parsed
        self.finish_reason, self.usage = job.finish_reason, job.usage

    async def __anext__(self) -> Piece:
        job = self._job
        while True:
            job.hungry = True  # set before looking, as a piece can come between look and wait
            if job.pieces:
                job.hungry = False
                piece = job.pieces.popleft()
                self._scheduler.was_read(job)
                self.session_id = job.session_id
                return piece
            if job.ended:
                if job.pieces:  # the last ones came after `job.pieces` was looked at
                    continue
                self._take_end()
                if (error := job.error) is not None:
                    job.error = None
                    raise error
                raise StopAsyncIteration
            await job.ready.wait()
            job.ready.clear()

    async def aclose(self) -> None:
        """Stop the answer within a block; what was written stays in the conversation."""
        job = self._job
        self._scheduler.cancel(job)
        while not job.ended:
            await job.ready.wait()
            job.ready.clear()
        job.pieces.clear()
        job.error = None
        self._take_end()

    def __del__(self) -> None:
        if not self._job.ended:
            self._scheduler.cancel(self._job)


class Scheduler:
    """Answers requests from any number of event loops: the `Conversations` of a server.

    Args:
        runtime: the model, loaded without a memory cap: `limits` are what keeps to it, and are
            found by `admission.py`.
        limits: what is taken on at once.
        disk: where idle conversations go; None: those without a place are forgotten.
        watch: whether the process has memory for one more session, and for each block; see `Watch`.
        memory_cap: of the process, for the figures.
        recall: how much evicted text is read again where a request does not say.
    """

    def __init__(
        self,
        runtime: Any,
        limits: Limits = Limits(),  # cannot be changed
        disk: SavedConversations | None = None,
        *,
        watch: Watch | None = None,
        memory_cap: int | None = None,
        recall: RecallSettings = DEFAULT,
    ) -> None:
        self.runtime, self.limits, self.disk, self.recall = runtime, limits, disk, recall
        self._watch, self._memory_cap = watch, memory_cap
        self.batch = runtime.batch(limits.together)
        self._pool = ConversationPool(runtime, limits.places, disk)
        self._shared = SharedPrompts(limits.shared_prompts, self._has_room)
        self._salt, self._model = salt_of(runtime), ModelFacts.of(runtime)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: list[Job] = []
        self._preparing: list[Job] = []
        self._answering: dict[int, Job] = {}  # by the `id` of the session
        self._looks: list[Callable[[], bool]] = []  # look-ups; each returns whether it is done
        self._count = dict.fromkeys(COUNTS, 0)
        self._lock = threading.Lock()  # guards the attributes below
        self._queued = self._queued_letters = 0
        self._closing = False
        self._mean_s = 1.0  # mean seconds of an answer, from its first block to its end
        self._moving = 0  # tasks of the second thread
        self._second = ThreadPoolExecutor(1, "kvcap-serve-second")
        self._worker = threading.Thread(target=self._run, name="kvcap-serve", daemon=True)
        self._worker.start()

    # Methods that any event loop may call.

    def submit(self, ask: Ask) -> Answering:
        """Put a request into the queue; see `Conversations.submit`."""
        check(ask)
        recall_of(ask, self.recall)
        if self._memory_cap is not None and "prompt_logprobs" in ask.options:
            raise ValueError(
                "log probabilities of a prompt need the logits of whole blocks, for which "
                "--memory-cap plans no memory; leave echo or logprobs out, or start the server "
                "without a cap"
            )
        texts = [ask.prompt or "", *(str(x.get("content")) for x in ask.messages or ())]
        letters = sum(map(len, texts))
        with self._lock:
            self._count["asked"] += 1
            full = self._queued >= self.limits.waiting
            long = self._queued and self._queued_letters + letters > self.limits.waiting_letters
            if self._closing or (not ask.admitted and (full or long)):
                self._count["refused"] += 1
                raise self._busy()
            self._queued += 1
            self._queued_letters += letters
        loop = asyncio.get_running_loop()
        counts = beginnings(ask, keys_of(ask, self._salt))
        job = Job(ask, counts, loop, asyncio.Event(), letters)
        self._calls.put(lambda: self._waiting.append(job))
        return Answering(job, self)

    def cancel(self, job: Job) -> None:
        """Stop a job soon."""
        job.cancelled = True
        self._calls.put(lambda: self._stop(job))

    def was_read(self, job: Job) -> None:
        """Note that a piece was read, so that a paused answer may go on."""
        if job.paused is not None and len(job.pieces) <= self.limits.buffered // 2:
            self._calls.put(lambda: self._resume(job))

    async def encode(self, ask: Ask, *, special: bool = True) -> list[int]:
        """Return the tokens of a text or of messages; see `Conversations.encode`."""
        check(ask)
        return await asyncio.to_thread(encoded, self.runtime.tokenizer, ask, special=special)

    async def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; see `Conversations.decode`."""
        tokenizer = self.runtime.tokenizer
        for token in tokens:
            if tokenizer.backend_tokenizer.id_to_token(token) is None:
                count = tokenizer.backend_tokenizer.get_vocab_size()
                raise TokenUnknown(
                    f"token {token:,} is not in the vocabulary, which has {count:,} tokens; give "
                    "ids of this model's tokenizer"
                )
        return await asyncio.to_thread(decoded, tokenizer, tokens)

    async def strip(self, owner: str, session_id: str) -> Strip:
        """Return which tokens of a conversation are held; see `Conversations.strip`."""
        unknown = ConversationUnknown(
            f"no conversation {session_id!r} is in memory; ask for one that was answered lately"
        )

        def look() -> Strip | None:
            from kvcap.serve.strip import strip_of

            conversation = self._pool.known(owner, session_id)
            if conversation is None:
                raise unknown
            if any(conversation is job.conversation for job in self._preparing):
                return None
            assert conversation.session is not None
            return strip_of(conversation.session, conversation.id)

        return await self._looked_up(look, unknown)

    async def delete(self, owner: str, session_id: str) -> None:
        """Forget a conversation, and remove its file; see `Conversations.delete`."""
        unknown = ConversationUnknown(
            f"there is no conversation {session_id!r}; it was deleted, or forgotten as others "
            "needed its place"
        )
        known = False

        def look() -> bool | None:
            nonlocal known
            conversation = self._pool.known(owner, session_id)
            if conversation is None:
                files = self.disk is not None and self.disk.remove(owner, session_id)
                if not (known or files):
                    raise unknown
                return True
            for job in (*self._preparing, *self._answering.values()):
                if job.conversation is conversation:
                    job.cancelled = True
                    self._stop(job)
            known = True  # an answer that is stopped may leave nothing to hold
            if conversation.state == "idle":
                assert conversation.session is not None
                blank(conversation.session)
                self._pool.close(conversation)
            return None  # look again, as it may be on its way to disk

        await self._looked_up(look, unknown)

    async def _looked_up(self, look: Callable[[], Result | None], closing: Exception) -> Result:
        """Have the worker look after each of its rounds, and return the first result but None.

        Raises:
            Exception: what `look` raises; `closing` where nobody looks any more.
        """
        future = Future[Result]()

        def looked() -> bool:
            with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
                try:
                    result = look()
                except Exception as error:
                    future.set_exception(error)
                else:
                    if result is not None:
                        future.set_result(result)
            return future.done()

        with self._lock:
            if self._closing:
                raise closing
            self._calls.put(lambda: self._looks.append(looked))
        return await asyncio.wrap_future(future)

    def figures(self) -> Figures:
        """Return figures of what is held and was done."""
        plan, disk, held = self.runtime.plan, self.disk, self._pool
        jobs = list(self._answering.values())
        with self._lock:
            counts, queued = dict(self._count), self._queued
        kept = (
            {}
            if disk is None
            else {
                "on_disk": len(disk),
                "disk_bytes": disk.nbytes,
                "disk_cap": disk.cap,
                "saved": disk.saved,
                "restored": disk.restored,
                "dropped": disk.dropped,
            }
        )
        return Figures(
            policy=plan.policy,
            chat_template=bool(getattr(self.runtime.tokenizer, "chat_template", None)),
            model=self._model,
            budget_tokens=plan.budget_tokens,
            places=self.limits.places,
            in_memory=len(held.conversations),
            answering=len(jobs),
            paused=sum(job.paused is not None for job in jobs),
            waiting=queued,
            most_waiting=self.limits.waiting,
            memory_bytes=held.made * plan.cache_bytes + self.batch.nbytes,
            index_bytes=held.index_bytes,
            shared_prompts=len(self._shared),
            shared_prompt_bytes=self._shared.nbytes,
            process_bytes=process_bytes(),
            memory_cap=self._memory_cap,
            closing=self._closing,
            **{**counts, **kept},
        )

    async def aclose(self) -> None:
        """Stop all answers, save every idle conversation, and end the threads."""
        self._close()
        await asyncio.to_thread(self._worker.join)

    def close(self) -> None:
        """Do as `aclose` where no event loop runs."""
        self._close()
        self._worker.join()

    def _close(self) -> None:
        with self._lock:
            self._closing = True
        self._calls.put(lambda: None)

    # Methods that only the worker calls.

    def _run(self) -> None:
        try:
            while not (self._closing and self._wound_up()):
                self._admit()  # before it waits for calls, as what came last may have freed a place
                self._take_calls()
                self._step()
                self._end_stalled()
                self._looks = [look for look in self._looks if not look()]
                self._keep()
        except BaseException as error:  # a fault of this program; nobody must wait for ever
            log.exception("the server's worker failed")
            failure = error if isinstance(error, Exception) else KvcapError("the server failed")
            with self._lock:
                self._closing = True
            for job in (*self._waiting, *self._preparing, *self._answering.values()):
                job.end("error", failure)
            raise
        finally:
            self._second.shutdown()
            with contextlib.suppress(queue.Empty):
                while True:
                    self._calls.get_nowait()()
            for job in self._waiting:  # requests that came while it ended
                job.end("error", self._busy())
            for look in self._looks:
                look()
            if self.disk is not None:
                self.disk.close()

    def _take_calls(self) -> None:
        """Run calls queued by other threads; wait for one where there is nothing else to do."""
        with contextlib.suppress(queue.Empty):
            if not self._writing:
                self._calls.get(timeout=self._tick())()
            while True:
                self._calls.get_nowait()()

    @property
    def _writing(self) -> bool:
        return any(job.paused is None for job in self._answering.values())

    def _tick(self) -> float | None:
        """Return the seconds after which something may be due; None: not before a call."""
        unsaved = self.disk is not None and any(
            conversation.state == "idle" and not conversation.clean
            for conversation in self._pool.conversations
        )
        timed = unsaved or self._answering or self._looks
        return 0.1 if timed and not self._closing else 0.01 if self._closing else None

    def _busy(self) -> Busy:
        """Return the error that refuses a request now."""
        if self._closing:
            return Busy("the server is closing; ask again when it is back", 5.0)
        rounds = (self._queued + 1) / self.limits.together
        after = min(60.0, max(1.0, self._mean_s * rounds))
        return Busy(
            f"{self._queued:,} requests wait and no more are taken; ask again in {after:.0f} s",
            after,
        )

    def _unqueue(self, job: Job) -> None:
        with self._lock:
            self._queued -= 1
            self._queued_letters -= job.letters

    def _admit(self) -> None:
        """Give places to those who wait, in the order in which they came."""
        for job in self._waiting[:]:
            active = len(self._preparing) + sum(
                other.paused is None for other in self._answering.values()
            )
            if self._closing or active >= self.limits.together:
                return
            lookup = self._pool.find(job.ask, job.counts)
            if lookup.wait:
                continue  # this request waits for its conversation, others need not
            leaving = None
            if lookup.conversation is not None:
                conversation = lookup.conversation
                conversation.state = "answering"
            else:
                room = self._has_room()
                place = self._pool.place(job.ask, room)
                if place is None and self._stop_stalled(self.limits.grace_s):
                    place = self._pool.place(job.ask, room)
                if place is None:
                    return
                leaving = place.leaving
                conversation = self._pool.open(job.ask, place.session, lookup.saved)
            self._waiting.remove(job)
            self._unqueue(job)
            self._preparing.append(job)
            job.conversation, job.key = conversation, conversation.key
            held = lookup.conversation is not None
            self._hand(partial(self._prepare, job, leaving, lookup.saved, lookup.messages, held))

    def _has_room(self) -> bool:
        """Return whether the process has memory for one more cache."""
        return self._watch is None or self._watch.has_room()

    def _hand(self, task: Callable[[], Callable[[], None]]) -> None:
        """Run a task on another thread, then the function that it returns on the worker."""
        self._moving += 1

        def run() -> None:
            after = by_a_thread(task)

            def done() -> None:
                self._moving -= 1
                after()

            self._calls.put(done)

        self._second.submit(run)

    def _prepare(
        self,
        job: Job,
        leaving: Conversation | None,
        saved: ConversationFile | None,
        count: int,
        held: bool,
    ) -> Callable[[], None]:
        """Make a session ready to answer. Called beside the worker.

        Args:
            job: whose conversation has this session, or is to have one.
            leaving: the conversation that has it yet.
            saved: the file to restore.
            count: messages that the session holds, or the file.
            held: it holds them.
        """
        conversation, error = job.conversation, None
        assert conversation is not None
        try:
            if leaving is not None:
                self._pool.save(leaving, saved)
            if conversation.session is None:
                conversation.session = self._new_session()
            session = conversation.session
            if not held:
                blank(session)
                if saved is not None:
                    assert self.disk is not None
                    if not self.disk.restore(session, saved):
                        blank(session)
                        count, job.key, conversation.key = 0, "", ""
                        conversation.file, conversation.clean = None, False
            job.seen = session.cache.seen
            if not job.cancelled:
                recall, shared = recall_of(job.ask, self.recall), self._shared.of(job.ask.owner)
                job.answer = begin(session, job.ask, count, recall, shared)
        except Exception as raised:
            error = raised
        if job.letters >= LONG:
            return_freed()
        return lambda: self._prepared(job, leaving, error)

    def _new_session(self) -> Session:
        session: Session = self.runtime.session()
        session.recall.set(self.recall)
        if self._watch is not None:
            self._watch.over(session)
        return session

    def _prepared(self, job: Job, leaving: Conversation | None, error: Exception | None) -> None:
        self._preparing.remove(job)
        conversation = job.conversation
        assert conversation is not None
        if leaving is not None:
            self._pool.conversations.remove(leaving)
            leaving.session = None
        if job.ask.messages is not None:
            job.session_id = conversation.id
        if conversation.session is None:  # it could not be made
            self._pool.made -= 1
        if error is not None or job.cancelled or self._closing:
            self._put_back(conversation, job.key)
            if error is not None:
                self._counted("failed")
                job.end("error", error)
            else:
                self._counted("stopped")
                job.end("interrupted", self._busy() if self._closing else None)
            return
        session = conversation.session
        assert session is not None
        assert job.answer is not None
        self._answering[id(session)] = job
        job.begun = time.monotonic()
        self.batch.add(session, job.answer)

    def _put_back(self, conversation: Conversation, key: str) -> None:
        """Keep a conversation under the key of its messages; forget it without one."""
        if key and conversation.session is not None:
            changed = key != conversation.key
            conversation.key, conversation.state = key, "idle"
            conversation.used = time.monotonic()
            conversation.clean = conversation.clean and not changed
        else:
            self._pool.close(conversation)

    def _step(self) -> None:
        """Have the batch read a block and a token of every answer; hand the pieces to readers."""
        if not self._writing:
            return
        fed: list[Job] = []
        for session, text, ended, error in self.batch.step():
            job = self._answering[id(session)]
            if job.ask.echo and (text or (ended and error is None)):
                job.give_prompt(session)
            if text:
                job.give(session, text, job.likely(session))
            elif job.ask.progress and not ended:
                job.give_progress(session)
            if job.pieces:
                fed.append(job)
            if ended:
                self._finish(job, error)
            elif len(job.pieces) >= self.limits.buffered:
                job.paused = time.monotonic()
                self.batch.pause(session)
        wake(fed)

    def _resume(self, job: Job) -> None:
        if not job.ended and job.paused is not None:
            job.paused = None
            assert job.conversation is not None
            assert job.conversation.session is not None
            self.batch.resume(job.conversation.session)

    def _stop(self, job: Job, error: Exception | None = None) -> None:
        """End a job because its reader is gone, or with `error`."""
        if job.ended or job in self._preparing:  # `cancelled` is checked once it is prepared
            return
        if job in self._waiting:
            self._waiting.remove(job)
            self._unqueue(job)
            self._counted("stopped")
            job.end("interrupted", error)
            return
        conversation = job.conversation
        assert conversation is not None
        assert conversation.session is not None
        self.batch.remove(conversation.session)
        self._finish(job, error)

    def _finish(self, job: Job, error: Exception | None) -> None:
        """Record an answer's usage after its last piece, and keep or close its conversation."""
        conversation = job.conversation
        assert conversation is not None
        session = conversation.session
        assert session is not None
        del self._answering[id(session)]
        turn: Turn = session.turn or Turn(finish_reason="error" if error else "interrupted")
        reason = turn.finish_reason or "interrupted"
        if job.ask.tools and error is None:
            job.parsed = session.parsed
            if job.ask.must_call:
                job.parsed = cut_call(job.parsed, (len(session.messages), session.number))
        cache = session.cache
        seen, held = cache.seen, cache.held
        reused = job.seen if session.turn is None else turn.reused_tokens + turn.copied_tokens
        slots = SlotUse.of(held, self.runtime.plan.budget_tokens)
        job.usage = Usage(
            prompt_tokens=reused + turn.prompt_tokens - turn.copied_tokens,
            reused_tokens=reused,
            completion_tokens=turn.completion_tokens,
            held=slots.held,
            waiting=slots.waiting,
            evicted=seen - held,
            cap_bytes=self.runtime.cap_bytes,
            recalled_tokens=turn.recalled_tokens,
            stop_string=turn.stop_string,
            recalled_passages=len(session.recall.passages) if turn.recalled_tokens else 0,
        )
        self._counted("prompt_tokens", turn.read_tokens - turn.copied_tokens)
        self._counted("reused_tokens", reused)
        self._counted("completion_tokens", turn.completion_tokens)
        self._counted("evicted_tokens", turn.evicted_tokens)
        self._counted("recalled_tokens", turn.recalled_tokens)
        self._counted("prompts_shared", int(turn.copied_tokens > 0))
        self._counted("shared_tokens", turn.copied_tokens)
        self._mean_s += 0.1 * (turn.ttft_s + turn.decode_s - self._mean_s)
        key = ""
        if job.ask.messages is not None:
            whole = turn.read_tokens == turn.prompt_tokens
            if reason in ("stop", "length", "full", "interrupted") and turn.prompt_tokens and whole:
                key = key_of(session, job.ask.tools, self._salt)
            elif seen == job.seen and seen and not turn.read_tokens:
                key = job.key  # nothing was read, and the message is taken back
        self._put_back(conversation, key)
        self._counted(
            "failed"
            if error is not None and not isinstance(error, ReaderTooSlow)
            else "stopped"
            if reason == "interrupted"
            else "answered"
        )
        job.end(reason, error)

    def _counted(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._count[name] += by

    def _end_stalled(self) -> None:
        """End answers that nobody has read for long."""
        if self._answering:
            self._stop_stalled(self.limits.patience_s, all_of_them=True)

    def _stop_stalled(self, after_s: float, *, all_of_them: bool = False) -> bool:
        """End the answer that waits for its reader the longest, if that is so many seconds."""
        now = time.monotonic()
        stalled = [job for job in self._answering.values() if job.paused is not None]
        stalled = [job for job in stalled if now - (job.paused or now) >= after_s]
        for job in sorted(stalled, key=lambda job: job.paused or now)[: None if all_of_them else 1]:
            waited = now - (job.paused or now)
            self._stop(job, ReaderTooSlow(f"nobody read the answer for {waited:.0f} s; ask again"))
        return bool(stalled)

    def _keep(self) -> None:
        """Write conversations to disk that are idle for a while; all of them, when it closes."""
        if self._closing:
            for job in (*self._waiting, *self._answering.values()):
                self._stop(job, self._busy())
        if self.disk is None or self._moving:
            return
        before = time.monotonic() - (0 if self._closing else self.limits.save_after_s)
        idle = [
            conversation
            for conversation in self._pool.conversations
            if conversation.state == "idle"
            and not conversation.clean
            and conversation.used <= before
        ]
        if not idle:
            return
        conversation = min(idle, key=lambda conversation: conversation.used)
        conversation.state = "moving"

        def save() -> Callable[[], None]:
            self._pool.save(conversation)
            return lambda: setattr(conversation, "state", "idle")

        self._hand(save)

    def _wound_up(self) -> bool:
        """Return whether nothing is left to be done before the worker ends."""
        if self._waiting or self._preparing or self._answering or self._moving:
            return False
        return self.disk is None or all(
            conversation.clean for conversation in self._pool.conversations
        )

"""Answers a server's conversations by replicas of the model that Ray Serve runs.

The API stays one process, with its keys and limits; `Replicas` is the `Conversations` behind it,
and hands every request to a replica, which is a scheduler of its own under a memory cap of its own.
Ray Serve starts replicas, looks after their health, replaces those that go, and finds the one of a
conversation on a ring of hashes (its `ConsistentHashRouter`), so that only the conversations of a
replica that goes or comes move. They move as session files in a folder that all replicas share.

Where a request goes follows from its owner and the beginning of its conversation's id alone; the
id that a nameless conversation is given begins with a digest of its first messages. So it returns
to its replica by its messages as by its id, and nobody keeps a table.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcap.runtime.cli.options import Run, Running
from kvcap.runtime.cluster import Share, join
from kvcap.runtime.errors import ExtraMissing, KvcapError, ReplicaLost, how_to_install
from kvcap.runtime.session.stats import FinishReason
from kvcap.runtime.session.tool_calls import Parsed
from kvcap.runtime.types import BUILT_IN
from kvcap.serve.contract import COUNTS, Ask, Figures, Piece, Reply, Usage
from kvcap.serve.conversations import check, keys_of
from kvcap.serve.saved import digest, tag

if TYPE_CHECKING:
    from kvcap.serve.strip import Strip

ROUTED = 6  # first hexadecimal digits of an id, which choose its replica: 16 million places
LOOK_S = 2.0  # seconds between two looks at all replicas
PATIENCE_S = 60  # seconds that a replica has to save its conversations before it ends
log = logging.getLogger("kvcap.serve")


@dataclass(frozen=True)
class Opening:
    """A description of the model and settings of every replica; see `open_conversations`."""

    run: Run
    load: dict[str, Any] = field(default_factory=dict)
    """Holds `together`, `places`, `waiting`, `folder`, `disk_cap`, `recall`, `shared_prompts`."""


class AnswerPiece(NamedTuple):
    """A piece of an answer that is on its way from a replica."""

    session_id: str | None
    piece: Piece


class AnswerEnd(NamedTuple):
    """A message that a replica sends after the last piece of an answer."""

    session_id: str | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    parsed: Parsed | None = None
    error: Exception | None = None


class ReplicaState(NamedTuple):
    """A state that a replica reports: its figures, or the error with which it could not open."""

    replica: str
    summary: str = ""  # of its memory plan
    figures: Figures = Figures()  # a default that all share, as it is frozen
    failure: Exception | None = None  # why it could not open


class Replica:
    """A process that answers: the conversations of `admission.py`, called by Ray Serve.

    Args:
        opening: what it loads.
    """

    def __init__(self, opening: Opening) -> None:
        from kvcap.serve.admission import open_conversations

        self.failure: Exception | None = None
        self.begun = time.monotonic()
        try:
            self.opened = open_conversations(opening.run, shared=True, **opening.load)
        except (KvcapError, ValueError) as error:  # `state` reports it to the front end
            self.failure = error

    async def answer(self, ask: Ask) -> AsyncIterator[AnswerPiece | AnswerEnd]:
        """Yield the pieces of an answer, and its end; errors are sent, as Ray would wrap them."""
        if self.failure is not None:
            yield AnswerEnd(error=ReplicaLost("this replica could not load its model"))
            return
        try:
            reply = self.opened.scheduler.submit(ask)
        except Exception as error:
            yield AnswerEnd(error=sent(error))
            return
        try:
            async for piece in reply:
                yield AnswerPiece(reply.session_id, piece)
            yield AnswerEnd(reply.session_id, reply.finish_reason, reply.usage, reply.parsed)
        except Exception as error:
            yield AnswerEnd(reply.session_id, error=sent(error))
        finally:
            await reply.aclose()

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the scheduler; return its result, or the error that says why not."""
        try:
            return await getattr(self.opened.scheduler, method)(*arguments, **named)
        except Exception as error:
            return sent(error)

    async def state(self) -> ReplicaState:
        """Return the replica's figures, or the error with which it could not open."""
        from ray import serve

        name = serve.get_replica_context().replica_id.unique_id
        if self.failure is not None:
            return ReplicaState(name, failure=self.failure)
        return ReplicaState(name, self.opened.plan.summary, self.opened.scheduler.figures())

    async def check_health(self) -> None:
        """Have Ray Serve replace a replica that cannot answer.

        Raises:
            RuntimeError: it cannot.
        """
        if self.failure is not None:
            if time.monotonic() - self.begun > PATIENCE_S:
                raise RuntimeError("the model could not be loaded") from self.failure
        elif self.opened.scheduler.figures().closing:
            raise RuntimeError("the scheduler has ended")

    async def __del__(self) -> None:
        """Save every conversation; called by Ray Serve before the process ends."""
        if self.failure is None:
            await self.opened.scheduler.aclose()


def sent(error: Exception) -> Exception:
    """Make an error such that another process can take it."""
    if isinstance(error, KvcapError | ValueError):
        return error
    log.error("an answer failed", exc_info=error)
    return KvcapError(f"a replica failed ({type(error).__name__}); its log says why")


class Forwarded(Reply):
    """A reply that comes from a replica.

    Args:
        parts: Ray Serve's stream of `Replica.answer`.
    """

    def __init__(self, parts: Any) -> None:
        self._parts, self._ended = parts, False

    async def __anext__(self) -> Piece:
        if not self._ended:
            part = await self._next()
            self.session_id = part.session_id
            if isinstance(part, AnswerPiece):
                return part.piece
            self._ended = True
            self.finish_reason, self.usage = part.finish_reason, part.usage
            self.parsed = part.parsed
            if part.error is not None:
                raise part.error
        raise StopAsyncIteration

    async def _next(self) -> AnswerPiece | AnswerEnd:
        from ray.exceptions import RayError

        try:
            part: AnswerPiece | AnswerEnd = await self._parts.__anext__()
            return part
        except (RayError, StopAsyncIteration) as error:
            log.warning("a replica is lost: %s", error)
            return AnswerEnd(
                self.session_id,
                error=ReplicaLost(
                    "the replica that wrote this answer has gone; ask again: the conversation goes "
                    "on from what was saved of it"
                ),
            )

    async def aclose(self) -> None:
        """Stop the answer; what was written stays in the conversation."""
        if not self._ended:
            self._ended, self.finish_reason = True, "interrupted"
            self._parts.cancel()

    def __del__(self) -> None:
        if not self._ended:
            self._parts.cancel()


class Replicas:
    """Hands requests to replicas: the `Conversations` of a server.

    Args:
        handle: Ray Serve's, of a deployment of `Replica` whose router is a `ConsistentHashRouter`.
        leave: what to do once all is closed; it ends the replicas.

    Raises:
        KvcapError, ValueError: no replica could load its model.
    """

    def __init__(self, handle: Any, leave: Any) -> None:
        self._handle, self._leave = handle, leave
        self._known: dict[str, Figures] = {}  # newest figures of every replica, ended ones too
        self._up: set[str] = set()
        self._closing = threading.Event()
        states = self._look()
        for state in states:
            if state.failure is not None:
                raise state.failure
        self.summary = f"{len(states)} replicas, each: {states[0].summary}"
        self._looker = threading.Thread(target=self._keep_looking, daemon=True)
        self._looker.start()

    def submit(self, ask: Ask) -> Forwarded:
        """Have the conversation's replica answer.

        What that refuses is raised by the first `__anext__`.

        Raises:
            ReplicaLost: none is up.
            MessagesInvalid, EmptyPrompt, ValueError: nothing that can be answered.
        """
        check(ask)
        if not self._up or self._closing.is_set():
            raise ReplicaLost("no replica is up yet or any more; ask again")
        ask, ring_key = routed(ask)
        stream = self._handle.options(method_name="answer", stream=True, session_id=ring_key)
        return Forwarded(stream.remote(ask))

    async def delete(self, owner: str, session_id: str) -> None:
        """Forget a conversation and remove its files.

        All replicas are asked, as one may hold a conversation whose place has moved to another, and
        would save it yet.

        Raises:
            ConversationUnknown: no replica has one of that id, in memory or on disk.
            ReplicaLost: none could say so.
        """
        deleted = self._handle.broadcast("call", "delete", owner, session_id)
        try:
            outcomes = await deleted.results_async(timeout_s=PATIENCE_S, return_exceptions=True)
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise ReplicaLost("a replica says nothing; ask again") from error
        if any(outcome is None for outcome in outcomes):
            return
        errors = [outcome for outcome in outcomes if isinstance(outcome, KvcapError)]
        raise errors[0] if errors else ReplicaLost("no replica is up; ask again")

    async def strip(self, owner: str, session_id: str) -> Strip:
        """Return which tokens of a conversation are held, evicted and pinned.

        Raises:
            ConversationUnknown: its replica has none of that id in memory.
            ReplicaLost: it has gone.
        """
        strip: Strip = await self._ask("strip", place_of(owner, session_id), owner, session_id)
        return strip

    async def encode(self, ask: Ask, *, special: bool = True) -> list[int]:
        """Return the tokens of a text or of messages; see `Conversations.encode`."""
        ids: list[int] = await self._ask("encode", "", ask, special=special)
        return ids

    async def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        text: str = await self._ask("decode", "", tokens)
        return text

    async def _ask(self, method: str, ring_key: str, *arguments: Any, **named: Any) -> Any:
        """Ask the replica of a place on the ring; of none, any.

        Raises:
            Exception: what it answers instead.
            ReplicaLost: it has gone.
        """
        from ray.exceptions import RayError

        handle = self._handle.options(method_name="call", session_id=ring_key)
        try:
            result = await handle.remote(method, *arguments, **named)
        except RayError as error:
            raise ReplicaLost("the conversation's replica has gone; ask again") from error
        if isinstance(result, Exception):
            raise result
        return result

    def figures(self) -> Figures:
        """Add up the figures of all replicas, as they were some seconds ago."""
        known, up = dict(self._known), set(self._up)
        together = total(known[name] for name in up)
        ended = total(figures for name, figures in known.items() if name not in up)
        counts = {name: getattr(together, name) + getattr(ended, name) for name in COUNTS}
        return replace(together, **counts, closing=self._closing.is_set())

    async def aclose(self) -> None:
        """End the replicas; they stop all answers and save every conversation."""
        if not self._closing.is_set():
            self._closing.set()
            await asyncio.to_thread(self._leave)

    def _look(self) -> list[ReplicaState]:
        results = self._handle.broadcast("state").results(timeout_s=30.0, return_exceptions=True)
        states = [state for state in results if isinstance(state, ReplicaState)]
        self._known |= {state.replica: state.figures for state in states}
        self._up = {state.replica for state in states if state.failure is None}
        return states

    def _keep_looking(self) -> None:
        while not self._closing.wait(LOOK_S):
            with contextlib.suppress(Exception):  # Ray's errors; the next look may succeed
                self._look()


def total(figures: Iterable[Figures]) -> Figures:
    """Add up sizes and counts of several replicas."""
    parts = list(figures)
    if not parts:
        return Figures()
    added = {
        figure.name: sum(getattr(each, figure.name) for each in parts)
        for figure in fields(Figures)
        if type(getattr(parts[0], figure.name)) is int and figure.name not in SHARED
    }
    return replace(parts[0], **added)


SHARED = frozenset({"budget_tokens", "on_disk", "disk_bytes", "disk_cap"})
"""Names the figures that are the same for every replica, and not added up."""


def routed(ask: Ask) -> tuple[Ask, str]:
    """Return a request with the id that its conversation may get, and its place on the ring.

    A text to continue has no place: any replica takes it.
    """
    if ask.messages is None:
        return ask, ""
    if ask.session_id is not None:
        return ask, place_of(ask.owner, ask.session_id)
    roles = [message["role"] for message in ask.messages]
    first = roles.index("user") if "user" in roles else 0  # which later requests have as well
    begun = keys_of(ask, "")[first][:ROUTED]
    ask = replace(ask, fresh_id=begun + secrets.token_hex(8)[ROUTED:])
    return ask, place_of(ask.owner, begun + "0" * (16 - ROUTED))


def place_of(owner: str, id_: str) -> str:
    """Return the text by which a conversation's replica is found on the ring."""
    return f"{digest(owner)}-{tag(id_)[:ROUTED]}"


def shared(nodes: Sequence[dict[str, float]], replicas: int | None, running: Running) -> Share:
    """Return the share of a machine that each replica gets: a GPU, or CPUs where there is none.

    Args:
        nodes: what each machine has.
        replicas: how many there must be; None: one per GPU, or per machine.
        running: its `device` and `threads` (CPUs of each).

    Raises:
        ValueError: the cluster has no room for so many.

    >>> shared([{"CPU": 8}], 3, Running())
    Share(workers=3, cpus=2, gpus=0)
    """
    usable = [dict(node) for node in nodes]
    if running.device == "cpu":
        for node in usable:
            node.pop("GPU", None)
    threads = running.threads
    if replicas is not None and threads is None:
        most = int(max((node.get("CPU", 0) for node in usable), default=0))
        fitting = (
            n for n in range(most, 0, -1) if sum(x.get("CPU", 0) // n for x in usable) >= replicas
        )
        threads = next(fitting, 1)
    share = Share.of(usable, replicas, threads)
    if replicas is not None and share.workers < replicas:
        room = f"{share.workers} GPUs"
        if not share.gpus:
            room = f"room for {share.workers} of {share.cpus} CPUs each"
        raise ValueError(
            f"--replicas {replicas} do not fit: the cluster has {room}; give fewer replicas, or "
            "fewer --threads of each"
        )
    return share


def open_replicas(
    opening: Opening,
    name: str,
    replicas: int | None = None,
    address: str | None = None,
    connections: int = 256,
) -> Replicas:
    """Start replicas on a cluster, and wait until all have loaded their model.

    Args:
        opening: what each loads.
        name: of the model; replicas of that name that the cluster has already are replaced.
        replicas: how many; None: one per GPU, or without any per machine.
        address: of an existing cluster; None starts one on this machine, for this process alone.
        connections: requests that the server has at once, at most.

    Raises:
        ExtraMissing: Ray Serve is not installed, or too old.
        ValueError: no cluster answers, or it has no room.
        KvcapError: as `open_conversations`.
    """
    if address is None:  # read when Ray is imported: others of this network cannot use our cluster
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        import ray
        from ray import serve
        from ray.serve.config import ProxyLocation, RequestRouterConfig
        from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
        from ray.serve.schema import LoggingConfig
    except ImportError as error:
        raise ExtraMissing(
            f"--engine ray needs Ray Serve 2.56 or newer ({error.name or 'ray'} is missing); "
            f"{how_to_install('serve-ray')}"
        ) from error
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    nodes = join(address) if address else join("local", include_dashboard=False)
    app = f"kvcap-{re.sub('[^A-Za-z0-9.-]', '-', name)}"

    def leave() -> None:
        with contextlib.suppress(Exception):  # the cluster may have ended already
            serve.delete(app)
        ray.shutdown()

    run = opening.run
    if run.model not in BUILT_IN and Path(run.model).exists():
        # Replicas have a working directory of their own.
        run = replace(run, model=str(Path(run.model).resolve()))
    if (folder := opening.load.get("folder")) is not None:
        opening = replace(opening, load={**opening.load, "folder": Path(folder).resolve()})
    try:
        share = shared(nodes, replicas, run.running)
        if not share.gpus:
            run = replace(run, running=replace(run.running, threads=int(share.cpus)))
        opening = replace(opening, run=run)
        quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
        serve.start(proxy_location=ProxyLocation.Disabled, logging_config=quiet)
        deployment = serve.deployment(
            Replica,
            name="replica",
            num_replicas=share.workers,
            ray_actor_options={"num_cpus": share.cpus, "num_gpus": share.gpus},
            # A replica's own queue refuses what is too much, so that the limits are one machine's.
            max_ongoing_requests=connections + 8,
            request_router_config=RequestRouterConfig(
                request_router_class=ConsistentHashRouter,
                request_router_kwargs={"num_fallback_replicas": 0},
            ),
            graceful_shutdown_timeout_s=PATIENCE_S,
            graceful_shutdown_wait_loop_s=0.5,
            health_check_period_s=5,
            logging_config=quiet,
        )
        handle = serve.run(deployment.bind(opening), name=app, route_prefix=None)
        return Replicas(handle, leave)
    except BaseException:
        leave()
        raise

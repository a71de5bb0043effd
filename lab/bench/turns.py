"""Runs a conversation of many random turns: messages long and short, saves, loads, pins, Ctrl-C.

After each turn all invariants are checked; a broken one is an error. `growth` is how much the
process's peak grew since the first row. Reads `steps` (turns), the first of `budgets` and of
`policies`, `block_size`; runs pocket.
"""

from __future__ import annotations

import copy
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.pocket.prose import filler
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.session.session import Session
from kvcap.runtime.testing.process_peak import peak

DEFAULTS = {"budgets": (256,), "steps": 1000}
# Shares of the actions in per cent.
ACTIONS = {"send": 70, "save": 12, "load": 8, "again": 6, "pin": 2, "clear": 2}
COLUMNS = ("turns", *ACTIONS, "interrupts", "tokens", "kv_bytes", "process_peak", "growth")
LONGEST = 2000  # most words of a message; most messages are far shorter
ANSWER = 24  # most tokens of an answer
INTERRUPTED = 0.3  # share of turns that are interrupted
ROWS = 10


class Broken(AssertionError):
    """An error that says which invariant does not hold after a turn."""


def run(options: BenchmarkOptions) -> Result:
    """Return a row for every tenth of the turns, counted from the start."""
    runtime = Runtime.from_pretrained(
        policy=options.policies[0],
        budget_tokens=options.budgets[0],
        block_size=options.block_size,
    )
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        walk = Walk(runtime, Path(folder))
        for turn in range(1, options.steps + 1):
            walk.step()
            if turn % max(1, options.steps // ROWS) == 0 or turn == options.steps:
                rows.append({"turns": turn, **{name: walk.done[name] for name in ACTIONS}})
                rows[-1] |= {
                    "interrupts": walk.done["interrupts"],
                    "tokens": walk.read,
                    "kv_bytes": walk.session.cache.nbytes,
                    "process_peak": (most := peak()),
                    "growth": most - rows[0].get("process_peak", most),
                }
    plan = runtime.plan
    derived = {"policy": plan.policy, "budget": plan.budget_tokens, "block_size": plan.block_size}
    return Result("turns", COLUMNS, rows, derived)


class Walk:
    """A random walk of turns in one session.

    Args:
        runtime: the model and its cap.
        folder: the folder that the session is saved in; nothing else may be in it.
        seed: seed of everything random, but for the moment of a Ctrl-C, which depends on speed.
    """

    def __init__(self, runtime: Runtime, folder: Path, seed: int = 0) -> None:
        self.runtime, self.folder, self.file = runtime, folder, folder / "turns.safetensors"
        self.rng = Random(f"turns/{seed}")
        self.session = runtime.session(seed=seed)
        self.session.set_generation(max_new_tokens=ANSWER)
        self.done: Counter[str] = Counter()
        self.read = 0  # tokens read so far, with those that were forgotten since
        self._bytes = self.session.cache.nbytes
        self._text = filler(self.rng)
        self._saved: dict[str, Any] | None = None
        self._seconds = 0.1  # about how long a turn takes

    def step(self) -> None:
        """Take one turn, which a Ctrl-C may cut short at any moment.

        Raises:
            Broken: an invariant does not hold.
        """
        action = self.rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        interrupted = self.rng.random() < INTERRUPTED
        moment = self.rng.uniform(0, 1.5 * self._seconds) if interrupted else None
        start, seen = time.perf_counter(), self.session.cache.seen
        try:
            with interrupt_after(moment):
                getattr(self, action)()
            self._seconds += (time.perf_counter() - start - self._seconds) / 10
        except KeyboardInterrupt:
            self.done["interrupts"] += 1
        self.done[action] += 1
        if action in ("send", "pin"):
            self.read += self.session.cache.seen - seen
        check(self.session, self._bytes)
        if left := [path.name for path in self.folder.iterdir() if path != self.file]:
            raise Broken(f"files were left behind: {left}")

    def send(self, pin: bool = False) -> None:
        """Send a message of 1 to `LONGEST` words, and read its answer."""
        count = 8 if pin else int(LONGEST ** self.rng.random())
        words: list[str] = []
        while len(words) < count:
            words += next(self._text).split()
        for _ in self.session.send(" ".join(words[:count]), pin=pin):
            pass

    def pin(self) -> None:
        """Send a pinned message, if enough unpinned slots are left."""
        pinned = sum(stop - start for start, stop in self.session.cache.pinned_spans)
        self.send(pin=pinned < self.runtime.plan.budget_tokens // 4)

    def again(self) -> None:
        """Ask for another answer to the last message."""
        if self.session.messages:
            for _ in self.session.regenerate():
                pass

    def clear(self) -> None:
        """Forget everything."""
        self.session.clear()

    def save(self) -> None:
        """Save the session; if cut short, the file must be the old one or the new one."""
        before, now = self._inode(), state(self.session)
        try:
            self.session.save(self.file)
        finally:
            if self._inode() != before:
                self._saved = now

    def load(self) -> None:
        """Load the file; if cut short, the session must be the old one or the saved one."""
        if self._saved is None:
            return
        before = state(self.session)
        try:
            self.session.restore(self.file)
        except KeyboardInterrupt:
            if state(self.session) not in (before, self._saved):
                raise Broken("the session is neither what it was nor what was saved") from None
            raise
        if state(self.session) != self._saved:
            raise Broken("the loaded session is not the saved one")

    def _inode(self) -> int | None:
        return self.file.stat().st_ino if self.file.exists() else None


def state(session: Session) -> dict[str, Any]:
    """Return the parts of a session that loading must restore and that are quick to compare."""
    positions = [
        s.positions.tolist() for layer in session.cache.capped_layers[:1] for s in layer.segments
    ]
    parts = copy.deepcopy(session.conversation)
    return {**parts, "seen": session.cache.seen, "positions": positions}


def check(session: Session, nbytes: int) -> None:
    """Check all invariants that hold between two turns.

    Args:
        session: the session after a turn.
        nbytes: bytes of its cache when it was new.

    Raises:
        Broken: naming the broken invariant.
    """
    cache, stats = session.cache, session.stats
    roles = [message["role"] for message in session.messages]
    heads = [
        head
        for layer in cache.capped_layers
        for segment in layer.segments
        for head in segment.positions.flatten(0, 1).tolist()
    ]
    holds = {
        "all layers have read the same tokens": cache.consistent,
        "the cache has the bytes it began with": cache.nbytes == nbytes,
        "no more slots are in use than the budget": stats.waiting_tokens == 0,
        "bytes in use are within the cap": stats.bytes <= stats.cap_bytes,
        "kept, waiting and evicted are what was seen": stats.held_tokens
        + stats.waiting_tokens
        + stats.evicted_tokens
        == stats.seen_tokens,
        "a head holds a token once": all(len(set(head)) == len(head) for head in heads),
        "slots hold tokens that were read": all(0 <= p < cache.seen for h in heads for p in h),
        "pinned tokens are held": all(
            p in head
            for head in map(set, heads)
            for start, stop in cache.pinned_spans
            for p in range(start, min(stop, cache.seen))
        ),
        "every message has its answer": roles == ["user", "assistant"] * (len(roles) // 2),
    }
    if broken := [what for what, held in holds.items() if not held]:
        raise Broken(f"no longer true: {'; '.join(broken)}")


@contextmanager
def interrupt_after(seconds: float | None) -> Iterator[None]:
    """Interrupt the `with` block by SIGINT after that time, unless it is done; None: never."""
    if seconds is None:
        yield
        return
    # A shell starts background jobs with SIGINT ignored.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    alarm = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        signal.signal(signal.SIGINT, previous)

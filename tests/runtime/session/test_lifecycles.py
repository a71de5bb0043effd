"""Lives of sessions, as one state machine: whatever was said, cut short, taken back or forgotten.

Each life is lived twice: by a session that is saved and loaded on the way, and by one that never
is. Both must keep the same tokens and say the same, and what their messages become is foretold
here. A life ends with all memory freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from alive import Alive
from chat_templates import THINKING, with_template
from conftest import in_turn, small_policy
from families import OLD, model_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as lived
from tools import runtime_of as around
from tools import tiny_decoder
from toy_engine import ToyEngine, sound
from transformers import AutoTokenizer

import kvcap
from kvcap import pocket
from kvcap.policies import policies
from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime
from kvcap.runtime.cache.query_window import QueryWindow
from kvcap.runtime.errors import (
    EmptyPrompt,
    KvcapError,
    MemoryCapExceeded,
    PinsTooLarge,
    SessionFileError,
)
from kvcap.runtime.session.messages import render, system_message
from kvcap.runtime.session.session import Session

LONG = "Hello there, how are you today? I am well, and it is a fine day by the sea. " * 2
TEXTS = {"long": LONG, "short": "Hi.", "empty": " \n"}
BLOCK, BUDGET, ROOMY = 16, 32, 400
WAYS: list[tuple[Any, ...]] = [
    ("compact", None, 1), ("true", None, 1), ("auto", None, 8), ("compact", "int8", 1),
    ("auto", "int8-int4", 1), ("true", "int8", 8), ("compact", "int4", 8),
]  # fmt: skip
"""Positions, slot formats, and after how many tokens an answer evicts."""
# What a window, a store or a mean has of a conversation that is forgotten is not the next one's.
HARD = [
    "send long", "clear", "send", "load", "send long", "undo", "load over", "send", "begin_anew",
    "send", "load", "send_pinned", "regenerate", "load", "branch", "send",
]  # fmt: skip
FAMILIES = [] if OLD else ["qwen3_5_text", "lfm2", "nemotron_h", "falcon_h1", "deepseek_v3"]
WINDOW = 12  # more queries than there are in a short message
few = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


class Lost(Exception):
    """A failure of the machine."""


ENDINGS: list[dict[str, Any]] = [
    *[{}] * 6,
    *({"pieces": count} for count in range(3)),
    *({"pieces": 1, "loses": True} for _ in range(2)),
    *({"blocks": count, "error": KeyboardInterrupt} for count in (0, 1, 1, 2, 3)),
    *({"blocks": count, "error": MemoryCapExceeded} for count in (0, 1, 2)),
    *({"blocks": count, "error": Lost} for count in (0, 1, 2)),
]
"""Arguments of `attempt`: how an answer ends, most often by itself."""
ENDS = st.sampled_from(ENDINGS)


class Life(RuleBasedStateMachine):
    """A life of a session that is saved and loaded, beside one that never is."""

    runtimes: tuple[Any, ...]  # these are set by whoever runs it
    folder: Path
    alive: Alive | None
    runtime: Any
    born: tuple[int, int] = (0, 0)

    @initialize(number=st.integers(0, 99))
    def begin(self, number: int = 0) -> None:
        self.runtime = self.runtimes[number % len(self.runtimes)]
        self.born = (0, 0) if self.alive is None else self.alive.count
        self.begin_anew()

    def begin_anew(self, system: str | None = None, pin: bool = False) -> None:
        """Begin with what memory the sessions that end here leave."""
        self.end()
        self.one, self.other = begun(self.runtime, system), begun(self.runtime, system)
        self.one.pin_system = self.other.pin_system = pin
        self.expected, self.pinned = list[dict[str, Any]](), set[int]()

    def end(self) -> None:
        self.one = self.other = None  # type: ignore[assignment]
        if self.alive is not None:  # of caches of other lives, errors may still hold some
            assert not any(self.alive.since(*self.born))

    teardown = end

    @property
    def path(self) -> Path:
        return self.folder / "s"

    def both(self, act: Callable[[Session], Any]) -> Any:
        """Do something in both sessions; return what came of it, which is the same."""
        done = [act(session) for session in (self.one, self.other)]
        assert done[0] == done[1]
        return done[0]

    # What is said ---------------------------------------------------------------------------------

    @rule(text=st.sampled_from(["long", "short"]), end=ENDS)
    def send(self, text: str = "short", pin: bool = False, end: Any = MappingProxyType({})) -> None:
        message = {"role": "user", "content": TEXTS[text]}
        self.answered(lambda session: session.send(TEXTS[text], pin=pin), [message], pin, **end)

    @rule(text=st.sampled_from([*TEXTS]), end=ENDS)
    def send_pinned(self, text: str = "short", end: Any = MappingProxyType({})) -> None:
        self.send(text, True, end)

    @rule(again=st.booleans(), end=ENDS)
    def regenerate(self, again: bool = True, end: Any = MappingProxyType({})) -> None:
        """Answer the last message again, or a text that is none."""
        if again:
            self.answered(lambda session: session.regenerate(), None, False, **end)
        else:
            self.answered(lambda session: session.complete(" And so on"), [], False, **end)

    def answered(
        self,
        call: Callable[[Session], Iterator[str]],
        new: list[dict[str, Any]] | None,
        pin: bool,
        **end: Any,
    ) -> None:
        """Take an answer in both sessions, to its end or not, and say what messages are then.

        `new` messages are added; None: the last answer is made again; []: the text is no message.
        """
        before, seen, unread = self.state(), self.other.cache.seen, self.other._unread
        read, evicted = self.other.read_ids, self.other.stats.evicted_tokens * (new is not None)
        refused, pieces, error = self.both(lambda session: attempt(session, call, **end))
        if refused or end.get("pieces") == 0:
            assert self.state() == before
            return
        turn, notice = self.other.turn, self.other.notice
        whole = turn.read_tokens == turn.prompt_tokens
        stopped = error == "KeyboardInterrupt" or turn.finish_reason == "interrupted"
        failed = bool(error) and not stopped
        text, anew = "".join(pieces), new is None
        reason = {"Lost": "error", "MemoryCapExceeded": "cap"}
        assert error is None or turn.finish_reason == reason.get(error, "interrupted")
        if new == []:
            forgotten = turn.finish_reason == "error"
        elif anew and not text and error:
            forgotten = True
            assert "the former one stays; the conversation is read again" in notice
        elif not whole and (failed or not turn.read_tokens):
            forgotten = turn.read_tokens > 0 or error == "Lost"
            assert "the message was not read and is taken back" in notice
        else:
            questions = self.unanswered() if anew else [*self.expected, *(new or [])]
            if pin:
                self.pinned |= set(range(len(self.expected), len(questions)))
            forgotten = turn.finish_reason == "error" or (
                not whole and (anew or (not seen and bool(self.expected)))
            )
            answer = self.other.messages[-1]["content"]
            assert answer.startswith(text)
            assert answer == text or error
            self.expected = [*questions, {"role": "assistant", "content": answer}]
        if forgotten:
            assert self.other.cache.seen == 0
            return
        if turn.finish_reason == "length":
            assert self.other._unread == self.other._written.tokens[-1:]
        if stopped and not whole:
            assert self.other.cache.seen == seen * (not anew) + turn.read_tokens
            notice_of_stop = f"stopped after {turn.read_tokens:,} of {turn.prompt_tokens:,} tokens"
            assert turn.read_tokens == 0 or notice == f"{notice_of_stop}; the rest was not read"
        elif not error:
            assert notice is None
            assert turn.evicted_tokens == self.other.stats.evicted_tokens - evicted
            assert self.other.on_full == "evict" or turn.evicted_tokens == 0
        if seen and not anew and turn.read_tokens:
            assert self.other.read_ids[: seen + len(unread)] == read + unread
        elif whole and new:
            self.is_read_from_its_beginning(turn.prompt_tokens)
        if whole and pin:
            self.pins_the_message()

    def pins_the_message(self) -> None:
        """Assert that the pinned tokens have the text of all pinned messages that were read."""
        session = self.other
        pins = [i for span in session.cache.pinned_spans for i in range(*span)]
        backend = session.runtime.tokenizer.backend_tokenizer
        text = backend.decode([session.read_ids[i] for i in pins])
        assert self.expected[-2]["content"].strip() in text
        assert ("Be kind." in text) == (session.pin_system and session.system is not None)

    def unanswered(self) -> list[dict[str, Any]]:
        """Return the messages without the last answer."""
        return self.expected[
            : max(i + 1 for i, m in enumerate(self.expected) if m["role"] == "user")
        ]

    def is_read_from_its_beginning(self, tokens: int) -> None:
        """Assert that the cache has read the conversation as it is written, and nothing before."""
        session = self.other
        recalled = {i for span in session.recall.spans for i in range(*span)}
        ids = [x for i, x in enumerate(session.read_ids[:tokens]) if i not in recalled]
        messages = [*system_message(session.system), *self.expected[:-1]]
        assert ids == session.encode(render(session.runtime.tokenizer, messages))

    # What is taken back or forgotten --------------------------------------------------------------

    @rule()
    def undo(self) -> None:
        if not self.expected:
            for session in (self.one, self.other):
                with pytest.raises(EmptyPrompt, match="nothing to take back"):
                    session.undo()
            return
        *self.expected, last = self.unanswered()
        assert self.both(lambda session: session.undo()) == last["content"]
        self.pinned = {index for index in self.pinned if index < len(self.expected)}
        assert self.other.cache.seen == 0

    @rule(
        new=st.booleans(), system=st.sampled_from([None, "Be kind."]), pin=st.booleans(),
        full=st.sampled_from(["evict", "evict", "stop", "error"]),
    )  # fmt: skip
    def forget(self, new: bool, system: str | None, pin: bool, full: Any) -> None:
        """Clear the conversation or begin a new session, and say what to do where it is full."""
        if new:
            self.begin_anew(system, pin)
        else:
            self.clear()
        self.one.on_full = self.other.on_full = full

    def clear(self) -> None:
        self.both(lambda session: session.clear())
        self.expected, self.pinned = [], set()
        assert (self.other.cache.seen, self.other._unread) == (0, [])

    # Files ----------------------------------------------------------------------------------------

    def saves(self) -> bool:
        return not isinstance(self.runtime, ToyEngine)

    @precondition(saves)
    @rule(over=st.booleans(), odd=st.booleans())
    def load(self, over: bool | str = False, odd: bool = False) -> None:
        """Go on from a file, `over` another conversation; of an `odd` one nothing is taken."""
        full = self.one.on_full
        self.one.save(self.path)
        if odd:
            bad = self.folder / "bad"
            bad.write_bytes(self.path.read_bytes()[:-9])
            with pytest.raises(SessionFileError):
                self.one.restore(bad)
            return
        if over:
            self.one = begun(self.runtime)
            attempt(self.one, lambda session: session.send(LONG))
            self.one.restore(self.path)
        else:
            del self.one
            self.one = Session.load(self.runtime, self.path)
        self.one.on_full = full
        assert self.one.stats == replace(self.other.stats, turn=None)

    @precondition(
        lambda self: isinstance(self.runtime, kvcap.Runtime) and self.runtime.plan.policy != "full"
    )
    @rule(budget=st.sampled_from([BUDGET - 8, ROOMY]))
    def branch(self, budget: int = BUDGET - 8) -> None:
        """Go on in a cache of another size, of which the session itself knows nothing."""
        self.one.save(self.path)
        runtime = self.runtime.with_budget(budget)
        try:
            branch = Session.load(runtime, self.path)
        except PinsTooLarge:
            return
        for _ in range(2):
            sound(branch, runtime)
            attempt(branch, lambda session: session.send("Hi."))

    # What holds -----------------------------------------------------------------------------------

    def state(self) -> Any:
        return self.both(holds)

    @invariant()
    def is_sound(self) -> None:
        """Hold both to the messages that are foretold, to each other, and to their cap."""
        assert self.other.messages == self.expected
        assert self.other.pinned == self.pinned
        self.state()
        sound(self.one, self.runtime)
        if not isinstance(self.runtime, ToyEngine):
            self.keeps_its_first_tokens()

    def keeps_its_first_tokens(self) -> None:
        cache = self.one.cache
        count = 0 if cache.pinned_spans else min(cache.sinks, cache.seen)
        for layer in cache.kept_tokens():
            assert all({*range(count)} <= set(head.tolist()) for head in layer.heads)

    @precondition(lambda self: self.other.cache.seen == self.other.cache.held > 0 and self.saves())
    @rule()
    def is_as_one_that_read_it_at_once(self) -> None:
        """Logits are those of a fresh cache where all fits; and a copy goes on by itself."""
        fresh, copy = self.runtime.loop(), self.runtime.loop()
        ids = torch.tensor([self.other.read_ids])
        fresh.prefill(ids)
        copy.go_on_from(self.one.loop.copied())
        torch.testing.assert_close(
            *(loop.read(ids[:, :1]) for loop in (fresh, copy)), rtol=1e-3, atol=1e-3
        )


def attempt(
    session: Session,
    call: Callable[[Session], Iterator[str]],
    blocks: int | None = None,
    pieces: int | None = None,
    loses: bool = False,
    error: type[BaseException] = KeyboardInterrupt,
) -> tuple[bool, list[str], str | None]:
    """Return whether an answer is refused at once, what is taken of it, and the error that ends it.

    Args:
        session: answers.
        call: begins the answer.
        blocks: of the prompt, after which reading ends by the error; None: all are read.
        pieces: of the answer, after which it is closed; None: all are taken.
        loses: the model fails after those pieces instead.
        error: the kind of the error that ends the reading.
    """

    def stop(done: int, total: int) -> None:
        if blocks is not None and done >= blocks * BLOCK:
            raise error

    taken, begun, model = list[str](), False, getattr(session.runtime, "model", None)
    # The last layer fails, when others have read the token already.
    last = None if model is None else model.model.layers[-1]
    part = (session.loop, "read") if last is None else (getattr(last, "mlp", last), "forward")
    session.on_block = stop
    try:
        stream = call(session)
        begun = True
        with failing(session.loop, "blocks", error) if blocks == 0 else nullcontext():
            taken += islice(stream, pieces)
        if loses and pieces:
            with failing(*part, Lost):
                taken += stream
        stream.close()  # type: ignore[attr-defined]
    except (KvcapError, Lost, KeyboardInterrupt) as caught:
        return not begun, taken, type(caught).__name__
    finally:
        session.on_block = None
    return False, taken, None


@contextmanager
def failing(thing: Any, name: str, error: type[BaseException]) -> Iterator[None]:
    """Let a function raise an error meanwhile."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thing, name, fail)
        yield


def begun(runtime: Any, system: str | None = None) -> Session:
    session: Session = runtime.session(system, seed=3)
    session.set_generation(max_new_tokens=3, temperature=0.8)
    if runtime.tokenizer.chat_template == THINKING["forgets"]:
        session.set_generation(max_new_tokens=12, thinking_budget=1)
    return session


def say(session: Session, text: str) -> str:
    return "".join(session.send(TEXTS[text]))


def holds(session: Session) -> Any:
    """Return the tokens that each head holds, those that were read, and the conversation."""
    kept = [
        [sorted(head.tolist()) for head in layer.heads] for layer in session.cache.kept_tokens()
    ]
    return kept, session.cache.seen, session.read_ids, session.conversation


def lives_of(folder: Path, *runtimes: Any, alive: Alive | None = None) -> type[Life]:
    """Return the lives that sessions of some runtimes may have."""
    given = {"runtimes": runtimes, "folder": folder, "alive": alive}
    return type("LifeOfThese", (Life,), given)


def parts_of(family: str, **sizes: Any) -> tuple[Any, Any]:
    """Return a random model of a family with pocket's tokens, and the tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(pocket.path())
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": None}
    return model_of(family, vocab_size=len(tokenizer), **ids, **sizes), tokenizer


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    return parts_of("llama", max_position_embeddings=96)


def runtime_of(
    parts: tuple[Any, Any],
    policy: str,
    positions: Any = "compact",
    kv_dtype: Any = None,
    every: int = 1,
    budget: int = BUDGET,
) -> kvcap.Runtime:
    model, tokenizer = parts
    eviction = small_policy(policy, model.config, window=WINDOW)
    if eviction.corrector is not None:
        kv_dtype = None  # it keeps evicted tokens beside the slots, which are not quantised then
    budget = 72 if policy == "full" else budget
    made = around(model, eviction, budget, BLOCK, positions, every, kv_dtype=kv_dtype)
    made.tokenizer = tokenizer
    return made


each_policy = pytest.mark.parametrize(
    ("policy", "positions", "kv_dtype", "every"), in_turn(sorted(policies()), WAYS)
)
beyond = pytest.mark.filterwarnings("ignore:position .* is beyond")


@beyond
@each_policy
def test_a_hard_life(policy, positions, kv_dtype, every, parts, tmp_path, alive):
    live_hard(runtime_of(parts, policy, positions, kv_dtype, every), tmp_path, alive)


@beyond
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hard_life_of_a_family(family, tmp_path, alive):
    """With states in place of slots or beside them, and with latents."""
    live_hard(runtime_of(parts_of(family), "keydiff"), tmp_path, alive, compared=True)


def live_hard(runtime: Any, folder: Path, alive: Alive, *, compared: bool = False) -> None:
    """Live through all that once left something of a conversation to the next one.

    Where it is to be compared, whatever all fits is also read by a cache of its own.
    """
    life = lives_of(folder, runtime, alive=alive)()
    life.begin()
    for act in HARD:
        name, *texts = act.split()
        getattr(life, name)(*texts)
        life.is_sound()
        if compared and life.other.cache.seen == life.other.cache.held > 0:
            life.is_as_one_that_read_it_at_once()
    life.end()


@beyond
@pytest.mark.slow
@each_policy
def test_any_life(policy, positions, kv_dtype, every, parts, tmp_path):
    runtime = runtime_of(parts, policy, positions, kv_dtype, every)
    lived(
        lives_of(tmp_path, runtime),
        settings=settings(few, max_examples=15, stateful_step_count=12),
    )


@beyond
@pytest.mark.parametrize(("policy", "template"), [
    *((policy, None) for policy in ("lagkv", "snapkv", "adakv", "cake", "calidrop")),
    *((policy, THINKING["forgets"]) for policy in ("lagkv", "snapkv", "adakv", "calidrop")),
])  # fmt: skip
def test_any_life_of_some(policy, template, parts, tmp_path, alive):
    model, tokenizer = parts
    parts = model, with_template(tokenizer, template or tokenizer.chat_template)
    made = [runtime_of(parts, policy, *way, size) for way in WAYS for size in (BUDGET, ROOMY)]
    kind = lives_of(tmp_path, *made, alive=alive)
    lived(kind, settings=settings(few, max_examples=8, stateful_step_count=12))


def test_any_life_in_toys(tmp_path):
    kind = lives_of(tmp_path, ToyEngine(BUDGET))
    lived(kind, settings=settings(few, max_examples=80, stateful_step_count=30))


@pytest.mark.slow
def test_any_life_by_onnx_runtime(tmp_path_factory, tmp_path):
    runtime = OrtRuntime.from_directory(tiny_decoder(tmp_path_factory) / "decoder")
    kind = lives_of(tmp_path, runtime)
    lived(kind, settings=settings(few, max_examples=25, stateful_step_count=12))


@each_policy
def test_a_file_has_nothing_of_a_conversation_that_was_cleared(
    policy, positions, kv_dtype, every, parts, tmp_path
):
    """It is that of a new session, to the byte."""
    runtime = runtime_of(parts, policy, positions, kv_dtype, every)
    cleared, new = begun(runtime), begun(runtime)
    for session in (cleared, new):
        session.set_generation(temperature=0.0)  # draws nothing, so that the seed's state is alike
    say(cleared, "long")
    cleared.clear()
    for what in (None, "short"):
        if what is not None:
            assert say(cleared, what) == say(new, what)
        cleared.save(tmp_path / "cleared")
        new.save(tmp_path / "new")
        assert (tmp_path / "cleared").read_bytes() == (tmp_path / "new").read_bytes()


def test_a_file_of_an_earlier_version_goes_on(parts, tmp_path, monkeypatch):
    """Which left a cleared conversation's queries in the window if the next was shorter."""
    runtime = runtime_of(parts, "snapkv", "compact", None, 1)
    session, new = begun(runtime), begun(runtime)
    say(session, "long")
    with monkeypatch.context() as patch:
        patch.setattr(QueryWindow, "reset", lambda self: None)
        session.clear()
    session.set_generation(seed=3)
    assert say(session, "short") == say(new, "short")
    assert session.cache.capped_layers[0].engine.query_window.shift.max() > session.cache.seen
    session.save(tmp_path / "s")
    loaded = Session.load(runtime, tmp_path / "s")
    assert say(loaded, "long") == say(new, "long")
    assert holds(loaded)[:2] == holds(new)[:2]

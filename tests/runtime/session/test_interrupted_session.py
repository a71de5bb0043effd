"""Ctrl-C, refusals and failures while a prompt is read: what messages and cache are afterwards."""

from __future__ import annotations

import copy
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
from chat_templates import THINKING, with_template
from toy_engine import ToyEngine, held, session_of, sound

from kvcap.runtime.errors import EmptyPrompt, KvcapError, MemoryCapExceeded
from kvcap.runtime.session import session as session_module
from kvcap.runtime.session.messages import render, system_message

LONG = "Seven kinds of mosses survive the cold near Porto, and tall grasses attract many bees. " * 3


@pytest.fixture
def session(runtime):
    made = session_of(runtime, "Be kind.")
    list(made.send("Hi, I am Ada."))
    return made


def goes_on(session: Any) -> None:
    """The next message is answered, and read after nothing but this conversation."""
    empty, before, unread = not session.cache.seen, held(session), session._unread
    seen = session.cache.seen
    list(session.send("And now?"))
    assert session.turn.finish_reason == "length"
    assert session.notice is None
    if empty:
        messages = [*system_message(session.system), *session.messages[:-1]]
        ids = session.encode(render(session.runtime.tokenizer, messages))
        assert session.read[: len(ids)] == ids
    else:
        assert held(session).startswith(before)
        assert session.read[seen : seen + len(unread)] == unread
    assert session.read_ids == session.read[: session.cache.seen]
    sound(session, session.runtime)


def test_a_message_stopped_while_all_is_read_anew_for_it_is_taken_back(runtime):
    """It needs another beginning, as with other options of the chat template."""
    runtime.tokenizer = with_template(runtime.tokenizer, THINKING["system"])
    session = session_of(runtime)
    list(session.send(LONG))
    before = copy.deepcopy(session.messages)
    session.set_generation(template_options={"enable_thinking": False})
    session.on_block = lambda *_: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        list(session.send("More."))
    session.on_block = None
    assert (session.messages, session.cache.seen) == (before, 0)
    assert session.notice.startswith("the message was not read and is taken back; ")
    assert "read again" in session.notice
    session.set_generation(template_options=None)
    goes_on(session)


@pytest.mark.parametrize(("unread", "since", "left"), [([7], 0, [7]), ([7], 5, []), ([], 3, [])])
def test_saved_tokens_that_were_not_read(session, unread, since, left):
    """Of files from before, in which a cleared conversation's token could still be."""
    seen = session.cache.seen
    conversation = {**session.conversation, "unread": unread, "unread_since": seen + since}
    session.take_over(conversation, session.rng)
    assert session._unread == left
    assert session.conversation["unread"] == left
    assert session.turn is None


def test_ctrl_c_at_any_line_of_a_session_leaves_a_conversation(runtime):
    """One run for every line that is executed, each stopped there as by the user."""
    code, lines, stop = session_module.__file__, 0, 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != code:
            return None
        if event == "line":
            lines += 1
            if lines == stop:
                signal.raise_signal(signal.SIGINT)
        return trace

    def run(action: Callable[[Any], Any]) -> Any:
        nonlocal lines
        session = session_of(runtime)
        session.set_generation(max_new_tokens=2)
        list(session.send("Hi."))
        lines = 0
        previous = sys.gettrace()
        try:
            sys.settrace(trace)
            list(action(session))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(previous)
        return session

    for action in (lambda s: s.send("And you?"), lambda s: s.regenerate()):
        stop = 0
        run(action)
        count = lines
        assert count > 50
        for stop in range(1, count, 1 if isinstance(runtime, ToyEngine) else 5):
            session = run(action)
            sound(session, runtime)
            stop = 0
            goes_on(session)


def test_refusals_are_the_calls(runtime):
    """With nothing read of what they return."""
    session = session_of(runtime, budget=32)
    for text in ("", " \n"):
        with pytest.raises(EmptyPrompt):
            session.send(text)
    with pytest.raises(EmptyPrompt):
        session.complete("")
    with pytest.raises(EmptyPrompt, match="nothing to answer"):
        session.regenerate()
    with pytest.raises(EmptyPrompt, match="nothing to take back"):
        session.undo()
    with pytest.raises(KvcapError, match="would be pinned"):
        session.send(LONG, pin=True)
    session.on_full = "error"
    for call in (session.send, session.complete):
        with pytest.raises(MemoryCapExceeded, match="raise the budget"):
            call(LONG)
    session.on_full = "evict"
    list(session.send("Hi."))
    list(session.send(LONG))
    session.on_full = "stop"
    seen, messages = session.cache.seen, copy.deepcopy(session.messages)
    with pytest.raises(MemoryCapExceeded, match="0 of 32 slots"):
        session.regenerate()
    session.on_full = "evict"
    session.pinned = {2}
    with pytest.raises(KvcapError, match="would be pinned"):
        session.regenerate()
    session.pinned = set()
    session.generation.eos_token_id = "</s>"
    with pytest.raises(ValueError, match="eos_token_id='</s>' will not work"):
        session.send("Hi.")
    assert (session.cache.seen, session.messages) == (seen, messages)


def test_what_was_said_since_the_call_is_taken_into_account(runtime):
    one, plain = session_of(runtime), session_of(runtime)
    streams = [one.send("One."), one.send("Two.")]
    for stream in streams:
        list(stream)
    for text in ("One.", "Two."):
        list(plain.send(text))
    assert one.messages == plain.messages
    assert held(one) == held(plain)


def test_an_answer_that_nobody_reads_on_ends_where_another_begins(runtime):
    session = session_of(runtime)
    first = session.send("One.")
    answer = next(first)
    list(session.send("Two."))
    assert list(first) == []
    assert [m["content"] for m in session.messages[:3]] == ["One.", answer, "Two."]
    sound(session, runtime)
    third = session.send("Three.")
    next(third)
    session.clear()
    third.close()
    assert session.messages == []
    assert session.cache.seen == 0

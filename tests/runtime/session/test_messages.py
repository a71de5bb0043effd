"""Chat messages given to `Session.send` as a list."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import PLAIN, with_template
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import held, session_of

from kvcap.runtime.errors import (
    ChatTemplateMissing,
    EmptyPrompt,
    KvcapError,
    MessagesInvalid,
    TokenUnknown,
)
from kvcap.runtime.session.messages import ROLES, checked_messages, render, system_message

SLOTS = 400
SYSTEM = {"role": "system", "content": "Be kind."}
QUESTION = {"role": "user", "content": "Who are you?"}
ANSWERED = {"role": "assistant", "content": "I am Pocket."}
AGAIN = {"role": "user", "content": "Say it again."}


def spelt(session: Any, messages: Any) -> str:
    tokenizer = session.runtime.tokenizer
    ids = session.encode(render(tokenizer, messages))
    return tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)


def test_a_history_begins_a_conversation(runtime):
    session = session_of(runtime)
    history = [SYSTEM, QUESTION, ANSWERED, AGAIN]
    answer = "".join(session.send(history))
    assert session.messages == [*history[1:], {"role": "assistant", "content": answer}]
    assert session.system == "Be kind."
    assert held(session).startswith(spelt(session, history))
    assert history == [SYSTEM, QUESTION, ANSWERED, AGAIN]
    session.messages[0]["content"] = "else"  # the caller's own are not the session's
    assert QUESTION["content"] == "Who are you?"


@pytest.mark.parametrize("text", ["\ud83d", "a" * 99 + "\ude42", "caf\udce9", "\ud83d\ude42"])
def test_what_is_no_letter_is_refused_and_changes_nothing(runtime, text):
    """Halves of a pair, as JSON may hold them, and bytes that are no UTF-8."""
    session = session_of(runtime, "Be kind.")
    list(session.send("Hello!"))
    before = session.conversation
    for ask in (
        lambda: session.send(text),
        lambda: session.send([QUESTION, ANSWERED, {**QUESTION, "content": text}]),
        lambda: session.complete(text),
        lambda: session.encode(text),
        lambda: session_of(runtime).send([{"role": "system", "content": text}, QUESTION]),
        lambda: session_of(runtime, text),
    ):
        with pytest.raises(MessagesInvalid, match="cannot be read: at letter") as refused:
            ask()
        assert str(refused.value).isascii()  # so that it can be shown
    for ask in (lambda: session.send("Hi.", begin=3), lambda: session_of(runtime, ["Be kind."])):
        with pytest.raises(MessagesInvalid, match="was given; give a text"):
            ask()
    with pytest.raises(TokenUnknown, match=r"has token 1,099,511,627,776, and the model"):
        session.complete([2**40])
    assert session.conversation == before
    assert "".join(session.send("Hello?"))


def test_messages_are_added_to_a_conversation(runtime):
    session = session_of(runtime, "Be kind.")
    first = "".join(session.send("Hello!"))
    before = held(session)
    list(session.send([QUESTION, ANSWERED, AGAIN]))
    assert session.messages[2:5] == [QUESTION, ANSWERED, AGAIN]
    assert session.messages[1]["content"] == first
    read = held(session)[len(before) :]
    assert spelt(session, [QUESTION, ANSWERED, AGAIN]).removeprefix("<|bos|>") in read
    assert read.count("Be kind.") == 0
    # A text is a list of one message.
    one, other = session_of(runtime), session_of(runtime)
    assert "".join(one.send("Hello!")) == "".join(
        other.send([{"role": "user", "content": "Hello!"}])
    )
    assert held(one) == held(other)


def test_all_messages_that_are_given_are_pinned(runtime):
    session = session_of(runtime)
    list(session.send([SYSTEM, QUESTION, ANSWERED, AGAIN], pin=True))
    assert session.pinned == {0, 1, 2}
    assert session.pin_system
    prompt = session.turn.prompt_tokens
    covered = {i for a, b in session.cache.pinned_spans for i in range(a, b)}
    assert len(covered) >= prompt - 6  # all but what only begins the answer
    session.cache.reset()
    list(session.send("And now?"))
    again = {i for a, b in session.cache.pinned_spans for i in range(a, b)}
    assert covered == {i for i in again if i < prompt}
    assert session.undo() == "And now?"
    assert session.undo() == "Say it again."
    assert session.pinned == {0, 1}
    assert session.messages == [QUESTION, ANSWERED]


@pytest.mark.parametrize(
    ("messages", "error", "says"),
    [
        (None, MessagesInvalid, "a NoneType was given"),
        (3, MessagesInvalid, "a int was given"),
        (b"Hi", MessagesInvalid, "a bytes was given"),
        (QUESTION, MessagesInvalid, "a dict was given; give a text, or a list"),
        ([], EmptyPrompt, "there are no messages"),
        (["Hi"], MessagesInvalid, "message 0 is a str"),
        ([{"content": "Hi"}], MessagesInvalid, "message 0 has no 'role'"),
        ([{"role": "user"}], MessagesInvalid, "message 0 has no 'content'"),
        ([{"role": "cat", "content": "Hi"}], MessagesInvalid, "role 'cat'; use system, user"),
        ([{"role": ["user"], "content": "Hi"}], MessagesInvalid, "has role"),
        (
            [QUESTION, {"role": "user", "content": None}],
            MessagesInvalid,
            "of message 1 is a NoneType",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], MessagesInvalid, "is a list"),
        ([{**QUESTION, "tool_calls": [1]}], MessagesInvalid, "has 'tool_calls'"),
        ([QUESTION, ANSWERED], MessagesInvalid, "the last message is of the assistant"),
        ([{**SYSTEM, "content": " "}], EmptyPrompt, "the message is empty"),
        ([QUESTION, {"role": "user", "content": " "}], EmptyPrompt, "the message is empty"),
    ],
)
def test_what_is_no_message_is_refused_by_the_call(runtime, messages, error, says):
    session = session_of(runtime)
    with pytest.raises(error, match=says):
        session.send(messages)
    assert session.messages == []


def test_a_system_prompt_begins_a_conversation(runtime):
    session = session_of(runtime)
    list(session.complete("Once"))
    with pytest.raises(MessagesInvalid, match="behind a text that was continued"):
        session.send([SYSTEM, QUESTION])
    session.clear()
    list(session.send([SYSTEM, {**QUESTION, "name": None, "tool_calls": []}]))
    assert session.messages[0] == QUESTION
    with pytest.raises(MessagesInvalid, match="a list was given"):
        session.complete([QUESTION])  # type: ignore[arg-type]


LATER = {"role": "system", "content": "Be brief from here on."}
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
NAMED = FIRST_ONLY.replace("{{ m.role }}:", "{{ m.name or m.role }}:")


@pytest.mark.parametrize("first", [[], [SYSTEM]])
def test_later_messages_of_the_system_are_read_as_the_template_writes_them(runtime, first):
    """Twice at the beginning, amid a history, and in a conversation that goes on."""
    session = session_of(runtime)
    history = [*first, LATER, QUESTION, ANSWERED, LATER, AGAIN]
    list(session.send(history))
    assert held(session).startswith(spelt(session, history))
    list(session.send([SYSTEM, AGAIN]))
    assert session.turn.read_tokens == session.turn.prompt_tokens
    whole = [*system_message(session.system), *session.messages]
    assert held(session).startswith(spelt(session, whole[:-1]))


def test_a_later_message_of_the_system_is_refused_where_the_template_leaves_it_out(runtime):
    runtime.tokenizer = with_template(runtime.tokenizer, FIRST_ONLY)
    session = session_of(runtime)
    list(session.send([SYSTEM, QUESTION]))
    before = list(session.messages)
    with pytest.raises(
        ChatTemplateMissing, match=f"system says .*, {LATER['content'][:40]!r}; say"
    ):
        session.send([LATER, AGAIN])
    assert session.messages == before


def test_the_template_is_given_the_name_of_who_speaks(runtime):
    runtime.tokenizer = with_template(runtime.tokenizer, NAMED)
    session = session_of(runtime)
    list(session.send([{**QUESTION, "name": "Ada"}]))
    assert held(session).startswith("Ada: Who are you?\nassistant: ")


odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.sampled_from(ROLES),
    lambda x: (
        st.lists(x, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "x"]), x, max_size=3)
    ),
    max_leaves=8,
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(odd)
def test_whatever_is_given_is_messages_or_refused_by_name(value):
    try:
        messages = checked_messages(value)
    except KvcapError:
        pass
    else:
        assert messages[-1]["role"] == "user"
        assert all(set(one) == {"role", "content"} for one in messages)
        assert all(type(one["content"]) is str for one in messages)


@pytest.mark.parametrize("template", [None, "trimmed"])
def test_a_system_prompt_alone_is_answered(runtime, template):
    """As it is written without a user; as a user's message where the template leaves it out."""
    if template is not None:
        runtime.tokenizer = with_template(runtime.tokenizer, PLAIN[template])
    session = session_of(runtime)
    answer = "".join(session.send([SYSTEM]))
    first = [SYSTEM] if template is None else [{**SYSTEM, "role": "user"}]
    assert held(session).startswith(spelt(session, first))
    assert [*system_message(session.system), *session.messages] == [
        *first,
        {"role": "assistant", "content": answer},
    ]
    assert "".join(session.regenerate()) == answer
    before = held(session)
    list(session.send("And now?"))
    assert held(session).startswith(before)


@pytest.mark.parametrize("seed", [0, 2**64 - 1, -(2**63)])
def test_seeds_have_64_bits(runtime, seed):
    answers = set()
    for one in (seed, seed % 2**64):
        session = session_of(runtime)
        session.set_generation(seed=one, temperature=1.0)
        answers.add("".join(session.send("Hello!")))
    assert len(answers) == 1
    session.set_generation(seed=-1)
    assert session.seed is None
    with pytest.raises(ValueError, match="seed="):
        session.set_generation(seed=2**64)

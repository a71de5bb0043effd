"""Chat messages that a session is given: whether they can be answered. Knows no backend."""

from __future__ import annotations

from typing import Any

from kvcap.runtime.errors import EmptyPrompt, MessagesInvalid
from kvcap.runtime.text import Message

ROLES = ("system", "user", "assistant")


def messages_of(said: Any) -> list[Message]:
    """What `Session.send` is given, as messages: a system prompt first, if any, a user's last.

    Raises:
        MessagesInvalid: neither a text nor such messages, naming the first that is wrong.
        EmptyPrompt: there is nothing to answer.
    """
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    elif not isinstance(said, (list, tuple)):
        raise MessagesInvalid(
            f"a {type(said).__name__} was given; give a text, or a list of messages such as "
            "{'role': 'user', 'content': 'Hello!'}"
        )
    if not said:
        raise EmptyPrompt("there are no messages; give at least one of the user")
    found = [_message(index, one) for index, one in enumerate(said)]
    if found[-1]["role"] != "user":
        raise MessagesInvalid(
            f"the last message is of the {found[-1]['role']}; it must be of the user, who is to be "
            "answered"
        )
    if not found[-1]["content"].strip():
        raise EmptyPrompt("the message is empty; write something to answer")
    return found


def _message(index: int, given: Any) -> Message:
    """One message, copied."""
    if not isinstance(given, dict):
        raise MessagesInvalid(
            f"message {index} is a {type(given).__name__}; give a dictionary with 'role' and "
            "'content'"
        )
    for key in ("role", "content"):
        if key not in given:
            raise MessagesInvalid(f"message {index} has no {key!r}; give 'role' and 'content'")
    if others := [key for key in given if key not in ("role", "content") and given[key]]:
        raise MessagesInvalid(
            f"message {index} has {others[0]!r}, which is not read; leave it out and say it in "
            "'content'"
        )
    role, content = given["role"], given["content"]
    if role not in ROLES:
        raise MessagesInvalid(f"message {index} has role {role!r}; use {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise MessagesInvalid(
            f"the content of message {index} is a {type(content).__name__}; give its text"
        )
    if role == "system" and index:
        raise MessagesInvalid(
            f"message {index} is of the system; a system prompt can only be the first message"
        )
    return {"role": role, "content": content}

"""What a session's file says of a conversation: whether it can be so. Knows no backend."""

from __future__ import annotations

from typing import Any


def check_conversation(said: dict[str, Any]) -> None:
    """Raise `ValueError` unless messages, pins and unread tokens are of the kinds they must be."""
    for message in said["messages"]:
        if not all(isinstance(message[key], str) for key in ("role", "content")):
            raise ValueError("messages")
    numbers = [*said["pinned"], *said["unread"], said["unread_since"]]
    texts = [x for x in (said["system"],) if x is not None]
    whole = all(type(n) is int and n >= 0 for n in numbers)
    if not whole or not all(isinstance(text, str) for text in texts):
        raise ValueError("what was said")
    if any(n >= len(said["messages"]) for n in said["pinned"]) or len(said["unread"]) > 1:
        raise ValueError("what was said")
    bool(said["pin_system"]), said["seed"]

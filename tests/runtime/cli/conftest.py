"""Gives tests of commands a small model, and chats whose output is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcap.runtime.cli.chat import Chat
from kvcap.runtime.cli.options import Output


class ReadChat(Chat):
    """A chat that returns what it writes."""

    capsys: pytest.CaptureFixture[str]

    def typed(self, *lines: str) -> tuple[str, str]:
        """Run these lines as a script; return what they write to stdout and to stderr."""
        self.capsys.readouterr()
        self.run_script(lines)
        return self.capsys.readouterr()

    def contents(self, role: str = "user") -> list[str]:
        """Return what was said in a role."""
        return [one["content"] for one in self.session.messages if one["role"] == role]


@pytest.fixture
def model(chat_model: str) -> str:
    """Return the folder of a small random model."""
    return chat_model


@pytest.fixture
def chat_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., ReadChat]:
    """Return a function that makes a chat of a session, with options of its output."""

    def make(session: Any, **output: bool) -> ReadChat:
        chat = ReadChat(session, Output(**output))
        chat.capsys = capsys
        return chat

    return make

"""The chat's keyboard: prompt, keys, history. Everything is drawn on stderr."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from kvcap.runtime.chat import Chat
from kvcap.runtime.screen import INTERRUPTED, OK, dim


def converse(chat: Chat) -> int:
    """Chat until the user leaves; returns the exit code."""
    if not chat.output.quiet:
        dim("\n".join(chat.banner()))
    prompt: PromptSession[str] = PromptSession(
        FormattedText([("bold", "> ")]),
        multiline=True,
        prompt_continuation="  ",
        key_bindings=keys(),
        history=history(),
        output=create_output(stdout=sys.stderr),
    )
    leaving = False
    while not chat.over:
        try:
            text = prompt.prompt()
        except EOFError:
            return OK
        except KeyboardInterrupt:
            if leaving:
                return INTERRUPTED
            leaving = True
            dim("Ctrl-C again leaves, so does Ctrl-D")
            continue
        leaving = False
        chat.take(text)
    return OK


def keys() -> KeyBindings:
    """Enter sends, Alt+Enter and a final backslash start a new line, Ctrl-C empties or leaves."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    return bindings


def history() -> History:
    """What was typed before, readable by this user alone; only in memory if that cannot be."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    file = Path(state) / "kvcap" / "history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(file)

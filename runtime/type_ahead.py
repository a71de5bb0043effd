"""What is typed while an answer is written: kept off the screen, and kept for the next prompt."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

try:
    import termios
except ImportError:  # Windows: it shows nothing that no one reads, and keeps it by itself
    termios = None  # type: ignore[assignment]


class TypeAhead:
    """While it is entered, a terminal shows no typing but that in a prompt.

    Ctrl-C stays the signal that it is.
    """

    def __init__(self, keyboard: Input) -> None:
        self._keyboard = keyboard
        self._mode: list[Any] | None = None  # of the terminal before

    def __enter__(self) -> TypeAhead:
        if termios is not None and os.isatty(self._keyboard.fileno()):
            self._mode = termios.tcgetattr(self._keyboard.fileno())
            silent = list(self._mode)
            silent[3] &= ~(termios.ECHO | termios.ICANON)
            silent[3] |= termios.NOFLSH  # Ctrl-C loses nothing of what was typed
            termios.tcsetattr(self._keyboard.fileno(), termios.TCSANOW, silent)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._mode is not None:
            termios.tcsetattr(self._keyboard.fileno(), termios.TCSANOW, self._mode)

    def take(self) -> str:
        """What was typed since the last prompt."""
        keys: list[KeyPress] = []
        while self._mode is not None and (more := self._keyboard.read_keys()):
            keys += more
        return typed([*keys, *self._keyboard.flush_keys()])


def typed(keys: list[KeyPress]) -> str:
    """The text that `keys` type; its end, where Enter was pressed, is left to the user."""
    text = ""
    for press in keys:
        if press.key == Keys.BracketedPaste or not isinstance(press.key, Keys):
            text += press.data
        elif press.key in (Keys.ControlM, Keys.ControlJ):
            text += "\n"
        elif press.key == Keys.ControlH:  # backspace
            text = text[:-1]
        elif press.key == Keys.ControlU:
            text = ""
    return text.strip("\r\n").replace("\r\n", "\n").replace("\r", "\n")

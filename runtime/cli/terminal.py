"""The chat's keyboard: prompt and keys. Everything is drawn on stderr."""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import FormattedText, StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.layout.utils import explode_text_fragments
from prompt_toolkit.output import Output, create_output
from prompt_toolkit.styles import Style

from kvcap.runtime.cli.chat import YOU, Chat
from kvcap.runtime.cli.console import INTERRUPTED, OK, dim, say
from kvcap.runtime.cli.tab_completion import ChatCompleter

STYLE = Style.from_dict({"": f"ansi{YOU}", "mark": f"bold ansi{YOU}"})


def converse(chat: Chat, keyboard: Input | None = None, screen: Output | None = None) -> int:
    """Chat until the user leaves; returns the exit code.

    Args:
        chat: the conversation.
        keyboard: what is typed on; stdin by default.
        screen: where prompts are drawn; stderr by default.
    """
    chat.spaced = True
    if not chat.output.quiet:
        dim("\n".join(chat.banner()))
    chat.resumed()
    prompt = Prompt(chat, keyboard, screen)
    with TypeAhead(prompt.keyboard) as ahead:
        return _converse(chat, prompt, ahead)


def _converse(chat: Chat, prompt: Prompt, ahead: TypeAhead) -> int:
    leaving, typed = False, ahead.take()  # while the model was loaded
    while not chat.over:
        say("")
        try:
            text = prompt.ask(typed)
        except EOFError:
            return OK
        except KeyboardInterrupt:
            if leaving:
                return INTERRUPTED
            leaving, typed = True, ""
            dim("Ctrl-C again leaves, so does Ctrl-D")
            continue
        leaving = False
        try:
            chat.take(text)
        except KeyboardInterrupt:  # where no answer was being written
            dim("stopped")
        typed = "\n".join(filter(None, (chat.draft, ahead.take())))
        chat.draft = ""
    return OK


class Prompt:
    """Asks for a message or a command."""

    def __init__(self, chat: Chat, keyboard: Input | None, screen: Output | None) -> None:
        self._pastes, self._history = Pastes(), history()
        self._session: PromptSession[str] = PromptSession(
            FormattedText([("class:mark", "> ")]),
            multiline=True,
            prompt_continuation="  ",
            key_bindings=self._keys(),
            history=self._history,
            completer=ChatCompleter(chat),
            complete_while_typing=False,
            input_processors=[self._pastes],
            style=STYLE,
            input=keyboard,
            output=screen or create_output(stdout=sys.stderr),
        )

    @property
    def keyboard(self) -> Input:
        """What is typed on."""
        return self._session.app.input

    def ask(self, typed: str = "") -> str:
        """What the user says, beginning with what was typed already.

        Raises:
            EOFError, KeyboardInterrupt: Ctrl-D, Ctrl-C in an empty prompt.
        """
        self._pasted(False)
        return self._pastes.unfold(self._session.prompt(default=self._pastes.fold(typed)))

    def _pasted(self, pasted: bool) -> None:
        if isinstance(self._history, TypedHistory):
            self._history.pasted = pasted

    def _keys(self) -> KeyBindings:
        """Enter sends, Alt+Enter and a final backslash start a new line, Ctrl-C empties or leaves.

        What is pasted is never sent by the new lines in it.
        """
        bindings = KeyBindings()

        @bindings.add("enter")
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if buffer.complete_state and buffer.complete_state.current_completion:
                buffer.complete_state = None  # it is chosen; the next Enter sends
            elif buffer.document.text_before_cursor.endswith("\\"):
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
                self._pasted(False)
                event.current_buffer.reset()
            else:
                event.app.exit(exception=KeyboardInterrupt())

        @bindings.add(Keys.BracketedPaste)
        def _(event: KeyPressEvent) -> None:
            text = event.data.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n")
            self._pasted(True)
            event.current_buffer.insert_text(self._pastes.fold(text))

        return bindings


LINES, CHARACTERS = 5, 500  # from so many on, a text is long
FIRST = 0xF0000  # of the characters that stand for texts: in a plane for private use


class Pastes(Processor):
    """The long texts of one prompt, by the characters that stand for them."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def fold(self, text: str) -> str:
        """`text`, or the character that stands for it if it is long."""
        if text.count("\n") + 1 < LINES and len(text) < CHARACTERS:
            return text
        code = FIRST + len(self._texts)
        self._texts[code] = text
        return chr(code)

    def unfold(self, typed: str) -> str:
        """What was typed, with the long texts in it."""
        return typed.translate(self._texts)

    def folded(self, typed: str) -> bool:
        """Whether a long text is in what was typed."""
        return any(ord(character) in self._texts for character in typed)

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        """Show labels in place of the characters."""
        shown: StyleAndTextTuples = []
        starts, column = [], 0  # where each character of the line is shown
        for style, character, *_ in explode_text_fragments(transformation_input.fragments):
            starts.append(column)
            text = self._texts.get(ord(character))
            shown.append((style, character) if text is None else (f"{style} italic", label(text)))
            column += len(shown[-1][1])

        def display(source: int) -> int:
            return starts[source] if source < len(starts) else column + source - len(starts)

        def source(display: int) -> int:
            if display >= column:
                return len(starts) + display - column
            return max(0, bisect_right(starts, display) - 1)

        return Transformation(shown, source_to_display=display, display_to_source=source)


def label(text: str) -> str:
    """What stands in the prompt for `text`."""
    lines = text.count("\n") + 1
    return f"[pasted {lines:,} lines]" if lines > 1 else f"[pasted {len(text):,} characters]"


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


PRIVATE = "/pin"  # what must never be forgotten is often what no one else must know


class TypedHistory(FileHistory):
    """Keeps in its file what was typed; what was pasted or pinned, until the chat ends."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.pasted = False
        """Whether a text that was pasted is in what is typed now."""
        self._private: set[str] = set()

    def store_string(self, string: str) -> None:
        """Write to the file what may be there; a file that cannot be written ends no chat."""
        if self.pasted or string.lower().startswith(PRIVATE):
            self._private.add(string)
        if string not in self._private:
            with suppress(OSError):
                super().store_string(string)


def history() -> History:
    """What was typed before, readable by this user alone; only in memory if that cannot be."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    file = Path(state) / "kvcap" / "history"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
        if not file.is_file():
            return InMemoryHistory()
        file.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return TypedHistory(file)

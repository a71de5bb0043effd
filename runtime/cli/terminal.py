"""Handles the chat's keyboard: prompt, keys, tab completion, pastes, history and type-ahead.

Everything is drawn on stderr.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText, StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.layout.utils import explode_text_fragments
from prompt_toolkit.output import Output, create_output
from prompt_toolkit.styles import Style

from kvcap.runtime.cli.chat import SETTINGS, SWITCH, YOU, Chat
from kvcap.runtime.cli.console import INTERRUPTED, OK, dim, say

try:
    import termios
except ImportError:  # on Windows nothing that is typed shows or is lost outside a prompt
    termios = None  # type: ignore[assignment]

STYLE = Style.from_dict({"": f"ansi{YOU}", "mark": f"bold ansi{YOU}"})
FILE_COMMANDS = ("read", "save", "load")  # commands that take a file
LONG_LINES, LONG_CHARACTERS = 5, 500  # from so many on, a pasted text is folded
FIRST_CODE = 0xF0000  # first of the private-use characters that stand for folded texts
PRIVATE = "/pin"  # pinned text is often secret, so it is not written to the history


def converse(chat: Chat, keyboard: Input | None = None, screen: Output | None = None) -> int:
    """Chat until the user leaves; return the exit code.

    Args:
        chat: the conversation.
        keyboard: what is typed on; stdin by default.
        screen: where prompts are drawn; stderr by default.
    """
    chat.spaced = True
    if not chat.output.quiet:
        dim("\n".join(chat.banner()))
    chat.show_resumed()
    prompt = Prompt(chat, keyboard, screen)
    with TypeAhead(prompt.keyboard, prompt.screen) as ahead:
        return _converse(chat, prompt, ahead)


def _converse(chat: Chat, prompt: Prompt, ahead: TypeAhead) -> int:
    ahead.hand_on(ahead.take())  # while the model was loaded
    leaving, typed = False, ""
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
        ahead.begin()
        try:
            stopped = chat.handle(text) == INTERRUPTED
        except KeyboardInterrupt:  # a Ctrl-C while no answer was being written
            dim("stopped")
            stopped = True
        leaving, typed, keys = False, chat.draft, ahead.take()
        if stopped or chat.draft:  # nothing more is sent before the user has seen why
            typed = "\n".join(filter(None, (chat.draft, text_of(keys))))
        else:
            ahead.hand_on(keys)
        chat.draft = ""
    return OK


class Prompt:
    """A prompt on the terminal that asks for a message or a command."""

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
        """Return the keyboard."""
        return self._session.app.input

    @property
    def screen(self) -> Output:
        """Return the screen on which prompts are drawn."""
        return self._session.app.output

    def ask(self, typed: str = "") -> str:
        """Return the message or command that the user enters; `typed` is in the prompt already.

        Raises:
            EOFError, KeyboardInterrupt: after Ctrl-D, or Ctrl-C, in an empty prompt.
        """
        self._pasted(False)
        return self._pastes.unfold(self._session.prompt(default=self._pastes.fold(typed)))

    def _pasted(self, pasted: bool) -> None:
        if isinstance(self._history, TypedHistory):
            self._history.pasted = pasted

    def _keys(self) -> KeyBindings:
        """Bind keys: Enter sends, Alt+Enter or a backslash starts a line, Ctrl-C empties or leaves.

        New lines in a pasted text do not send it.
        """
        bindings = KeyBindings()

        @bindings.add("enter")
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if buffer.complete_state and buffer.complete_state.current_completion:
                buffer.complete_state = None  # chosen; the next Enter sends it
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


class ChatCompleter(Completer):
    """A completer of commands, settings, policies and file names that are typed for `chat`."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterator[Completion]:
        """Yield the completions of the text before the cursor."""
        text = document.text_before_cursor
        if not self._chat.commands or not text.startswith("/") or "\n" in text:
            return
        command, space, rest = text[1:].partition(" ")
        if not space:
            for name, (usage, says, _) in self._chat.COMMANDS.items():
                if name.startswith(command.lower()):
                    yield Completion(
                        f"{name} " if usage else name,
                        -len(command),
                        display=name,
                        display_meta=says,
                    )
        elif command == "set":
            key, space, value = rest.partition(" ")
            if not space:
                yield from beginning(key, SETTINGS, end=" ")
            elif key == "markdown":
                yield from beginning(value, SWITCH)
        elif command == "policy":
            policies = self._chat.session.runtime.policies()
            name, *options = rest.split(" ")
            if not options:
                yield from beginning(name, policies)
            else:
                yield from beginning(options[-1], policies.get(name, ()), end="=")
        elif command in FILE_COMMANDS:
            yield from self._files(rest, complete_event, escaped=command == "read")

    def _files(self, typed: str, event: CompleteEvent, escaped: bool) -> Iterator[Completion]:
        """Yield files that begin with `typed`; `escaped` puts backslashes before spaces."""
        begun = typed.replace("\\ ", " ") if escaped else typed
        for completion in self._paths.get_completions(Document(begun), event):
            rest = completion.text.replace(" ", "\\ ") if escaped else completion.text
            folder = completion.display_text.endswith("/")
            end = "/" if folder else " " if escaped else ""  # a question may follow
            yield Completion(rest + end, completion.start_position, display=completion.display)


def beginning(typed: str, words: Iterable[str], end: str = "") -> Iterator[Completion]:
    """Yield the `words` that begin with `typed`, each followed by `end`."""
    for word in words:
        if word.startswith(typed):
            yield Completion(word + end, -len(typed), display=word)


class Pastes(Processor):
    """A processor that folds long texts in a prompt: one character stands for each, as a label."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def fold(self, text: str) -> str:
        """Return the text, or the character that stands for it if it is long."""
        if text.count("\n") + 1 < LONG_LINES and len(text) < LONG_CHARACTERS:
            return text
        code = FIRST_CODE + len(self._texts)
        self._texts[code] = text
        return chr(code)

    def unfold(self, typed: str) -> str:
        """Return the typed text, with the long texts in place of their characters."""
        return typed.translate(self._texts)

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
    """Return the label that stands for `text` in the prompt."""
    lines = text.count("\n") + 1
    return f"[pasted {lines:,} lines]" if lines > 1 else f"[pasted {len(text):,} characters]"


class TypedHistory(FileHistory):
    """A history that keeps typed lines in a file, and pasted or pinned ones until the chat ends."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.pasted = False
        """Says whether the line being typed has a pasted text in it."""
        self._private: set[str] = set()

    def store_string(self, string: str) -> None:
        """Write a line that is not private to the file; if that fails, the chat goes on."""
        if self.pasted or string.lower().startswith(PRIVATE):
            self._private.add(string)
        if string not in self._private:
            with suppress(OSError):
                super().store_string(string)


def history() -> History:
    """Return the lines typed in earlier chats, from a file of this user's, else from memory."""
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


class TypeAhead:
    """A keeper of what is typed between prompts, for those that follow; the terminal hides it.

    Ctrl-C still interrupts, and the terminal marks pastes.

    Args:
        keyboard: what is typed on.
        screen: of its terminal.
    """

    def __init__(self, keyboard: Input, screen: Output) -> None:
        self._keyboard, self._screen = keyboard, screen
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
        self._screen.disable_bracketed_paste()
        self._screen.flush()
        if self._mode is not None:
            termios.tcsetattr(self._keyboard.fileno(), termios.TCSANOW, self._mode)

    def begin(self) -> None:
        """Make the terminal mark pastes, as a prompt does until it ends."""
        self._screen.enable_bracketed_paste()
        self._screen.flush()

    def take(self) -> list[KeyPress]:
        """Return the keys typed since the last prompt, and those behind the line that it took.

        Where the keyboard is no terminal there are none, as prompts read them by themselves.
        """
        if self._mode is None:
            return []
        keys = get_typeahead(self._keyboard)
        while more := self._keyboard.read_keys():
            keys += more
        keys += self._keyboard.flush_keys()
        enter = KeyPress(Keys.ControlM, "\r")  # the terminal sends a line feed in its place
        presses = [enter if press.key == Keys.ControlJ else press for press in keys]
        return [press for press in presses if press.key != Keys.CPRResponse]

    def hand_on(self, keys: list[KeyPress]) -> None:
        """Give keys to the next prompt as if they were typed then: it ends with the first Enter.

        Keys behind that are for the prompt after it.
        """
        store_typeahead(self._keyboard, keys)


def text_of(keys: list[KeyPress]) -> str:
    """Return the text that keys type, without new lines at its ends, as the user is to send it."""
    text = ""
    for press in keys:
        if press.key == Keys.BracketedPaste or not isinstance(press.key, Keys):
            text += press.data
        elif press.key == Keys.ControlM:
            text += "\n"
        elif press.key == Keys.ControlH:  # backspace
            text = text[:-1]
        elif press.key == Keys.ControlU:
            text = ""
    return text.strip("\r\n").replace("\r\n", "\n").replace("\r", "\n")

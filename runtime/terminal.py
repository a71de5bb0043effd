"""The chat's keyboard: prompt and keys. Everything is drawn on stderr."""

from __future__ import annotations

import sys

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output, create_output
from prompt_toolkit.styles import Style

from kvcap.runtime.chat import YOU, Chat
from kvcap.runtime.history import TypedHistory, history
from kvcap.runtime.pastes import Pastes
from kvcap.runtime.screen import INTERRUPTED, OK, dim, say
from kvcap.runtime.tab_completion import ChatCompleter
from kvcap.runtime.type_ahead import TypeAhead

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

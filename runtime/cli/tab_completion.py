"""What Tab completes in the chat: commands, settings, policies and files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from kvcap.runtime.cli.chat import SETTINGS, SWITCH, Chat

FILES = ("read", "save", "load")  # commands that take one


class ChatCompleter(Completer):
    """Completes the line that is being typed for `chat`; messages are the user's own."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterator[Completion]:
        """All that the text before the cursor may become."""
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
        elif command in FILES:
            yield from self._files(rest, complete_event, escaped=command == "read")

    def _files(self, typed: str, event: CompleteEvent, escaped: bool) -> Iterator[Completion]:
        """Files that begin with `typed`; `escaped`: in names, spaces have backslashes."""
        begun = typed.replace("\\ ", " ") if escaped else typed
        for found in self._paths.get_completions(Document(begun), event):
            rest = found.text.replace(" ", "\\ ") if escaped else found.text
            folder = found.display_text.endswith("/")
            end = "/" if folder else " " if escaped else ""  # a question may follow
            yield Completion(rest + end, found.start_position, display=found.display)


def beginning(typed: str, words: Iterable[str], end: str = "") -> Iterator[Completion]:
    """Those of `words` that begin with `typed`; `end` comes behind them."""
    for word in words:
        if word.startswith(typed):
            yield Completion(word + end, -len(typed), display=word)

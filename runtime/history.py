"""What was said to the chat before, for the arrow keys: in a file of the user's own."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

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

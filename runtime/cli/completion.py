"""Has a shell complete the words of `kvcap`, by what click prints for it."""

from __future__ import annotations

import os
from pathlib import Path

FILES = {"bash": ".bashrc", "zsh": ".zshrc", "fish": ".config/fish/completions/kvcap.fish"}
"""Holds the file of each shell's user, by the shell's name."""


def script() -> str:
    """Return the line by which the user's shell completes.

    Raises:
        ValueError: SHELL names no shell that can.
    """
    name = _shell()
    command = f"_KVCAP_COMPLETE={name}_source kvcap"
    return f"{command} | source" if name == "fish" else f'eval "$({command})"'


def install() -> str:
    """Add that line to the shell's file, if it lacks it; return what to do next."""
    line, file = script(), Path.home() / FILES[_shell()]
    there = file.read_text() if file.exists() else ""
    if line not in there.splitlines():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{there}\n{line}\n".lstrip())
    return f"completion is in {file}; it begins with the next shell"


def _shell() -> str:
    name = Path(os.environ.get("SHELL", "")).name
    if name not in FILES:
        raise ValueError(f"SHELL={name!r} completes nothing here; it takes {', '.join(FILES)}")
    return name

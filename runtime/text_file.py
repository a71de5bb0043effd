"""Text files that people name: read whole, or refused by what they are."""

from __future__ import annotations

import os
from pathlib import Path

from kvcap.runtime.screen import size

MOST = 4 * 1024**2  # bytes: a million tokens of English


def read_text(file: str | os.PathLike[str]) -> str:
    """The text of a regular file, without the newline that ends it.

    Raises:
        ValueError: no such file, not readable, no text, or too large.
    """
    path, name = Path(file).expanduser(), repr(str(file))
    try:
        if path.exists() and not path.is_file():  # a pipe or a device might never end
            kind = "a directory" if path.is_dir() else "no regular file"
            raise ValueError(f"cannot read {name}: it is {kind}; give a text file")
        if (length := path.stat().st_size) > MOST:
            raise ValueError(
                f"{name} has {size(length)}, and the most is {size(MOST)}; give the part of it "
                "that matters"
            )
        return as_text(path.read_bytes(), name)
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror}") from error


def as_text(data: bytes, name: str) -> str:
    """Bytes as text, without the newline that ends it; `name` says what they are of.

    Raises:
        ValueError: they are no UTF-8 text.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text (at byte {error.start:,})") from error
    if "\0" in text:
        raise ValueError(f"{name} is not text: it holds NUL bytes")
    return text.replace("\r\n", "\n").removesuffix("\n")

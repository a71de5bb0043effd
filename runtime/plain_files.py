"""Files that strangers made, opened only if they are plain ones of a bearable size.

A pipe or a device under a file's name would never end, or wait for ever. Knows no format.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
         stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}  # fmt: skip
SETTINGS = 32 << 20  # bytes of JSON that is turned into Python's objects
VOCABULARY = 256 << 20  # bytes of a tokenizer's files
TEMPLATE = 1 << 20
Name = str | os.PathLike[str]


def check_plain(path: Name, most: int | None = None) -> None:
    """Refuse what is no plain file, or a link to one, or is larger than `most` bytes.

    Raises:
        OSError: it is not there.
        ValueError: it is another kind of thing, or too large.
    """
    found, name = os.stat(path), Path(path).name
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise ValueError(f"{name} is {kind}, not a file")
    if most is not None and found.st_size > most:
        raise ValueError(f"{name} has {found.st_size:,} bytes, more than {most:,}")


def read_plain(path: Name, most: int) -> bytes:
    """All bytes of a file.

    Raises:
        OSError: it is not there or cannot be read.
        ValueError: it is no plain file, or larger than `most` bytes.
    """
    check_plain(path, most)
    return Path(path).read_bytes()


def read_json(path: Name, most: int = SETTINGS) -> Any:
    """A JSON file's content.

    Raises:
        OSError: it is not there or cannot be read.
        ValueError: it is no plain file, too large, or no JSON.
    """
    return parse_json(read_plain(path, most))


def parse_json(text: str | bytes) -> Any:
    """A JSON document; NaN and infinity are no JSON.

    Raises:
        ValueError: it is none, or nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def check_folder(folder: Path) -> None:
    """Refuse a model's directory with a pipe, a device or a text too large to be read.

    Raises:
        ValueError: naming the file.
    """
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if path.is_dir() or (path.is_symlink() and not path.exists()):
            continue
        check_plain(path, _most(path.name))


def _most(name: str) -> int | None:
    """The bytes that a file of this name may have."""
    if name.endswith(".jinja"):
        return TEMPLATE
    if name in ("tokenizer.json", "vocab.json") or name.endswith((".txt", ".model", ".tiktoken")):
        return VOCABULARY
    return SETTINGS if name.endswith(".json") else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")

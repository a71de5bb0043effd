"""Files that strangers made, opened only if they are plain ones of a bearable size.

A pipe or a device under a file's name would never end, or wait for ever. Knows no format.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from kvcap.runtime.units import size

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


SUFFIX = ".part"


@contextmanager
def replacing(target: Path) -> Iterator[int]:
    """A descriptor to write the new content of `target` to, which is in its place afterwards.

    After an error within, or Ctrl-C, the old content is as it was and nothing is left beside it.

    Raises:
        OSError: it cannot be written.
    """
    _sweep(target)
    descriptor, part = _new(target)
    try:
        try:
            yield descriptor
            os.fsync(descriptor)
            if os.name == "posix":  # while it is locked; elsewhere an open file keeps its name
                os.replace(part, target)
        finally:
            os.close(descriptor)
        if os.name != "posix":
            os.replace(part, target)
    except BaseException:  # Ctrl-C too
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    if os.name == "posix":  # the new name, too, must survive a power cut
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _new(target: Path) -> tuple[int, str]:
    """A part of `target`, locked: its descriptor and its path."""
    while True:
        descriptor, part = tempfile.mkstemp(SUFFIX, f".{target.name}.", target.parent)
        _lock(descriptor, wait=True)
        if os.path.exists(part):  # else another's sweep came between
            return descriptor, part
        os.close(descriptor)


def _sweep(target: Path) -> None:
    """Remove parts of `target` that nobody holds a lock on."""
    if os.name != "posix":
        return  # without such locks, nobody knows whose they are
    ours = re.compile(re.escape(f".{target.name}.") + "[a-z0-9_]{8}" + re.escape(SUFFIX))
    for name in filter(ours.fullmatch, os.listdir(target.parent)):
        with contextlib.suppress(OSError):  # locked, or gone already
            part = target.parent / name
            descriptor = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                _lock(descriptor, wait=False)
                os.unlink(part)
            finally:
                os.close(descriptor)


def _lock(descriptor: int, *, wait: bool) -> None:
    """Lock a file until it is closed, or its process has ended.

    Raises:
        BlockingIOError: another process has, and this is not to wait.
    """
    if os.name == "posix":
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


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

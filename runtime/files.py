"""Reads files that strangers made, and replaces our own files whole or not at all.

Only a plain file of a bearable size is opened: reading a pipe or a device might never end. Knows
no format but JSON.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from kvcap.runtime.units import format_bytes

KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# The most bytes of a file, by what is in it.
SETTINGS = 32 << 20  # JSON, which is turned into Python's objects
VOCABULARY = 256 << 20  # a tokenizer's files
TEMPLATE = 1 << 20  # a chat template
TEXT = 4 << 20  # a text for the model: a million tokens of English
KEPT_FROM = "made.json"  # in a folder of the cache: of what it was made
PART = ".part"  # how the name of a file ends that is still being written
Name = str | os.PathLike[str]


def cache_home() -> Path:
    """Return the folder of all that is kept: `kvcap` in XDG_CACHE_HOME, by default ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    return base / "kvcap"


def check_plain(path: Name, most: int | None = None) -> None:
    """Refuse a path that is no plain file (or a link to one), or has more than `most` bytes.

    Raises:
        OSError: it is not there.
        ValueError: it is another kind of thing, or too large.
    """
    status, name = os.stat(path), Path(path).name
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise ValueError(f"{name} is {kind}, not a file")
    if most is not None and status.st_size > most:
        raise ValueError(f"{name} has {status.st_size:,} bytes, more than {most:,}")


def check_folder(folder: Path) -> None:
    """Refuse a model's directory that holds a pipe, a device or a text too large to be read.

    Raises:
        ValueError: naming the file.
    """
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if path.is_dir() or (path.is_symlink() and not path.exists()):
            continue
        check_plain(path, _most(path.name))


def _most(name: str) -> int | None:
    """Return the bytes that a model's file of this name may have."""
    if name.endswith(".jinja"):
        return TEMPLATE
    if name in ("tokenizer.json", "vocab.json") or name.endswith((".txt", ".model", ".tiktoken")):
        return VOCABULARY
    return SETTINGS if name.endswith(".json") else None


def read_plain(path: Name, most: int) -> bytes:
    """Return all bytes of a plain file.

    Raises:
        OSError: it is not there or cannot be read.
        ValueError: it is no plain file, or larger than `most` bytes.
    """
    check_plain(path, most)
    return Path(path).read_bytes()


def read_json(path: Name, most: int = SETTINGS) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: it is not there or cannot be read.
        ValueError: it is no plain file, too large, or no JSON.
    """
    return parse_json(read_plain(path, most))


def parse_json(text: str | bytes) -> Any:
    """Return the content of a JSON document; refuse NaN and infinity, which Python would take.

    Raises:
        ValueError: it is none, or nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def read_text(file: Name) -> str:
    """Return the text of a plain UTF-8 file, without the newline that ends it.

    Raises:
        ValueError: no such file, not readable, no text, or too large.
    """
    path, name = Path(file).expanduser(), repr(str(file))
    try:
        if path.exists() and not path.is_file():
            kind = "a directory" if path.is_dir() else "no regular file"
            raise ValueError(f"cannot read {name}: it is {kind}; give a text file")
        if (length := path.stat().st_size) > TEXT:
            raise ValueError(
                f"{name} has {format_bytes(length)}, and the most is {format_bytes(TEXT)}; give "
                "the part of it that matters"
            )
        return as_text(path.read_bytes(), name)
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror}") from error


def as_text(data: bytes, name: str) -> str:
    """Return UTF-8 bytes as text, without the newline that ends it; errors call them `name`.

    Raises:
        ValueError: they are no UTF-8 text.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        other = (
            "UTF-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "LATIN1"
        )
        raise ValueError(
            f"{name} is not UTF-8 text (at byte {error.start:,}); convert it, as iconv -f {other} "
            "-t UTF-8 does"
        ) from error
    if "\0" in text:
        raise ValueError(f"{name} is not text: it holds NUL bytes")
    return text.replace("\r\n", "\n").removesuffix("\n")


@contextmanager
def replacing(target: Path) -> Iterator[int]:
    """Open a new file to write to, which takes the place of `target` once all is written.

    Yields its descriptor. After an error within, or Ctrl-C, the old file is as it was and nothing
    is left beside it.

    Raises:
        OSError: it cannot be written.
    """
    remove_abandoned(target.parent, re.escape(target.name))
    descriptor, part = _new_part(target)
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


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a file, which is made; no other process holds it at the same time.

    `waiting` is called where another one does, before it is waited for. A process that ends gives
    its locks back. Where the system has none of them (Windows), nothing is locked.
    """
    with path.open("wb") as file:
        try:
            _lock(file.fileno(), wait=False)
        except BlockingIOError:
            waiting()
            _lock(file.fileno(), wait=True)
        yield


def _new_part(target: Path) -> tuple[int, str]:
    """Return the descriptor and path of a new, locked file beside `target`."""
    from tempfile import mkstemp  # which starts do without

    while True:
        descriptor, part = mkstemp(PART, f".{target.name}.", target.parent)
        _lock(descriptor, wait=True)
        if os.path.exists(part):  # else another process took it for abandoned before it was locked
            return descriptor, part
        os.close(descriptor)


def remove_abandoned(folder: Path, names: str) -> None:
    """Remove unfinished files whose writers have ended, so that nobody locks them.

    Args:
        folder: in which they are.
        names: a regular expression of the names that they would have got.
    """
    if os.name != "posix":
        return  # without such locks, nobody knows whose they are
    ours = re.compile(rf"\.(?:{names})\.[a-z0-9_]{{8}}{re.escape(PART)}")
    for name in filter(ours.fullmatch, os.listdir(folder)):
        with contextlib.suppress(OSError):  # locked, or gone already
            part = folder / name
            descriptor = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                _lock(descriptor, wait=False)
                os.unlink(part)
            finally:
                os.close(descriptor)


def _lock(descriptor: int, *, wait: bool) -> None:
    """Lock a file until it is closed, or its process has ended.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is false.
    """
    if os.name == "posix":
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))

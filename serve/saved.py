"""Keeps idle conversations on disk: session files in one folder, under a cap of bytes.

One server has the folder to itself, or its replicas share it: then each looks at the names again
when they have changed, and one writes at a time.

A file's name says whose conversation it holds, its id and its messages, each as a digest, so that
the names are the index: it cannot disagree with the files, whatever ends the server. A file appears
whole or not at all, and its content is checked when it is read. One that cannot be read is set
aside under a name of its own, for people to look at. Nothing that a request says becomes part of a
path. Knows nothing of HTTP.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kvcap.runtime.errors import (
    KvcapError,
    PinsTooLarge,
    SessionFileCorrupt,
    SessionFileError,
    SessionNotSaved,
)
from kvcap.runtime.files import PART, locked, remove_abandoned

NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{32})\.kvcap")
FACTS = 64 << 10  # bytes of a file besides the cache and the messages
LOCK, WRITING = ".lock", ".writing"
ASIDE = ".unreadable"  # is appended to an unreadable file's name, then -2, -3, ... if that exists
FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))  # errors of a disk without room
TICK_NS = 100_000_000  # two changes of a folder closer than this can have the same time
log = logging.getLogger("kvcap.serve")


def tag(id_: str) -> str:
    """Return the part of a file's name for an id: a server's own id unchanged, else a digest."""
    return id_ if re.fullmatch("[0-9a-f]{16}", id_) else digest(id_)


def digest(text: str) -> str:
    """Return a digest that stands for an owner in a file's name."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


@dataclass
class ConversationFile:
    """A file that holds a conversation."""

    name: str
    nbytes: int
    used: float  # seconds since 1970; 0: its conversation went on in memory

    @property
    def tag(self) -> str:
        """Return the part of the name that stands for the conversation's id."""
        return self.name[17:33]

    @property
    def key(self) -> str:
        """Return the key of its messages; see `keys_of` in `conversations.py`."""
        return self.name[34:66]


class SavedConversations:
    """Keeps conversations in a folder; the least recently used go when their bytes reach the cap.

    Any thread may call it; two never `save` or `restore` at the same time.

    Args:
        folder: is made, if it is not there; no other server uses it.
        cap: bytes of all files together, those too that are being written or are set aside.
        shared: other processes use it as well, all of them `shared` and with the same cap.

    Raises:
        SessionNotSaved: it cannot be used, or another server uses it.
    """

    def __init__(self, folder: str | os.PathLike[str], cap: int, *, shared: bool = False) -> None:
        self.folder, self.cap, self._shared = Path(folder), cap, shared
        self.saved = self.restored = self.dropped = 0
        self._scanned = 0  # the folder's time when its names were read; 0: read them again
        self._left_out: set[str] = set()  # names of files that could not be restored
        self._aside = 0  # bytes of files that are set aside
        self._lock = threading.Lock()
        self._files: dict[
            tuple[str, str], dict[str, ConversationFile]
        ] = {}  # by owner and key, then by id
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._held = self._hold()
            if shared:
                remove_abandoned(self.folder, NAME.pattern)
            else:  # left by a server that ended while it wrote
                for entry in os.scandir(self.folder):
                    if entry.name.endswith(PART):
                        os.unlink(entry.path)
            self._scan()
        except SessionNotSaved:
            raise
        except OSError as error:
            raise SessionNotSaved(
                f"conversations cannot be kept in {str(folder)!r} ({error.strerror}); give another "
                "folder"
            ) from error
        with self._writing():
            self._make_room(0)

    def _hold(self) -> IO[bytes]:
        """Lock the folder as long as this process lives."""
        held = (self.folder / LOCK).open("w+b")
        if os.name == "posix":
            import fcntl

            kind = fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX
            try:
                fcntl.flock(held.fileno(), kind | fcntl.LOCK_NB)
            except BlockingIOError as error:
                held.close()
                raise SessionNotSaved(
                    f"another server keeps its conversations in {str(self.folder)!r}; give each a "
                    "folder of its own"
                ) from error
        return held

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        """Have no other process write, or make room, meanwhile."""
        if not self._shared:
            return contextlib.nullcontext()
        return locked(self.folder / WRITING, lambda: None)

    def _scan(self) -> None:
        """Read the names of all files, and the sizes of those that are new."""
        by_name = {file.name: file for file in self._all()}
        self._files.clear()
        self._aside = 0
        for entry in os.scandir(self.folder):
            if f".kvcap{ASIDE}" in entry.name:
                with contextlib.suppress(FileNotFoundError):
                    self._aside += entry.stat().st_size
            if not NAME.fullmatch(entry.name) or entry.name in self._left_out:
                continue
            file = by_name.get(entry.name)
            if file is None:
                with contextlib.suppress(FileNotFoundError):  # another has removed it
                    if entry.is_file(follow_symlinks=False):
                        stat = entry.stat()
                        file = ConversationFile(entry.name, stat.st_size, stat.st_mtime)
            if file is not None:
                self._add(file)

    def _look(self) -> None:
        """Update the list of files by those that other processes have written and removed."""
        if not self._shared:
            return
        with self._lock, contextlib.suppress(OSError):
            changed, now = os.stat(self.folder).st_mtime_ns, time.time_ns()
            if changed == self._scanned:
                return
            self._scan()
            self._scanned = changed if now - changed > TICK_NS else 0

    def close(self) -> None:
        """Let another server use the folder."""
        self._held.close()

    @property
    def nbytes(self) -> int:
        """Return the bytes of all files."""
        self._look()
        with self._lock:
            return sum(file.nbytes for file in self._all())

    def __len__(self) -> int:
        self._look()
        with self._lock:
            return len(self._all())

    def find(
        self, owner: str, id_: str | None, keys: Sequence[str]
    ) -> tuple[ConversationFile, int] | None:
        """Find the file of the longest conversation; return it with the number of its messages.

        Args:
            owner: whose it must be.
            id_: which it must be; None: any of the owner's.
            keys: of the first message, the first two, and so on.
        """
        self._look()
        mine, wanted_tag = digest(owner), None if id_ is None else tag(id_)
        with self._lock:
            for count in range(len(keys), 0, -1):
                by_id = self._files.get((mine, keys[count - 1]), {})
                candidates = [file for name, file in by_id.items() if wanted_tag in (None, name)]
                if candidates:
                    return max(candidates, key=lambda file: file.used), count
        return None

    def save(
        self,
        session: Any,
        owner: str,
        id_: str,
        key: str,
        before: str | None,
        needed_file: ConversationFile | None = None,
    ) -> str | None:
        """Write a conversation; returns its file's name, None where it could not be written.

        Args:
            session: holds it.
            owner: whose it is.
            id_: its id.
            key: of its messages.
            before: the name of its file with fewer messages, which is the first to go from now on.
            needed_file: a file that is restored next: it makes room only where no other does.
        """
        name = f"{digest(owner)}-{tag(id_)}-{key}.kvcap"
        text_bytes = sum(4 * len(message["content"] or "") for message in session.messages)
        needed = session.cache.nbytes + 16 * session.cache.seen + text_bytes + FACTS
        if before is not None:
            self._age(before)
        try:
            if needed > self.cap - self._aside:
                also, do = "", "raise it"
                if self._aside:
                    also = f", of which files that were set aside take {self._aside:,}"
                    do = f"raise it, or remove {str(self.folder)!r}/*{ASIDE}*"
                raise SessionNotSaved(
                    f"a conversation takes up to {needed:,} bytes, and the cap on disk is "
                    f"{self.cap:,}{also}; {do}"
                )
            spared = {name, "" if needed_file is None else needed_file.name}
            with self._writing():
                self._make_room(needed, name, "" if needed_file is None else needed_file.name)
                self._write(session, name, needed, spared)
                nbytes = os.stat(self.folder / name).st_size  # before another makes room
        except (KvcapError, OSError) as error:
            self.dropped += 1
            log.warning("a conversation is not kept: %s", error)
            return None
        except Exception:  # a fault of kvcap, which must not fail the next request
            self.dropped += 1
            log.exception("a conversation is not kept")
            return None
        with self._lock:
            self._left_out.discard(name)
            self._add(ConversationFile(name, nbytes, time.time()))
        self.saved += 1
        return name

    def _write(self, session: Any, name: str, needed: int, spared: Collection[str]) -> None:
        """Write a conversation; on a full disk remove the least recently used files for it.

        As many go as it takes, and no more bytes than it needs: others may fill the disk.

        Raises:
            SessionNotSaved: it cannot be written.
        """
        session.files.clear()  # of files here the last one to be saved is right
        try:
            session.save(self.folder / name)
        except SessionNotSaved as error:
            with self._lock:
                others = [file for file in self._all() if file.name not in spared]
            if not _disk_is_full(error) or needed <= 0 or not others:
                raise
            oldest = min(others, key=lambda file: file.used)
            log.warning("the disk is full: the conversation used longest ago is forgotten")
            self._remove(oldest)
        else:
            return
        self._write(session, name, needed - oldest.nbytes, spared)

    def restore(self, session: Any, saved: ConversationFile) -> bool:
        """Make a session the saved one; False where the file cannot be taken.

        One that cannot be read is set aside and never removed: what is wrong may be this program.
        """
        path = self.folder / saved.name
        if not path.exists():  # removed to make room
            with self._lock:
                self._drop(saved)
            return False
        try:
            session.restore(path)
        except (SessionFileError, PinsTooLarge) as error:
            with self._lock:
                self._drop(saved)
            self.dropped += 1
            if isinstance(error, SessionFileCorrupt):
                aside = self._put_aside(saved)
                log.warning("a saved conversation is set aside as %s: %s", aside, error)
            else:  # another model's, whose server may still want it
                with self._lock:
                    self._left_out.add(saved.name)
                log.warning("a saved conversation is left out: %s", error)
            return False
        saved.used = time.time()
        with contextlib.suppress(OSError):
            os.utime(path)
        self.restored += 1
        return True

    def remove(self, owner: str, id_: str) -> bool:
        """Remove a conversation's files, also those set aside; return whether there were any."""
        self._look()
        mine, wanted_tag = digest(owner), tag(id_)
        with self._lock:
            files = [
                x for x in self._all() if x.name.startswith(f"{mine}-") and x.tag == wanted_tag
            ]
            aside = list(self.folder.glob(f"{mine}-{wanted_tag}-*.kvcap{ASIDE}*"))
        for file in files:
            self._remove(file)
        for path in aside:
            with self._lock, contextlib.suppress(OSError):
                size = path.stat().st_size
                path.unlink()
                self._aside -= size
        return bool(files or aside)

    def _put_aside(self, saved: ConversationFile) -> Path:
        """Rename a file that cannot be read, beside the others; returns its new path."""
        path = target = self.folder / f"{saved.name}{ASIDE}"
        number = 1
        while target.exists():
            number += 1
            target = path.with_name(f"{path.name}-{number}")
        with self._lock:
            try:
                os.rename(self.folder / saved.name, target)
                self._aside += saved.nbytes
            except OSError:  # another process renamed it, or none can: do not look at it again
                self._left_out.add(saved.name)
        return target

    def _age(self, name: str) -> None:
        """Let a file be the first to go."""
        with self._lock:
            for file in self._all():
                if file.name == name:
                    file.used = 0.0
        with contextlib.suppress(OSError):
            os.utime(self.folder / name, (0, 0))

    def _make_room(self, nbytes: int, keep: str = "", last: str = "") -> None:
        """Remove the least recently used until so many bytes more stay within the cap.

        The file `keep` stays, and the file `last` goes only after all others.
        """
        self._look()
        with self._lock:
            files = self._all()
        for file in files if self._shared else ():
            with contextlib.suppress(OSError):  # another process removed it
                stat = os.stat(self.folder / file.name)
                file.nbytes, file.used = stat.st_size, stat.st_mtime
        files.sort(key=lambda file: (file.name == last, file.used))
        held = self._aside + sum(file.nbytes for file in files)
        for file in files:
            if held + nbytes <= self.cap:
                return
            if file.name != keep:
                self._remove(file)
                held -= file.nbytes

    def _remove(self, file: ConversationFile) -> None:
        with self._lock:
            self._drop(file)
        with contextlib.suppress(OSError):
            os.unlink(self.folder / file.name)

    def _all(self) -> list[ConversationFile]:
        return [file for by_id in self._files.values() for file in by_id.values()]

    def _add(self, file: ConversationFile) -> None:
        self._files.setdefault((file.name[:16], file.key), {})[file.tag] = file

    def _drop(self, file: ConversationFile) -> None:
        group = file.name[:16], file.key
        by_id = self._files.get(group, {})
        by_id.pop(file.tag, None)
        if not by_id:
            self._files.pop(group, None)


def _disk_is_full(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, is that the disk is full."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in FULL

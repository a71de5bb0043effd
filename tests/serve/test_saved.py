"""A folder of saved conversations that several processes share."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from kvcap.runtime.errors import SessionFileCorrupt, SessionNotSaved
from kvcap.runtime.files import replacing
from kvcap.serve.saved import FACTS, SavedConversations

SIZE = 1000


class Session:
    """Stands in for one: a file of zeros."""

    messages = ()
    files: ClassVar[dict[str, str]] = {}
    cache = SimpleNamespace(nbytes=SIZE, seen=0)

    def save(self, path: Path) -> None:
        time.sleep(0.002)  # others would write meanwhile
        with replacing(path) as file, open(file, "wb", closefd=False) as out:
            out.write(bytes(SIZE))

    def restore(self, path: Path) -> None:
        if not path.exists():
            raise SessionFileCorrupt("there is no such file")


def key(number: int) -> str:
    return f"{number:032x}"


def saved(disk: SavedConversations, number: int, before: str | None = None) -> str:
    name = disk.save(Session(), "ada", f"number {number}", key(number), before)
    assert name is not None
    return name


@contextmanager
def sharing(folder: Path, count: int, cap: int = 1 << 20) -> Iterator[list[SavedConversations]]:
    """Provide the same folder, as several processes have it."""
    disks = [SavedConversations(folder, cap, shared=True) for _ in range(count)]
    yield disks
    for disk in disks:
        disk.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[SavedConversations]]:
    with sharing(tmp_path, 2) as disks:
        yield disks


def test_what_one_process_saves_another_goes_on_with(two, tmp_path):
    one, other = two
    later = time.time() + 60
    for number in range(5):
        assert other.find("ada", None, [key(number)]) is None
        name = saved(one, number)
        os.utime(tmp_path, (later, later))  # as if all were within a tick of the clock
        match = other.find("ada", None, [key(number)])
        assert (match[0].name, match[1]) == (name, 1)
        assert other.find("bob", None, [key(number)]) is None
        assert other.restore(Session(), match[0])
    assert (len(other), other.nbytes) == (5, 5 * SIZE)


def test_a_file_that_another_process_removes_is_read_anew(two, tmp_path):
    one, other = two
    name = saved(one, 0)
    match = other.find("ada", None, [key(0)])
    (tmp_path / name).unlink()
    assert not other.restore(Session(), match[0])
    assert other.find("ada", None, [key(0)]) is None
    assert len(one) == 0


def test_processes_together_keep_to_the_cap(tmp_path):
    cap = FACTS + 5 * SIZE
    most = []

    def many(index: int, disk: SavedConversations) -> None:
        for number in range(25):
            saved(disk, 100 * index + number)
            most.append(SIZE * len(list(tmp_path.glob("*.kvcap"))))

    with sharing(tmp_path, 4, cap) as disks, ThreadPoolExecutor(4) as threads:
        list(threads.map(many, range(4), disks))
        assert len({len(disk) for disk in disks}) == 1
    assert SIZE < max(most) <= 5 * SIZE


def test_the_least_recently_used_of_all_processes_go(two, tmp_path):
    one, other = two
    names = [saved(disk, number) for number, disk in enumerate((one, other, one))]
    assert other.find("ada", None, [key(2)]) is not None
    saved(other, 3, before=names[2])  # which went on there
    one.cap = FACTS + 4 * SIZE
    saved(one, 4)
    assert not (tmp_path / names[2]).exists()
    assert (tmp_path / names[0]).exists()


def test_a_file_that_is_wanted_next_makes_room_last(tmp_path):
    disk = SavedConversations(tmp_path, FACTS + 2 * SIZE)
    for number in (1, 2):
        saved(disk, number)
    wanted, _ = disk.find("ada", None, [key(1)]) or (None, 0)
    save = partial(disk.save, Session(), "ada", "number 3", key(3), wanted.name, needed_file=wanted)
    assert save()
    assert disk.find("ada", None, [key(2)]) is None
    assert disk.restore(Session(), wanted)
    disk.cap = FACTS + SIZE
    assert save()  # nothing else is left to go
    assert not disk.restore(Session(), wanted)
    assert disk.dropped == 0
    disk.close()


def test_unfinished_files_of_ended_processes_alone_are_removed(two, tmp_path):
    name = saved(two[0], 0)
    ended = tmp_path / f".{name}.abcdefgh.part"
    ended.write_bytes(b"1")
    with replacing(tmp_path / name) as file:
        SavedConversations(tmp_path, 1 << 20, shared=True).close()
        assert not ended.exists()
        assert len(list(tmp_path.glob(".*.part"))) == 1
        assert file


def test_a_server_of_its_own_and_replicas_do_not_share_a_folder(tmp_path):
    own = SavedConversations(tmp_path, 1 << 20)
    with pytest.raises(SessionNotSaved, match="another server"):
        SavedConversations(tmp_path, 1 << 20, shared=True)
    own.close()
    replica = SavedConversations(tmp_path, 1 << 20, shared=True)
    with pytest.raises(SessionNotSaved, match="another server"):
        SavedConversations(tmp_path, 1 << 20)
    replica.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(SessionNotSaved, match="give another folder"):
        SavedConversations(tmp_path / "file", 1 << 20)


class Unreadable(Session):
    """Stands in for one that takes no file."""

    def restore(self, path: Path) -> None:
        raise SessionFileCorrupt(f"{str(path)!r} cannot be loaded")


def set_aside(disk: SavedConversations, number: int) -> str:
    """Save a file that is not taken afterwards; returns its name."""
    name = saved(disk, number)
    match = disk.find("ada", None, [key(number)])
    assert not disk.restore(Unreadable(), match[0])
    assert disk.find("ada", None, [key(number)]) is None
    return name


def test_files_that_cannot_be_read_are_kept_and_count(tmp_path, caplog):
    disk = SavedConversations(tmp_path, FACTS + 4 * SIZE)
    name = set_aside(disk, 0)
    assert set_aside(disk, 0) == name  # saved anew, and broken again
    aside = [tmp_path / f"{name}.unreadable", tmp_path / f"{name}.unreadable-2"]
    assert all(str(path) in caplog.text for path in aside)
    for number in range(1, 6):
        saved(disk, number)
    assert len(disk) == 2  # two that are set aside take the rest
    disk.close()
    disk = SavedConversations(tmp_path, FACTS + 2 * SIZE)
    assert disk.save(Session(), "ada", "number 6", key(6), None) is None
    assert ".unreadable*" in caplog.text
    assert [path.stat().st_size for path in aside] == [SIZE, SIZE]
    assert not disk.remove("bob", "number 0")
    assert disk.remove("ada", "number 0")
    assert not any(path.exists() for path in aside)
    assert saved(disk, 6)
    disk.close()


def test_a_file_that_another_process_set_aside_is_left(two, tmp_path):
    one, other = two
    name = saved(one, 0)
    match, again = (disk.find("ada", None, [key(0)]) for disk in (one, other))
    assert not one.restore(Unreadable(), match[0])
    assert not other.restore(Unreadable(), again[0])
    assert [path.name for path in tmp_path.glob("*.unreadable*")] == [f"{name}.unreadable"]


class FullDisk:
    """A session whose file fits a disk of so many bytes beside what lies there, or does not."""

    messages = ()
    files: ClassVar[dict[str, str]] = {}
    cache = SimpleNamespace(nbytes=SIZE, seen=0)

    def __init__(self, size: int) -> None:
        self.size = size

    def save(self, path: Path) -> None:
        if sum(x.stat().st_size for x in path.parent.glob("*.kvcap")) + SIZE > self.size:
            raise SessionNotSaved("no room") from OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(bytes(SIZE))


def test_on_a_full_disk_the_newest_conversations_are_kept(tmp_path):
    disk = SavedConversations(tmp_path, 1 << 20)
    for number in range(5):
        session = FullDisk(3 * SIZE)
        assert disk.save(session, "ada", f"number {number}", key(number), None) is not None
        os.utime(tmp_path / disk.find("ada", None, [key(number)])[0].name, (number, number))
    kept = [number for number in range(5) if disk.find("ada", None, [key(number)])]
    assert kept == [2, 3, 4]
    assert len(disk) == len([*tmp_path.glob("*.kvcap")]) == 3
    disk.close()


def test_a_disk_that_others_fill_costs_no_more_than_one_conversation_takes(tmp_path):
    disk = SavedConversations(tmp_path, 1 << 30)
    FullDisk.cache = SimpleNamespace(nbytes=SIZE, seen=0)
    count = FACTS // SIZE + 10
    for number in range(count):
        assert disk.save(FullDisk(1 << 30), "ada", f"number {number}", key(number), None)
    assert disk.save(FullDisk(0), "ada", "more", key(count), None) is None
    assert 0 < len(disk) < count
    assert disk.find("ada", None, [key(count - 1)]) is not None
    disk.close()

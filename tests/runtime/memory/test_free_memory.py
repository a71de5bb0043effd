"""Free memory as a process in a container should see it, on trees of proc and sys."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from kvcap import Runtime
from kvcap.runtime.memory.free_memory import FreeMemory, free_memory, process_bytes

MIB, GIB = 1 << 20, 1 << 30


def tree(root: Path, files: dict[str, str], available: int = 64 * GIB) -> Path:
    for name, text in {
        "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {available // 1024} kB\n",
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_machine_alone(tmp_path):
    free = free_memory(tree(tmp_path, {}, 5 * GIB))
    assert (free.nbytes, free.source) == (5 * GIB, "MemAvailable")


def full_of_page_cache(root: Path) -> Path:
    """32 GiB allowed, 25 used, 23 of them cached files: 30 are free, not 7."""
    group = "sys/fs/cgroup/pod/box"
    return tree(
        root,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            f"{group}/memory.max": f"{32 * GIB}\n",
            f"{group}/memory.current": f"{25 * GIB}\n",
            f"{group}/memory.stat": f"anon {2 * GIB}\nfile {23 * GIB}\ninactive_file {20 * GIB}\n"
            f"active_file {3 * GIB}\nslab_reclaimable 0\n",
            "sys/fs/cgroup/pod/memory.max": "max\n",
        },
    )


def test_a_cgroup_full_of_page_cache(tmp_path):
    free = free_memory(full_of_page_cache(tmp_path))
    assert free.nbytes == 30 * GIB
    assert "box" in free.source


def test_the_plan_says_what_is_free(tmp_path, monkeypatch, kvcap):
    free = free_memory(full_of_page_cache(tmp_path))
    monkeypatch.setattr("kvcap.runtime.cli.commands.free_memory", lambda: free)
    printed = kvcap.document("plan", "pocket")
    assert (printed["free_bytes"], printed["free_by"]) == (30 * GIB, "the limit of cgroup box")
    assert kvcap.document("plan", "pocket", "--kv-budget", "1", code=3)["free_bytes"] == 30 * GIB
    with pytest.warns(UserWarning, match="32,212,254,720 are free .the limit of cgroup box."):
        text = kvcap("plan", "pocket", "--memory-cap", "40GiB")[1]
    assert "30.0 GiB  32,212,254,720  the limit of cgroup box" in text


def test_a_run_that_there_is_no_memory_for_is_warned_of(monkeypatch):
    free = FreeMemory(MIB, "here")
    monkeypatch.setattr("kvcap.runtime.backends.pytorch.runtime.free_memory", lambda: free)
    with pytest.warns(UserWarning, match=r"1,048,576 are free .here."):
        Runtime.from_pretrained("pocket", device="cpu")


BOX, DOCKER = "sys/fs/cgroup/box/memory", "sys/fs/cgroup/memory/docker/abc/memory"
TREES: dict[str, tuple[dict[str, str], int]] = {  # files, and the bytes that are free
    "files in /dev/shm count as 'file' but cannot be given back": (
        {
            "proc/self/cgroup": "0::/box\n",
            f"{BOX}.max": f"{8 * GIB}\n",
            f"{BOX}.current": f"{6 * GIB}\n",
            f"{BOX}.stat": f"file {5 * GIB}\nshmem {5 * GIB}\ninactive_file 0\n",
        },
        2 * GIB,
    ),
    "a tighter cgroup above": (
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{1 * GIB}\n",
        },
        3 * GIB,
    ),
    "inside a container the mount is the cgroup": (
        {
            "proc/self/cgroup": "0::/../../kubepods/other\n",
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{GIB}\n",
        },
        GIB,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/docker/abc\n",
            f"{DOCKER}.limit_in_bytes": f"{16 * GIB}\n",
            f"{DOCKER}.usage_in_bytes": f"{12 * GIB}\n",
            f"{DOCKER}.stat": f"cache {9 * GIB}\ntotal_inactive_file {8 * GIB}\n"
            f"total_active_file {GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        13 * GIB,
    ),
    "a cgroup beyond its limit has nothing left": (
        {"proc/self/cgroup": "0::/box\n", f"{BOX}.max": "100\n", f"{BOX}.current": "200\n"},
        0,
    ),
}


@pytest.mark.parametrize(("files", "free"), TREES.values(), ids=TREES)
def test_what_a_cgroup_leaves(files, free, tmp_path):
    assert free_memory(tree(tmp_path, files)).nbytes == free


@pytest.mark.parametrize("text", ["", "garbage", "0::", "4:memory"])
def test_odd_files_fall_back_to_the_machine(tmp_path, text):
    root = tree(tmp_path, {"proc/self/cgroup": text, "sys/fs/cgroup/memory.max": "lots"}, GIB)
    assert free_memory(root).nbytes == GIB


def test_here():
    assert 0 < free_memory().nbytes <= psutil.virtual_memory().total
    assert 1 << 20 < process_bytes() < psutil.virtual_memory().total

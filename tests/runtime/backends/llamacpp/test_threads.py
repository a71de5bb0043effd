"""Tests that threads leave the cores to other programs that compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from llama_reference import needs_library, runtime_of

from kvcap.runtime import cores
from kvcap.runtime.cores import free_core_count, usable_cores


@pytest.mark.parametrize(
    ("load", "free"),
    [
        ("0.50 0.40 0.30 1/170 999", 8),
        ("9.00 9.00 9.00 1/170 999", 8),  # what computed before does no longer
        ("0.50 0.40 0.30 4/170 999", 8),  # on cores that this process may not use
        ("0.50 0.40 0.30 14/170 999", 3),
        ("0.50 0.40 0.30 99/170 999", 1),
        ("nothing", 8),
        (None, 8),
    ],
)
def test_threads_are_as_many_as_free_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: str | None, free: int
) -> None:
    monkeypatch.setattr(cores, "LOAD", tmp_path / "loadavg")
    monkeypatch.setattr(cores, "usable_cores", lambda: [*range(8)])
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    if load is not None:
        cores.LOAD.write_text(load)
    assert free_core_count() == free


@needs_library
@pytest.mark.parametrize("threads", [None, 3])
def test_a_block_counts_anew_unless_threads_are_given(
    gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, threads: int | None
) -> None:
    requested = []
    session = runtime_of(gguf(), budget_tokens=64, block_size=16, threads=threads).session(seed=0)
    session.set_generation(max_new_tokens=4)
    counting = "kvcap.runtime.backends.llamacpp.context.free_core_count"
    monkeypatch.setattr(counting, lambda: requested.append(1) or 1)
    "".join(session.send("a " * 40))
    assert bool(requested) == (threads is None)
    assert len(usable_cores()) >= 1


@needs_library
def test_threads_are_no_more_than_cores(
    gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcap.runtime.backends.llamacpp.context.usable_cores", lambda: [0])
    runtime = runtime_of(gguf(), budget_tokens=64, threads=100)
    assert runtime.contexts[0].threads == 1

"""Gives tests small GGUF files of every architecture, written once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that returns the file of an architecture; see `tiny_gguf.written`."""
    folder = tmp_path_factory.mktemp("gguf")

    @functools.cache
    def file(architecture: str = "llama", **how: Any) -> Path:
        own = folder / f"{len(list(folder.iterdir()))}"
        own.mkdir()
        return tiny_gguf.written(own, architecture, **how)

    return file

"""Provides a runtime of each backend to tests of sessions."""

from __future__ import annotations

from typing import Any

import make
import pytest
from toy_engine import BACKENDS


@pytest.fixture(scope="module", params=BACKENDS)
def runtime(request: pytest.FixtureRequest, chat_model: str) -> Any:
    """Return a runtime of as many slots as the test file's `SLOTS`."""
    return make.engine(request.param, chat_model, getattr(request.module, "SLOTS", 64))

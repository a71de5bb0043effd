"""Provides a runtime of each backend to tests of sessions."""

from __future__ import annotations

from typing import Any

import make
import pytest
from chat_templates import with_template
from toy_engine import BACKENDS


@pytest.fixture(params=BACKENDS)
def runtime(request: pytest.FixtureRequest, chat_model: str) -> Any:
    """Return a runtime of the test file's `SLOTS`, whose tokenizer has its `TEMPLATE`, if any."""
    made = make.engine(request.param, chat_model, getattr(request.module, "SLOTS", 64))
    if template := getattr(request.module, "TEMPLATE", None):
        made.tokenizer = with_template(made.tokenizer, template)
    return made

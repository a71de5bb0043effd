"""Tests conversations over llama.cpp's engine, from messages to files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from llama_reference import needs_library, runtime_of

pytestmark = needs_library

Files = Callable[..., Path]


def test_answers_are_held_to_a_schema_and_an_expression(gguf: Files) -> None:
    pytest.importorskip("llguidance")
    session = runtime_of(gguf(), budget_tokens=128).session(seed=1)
    schema = {
        "type": "object",
        "properties": {"door": {"enum": ["blue", "red"]}, "open": {"type": "boolean"}},
        "required": ["door", "open"],
        "additionalProperties": False,
    }
    session.set_generation(json_schema=schema, max_new_tokens=200)
    said = json.loads("".join(session.send("Which door?")))
    assert said["door"] in ("blue", "red")
    assert said["open"] in (True, False)
    assert session.turn.finish_reason == "stop"
    session.set_generation(json_schema=None, regex="(the |é☃){3}[0-9]{4}")
    assert re.fullmatch("(the |é☃){3}[0-9]{4}", "".join(session.send("A number?")))

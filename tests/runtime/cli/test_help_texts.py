"""Each option's and argument's help is a sentence by itself, and long helps have headings.

Walks the whole app, so that a new command or option is held to the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import click
import pytest

from kvcap.cli import application
from kvcap.runtime.cli.declare import HEADINGS, MANY

FRAGMENT = re.compile(  # beginnings of what is no sentence, or of one whose verb comes late
    r"(Of|Or|And|That|Those|The same|What|Which|Whether|For|By|Where|With commas|Names|Such as)\b"
)


def commands(command: Any, name: str = "kvcap") -> Iterator[tuple[str, Any]]:
    """Yield every command below this one, and itself, by the words that call it."""
    yield name, command
    for word, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {word}")


COMMANDS = dict(commands(application()))


def parameters(command: Any) -> list[Any]:
    """Return the options and arguments of a command, --help among them."""
    listed: list[Any] = command.get_params(click.Context(command))
    return listed


def fault(text: str | None) -> str | None:
    """Return why this is no sentence, if it is none."""
    if not text:
        return "it has no help"
    if not text[0].isupper():
        return "it does not begin with a capital letter"
    if fragment := FRAGMENT.match(text):
        return f"it begins with {fragment[0]!r}"
    return None if text.endswith(".") else "it does not end with a full stop"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_texts_are_sentences(name: str) -> None:
    command = COMMANDS[name]
    faults = {
        parameter.name: f"{why}: {parameter.help!r}"
        for parameter in parameters(command)
        if (why := fault(parameter.help)) is not None
    }
    assert faults == {}


@pytest.mark.parametrize("name", COMMANDS)
def test_many_options_stand_under_headings(name: str) -> None:
    command = COMMANDS[name]
    options = [one for one in parameters(command) if one.param_type_name == "option"]
    headings = {getattr(one, "panel", None) for one in options} - {None}
    if len(options) > MANY:
        assert len(headings) > 1
    assert headings <= {*HEADINGS}

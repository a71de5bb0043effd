"""Renders chat templates as a program: requests come in and answers go out as lines of JSON.

`chat_template.py` runs it by its path in a process of its own: a stranger's template may compute
for ever or fill the memory, which no sandbox within Python stops, but the system does. Templates
get the names that transformers gives them. Imports nothing of kvcap.
"""

from __future__ import annotations

import os
import sys

# A program's own folder comes first on the path, and this one's has names of its own.
sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(__file__)]

import json
import signal
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY = 512 << 20  # bytes of addresses, of which Python itself takes some 30 MiB


def main() -> None:
    """Answer every request until there are no more."""
    if os.name == "posix":
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if os.name == "posix":  # processor time: on a busy machine clock time would end it early
            signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        answer = json.dumps(answered(request))
        if os.name == "posix":
            signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()


def answered(request: dict[str, Any]) -> dict[str, str]:
    """Return the `text` that a template writes, or the `error` that it ends with."""
    try:
        text = template_of(request["template"]).render(**request["names"])
    except MemoryError:
        return {"error": f"it takes more than {MEMORY >> 20} MiB"}
    except Exception as error:  # what a template does in its sandbox can fail in any way
        return {"error": str(error)[:1000] or type(error).__name__}
    if len(text) > request["longest"]:
        return {"error": f"it writes {len(text):,} letters for a conversation that has fewer"}
    return {"text": text}


class GenerationTag(Extension):
    """A tag, `{% generation %}`, that marks answers for training; here it is only text."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Names(Namespace):
    """A `namespace()` of Jinja that gives no access to attributes that are Python's own."""

    def __setitem__(self, name: str, value: Any) -> None:
        """Set an attribute, as `{% set ns.name = value %}` does."""
        if name.startswith("_"):
            raise SecurityError(f"a chat template cannot set {name!r}")
        super().__setitem__(name, value)


@lru_cache(maxsize=8)
def template_of(text: str) -> Template:
    """Return a compiled template with the filters and functions that chat templates expect."""

    def fail(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=fail,
        strftime_now=lambda form: datetime.now().strftime(form),
        namespace=Names,
    )
    return environment.from_string(text)


if __name__ == "__main__":
    main()

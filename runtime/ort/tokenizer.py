"""A tokenizer from its files: what a conversation uses of transformers' tokenizers, without them.

Templates run in a sandbox, with the names that transformers gives them. Knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from kvcap.runtime.errors import ModelFilesBroken, first_line
from kvcap.runtime.text import Message

NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
CONFIG, OLD_CONFIG, TEMPLATE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class Tokenizer:
    """Encodes text and writes chat turns.

    Args:
        folder: with tokenizer.json, and tokenizer_config.json and a chat template where there are.

    Raises:
        ModelFilesBroken: a file is missing or broken, or the vocabulary has no letters.
    """

    def __init__(self, folder: Path) -> None:
        try:
            if not (folder / "tokenizer.json").exists():
                raise ValueError("there is no tokenizer.json")
            self.backend_tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            self.backend_tokenizer.no_truncation()
            self.backend_tokenizer.no_padding()
            config, older = _json(folder / CONFIG), _json(folder / OLD_CONFIG)
            self.special = _special({**older, **config})
            self.chat_template = _template(folder, config)
            if not self("Hello", add_special_tokens=False)["input_ids"]:
                raise ValueError("its vocabulary has no letters")
        except Exception as error:  # the library's own are plain exceptions
            raise ModelFilesBroken(
                f"the tokenizer in {str(folder)!r} cannot be used: {first_line(error)}; get the "
                "files again, or export the model again"
            ) from error

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Token ids of `text` as `input_ids`."""
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoding.ids}

    def apply_chat_template(self, messages: Sequence[Message], **names: Any) -> str:
        """The conversation as the template writes it; `names` are for the template."""
        assert self.chat_template is not None
        names = {"tools": None, "documents": None, **names}
        template = _environment().from_string(self.chat_template)
        return template.render(messages=list(messages), **names, **self.special)


def _json(path: Path) -> dict[str, Any]:
    """A file's settings; none where there is no file."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds no settings")
    return found


def _special(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens that have a name; their values are texts, or say more than the text."""
    named = {f"{name}_token": config.get(f"{name}_token") for name in NAMED}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    if (folder / TEMPLATE).exists():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {one["name"]: one["template"] for one in found}.get("default")
    return found if isinstance(found, str) else None


class _Generation(Extension):
    """`{% generation %}` marks what a model is trained to say; here it is only text."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What is between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Names(Namespace):
    """`namespace()`, whose attributes cannot be Python's own."""

    def __setitem__(self, name: str, value: Any) -> None:
        """Set one, as `{% set ns.name = value %}` does."""
        if name.startswith("_"):
            raise SecurityError(f"a chat template cannot set {name!r}")
        super().__setitem__(name, value)


def _environment() -> ImmutableSandboxedEnvironment:
    """A sandbox with the filters and functions that chat templates are written for."""

    def fail(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    found.filters["tojson"] = tojson
    found.globals.update(
        raise_exception=fail,
        strftime_now=lambda form: datetime.now().strftime(form),
        namespace=_Names,
    )
    return found

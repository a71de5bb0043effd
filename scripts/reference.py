"""Extends griffe: adds to the site's reference what the code says beside its docstrings.

The comment behind a field of a dataclass is its description, and an example in a docstring is code.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Attribute, Class, Docstring, Extension, Object

COMMENT = re.compile(r"  # (?!type:|noqa)(.*)$")
EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)


class Reference(Extension):
    """Lists a dataclass's fields with their comments, and fences examples as code."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Fence the examples of one docstring, and of a dataclass list its fields."""
        if isinstance(obj, Class) and any(
            str(decorator.value).startswith("dataclass") for decorator in obj.decorators
        ):
            list_fields(obj)
        if obj.docstring is not None:
            text = EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value)
            obj.docstring.value = text.replace("  # doctest: +SKIP", "")


def list_fields(cls: Class) -> None:
    """Add the fields of a dataclass that have no docstring of their own to that of the class."""
    lines = []
    for name, field in cls.attributes.items():
        if "ClassVar" in str(field.annotation) or "property" in field.labels:
            continue
        if name.startswith("_") or field.docstring is not None or field.annotation is None:
            continue
        lines.append(f"    {name}: {described(field)}")
    if lines:
        docstring = cls.docstring or Docstring("", lineno=cls.lineno, parent=cls)
        docstring.value = "\n".join([docstring.value, "", "Attributes:", *lines])
        cls.docstring = docstring


def described(field: Attribute) -> str:
    """Return the comment behind a field, or its name in words, beginning as a sentence."""
    match = COMMENT.search(field.lines[-1]) if field.lines else None
    text = match[1] if match else field.name.replace("_", " ")
    return text[:1].upper() + text[1:]

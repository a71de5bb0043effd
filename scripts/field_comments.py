"""A griffe extension: the comment behind a field of a dataclass is its description on the site."""

from __future__ import annotations

import re
from typing import Any

from griffe import Attribute, Docstring, Extension

COMMENT = re.compile(r"  # (?!type:|noqa)(.*)$")


class FieldComments(Extension):
    """Describes every field that has no docstring by the comment on its last line."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Take the comment of one field."""
        found = COMMENT.search(attr.lines[-1]) if attr.docstring is None and attr.lines else None
        if found:
            text = found[1][:1].upper() + found[1][1:]
            attr.docstring = Docstring(text, lineno=attr.lineno, parent=attr)

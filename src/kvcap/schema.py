"""Holds JSON documents to JSON schemas that lie beside the code: the first fault in words, or none.

Stricter than JSON: 1.0 is no whole number here, and what is too large for a float is no number.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

SHOWN = 120  # letters of a value that a message shows
RANGE = {"type", "minimum", "maximum"}  # all that the schema of a long list's numbers may say


def fault(document: object, schema: Path) -> str | None:
    """Return the first part of a document that breaks a schema, and why; None if it fits.

    Others are not looked for, as a document may have as many as it has numbers.

    Args:
        document: the parsed document.
        schema: its file; it may refer to others in the same folder by their names.
    """
    try:
        error = next(_validator(schema).iter_errors(document), None)
        if error is None:
            return None
        path = "/".join(str(part) for part in error.absolute_path) or "the whole"
        message: str = error.message
    except RecursionError:
        return "it is nested too deeply"
    if len(message) > SHOWN:
        message = f"{message[: SHOWN // 2]} ... {message[-SHOWN // 2 :]}"
    return f"{path[:SHOWN]}: {message}"


@cache
def _validator(schema: Path) -> Any:
    # Slow to import, and needed only where a file is read or written.
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012

    one_by_one = Draft202012Validator.VALIDATORS["items"]

    def items(validator: Any, wanted: Any, document: Any, whole: Any) -> Iterator[Any]:
        """Check lists of numbers, which may have millions, by one comparison each."""
        plain = isinstance(wanted, dict) and wanted.keys() <= RANGE
        if not plain or wanted.get("type") != "number" or not isinstance(document, list):
            yield from one_by_one(validator, wanted, document, whole) or ()
            return
        most = sys.float_info.max
        low, high = wanted.get("minimum", -most), wanted.get("maximum", most)
        for index, number in enumerate(document):
            if type(number) not in (int, float) or not low <= number <= high:
                yield from validator.descend(number, wanted, path=index)

    texts = {path.name: path.read_text(encoding="utf-8") for path in schema.parent.glob("*.json")}
    schemas = {name: json.loads(text) for name, text in texts.items()}
    resources = [(name, DRAFT202012.create_resource(each)) for name, each in schemas.items()]
    checker = Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"integer": lambda _, x: type(x) is int, "number": lambda _, x: _is_number(x)}
    )
    extended: Any = extend  # has no annotations
    strict = extended(Draft202012Validator, {"items": items}, type_checker=checker)
    return strict(schemas[schema.name], registry=Registry().with_resources(resources))


def _is_number(x: object) -> bool:
    return type(x) is int or (isinstance(x, float) and isfinite(x))

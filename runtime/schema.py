"""What files say, held to the JSON schemas beside this: the first fault, or none.

Stricter than JSON: 1.0 is no whole number here, and what is too large for a float is no number.
"""

from __future__ import annotations

import json
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).parent / "schemas"
SESSION, DECODER = "session", "decoder"
SHOWN = 120  # letters of a value that a message shows


def fault(found: object, name: str) -> str | None:
    """The first place where a document is not what the schema `name` allows; None: it is.

    Args:
        found: the parsed document.
        name: of the schema, `SESSION` or `DECODER`.
    """
    try:
        error = next(_validator(name).iter_errors(found), None)
        if error is None:
            return None
        place = "/".join(str(part) for part in error.absolute_path) or "the whole"
        message: str = error.message
    except RecursionError:
        return "it is nested too deeply"
    if len(message) > SHOWN:
        message = f"{message[: SHOWN // 2]} ... {message[-SHOWN // 2 :]}"
    return f"{place[:SHOWN]}: {message}"


@cache
def _validator(name: str) -> Any:
    # Slow to import, and needed only where a file is read.
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012

    files = {path.name: path.read_text(encoding="utf-8") for path in SCHEMAS.glob("*.json")}
    schemas = {file: json.loads(text) for file, text in files.items()}
    resources = [(file, DRAFT202012.create_resource(schema)) for file, schema in schemas.items()]
    checker = Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"integer": lambda _, x: type(x) is int, "number": lambda _, x: _is_number(x)}
    )
    extended: Any = extend  # has no annotations
    strict = extended(Draft202012Validator, type_checker=checker)
    return strict(schemas[f"{name}.schema.json"], registry=Registry().with_resources(resources))


def _is_number(x: object) -> bool:
    return type(x) is int or (isinstance(x, float) and isfinite(x))

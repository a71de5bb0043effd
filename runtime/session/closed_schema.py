"""Reads a JSON schema as its author means it, for an answer that a model writes by it.

As llama.cpp and vLLM do: an object has the properties that are named, unless more are asked for.
By the letter of JSON Schema it may have any others, and a model then writes on and on. Keywords
that only describe a text or a list, and that no answer can be held to, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri",
     "uuid"}
)  # fmt: skip
"""Names the formats of texts that llguidance holds; all others are notes to the reader."""
NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Names the keywords that have schemas by name."""
NESTED = (
    "allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalItems", "additionalProperties",
)  # fmt: skip
"""Names the keywords that have a schema, or a list of them, as far as llguidance holds them."""


def closed(schema: Any) -> Any:
    """Return a schema whose objects allow only the properties that it names.

    Objects stay open where the schema says so (`additionalProperties`), names no property, requires
    one that it does not name, or has several parts that must all fit, as each names a few.

    >>> closed({"properties": {"door": {"format": "path"}}})
    {'properties': {'door': {}}, 'additionalProperties': False}

    Args:
        schema: as JSON.
    """
    return _closed(schema, _joined(schema))


def _closed(schema: Any, joined: set[int]) -> Any:
    if isinstance(schema, list):
        return [_closed(part, joined) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for word, value in schema.items():
        if word == "uniqueItems" or (word == "format" and not _is_held(value)):
            continue
        if word in NAMED and isinstance(value, dict):
            value = {name: _closed(part, joined) for name, part in value.items()}
        elif word in NESTED:
            value = _closed(value, joined)
        result[word] = value
    if id(schema) not in joined and _names_all(schema):
        result["additionalProperties"] = False
    return result


def _is_held(name: Any) -> bool:
    return not isinstance(name, str) or name in FORMATS


def _names_all(schema: dict[str, Any]) -> bool:
    """Return whether a schema names all properties that its object may have."""
    if "additionalProperties" in schema or not schema.keys() & {"properties", "patternProperties"}:
        return False
    named, required = schema.get("properties", {}), schema.get("required", [])
    return not isinstance(required, list) or all(name in named for name in required)


def _joined(root: Any) -> set[int]:
    """Return the ids of schemas combined with others, as by `allOf`, and of those within."""
    ids, left = set[int](), list[Any](value for value in _objects(root) if _is_joined(value))
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict) and id(value) not in ids:
            ids.add(id(value))
            left += [*value.values(), _target(root, value.get("$ref"))]
    return ids


def _is_joined(schema: dict[str, Any]) -> bool:
    """Return whether a schema has several parts that must all fit."""
    whole = schema.get("allOf")
    parts = len(whole) if isinstance(whole, list) else 0
    parts += sum(word in schema for word in ("anyOf", "oneOf", "$ref"))
    return parts + bool(schema.keys() & {"properties", "patternProperties"}) > 1


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects within a value, itself included."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
        if isinstance(part, (dict, list)):
            left += part.values() if isinstance(part, dict) else part


def _target(root: Any, reference: Any) -> Any:
    """Return the schema that a reference within `root` points to, or None."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target = root
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
            target = target[int(step)]
        else:
            target = target.get(step) if isinstance(target, dict) else None
    return target

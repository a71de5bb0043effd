"""Identifies an export's files by checksums, and never replaces them by another export."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcap.runtime.errors import ExportExists


def file_entry(path: Path) -> dict[str, Any]:
    """Return a file's name, size and checksum."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}


def refuse_other(path: Path, settings: dict[str, Any]) -> None:
    """Refuse to replace an export of something else.

    Args:
        path: the manifest of the existing export; one that cannot be read counts as another.
        settings: the settings of the new export, as its manifest will have them.

    Raises:
        ExportExists: the two differ; the message names where.
    """
    try:
        existing = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        existing = None
    there, new = (dict(_leaves(x)) for x in (existing, json.loads(json.dumps(settings))))
    differ = [name for name in new if there.get(name) != new[name]]
    if differ:
        says = ", ".join(
            f"{name.rpartition('.')[2]} {there.get(name)} instead of {new[name]}"
            for name in differ[:3]
        )
        existing_kind = (
            f"an export of another kind ({says})" if existing else "no export that can be read"
        )
        raise ExportExists(
            f"in {str(path.parent)!r} there is {existing_kind}; add --force to replace it, or give "
            "another place with -o"
        )


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of every leaf of nested objects."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, f"{name}.{key}")
    else:
        yield name, value


def sha256(path: Path) -> str:
    """Return the SHA-256 checksum of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):  # weights may be larger than memory
            digest.update(part)
    return digest.hexdigest()

"""Reads tables of one number per head, measured once per model, that some budgets need.

A JSON file: `{"model": NAME, "kind": "heads", "scores": [[...], ...]}`, a row for every capped
layer, in it a number (0 or more, higher matters more) for every query head or every KV head.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvcap.policies.base.component import PolicyError

_READ: dict[str, Table] = {}  # the tables that `read_table` found last, by path


@dataclass(frozen=True, eq=False)
class Table:
    """Scores of every KV head of every capped layer."""

    model: str
    scores: list[list[float]]  # [L][K]


def read_table(path: str, layers: int, kv_heads: int, component: str) -> Table:
    """Return the table at `path` for a model of these sizes, averaged over query groups.

    A file that has changed since is read again.

    Raises:
        PolicyError: no table, one that cannot be read, or one made for another model.
    """
    command = f"`kvcap policies calibrate {component} MODEL -f TEXT -o heads.json`"
    if not path:
        raise PolicyError(
            f"{component} needs a table of how much every head matters, and none was given; make "
            f"one with {command}, then give it with `--policy-option table=heads.json`"
        )
    try:
        _READ[path] = _parse(path, os.stat(path).st_mtime_ns, layers, kv_heads)
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
        raise PolicyError(f"{component}: table={path!r} {why}; make one with {command}") from error
    except ValueError as error:
        raise PolicyError(
            f"{component}: table={path!r} {error}; make one with {command}"
        ) from error
    return _READ[path]


def last_read(path: str, component: str) -> Table:
    """Return the table that `read_table` found at `path`.

    Raises:
        PolicyError: nothing was read yet: heads are allotted before they are looked at.
    """
    if path not in _READ:
        raise PolicyError(f"{component}: no slots were allotted by table={path!r} yet")
    return _READ[path]


@lru_cache
def _parse(path: str, changed: int, layers: int, kv_heads: int) -> Table:
    """Return the table of a file; its `changed` time is part of the key of the cache."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # bad JSON or bad UTF-8
        raise ValueError(f"is not JSON ({error})") from error
    rows: Any = document.get("scores") if isinstance(document, dict) else None
    if not _is_table(rows) or document.get("kind", "heads") != "heads":
        raise ValueError('has no "scores" of "kind" "heads": rows of as many numbers each')
    if not all(math.isfinite(x) and x >= 0 for row in rows for x in row):
        raise ValueError("has numbers below 0 or not finite")
    model, width = str(document.get("model", "an unnamed model")), len(rows[0])
    if len(rows) != layers or width % kv_heads or width == 0:
        raise ValueError(
            f"was made for {model}, {len(rows)} layers of {width} heads; this model has {layers} "
            f"capped layers of {kv_heads} KV heads"
        )
    group = width // kv_heads
    return Table(
        model,
        [[sum(row[i : i + group]) / group for i in range(0, width, group)] for row in rows],
    )


def _is_table(rows: Any) -> bool:
    return (
        isinstance(rows, list)
        and bool(rows)
        and all(isinstance(row, list) and len(row) == len(rows[0]) for row in rows)
        and all(type(x) in (int, float) for row in rows for x in row)
    )

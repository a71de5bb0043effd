"""Reads and writes plans and results, JSON files that are checked against their schemas."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from kvcap.android_bench.errors import AndroidError, PlanBroken, ResultBroken
from kvcap.export.files import sha256
from kvcap.runtime.files import parse_json, read_plain
from kvcap.schema import fault

PLAN, BENCH = "kvcap.android_plan/1", "kvcap.android_bench/1"
PLAN_FILE = "plan.json"
FILE_BYTES = 512 << 20  # most bytes of a plan or result: 20 times the largest preset's samples
PARTS = 200_000  # lists and objects in one document; the largest preset has some ten thousand
SCHEMAS = Path(__file__).parent / "schemas"
_FILES = {PLAN: "plan.schema.json", BENCH: "bench.schema.json"}


@cache
def schema(name: str) -> dict[str, Any]:
    """Load the JSON schema called `name`."""
    document: dict[str, Any] = json.loads((SCHEMAS / _FILES[name]).read_text(encoding="utf-8"))
    return document


def validate(document: object, name: str, title: str, error: type[AndroidError]) -> None:
    """Check a document against a schema.

    Args:
        document: the parsed document.
        name: the schema, `PLAN` or `BENCH`.
        title: the document's name in messages.
        error: the class of error to raise, with the place of the first fault.
    """
    stated = document.get("schema") if isinstance(document, dict) else None
    try:
        if stated != name:
            raise error(f"{title} has schema {repr(stated)[:100]}; this kvcap reads {name!r}")
    except RecursionError:
        raise error(f"{title} is not a {name}: it is nested too deeply") from None
    wrong = fault(document, SCHEMAS / _FILES[name])
    if wrong is not None:
        raise error(f"{title} is not a {name}: {wrong}")


def parsed(data: bytes, title: str, error: type[AndroidError]) -> Any:
    """Parse a JSON document; refuse NaN and infinity, which Python's parser takes.

    Args:
        data: the document in UTF-8.
        title: the document's name in messages.
        error: the class of error to raise if it is no JSON, or has more than `PARTS` parts.
    """
    parts = data.count(b"[") + data.count(b"{")
    if parts > PARTS:
        raise error(f"{title} has {parts:,} lists and objects; at most {PARTS:,} are read")
    try:
        return parse_json(data.decode("utf-8-sig"))
    except ValueError as cause:
        raise error(f"{title} cannot be read, it is no JSON: {cause}") from cause


def load_json(path: Path, error: type[AndroidError]) -> Any:
    """Read a JSON file; raise `error` if it cannot be read."""
    try:
        data = read_plain(path, FILE_BYTES)
    except (OSError, ValueError) as cause:
        why = getattr(cause, "strerror", None) or cause
        raise error(f"{path.name} cannot be read: {why}") from cause
    return parsed(data, path.name, error)


def read_plan(folder: Path) -> dict[str, Any]:
    """Read the plan in a folder, and check that all its files are there and unchanged.

    Raises:
        PlanBroken: there is no plan, it has another schema, a file is missing or was changed, or
            parts of the plan contradict each other.
    """
    if not (folder / PLAN_FILE).is_file():
        raise PlanBroken(f"no {PLAN_FILE} in {str(folder)!r}; kvcap android plan -o DIR writes one")
    plan: dict[str, Any] = load_json(folder / PLAN_FILE, PlanBroken)
    validate(plan, PLAN, PLAN_FILE, PlanBroken)
    if plan_id(plan) != plan["id"]:
        raise PlanBroken(f"{PLAN_FILE} was changed: its id is {plan['id']}, not {plan_id(plan)}")
    for entry in plan["files"]:
        path = folder / entry["file"]
        if not path.is_file():
            raise PlanBroken(f"the plan's file {entry['file']} is missing; write the plan again")
        if path.stat().st_size != entry["bytes"] or sha256(path) != entry["sha256"]:
            raise PlanBroken(f"the plan's file {entry['file']} was changed; write the plan again")
    _check_references(plan)
    return plan


def _check_references(plan: dict[str, Any]) -> None:
    """Check that the plan has every file, input and cell that it names, and no cell twice.

    Raises:
        PlanBroken: naming the first fault.
    """
    named = {entry["file"] for entry in plan["files"]}
    ids = [cell["id"] for cell in plan["cells"]]
    if len(set(ids)) < len(ids):
        twice = next(name for name, count in Counter(ids).items() if count > 1)
        raise PlanBroken(f"the plan has the cell {twice} twice")
    if plan["reference"] not in ids:
        raise PlanBroken(f"the reference {plan['reference']!r} is no cell of the plan")
    if decoder := plan.get("decoder"):
        if missing := {decoder["manifest"], decoder["check"]["file"]} - named:
            raise PlanBroken(f"the decoder names files that the plan does not list: {min(missing)}")
        if sum(decoder["check"]["runs"]) != len(decoder["check"]["prompt"]):
            raise PlanBroken("the decoder's check has runs of another length than its prompt")
    for cell in plan["cells"]:
        inputs, outputs = cell["inputs"], cell["outputs"]
        files = {
            cell["model"],
            *(port["fill"].get("file") for port in inputs),
            *(port["check"].get("file") for port in outputs),
        } - {None}
        if missing := files - named:
            raise PlanBroken(f"cells name files that the plan does not list: {min(missing)}")
        sources = {port["check"].get("of") for port in outputs} - {None}
        if missing := sources - {port["name"] for port in inputs}:
            raise PlanBroken(f"the cell {cell['id']} has no input {min(missing)!r}")
        held = sum(map(port_bytes, (*inputs, *outputs)))
        if held != cell["bytes"]:
            raise PlanBroken(
                f"the cell {cell['id']} says {cell['bytes']:,} bytes, its shapes are {held:,}"
            )


def port_bytes(port: dict[str, Any]) -> int:
    """Return how many bytes an input or output of a cell has."""
    numbers: int = prod(port["shape"])
    return numbers * int(np.dtype(port["dtype"]).itemsize)


def plan_id(plan: dict[str, Any]) -> str:
    """Return 16 hexadecimal digits that differ for any two plans."""
    rest = {key: value for key, value in plan.items() if key != "id"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_result(path: Path) -> dict[str, Any]:
    """Read a result from a file, without judging it.

    Raises:
        ResultBroken: the file cannot be read, or has another schema.
    """
    result: dict[str, Any] = load_json(path, ResultBroken)
    validate(result, BENCH, path.name, ResultBroken)
    return result


def parent_of(path: Path) -> Path:
    """Return the folder that a file will be written to.

    Commands call it before they measure, so that no measurement is lost.

    Raises:
        ResultBroken: there is no such folder, it is read-only, or the path is a folder itself.
    """
    if path.is_dir():
        raise ResultBroken(f"{str(path)!r} is a folder; name a file to write")
    if not path.parent.is_dir():
        raise ResultBroken(f"no folder {str(path.parent)!r} to write {path.name} to")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ResultBroken(f"{str(path)!r} cannot be written here")
    return path.parent


def write_json(document: dict[str, Any], path: Path) -> None:
    """Write a document whole or not at all.

    Raises:
        ResultBroken: it cannot be written there.
    """
    part = parent_of(path) / f".{path.name}.part"
    try:
        part.write_text(json.dumps(document, allow_nan=False) + "\n", encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)

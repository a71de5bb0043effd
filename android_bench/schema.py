"""Plans and results as files: read, held to their JSON schemas, refused by name."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from kvcap.android_bench.errors import AndroidError, PlanBroken, ResultBroken

PLAN, BENCH = "kvcap.android_plan/1", "kvcap.android_bench/1"
PLAN_FILE = "plan.json"
SCHEMAS = Path(__file__).parent / "schemas"
_FILES = {PLAN: "plan.schema.json", BENCH: "bench.schema.json"}


@cache
def schema(name: str) -> dict[str, Any]:
    """The JSON schema called `name`."""
    found: dict[str, Any] = json.loads((SCHEMAS / _FILES[name]).read_text(encoding="utf-8"))
    return found


def validate(found: object, name: str, said: str, error: type[AndroidError]) -> None:
    """Hold a document to a schema.

    Args:
        found: the parsed document.
        name: of the schema, `PLAN` or `BENCH`.
        said: what the document is called in messages.
        error: what is raised, with the place of the first fault.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    stated = found.get("schema") if isinstance(found, dict) else None
    if stated != name:
        raise error(f"{said} has schema {stated!r}; this kvcap reads {name!r}")
    fault = best_match(Draft202012Validator(schema(name)).iter_errors(found))
    if fault is not None:
        place = "/".join(str(part) for part in fault.absolute_path) or "the whole"
        raise error(f"{said} is not a {name}: {place}: {fault.message[:200]}")


def load_json(path: Path, error: type[AndroidError]) -> Any:
    """A JSON file's content; NaN and infinity are no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except (OSError, ValueError) as cause:
        raise error(f"{path.name} cannot be read: {cause}") from cause


def read_plan(folder: Path) -> dict[str, Any]:
    """The plan in a folder, whose files are all there and as they were written.

    Raises:
        PlanBroken: no plan, another schema, a missing or changed file.
    """
    if not (folder / PLAN_FILE).is_file():
        raise PlanBroken(f"no {PLAN_FILE} in {str(folder)!r}; kvcap android plan -o DIR writes one")
    found: dict[str, Any] = load_json(folder / PLAN_FILE, PlanBroken)
    validate(found, PLAN, PLAN_FILE, PlanBroken)
    if plan_id(found) != found["id"]:
        raise PlanBroken(f"{PLAN_FILE} was changed: its id is {found['id']}, not {plan_id(found)}")
    named = {entry["file"] for entry in found["files"]}
    for entry in found["files"]:
        path = folder / entry["file"]
        if not path.is_file():
            raise PlanBroken(f"the plan's file {entry['file']} is missing; write the plan again")
        if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
            raise PlanBroken(f"the plan's file {entry['file']} was changed; write the plan again")
    if missing := {cell["model"] for cell in found["cells"]} - named:
        raise PlanBroken(f"cells name files that the plan does not list: {sorted(missing)[0]}")
    if found["reference"] not in {cell["id"] for cell in found["cells"]}:
        raise PlanBroken(f"the reference {found['reference']!r} is no cell of the plan")
    return found


def plan_id(plan: dict[str, Any]) -> str:
    """16 digits that change with anything in the plan."""
    rest = {key: value for key, value in plan.items() if key != "id"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_result(path: Path) -> dict[str, Any]:
    """A result as a file holds it.

    Raises:
        ResultBroken: it cannot be read, or is of another schema.
    """
    found: dict[str, Any] = load_json(path, ResultBroken)
    validate(found, BENCH, path.name, ResultBroken)
    return found


def parent_of(path: Path) -> Path:
    """The folder that a file will be written to; asked before anything is measured.

    Raises:
        ResultBroken: there is none.
    """
    if not path.parent.is_dir():
        raise ResultBroken(f"no folder {str(path.parent)!r} to write {path.name} to")
    return path.parent


def write_json(document: dict[str, Any], path: Path) -> None:
    """Write a document whole or not at all.

    Raises:
        ResultBroken: there is no such folder.
    """
    part = parent_of(path) / f".{path.name}.part"
    part.write_text(json.dumps(document, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")

"""Makes the list of `kvcap policies` from the policies' files, without importing them.

Importing them takes PyTorch, and so longer than all else that the command does. What a policy says
of itself stands in its class statement, which needs no tensors: that is executed, without the
imports and functions of its file. Where one needs them, there is no list.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from kvcap.runtime.cli.tables import DOES, TablePart, companion_rows, row_of
from kvcap.runtime.types import PINS

CONTRACTS = ("component", "policy", "companions")  # files of `base` that classes derive from
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1, "bool": 1}
TORCH = SimpleNamespace(**{name: SimpleNamespace(itemsize=size) for name, size in BYTES.items()})
NAMES = {  # names that class statements use
    "__name__": __name__, "ClassVar": ClassVar, "NamedTuple": NamedTuple, "dataclass": dataclass,
    "fields": fields, "torch": TORCH,
}  # fmt: skip
Listing = list[dict[str, Any]]


def read_list() -> tuple[Listing, Listing] | None:
    """Return the rows of policies and of companions; None where these must be imported for it."""
    spec = find_spec("kvcap.policies")
    if spec is None or spec.origin is None or entry_points(group="kvcap.policies"):
        return None
    try:
        return _rows(Path(spec.origin).parent)
    except Exception:  # a class statement may raise any; if it is wrong, its import says so
        return None


def _rows(folder: Path) -> tuple[Listing, Listing]:
    names = dict[str, Any](NAMES)
    for file in CONTRACTS:
        names = _executed(folder / "base" / f"{file}.py", names)
    kinds = {slot: names[slot.title().replace("_", "")] for slot in DOES}

    def parts(directory: Path) -> dict[str, TablePart]:
        files = [path for path in directory.glob("*.py") if path.stem != "__init__"]
        return {path.stem: _part(path, names, kinds) for path in files}

    policies, others = parts(folder), dict[str, TablePart]()
    for subfolder in folder.iterdir():
        if subfolder.name != "base":
            others |= parts(subfolder)
    presets = {name: names["Preset"](name) for name in policies}
    for part in (*policies.values(), *others.values()):
        for name, preset in part.component.presets.items():
            if name in presets and presets[name].parts != preset.parts.partition("+")[0]:
                raise ValueError(f"the name {name!r} is taken")
            presets[name] = preset
    rows = [_row(name, presets[name], policies, others) for name in sorted(presets)]
    return rows, companion_rows(others.values())


def _executed(path: Path, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return `names` and the classes that a file defines, with their properties but no methods."""
    namespace = dict(names)
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.ClassDef):
            node.body = [
                x
                for x in node.body
                if not isinstance(x, ast.FunctionDef) or x.decorator_list or x.name == "options"
            ]
            # As in this file, annotations stay text: their names are not needed.
            exec(compile(ast.Module([node], []), str(path), "exec"), namespace)
    return namespace


def _part(path: Path, names: Mapping[str, Any], kinds: Mapping[str, Any]) -> TablePart:
    """Return the policy or companion that a file defines, with its default options."""
    names_defined = _executed(path, names).items()
    [kind] = [
        x for key, x in names_defined if key not in names and issubclass(x, names["Component"])
    ]
    if any("ClassVar" in str(field.type) for field in fields(kind)):
        raise ValueError("a ClassVar by another name is taken for an option")
    return TablePart(
        next(slot for slot in kinds if issubclass(kind, kinds[slot])), path.stem, kind()
    )


def _row(
    name: str, preset: Any, policies: Mapping[str, TablePart], others: Mapping[str, TablePart]
) -> dict[str, Any]:
    base, *combined = preset.parts.split("+")
    left, filled = dict(preset.options), dict[str, TablePart]()
    for part in (policies[base], *(others[other] for other in combined)):
        own = {key: left.pop(key) for key in part.component.options() if key in left}
        filled[part.slot] = part._replace(component=type(part.component)(**own))
    if len(filled) <= len(combined) or left.keys() - PINS:
        raise ValueError(f"{name!r} is no combination: {preset}")
    parts = [filled[slot] for slot in DOES if slot in filled]
    return row_of(name, parts, preset, **left)

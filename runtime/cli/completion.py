"""Names that a shell completes, found without PyTorch, whose import a key press cannot wait for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path


def policy_names(incomplete: str) -> list[str]:
    """Policies and presets that begin like this; after a plus sign, what can be combined."""
    spec = find_spec("kvcap.policies")
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent
    base, plus, last = incomplete.rpartition("+")
    if plus:
        names = {name for sub in folder.iterdir() if sub.name != "base" for name in _modules(sub)}
    else:
        names = {*_modules(folder), *_presets(folder)}
    return sorted(f"{base}{plus}{name}" for name in names if name.startswith(last))


def _modules(folder: Path) -> list[str]:
    """The file's name is the policy's name."""
    return [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]


def _presets(folder: Path) -> Iterator[str]:
    """The keys of the dictionary `presets` of every class, read from the sources."""
    for path in (*folder.glob("*.py"), *folder.glob("*/*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.AnnAssign(target=ast.Name(id="presets"), value=ast.Dict(keys=keys)):
                    yield from (ast.literal_eval(key) for key in keys if key is not None)

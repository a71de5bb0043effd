"""Every public class of the package has a name of its own, so that a search finds the one meant."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "runtime", "policies", "kernels", "export", "serve", "evals", "android_bench", "pocket",
)  # fmt: skip
TWICE = {  # names that stand for two classes yet, and why; delete a line to enforce its name
    "Cap": "options in runtime/cli/options.py, and a model under them in runtime/backends/pytorch",
}


def files_by_class(folders: Iterable[Path]) -> dict[str, set[Path]]:
    """The files that define each public class, by its name; classes inside others count, too."""
    found = defaultdict[str, set[Path]](set)
    for folder in folders:
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].add(path)
    return found


def shared_names(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Names that stand in two files or more, with these files."""
    classes = files_by_class(folders)
    return {
        name: sorted(map(str, paths)) for name, paths in sorted(classes.items()) if len(paths) > 1
    }


def test_every_public_class_has_a_name_of_its_own():
    found = shared_names(ROOT / folder for folder in FOLDERS)
    assert not {name: paths for name, paths in found.items() if name not in TWICE}
    assert not TWICE.keys() - found.keys(), "these have a name of their own: delete their lines"


def test_a_name_that_stands_twice_would_be_seen(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    (one / "a.py").write_text("class Row: ...\nclass Alone: ...\nclass _Inner: ...\n")
    (two / "b.py").write_text("if True:\n    class Row: ...\nclass _Inner: ...\n")
    assert shared_names([one, two]) == {"Row": [str(one / "a.py"), str(two / "b.py")]}

"""Every public class has a name of its own, and every docstring begins with a sentence."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "runtime", "policies", "kernels", "export", "serve", "evals", "android_bench", "pocket", "lab",
)  # fmt: skip
MIDDLE = re.compile(  # a first line that begins so is about something that only the code names
    "(What|Whether|Which|Who|Whose|Why|How|Where|When|Of|Or|And|But|As|By|For|From|In|On|With|Within"
    "|Those|These|The same|Its|Their|Likewise|Nothing|None|Else|So)\\b"
)
VAGUE = {  # names that do not say what they hold, and what to write instead
    "said": "what it is: response, output, message, answer, manifest",
    "found": "what it is: matches, rows, path, plan",
    "asked": "request, question, settings",
    "those": "the noun",
    "place": "position, index, offset, cell",
    "places": "positions, indices, cells, slot_mapping",
    "told": "facts, messages, reason",
    "heard": "the noun",
    "late": "what it is late for",
    "lent": "leased",
    "settled": "what was done to it",
    "apart": "difference, distance, spacing",
    "give_up": "evict, stop",
    "given_up": "evicted, stopped",
}
LEFT = {  # by folder or file: names that others read, and some that are to be replaced yet
    "evals": {"found"},
    "lab": {"place"},
    "pocket": {"place"},
    "policies": {"place"},
    "runtime/backends/pytorch": {"place"},
    "runtime/cache": {"place", "places"},
    "runtime/planning": {"places"},
    "runtime/session": {"place", "said"},  # the parameter of `Session.send` is public
    "serve": {"asked", "place", "places"},
    "export": {"place"},
    "tests/evals": {"found"},
    "tests/reference.py": {"place"},
}
NOUN = re.compile(r"(A|An|The|One|Some|All|Every|Each|Any|No)\b|\w*[^s\W]s\b|[^A-Z]")  # no verb


def files_by_class(folders: Iterable[Path]) -> dict[str, set[Path]]:
    """The files that define each public class, by its name; classes inside others count, too."""
    by_name = defaultdict[str, set[Path]](set)
    for folder in folders:
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    by_name[node.name].add(path)
    return by_name


def shared_names(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Names that stand in two files or more, with these files."""
    classes = files_by_class(folders)
    return {
        name: sorted(map(str, paths)) for name, paths in sorted(classes.items()) if len(paths) > 1
    }


def test_every_public_class_has_a_name_of_its_own():
    shared = shared_names(ROOT / folder for folder in FOLDERS)
    assert not shared


def given_names(path: Path) -> set[str]:
    """Return the names that a file gives: to values, arguments, attributes and definitions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
    return {name.strip("_").lower() for name in names}


def programs() -> list[Path]:
    """Return the files of Python that kvcap has, those of its tests among them."""
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    files += sorted((ROOT / "src" / "kvcap").glob("*.py"))
    files += sorted((ROOT / "tests").rglob("*.py"))
    return files + [x for x in scripts if b"python" in x.read_bytes().partition(b"\n")[0]]


def test_names_say_what_they_hold():
    for path in programs():
        inside = path.relative_to(ROOT).as_posix()
        left = {x for where, words in LEFT.items() if inside.startswith(where) for x in words}
        vague = given_names(path) & VAGUE.keys() - left
        assert not vague, f"{inside}: " + "; ".join(f"{x}: write {VAGUE[x]}" for x in vague)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """The kind and the text of every docstring of a file, those of attributes too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = node.body if isinstance(getattr(node, "body", None), list) else []
        for before, part in pairwise([node, *body]):
            value = part.value if isinstance(part, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                is_help = getattr(before, "name", "").endswith("_command")
                yield "help" if is_help else type(before).__name__, value.value.strip()


def is_fragment(kind: str, text: str) -> bool:
    """Return whether a first line begins in the middle, or names a thing where a verb belongs."""
    noun = ("Function" in kind and NOUN.match(text)) or (
        "Assign" in kind and not text.split()[0].endswith("s")  # "Says ...", "Holds ..."
    )
    return bool(MIDDLE.match(text) or noun)


def test_a_docstring_begins_with_a_sentence():
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert files
    for path in files:
        assert not [text for kind, text in docstrings(path) if is_fragment(kind, text)], path

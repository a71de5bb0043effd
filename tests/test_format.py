"""Only tables are laid out by hand: all else looks as the formatter has it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from test_names import FOLDERS, ROOT

MARK = "# fmt: skip"
LITERALS = (ast.Dict, ast.List, ast.Set, ast.Tuple)


def tables(tree: ast.Module) -> Iterator[int]:
    """Yield the last lines of decorators, and of assignments of a literal, bare or in a call."""
    for node in ast.walk(tree):
        for decorator in getattr(node, "decorator_list", ()):
            yield decorator.end_lineno
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            value = node.value
            inner = value.args[0] if isinstance(value, ast.Call) and value.args else value
            if isinstance(inner, LITERALS):
                yield node.end_lineno


def by_hand(source: str) -> set[int]:
    """Lines that keep the formatter from a statement that is no table."""
    marked = {i for i, line in enumerate(source.splitlines(), 1) if line.endswith(MARK)}
    return marked - set(tables(ast.parse(source)))


def test_only_tables_are_laid_out_by_hand():
    files = [p for name in (*FOLDERS, "tests") for p in (ROOT / name).rglob("*.py")]
    by_file = {str(p): lines for p in files if (lines := by_hand(p.read_text(encoding="utf-8")))}
    assert len(files) > 300
    assert not by_file

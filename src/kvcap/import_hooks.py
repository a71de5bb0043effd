"""Runs functions when modules of other packages have been imported, and imports none of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

After = Callable[[Any], None]


class _Finder:
    """A finder at the head of `sys.meta_path` that adds to what the others find."""

    def __init__(self) -> None:
        self.functions: dict[str, list[After]] = {}  # by the module's name

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module as the other finders do; of one that is waited for, hook its execution."""
        if name not in self.functions:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if module.__name__ == name:  # a loader of a zip file has many modules
                    self.run(module)

            loader.exec_module = exec_module
        return spec

    def run(self, module: ModuleType) -> None:
        """Run what waits for a module, once."""
        for function in self.functions.pop(module.__name__, []):
            function(module)


_FINDER = _Finder()


def after_import(name: str, function: After) -> None:
    """Run `function` with the module `name` once it has been imported; now, if it has been.

    >>> after_import("json", lambda module: print(module.__name__))
    json
    """
    if (module := sys.modules.get(name)) is not None:
        function(module)
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.functions.setdefault(name, []).append(function)

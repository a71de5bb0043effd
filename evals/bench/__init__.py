"""Loads and runs benchmarks: one file per benchmark, named as the benchmark.

Each file defines `run(options) -> Result`, a table to read and one JSON object, and may define
`DEFAULTS` in place of those of `BenchmarkOptions`. Variants that are compared are measured in the
same run. A benchmark asserts nothing; correctness is checked by the tests.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from pkgutil import ModuleInfo, iter_modules
from types import ModuleType
from typing import Any

from kvcap.evals.reports import environment, grid
from kvcap.runtime.errors import IN_A_CHECKOUT


@dataclass(frozen=True)
class BenchmarkOptions:
    """Settings of a benchmark; each benchmark reads those that its docstring names."""

    lengths: Sequence[int] = (8192, 32768)  # tokens of a prompt
    budgets: Sequence[int] = (1024,)
    policies: Sequence[str] = ("keydiff",)
    block_size: int = 128
    repeats: int = 3
    steps: int = 64  # tokens decoded
    evictions: int = 10_000
    layers: int = 8
    hidden: int = 512
    starts: Sequence[int] = ()  # words of prompts for new processes
    depths: Sequence[int] = (0,)  # tokens read before decoding
    threads: Sequence[int] = (1,)
    clients: int = 64
    conversations: int = 1000
    kills: int = 100
    model: str = "random-360m"
    weights: Sequence[str] = ("int8",)
    backend: str | None = None  # pytorch or onnxruntime; None: as suits the weights
    vs: Sequence[str] = ()  # programs that run beside kvcap
    peer_pythons: Mapping[str, str] = field(default_factory=dict)  # interpreters by peer
    files: Path = Path("out/cpu")  # folder of models, exports and GGUF files
    text: Path | None = None  # a file whose perplexity is measured


@dataclass(frozen=True)
class Result:
    """The result of a benchmark: rows, the columns that a table prints, and derived figures."""

    name: str
    columns: Sequence[str]
    rows: Sequence[dict[str, Any]]
    derived: dict[str, Any]

    def table(self) -> str:
        """Return the rows as a table."""
        rows = [[_cell(row[column]) for column in self.columns] for row in self.rows]
        return "\n".join(grid(self.columns, rows))

    def csv(self) -> str:
        """Return all rows as CSV with a header; a cell that is no number or word is JSON."""
        text = StringIO()
        writer = csv.DictWriter(text, list(self.rows[0]) if self.rows else self.columns)
        writer.writeheader()
        for row in self.rows:
            nested = {name: json.dumps(v) for name, v in row.items() if isinstance(v, dict)}
            writer.writerow({**row, **nested})
        return text.getvalue().rstrip()

    def as_dict(self) -> dict[str, Any]:
        """Return the result as one object of JSON."""
        return {
            "bench": self.name,
            **environment("cpu"),
            **self.derived,
            "rows": list(self.rows),
        }


def benchmarks() -> dict[str, ModuleInfo]:
    """Return the modules of all benchmarks by name, with those of the lab where that is."""
    packages = [__name__, *(["kvcap.lab.bench"] if find_spec("kvcap.lab") else [])]
    modules = (m for p in packages for m in iter_modules(import_module(p).__path__, f"{p}."))
    return {m.name.rpartition(".")[2].replace("_", "-"): m for m in modules}


def load(name: str) -> Callable[[BenchmarkOptions], Result]:
    """Import the benchmark of that name; return its `run`.

    Raises:
        ValueError: there is no such benchmark.
    """
    if name not in benchmarks():
        others = "" if find_spec("kvcap.lab") else f"; any other {IN_A_CHECKOUT}"
        known = ", ".join(sorted(benchmarks()))
        raise ValueError(f"no benchmark is called {name!r}; known: {known}{others}")
    run: Callable[[BenchmarkOptions], Result] = _module(name).run
    return run


def options_for(name: str, given: Mapping[str, Any]) -> BenchmarkOptions:
    """Return the options `given`, with the benchmark's defaults for all others."""
    return BenchmarkOptions(**{**getattr(_module(name), "DEFAULTS", {}), **given})


def _module(name: str) -> ModuleType:
    return import_module(benchmarks()[name].name)


def _cell(value: Any) -> str:
    if isinstance(value, dict):  # percentiles
        return f"{_cell(value['p50'])} ({_cell(value['p20'])}–{_cell(value['p80'])})"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"

"""Declares the options that several measuring commands take, and reads what they are given."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvcap.runtime.cli.declare import argument, option

if TYPE_CHECKING:
    from rich.progress import Progress

USED = (
    "Use this model: a repository of the hub, a directory, a GGUF file, smollm2, a chat "
    "model that is downloaded once, or pocket, pocket-plain or pocket-text, which are built in."
)
MODEL: Any = argument("pocket", USED)
THREADS: Any = option(
    None, "Compute with N threads of the CPU (all cores by default).", min=1, panel="Device"
)
SEED: Any = option(0, "Make the same texts and facts with the same N.", panel="Texts")
DTYPE: Any = option(
    None,
    "Compute in float32, bfloat16 or float16, also written fp32, bf16, fp16, half (the "
    "checkpoint's type by default).",
    metavar="NAME",
    panel="Model",
)
DEVICE: Any = option(
    None, "Run on cpu, cuda or mps (the best there is by default).", metavar="NAME", panel="Device"
)
JSON: Any = option(False, "Print one JSON document.", panel="Output")


def names_of(text: str) -> tuple[str, ...]:
    """Return the names that commas separate."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers_of(option: str, text: str) -> tuple[int, ...]:
    """Return the whole numbers that commas separate.

    Raises:
        ValueError: one is none; the message names the option.
    """
    try:
        return tuple(int(part.replace("_", "")) for part in names_of(text))
    except ValueError as error:
        raise ValueError(f"--{option} {text!r}: give whole numbers, such as 128,256") from error


@dataclass(frozen=True)
class BenchOptions:
    """The options of `kvcap bench`, of which each benchmark reads those that its file names."""

    heading: ClassVar = "Measure"
    STARTING: ClassVar[tuple[str, ...]] = ()
    """Names benchmarks that take several counts of threads, for the processes that they start."""
    READ: ClassVar[dict[str, Any]] = {  # how options are read, where they are no single value
        "lengths": partial(numbers_of, "lengths"),
        "budgets": partial(numbers_of, "budgets"),
        "threads": partial(numbers_of, "threads"),
        "policies": names_of,
    }

    lengths: str | None = option(
        None,
        "Read texts of so many tokens; numbers separated by commas (each benchmark has its own "
        "default).",
        "--lengths",
        "-p",
        metavar="TOKENS",
        panel="Texts",
    )
    budgets: str | None = option(
        None,
        "Keep so many slots per KV head; numbers separated by commas (each benchmark "
        "has its own default).",
        metavar="SLOTS",
        panel="Memory",
    )
    policies: str | None = option(
        None,
        "Measure these policies, separated by commas, or all (each benchmark has its own default).",
        metavar="NAMES",
        panel="Measure",
    )
    block_size: int | None = option(
        None, "Read N tokens at once (each benchmark has its own default).", panel="Memory"
    )
    repeats: int | None = option(
        None,
        "Measure every row N times, or on N texts (each benchmark has its own default).",
        "--repeats",
        "-r",
        panel="Measure",
    )
    steps: int | None = option(
        None,
        "Decode N tokens (each benchmark has its own default).",
        "--steps",
        "-n",
        panel="Measure",
    )
    layers: int | None = option(
        None, "Give the random model of prefill N layers (8 by default).", panel="Model"
    )
    hidden: int | None = option(
        None,
        "Give the random model of prefill a hidden size of N, a multiple of 64 (512 by default).",
        panel="Model",
    )
    threads: str | None = option(
        None,
        "Compute with so many threads of the CPU (all cores by default).",
        "--threads",
        "-t",
        metavar="COUNTS",
        panel="Device",
    )
    output: Literal["md", "json", "csv"] | None = option(
        None,
        "Print only a table (md), an object (json) or all rows (csv).",
        "--output",
        "-o",
        panel="Output",
    )
    rows: Path | None = option(
        None, "Write the rows as a JSON list here, too.", metavar="FILE", panel="Output"
    )

    def given(self) -> dict[str, Any]:
        """Return what was given, as `BenchmarkOptions` has it.

        Raises:
            ValueError: an option cannot be read; the message names it.
        """
        return {
            name: self.READ[name](value) if name in self.READ else value
            for name, value in vars(self).items()
            if value is not None and name not in ("output", "rows")
        }

    def run(self, name: str) -> None:
        """Run a benchmark, and print what it found.

        Raises:
            ValueError: there is none of this name, or an option is wrong.
        """
        from kvcap.evals.bench import load, options_for
        from kvcap.runtime.cli.commands import quiet_libraries, use_threads

        quiet_libraries()
        given = self.given()
        counts = given.get("threads")
        if counts and (min(counts) < 1 or (len(counts) > 1 and name not in self.STARTING)):
            raise ValueError(f"--threads {self.threads}: give one count of at least 1")
        if name not in self.STARTING:
            use_threads(counts[0] if counts else None)
        result = load(name)(options_for(name, given))
        if self.rows is not None:
            self.rows.write_text(json.dumps(list(result.rows), indent=1) + "\n")
        if self.output in (None, "md"):
            print(result.table())
        if self.output == "csv":
            print(result.csv())
        if self.output in (None, "json"):
            print(json.dumps(result.as_dict()))


@contextmanager
def progress_bar(*columns: str, off: bool = False) -> Iterator[Progress]:
    """Show a live line on stderr, if that is a terminal, and remove it after the work."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    shown = [BarColumn(bar_width=24), *(TextColumn(c) for c in columns), TimeRemainingColumn()]
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    shown.append(TimeElapsedColumn())
    off = off or not console.is_interactive  # where it would print an empty line at every stop
    with Progress(*shown, console=console, transient=True, disable=off) as progress:
        yield progress


def note(text: str) -> None:
    """Write a line to stderr."""
    print(f"kvcap: {text}", file=sys.stderr, flush=True)

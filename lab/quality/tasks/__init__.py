"""Defines quality tasks: one file per task, named as the task.

To add a task, add a file that defines all names of `Task`. A task is English text, and knows no
cache and no policy. A prompt that a task writes has exactly the requested number of tokens, so that
samples can be read in one batch; a prompt from a user's file may have fewer.

A file may also define `from_file(path) -> Task`, which makes the task `NAME:PATH`; with a second
argument, `NAME/PART:PATH` is a part of it, such as one set of a benchmark. Such a task may define
`draw(tokenizer, length, count, seed)`, which returns all samples at once, and `digest`, which
differs for different contents of the file.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from random import Random
from typing import Any, Protocol, cast

from kvcap.evals.quality.prompts import Sample, drawn

GROUPS = {  # names that stand for several tasks
    "ruler": (
        "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2",
        "niah_multikey_3", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe",
    ),
}  # fmt: skip


class Task(Protocol):
    """A module that defines a task: one file of this folder.

    It may also define `UNIT`, a name in `scores.UNITS` ('share' by default), and `PLACED`, whether
    it uses `depth` (true by default).
    """

    MAX_NEW_TOKENS: int
    """Limits the tokens of an answer.

    With 0, nothing is asked, and a sample's score is the loss of its text.
    """

    def make(self, rng: Random, tokenizer: Any, length: int, depth: float) -> Sample:
        """Make a sample whose prompt has exactly `length` tokens (`prompt_ids`).

        Args:
            rng: the only source of randomness.
            tokenizer: the model's tokenizer.
            length: tokens of the prompt.
            depth: place of the answer in the text, 0 (start) to 1 (end).

        Raises:
            ValueError: the length is too short; the message names one that works.
        """
        ...

    def score(self, sample: Sample, reply: str) -> float:
        """Return how well `reply` answers the question, 0 to 1; not called if nothing is asked."""
        ...


def tasks() -> dict[str, Task]:
    """Return every task that makes its own samples, by name."""
    return {name: cast(Task, task) for name, task in _modules().items() if hasattr(task, "make")}


def files() -> list[str]:
    """Return the names of tasks that need a file, `NAME:PATH`."""
    return [name for name, task in _modules().items() if not hasattr(task, "make")]


@cache
def _modules() -> dict[str, Any]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}


def spelled_out(names: Iterable[str]) -> list[str]:
    """Return every task once, with groups such as 'ruler' replaced by the names of their tasks."""
    return list(dict.fromkeys(task for name in names for task in GROUPS.get(name, (name,))))


@cache
def load_task(name: str) -> Task:
    """Load a task by name; `NAME:PATH` is that of a user's file, `NAME/PART:PATH` a part of it.

    Raises:
        ValueError: there is no such task (the message names the nearest one), or it takes no file,
            or needs one.
        OSError: the file cannot be read.
    """
    given, _, path = name.partition(":")
    name, _, part = given.partition("/")
    if name not in _modules():
        known = dict.fromkeys([*_modules(), *GROUPS])
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        raise ValueError(f"no task is called {name!r}; {hint}")
    task = _modules()[name]
    if hasattr(task, "make") and not path and not part:
        return cast(Task, task)
    if not hasattr(task, "from_file"):
        raise ValueError(f"task {name!r} reads no file; give it without what follows its name")
    return cast(Task, task.from_file(path, part) if part else task.from_file(path))


def with_data(names: Iterable[str], path: str | None) -> list[str]:
    """Return the names of tasks, with `path` added to those that need a file and name none.

    Raises:
        ValueError: `path` is given, and no task needs it.
    """
    given = list(names)
    if path is None:
        return given
    takes = [":" not in name and name.partition("/")[0] in files() for name in given]
    if not any(takes):
        raise ValueError(f"--data {path}: no task of this sweep takes it; {', '.join(files())} do")
    return [f"{name}:{path}" if yes else name for name, yes in zip(given, takes, strict=True)]


def unit_of(task: Task) -> str:
    """Return the unit of a task's scores: a name in `scores.UNITS`."""
    return str(getattr(task, "UNIT", "share"))


def is_placed(task: Task) -> bool:
    """Return whether a task puts the answer at a depth."""
    return bool(getattr(task, "PLACED", True))


def make_samples(
    name: str,
    tokenizer: Any,
    length: int,
    count: int,
    seed: int,
    depth: float | None = None,
    threads: int = 1,
) -> list[Sample]:
    """Make a task's samples, as `drawn` does, or as the task draws them itself.

    Raises:
        ValueError: the length is too short for the task, which is named.
    """
    task = load_task(name)
    if draw := getattr(task, "draw", None):
        return cast(list[Sample], draw(tokenizer, length, count, seed))
    return drawn(name, task.make, tokenizer, length, count, seed, depth, threads)

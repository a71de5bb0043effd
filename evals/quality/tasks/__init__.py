"""Quality tasks: one file per task, and the file's name is the task's name.

To add a task, add a file with `MAX_NEW_TOKENS`, `make` and `is_right` (see `Task`). A task is
English text and knows no cache and no policy. Every sample's prompt has exactly the tokens asked
for, so that samples can be read in one batch.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, Protocol, cast

from kvcap.runtime.session.messages import render

GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Sample:
    """A text, a question below it in the same user message, and the answer."""

    context: str
    question: str
    answer: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation to be answered."""
        return [{"role": "user", "content": f"{self.context}\n\n{self.question}"}]


class Task(Protocol):
    """What a task's file defines."""

    MAX_NEW_TOKENS: int
    """Tokens an answer may take."""

    def make(self, rng: Random, tokenizer: Any, length: int, depth: float) -> Sample:
        """A sample whose prompt has exactly `length` tokens (`prompt_ids`).

        Args:
            rng: the only source of chance.
            tokenizer: the model's.
            length: tokens.
            depth: where in the text what is asked for should stand, 0 (start) to 1 (end).

        Raises:
            ValueError: the length is too short, naming one that works.
        """
        ...

    def is_right(self, sample: Sample, reply: str) -> bool:
        """Whether `reply` answers the question."""
        ...


@cache
def tasks() -> dict[str, Task]:
    """Every task by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: cast(Task, importlib.import_module(f"{__name__}.{name}")) for name in names}


def load_task(name: str) -> Task:
    """The task of that name.

    Raises:
        ValueError: no such task; the nearest one is named.
    """
    if name not in tasks():
        close = difflib.get_close_matches(name, tasks(), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(tasks())}"
        raise ValueError(f"no task is called {name!r}; {hint}")
    return tasks()[name]


def make_samples(name: str, tokenizer: Any, length: int, count: int, seed: int) -> list[Sample]:
    """`count` samples; the first ones stay the same when more are asked for.

    Depths start at random and step by the golden ratio: few samples are spread evenly too.
    """
    task, key = load_task(name), f"{name}/{length}/{seed}"
    start = Random(key).random()
    return [
        task.make(Random(f"{key}/{i}"), tokenizer, length, (start + i * GOLDEN) % 1)
        for i in range(count)
    ]


def prompt_ids(tokenizer: Any, sample: Sample) -> list[int]:
    """The token ids that the model reads, chat template and opening of the answer included."""
    text = render(tokenizer, sample.messages)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids

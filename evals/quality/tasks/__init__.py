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
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, Protocol, cast

from kvcap.evals.quality.cells import Question
from kvcap.runtime.session.messages import common_prefix, common_suffix, render

GOLDEN = (5**0.5 - 1) / 2
GROUPS = {  # names that stand for several tasks
    "ruler": (
        "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2",
        "niah_multikey_3", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A text with a question below it in the same user message, and the accepted answers."""

    context: str
    question: str
    answers: tuple[str, ...]
    joint: str = "\n\n"  # the text between the context and the question
    opening: str = ""  # the beginning of the answer, which the model continues
    cue: str = ""  # the opening in plain text, which has no turn mark before an answer
    chat: bool = True  # whether to use the model's chat template, if it has one
    ids: tuple[int, ...] | None = None  # tokens of the prompt, for a task that asks nothing
    before: tuple[tuple[str, str], ...] = ()  # earlier messages: role and content

    @property
    def messages(self) -> list[dict[str, str]]:
        """Return the conversation to be answered."""
        last = ("user", f"{self.context}{self.joint}{self.question}")
        return [{"role": role, "content": content} for role, content in (*self.before, last)]

    @property
    def plain(self) -> str:
        """Return the text that a model without a chat template continues, as in RULER.

        Several messages are written as a dialogue, one per line.
        """
        if self.before:
            turns = [f"{role.capitalize()}: {content}\n" for role, content in self.before]
            return f"{''.join(turns)}User: {self.messages[-1]['content']}\nAssistant:{self.opening}"
        begun = self.opening or self.cue
        gap = " " if begun and not begun[0].isspace() else ""
        return f"{self.messages[-1]['content']}{gap}{begun}"


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
    """Make `count` samples; a larger `count` adds samples, and leaves the first ones the same.

    All are at one `depth`. By default depths start at random and step by the golden ratio, so that
    even few samples are spread evenly. `threads` threads make them.

    Raises:
        ValueError: the length is too short for the task, which is named.
    """
    task, key = load_task(name), f"{name}/{length}/{seed}"
    if draw := getattr(task, "draw", None):
        return cast(list[Sample], draw(tokenizer, length, count, seed))
    start = Random(key).random()
    depths = [(start + i * GOLDEN) % 1 if depth is None else depth for i in range(count)]

    def make(i: int) -> Sample:
        try:
            return task.make(Random(f"{key}/{i}"), tokenizer, length, depths[i])
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith(name) else f"{name}: {text}") from error

    first = [make(i) for i in range(min(1, count))]  # reads files that all need, once
    with ThreadPoolExecutor(threads) as pool:
        return first + list(pool.map(make, range(1, count)))


def has_template(tokenizer: Any) -> bool:
    """Return whether a model has a chat template; a base model has none."""
    return bool(getattr(tokenizer, "chat_template", None))


def tokens_to_say(tokenizer: Any, sample: Sample) -> int:
    """Return how many tokens suffice to name all answers of a sample in a list or a sentence."""
    listed = f" {', '.join(sample.answers)}"
    return 16 + 2 * len(tokenizer(listed, add_special_tokens=False)["input_ids"])


def prompt_ids(tokenizer: Any, sample: Sample) -> list[int]:
    """Return the token ids of a prompt, with the chat template and the answer's opening."""
    if sample.ids is not None:
        return list(sample.ids)
    return _encode(tokenizer, sample, _text(tokenizer, sample))


def prompt_parts(
    tokenizer: Any, sample: Sample, question: Question | None
) -> tuple[list[int], ...]:
    """Return the token ids of a prompt in parts that are read one after another.

    There is one part, or two if the question comes `after` the context: the same tokens, split
    before the first one that has a letter of the question.

    Raises:
        ValueError: there is no context, or the text of the chat template does not have the
            question.
    """
    ids = prompt_ids(tokenizer, sample)
    if question != "after":
        return (ids,)
    if not sample.context and not sample.before:
        raise ValueError(
            "--question after: this task has a question without a text before it; use --question "
            "aware"
        )
    before, question_text, _ = _around_question(tokenizer, sample)
    if not question_text:
        raise ValueError(
            "--question after: this sample's question is not in what the chat template writes; "
            "use --question aware"
        )
    # A token across the border has letters of the question, so it belongs to the question.
    split = common_prefix(_encode(tokenizer, sample, before), ids)
    return ids[:split], ids[split:]


def _around_question(tokenizer: Any, sample: Sample) -> tuple[str, str, str]:
    """Return a prompt's text before the question, the question, and the rest; '' where it lacks."""
    text, question = _text(tokenizer, sample), sample.question.strip()
    end = len(text) - len(sample.opening)
    before, separator, rest = text[:end].rpartition(question) if question else (text, "", "")
    return before, separator, rest + text[end:]


def answer_start(tokenizer: Any, sample: Sample, ids: Sequence[int]) -> int:
    """Return where in a prompt the question has ended, and what prepares the answer begins."""
    _, question, rest = _around_question(tokenizer, sample)
    if not question:
        return len(ids)
    behind = tokenizer(rest, add_special_tokens=False)["input_ids"]
    return len(ids) - common_suffix(ids, behind)


def _in_chat(tokenizer: Any, sample: Sample) -> bool:
    """Return whether a sample's prompt is written by the chat template."""
    return sample.chat and has_template(tokenizer)


def _text(tokenizer: Any, sample: Sample) -> str:
    if not _in_chat(tokenizer, sample):
        return sample.plain
    return render(tokenizer, sample.messages) + sample.opening


def _encode(tokenizer: Any, sample: Sample, text: str) -> list[int]:
    """Return token ids of a sample's text; plain text gets the tokenizer's opening tokens."""
    special = not _in_chat(tokenizer, sample)
    ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    return ids

"""Writes a text with a question as a model is asked it: with its chat template, in one part or two.

English text and tokens only; knows no cache and no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from kvcap.runtime.session.messages import common_prefix, common_suffix, render

GOLDEN = (5**0.5 - 1) / 2
Question = Literal["aware", "after"]
PLAIN = (
    "{} has no chat template: it is asked in plain text, which ends with the beginning of the "
    "answer, and its answers are as long as naming what is asked for takes"
)


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


Make = Callable[[Random, Any, int, float], Sample]
"""Makes a sample: its random numbers, the tokenizer, tokens of its prompt, depth of the answer."""


def drawn(
    name: str,
    make: Make,
    tokenizer: Any,
    length: int,
    count: int,
    seed: int,
    depth: float | None = None,
    threads: int = 1,
) -> list[Sample]:
    """Make `count` samples; a larger `count` adds samples, and leaves the first ones the same.

    All are at one `depth`. By default depths start at random and step by the golden ratio, so that
    even few samples are spread evenly. `threads` threads make them. Of a file that a task reads its
    name counts, and not its folder, so that every machine draws alike.

    Raises:
        ValueError: the length is too short for the task, which is named.
    """
    task, colon, path = name.partition(":")
    key = f"{task}{colon}{Path(path).name}/{length}/{seed}"
    start = Random(key).random()
    depths = [(start + i * GOLDEN) % 1 if depth is None else depth for i in range(count)]

    def made(i: int) -> Sample:
        try:
            return make(Random(f"{key}/{i}"), tokenizer, length, depths[i])
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith(name) else f"{name}: {text}") from error

    first = [made(i) for i in range(min(1, count))]  # reads files that all need, once
    with ThreadPoolExecutor(threads) as pool:
        return first + list(pool.map(made, range(1, count)))


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

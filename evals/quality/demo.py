"""Runs the demo: states facts in a chat, reads a long text in fixed memory, and asks for the facts.

Everything goes through `Session.send`, like a user's turns: the model acknowledges each message,
and questions and answers take slots, too. A demo of recall asks twice from one saved state: once
with evicted text read again, once without.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, files
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

from kvcap.evals.quality.text import has_word, names_no_other, number_facts
from kvcap.evals.reports import environment
from kvcap.pocket.facts import Fact
from kvcap.pocket.prose import filler
from kvcap.runtime.backends.llamacpp.runtime import LlamaRuntime
from kvcap.runtime.cores import usable_cores
from kvcap.runtime.recall.settings import DEFAULT
from kvcap.runtime.session.engine import Engine
from kvcap.runtime.session.session import Session

TURN_TOKENS = 1000  # filler tokens of one message
REPLY_TOKENS = 12  # most tokens of the model's acknowledgements
ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Question:
    """A question at the end of the demo, with its answer."""

    question: str
    expected: str
    answer: str
    found: bool  # whether the expected value is in the answer
    right: bool  # whether it is, and its sentence names no other fact


@dataclass(frozen=True)
class DemoReport:
    """The result of a demo; tokens are counted per KV head and layer, bytes over all layers."""

    model: str
    recall: float  # share of right answers
    tokens: int  # tokens read and written in all
    filler_tokens: int  # tokens between the facts and the questions
    seconds: float
    positions: str
    seed: int
    kv: dict[str, Any]  # the session's figures after the last answer
    questions: list[Question]
    recalled: list[Question]  # the same ones, asked with recall; empty if they were not
    environment: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as one object of JSON."""
        row = asdict(self)
        measured_on = row.pop("environment")
        return {**row, **measured_on}


class Demo:
    """A demonstration in one session: states facts, reads a text, and asks for the facts.

    Args:
        runtime: the model and its cap.
        tokens: tokens of filler to read.
        facts: number of facts.
        seed: seed of facts and text.
        text: the text in sentences or paragraphs; None: filler.
        recall: whether all questions are also asked with recall.
    """

    def __init__(
        self,
        runtime: Engine,
        *,
        tokens: int,
        facts: int = 16,
        seed: int = 0,
        text: Iterator[str] | None = None,
        recall: bool = False,
    ) -> None:
        if tokens < 0 or facts < 1:
            raise ValueError(f"tokens={tokens}, facts={facts}: give 0 or more, and 1 or more")
        self.tokens, self.seed = tokens, seed
        rng = Random(f"demo/{seed}")
        self.facts = number_facts(rng, facts)
        self._sentences = text or filler(rng)
        self._recalls = recall
        self._order = rng.sample(self.facts, facts)
        self.runtime = runtime
        self.session: Session = runtime.session(seed=seed)
        self.session.recall.limit = 0  # so that answers come from the cache alone
        self.read = 0  # filler tokens so far, with turn marks and acknowledgements
        self._reading_since = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Return the filler tokens read per second so far."""
        return self.read / (time.perf_counter() - self._reading_since)

    def run(
        self,
        on_progress: Callable[[Demo], None] = lambda _: None,
        on_answer: Callable[[Question], None] = lambda _: None,
    ) -> DemoReport:
        """Run all three parts.

        Args:
            on_progress: called after every block of filler.
            on_answer: called after every answer without recall.
        """
        start = time.perf_counter()
        # An acknowledgement that is cut short within a number would be recalled as another one.
        limit = ANSWER_TOKENS if self._recalls else REPLY_TOKENS
        for fact in self.facts:
            self._say(f"Please remember: {fact.key} is {fact.value}.", limit)
        self._read(on_progress)
        recalled = self._ask_with_recall() if self._recalls else []
        questions = []
        for fact in self._order:
            questions.append(self._ask(fact))
            on_answer(questions[-1])
        return self._report(questions, recalled, time.perf_counter() - start)

    def _ask_with_recall(self) -> list[Question]:
        """Ask all questions with recall, and go back to before them."""
        with tempfile.TemporaryDirectory() as folder:
            state = Path(folder, "session")
            self.session.save(state)
            self.session.recall.set(DEFAULT)
            recalled = [self._ask(fact) for fact in self._order]
            self.session.restore(state)
        self.session.recall.limit = 0
        return recalled

    def _read(self, on_progress: Callable[[Demo], None]) -> None:
        session = self.session
        before = session.stats.seen_tokens
        self._reading_since = time.perf_counter()

        def count(*_: int) -> None:
            self.read = session.stats.seen_tokens - before
            on_progress(self)

        session.on_block = count
        while (left := self.tokens - self.read) > 0:
            self._say(" ".join(self._turn(min(left, TURN_TOKENS))), REPLY_TOKENS)
            if not self._recalls:
                session.messages.clear()  # the text itself would make memory grow
            count()
        session.on_block = None

    def _turn(self, tokens: int) -> Iterator[str]:
        """Yield sentences of about `tokens` tokens, at least one."""
        while tokens > 0:
            sentence = next(self._sentences)
            tokens -= len(self.session.encode(sentence)) or 1
            yield sentence

    def _ask(self, fact: Fact) -> Question:
        answer = self._say(fact.question, ANSWER_TOKENS).strip()
        has_value = has_word(answer, fact.value)
        return Question(
            fact.question,
            fact.answer,
            answer,
            has_value,
            has_value and names_no_other(answer, fact),
        )

    def _say(self, text: str, limit: int) -> str:
        self.session.set_generation(do_sample=False, max_new_tokens=limit)
        return "".join(self.session.send(text))

    def _report(
        self, questions: list[Question], recalled: list[Question], seconds: float
    ) -> DemoReport:
        runtime, stats = self.runtime, self.session.stats
        names = ("policy", "budget_tokens", "held_tokens", "waiting_tokens", "evicted_tokens")
        sizes = ("bytes", "cap_bytes", "peak_bytes")
        return DemoReport(
            model=runtime.name,
            recall=sum(q.right for q in questions) / len(questions),
            tokens=stats.seen_tokens,
            filler_tokens=self.read,
            seconds=round(seconds, 2),
            positions=runtime.plan.positions,
            seed=self.seed,
            kv={name: getattr(stats, name) for name in (*names, *sizes)},
            questions=questions,
            recalled=recalled,
            environment=_environment(runtime),
        )


def _environment(runtime: Engine) -> dict[str, Any]:
    if isinstance(runtime, LlamaRuntime):
        library = {"library": runtime.gguf.library.label}
        return {**environment("cpu", runtime.threads or len(usable_cores())), **library}
    model: Any = getattr(runtime, "model")  # noqa: B009  # PyTorch's, which an engine need not have
    return environment(model.device)


def licences() -> Iterator[str]:
    """Yield the paragraphs of the licences of kvcap and NumPy, which are installed, in a circle.

    Raises:
        ValueError: they were installed without their licences.
    """
    paragraphs = []
    for package in ("kvcap", "numpy"):
        try:
            listed = files(package) or []
        except PackageNotFoundError:  # kvcap, run from its folder
            continue
        for file in listed:
            if file.stem == "LICENSE" and re.search(r"(dist-info|licenses)$", str(file.parent)):
                text = file.read_text(encoding="utf-8")
                paragraphs += [" ".join(x.split()) for x in re.split(r"\n\s*\n", text)]
    if not paragraphs:
        raise ValueError("NumPy is installed without its licence; install it anew by pip")
    return cycle(filter(None, paragraphs))

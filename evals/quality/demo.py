"""Runs the demo: states facts in a chat, reads a long text in fixed memory, and asks for the facts.

Everything goes through `Session.send`, like a user's turns: the model acknowledges each message,
and questions and answers take slots, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from kvcap.evals.quality.text import has_word, names_no_other, number_facts
from kvcap.evals.reports import environment
from kvcap.pocket.corpus import Fact, filler
from kvcap.runtime.backends.pytorch.runtime import Runtime

TURN_TOKENS = 1000  # filler tokens of one message
REPLY_TOKENS = 12  # most tokens of the model's acknowledgements
ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Question:
    """A question that is asked at the end, with its answer."""

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
    """

    def __init__(self, runtime: Runtime, *, tokens: int, facts: int = 16, seed: int = 0) -> None:
        if tokens < 0 or facts < 1:
            raise ValueError(f"tokens={tokens}, facts={facts}: give 0 or more, and 1 or more")
        self.tokens, self.seed = tokens, seed
        rng = Random(f"demo/{seed}")
        self.facts = number_facts(rng, facts)
        self._sentences = filler(rng)
        self._order = rng.sample(self.facts, facts)
        self.runtime, self.session = runtime, runtime.session(seed=seed)
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
            on_answer: called after every answer.
        """
        start = time.perf_counter()
        for fact in self.facts:
            self._say(f"Please remember: {fact.key} is {fact.value}.", REPLY_TOKENS)
        self._read(on_progress)
        asked = []
        for fact in self._order:
            asked.append(self._ask(fact))
            on_answer(asked[-1])
        return self._report(asked, time.perf_counter() - start)

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
        found = has_word(answer, fact.value)
        return Question(
            fact.question, fact.answer, answer, found, found and names_no_other(answer, fact)
        )

    def _say(self, text: str, limit: int) -> str:
        self.session.set_generation(do_sample=False, max_new_tokens=limit)
        return "".join(self.session.send(text))

    def _report(self, asked: list[Question], seconds: float) -> DemoReport:
        runtime, stats = self.runtime, self.session.stats
        names = ("policy", "budget_tokens", "held_tokens", "waiting_tokens", "evicted_tokens")
        sizes = ("bytes", "cap_bytes", "peak_bytes")
        return DemoReport(
            model=runtime.name,
            recall=sum(q.right for q in asked) / len(asked),
            tokens=stats.seen_tokens,
            filler_tokens=self.read,
            seconds=round(seconds, 2),
            positions=runtime.plan.positions,
            seed=self.seed,
            kv={name: getattr(stats, name) for name in (*names, *sizes)},
            questions=asked,
            environment=environment(runtime.model.device),
        )

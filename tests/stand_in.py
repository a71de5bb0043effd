"""Stands in for conversations with a model: records requests, and answers by a test's script."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvcap.runtime.session.tool_calls import Parsed, parsed_text
from kvcap.serve.contract import Ask, Figures, Piece, Usage
from kvcap.serve.model_facts import ModelFacts
from kvcap.serve.tool_calls import cut_call


@dataclass
class Script:
    """The script of the next answers."""

    pieces: Iterable[str | Piece] = ("Hel", "lo", " there")
    reason: str = "stop"
    refused: Exception | None = None  # raised by `submit`
    early: Exception | None = None  # raised instead of a first piece
    at_end: Exception | None = None  # raised after the last piece
    wait_s: float = 0.0  # seconds before each piece


class Answer:
    """A reply, which is `closed` once its reader closes it."""

    def __init__(self, ask: Ask, script: Script) -> None:
        self.ask, self.script = ask, script
        self.session_id = ask.session_id or ("made-up" if ask.prompt is None else None)
        self.finish_reason: Any = None
        self.usage: Usage | None = None
        self.parsed: Parsed | None = None
        self.closed = False
        self.given = 0
        self._left = iter(script.pieces)

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Piece:
        await asyncio.sleep(self.script.wait_s)
        if self.closed:
            raise StopAsyncIteration
        if self.script.early is not None:
            raise self.script.early
        for piece in self._left:
            self.given += 1
            given = Piece(piece) if isinstance(piece, str) else piece
            written = given.completion_tokens or self.given
            return given._replace(prompt_tokens=11, completion_tokens=written, reused_tokens=4)
        if self.script.at_end is not None:
            raise self.script.at_end
        self.finish_reason = self.script.reason
        if self.ask.tools:
            text = "".join(x if isinstance(x, str) else x.text for x in self.script.pieces)
            answer_index = (1, self.ask.number)
            self.parsed = parsed_text(text, text, self.ask.tools).with_ids(answer_index)
            if self.ask.must_call:
                self.parsed = cut_call(self.parsed, answer_index)
        self.usage = Usage(
            11,
            4,
            self.given,
            held=9,
            waiting=2,
            evicted=6,
            cap_bytes=4096,
            recalled_tokens=5,
            recalled_passages=1,
        )
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed = True


@dataclass
class StandIn:
    """A stand-in for the scheduler, which keeps every request in `answers`."""

    script: Script = field(default_factory=Script)
    answers: list[Answer] = field(default_factory=list)
    saved: bool = False
    model: ModelFacts = field(default_factory=ModelFacts)

    def submit(self, ask: Ask) -> Answer:
        if self.script.refused is not None:
            raise self.script.refused
        self.answers.append(Answer(ask, self.script))
        return self.answers[-1]

    @property
    def request(self) -> Ask:
        return self.answers[-1].ask

    async def encode(self, ask: Ask, *, special: bool = True) -> list[int]:
        self.answers.append(Answer(ask, self.script))
        return [1, 2, 3] if special else [2, 3]

    async def decode(self, tokens: Any) -> str:
        return f"{len(tokens)} tokens"

    async def strip(self, owner: str, session_id: str) -> Any:
        raise NotImplementedError

    async def delete(self, owner: str, session_id: str) -> None:
        raise NotImplementedError

    def figures(self) -> Figures:
        return Figures(
            policy="keydiff",
            asked=len(self.answers),
            waiting=3,
            closing=self.saved,
            model=self.model,
        )

    async def aclose(self) -> None:
        self.saved = True

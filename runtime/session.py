"""One conversation in a fixed amount of memory: turns in, streamed text out, figures kept."""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

from kvcap.runtime.engine import OnFull
from kvcap.runtime.errors import EmptyPrompt
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.pins import message_spans, system_span
from kvcap.runtime.stats import Stats, Turn
from kvcap.runtime.text import Message, TextStream, render, render_turn

if TYPE_CHECKING:
    from kvcap.runtime.engine import Engine

MAX_NEW_TOKENS = 512


class Session:
    """A conversation over one cache. Made by `Runtime.session`; knows no library that runs models.

    >>> from kvcap import Runtime
    >>> session = Runtime.from_pretrained("pocket", kv_budget_tokens=256).session()
    >>> print("".join(session.send("Hello!")))  # doctest: +SKIP
    """

    def __init__(
        self,
        runtime: Engine,
        system: str | None = None,
        seed: int | None = None,
        generation: Any = None,
    ) -> None:
        self.runtime = runtime
        self.system = system
        self.messages: list[Message] = []
        self.generation = copy.deepcopy(generation or runtime.generation)
        self.turn = Turn()
        self.on_block: Callable[[int, int], None] | None = None
        """Called while a prompt is read: (tokens read, tokens of the prompt)."""
        self.pinned: set[int] = set()
        """Which of `messages` are never evicted."""
        self.pin_system = False
        """Whether the system prompt is never evicted, from the next time it is read."""
        self._unread: list[int] = []  # the last token said, until it is read
        self._unread_since = 0  # what the cache had seen when it was said
        self._warned = False  # that positions are beyond what the model was trained on
        self.seed = seed
        self.draws = runtime.draws(seed)
        self._loop = runtime.loop()

    @property
    def cache(self) -> Any:
        """The conversation's cache, of the backend's own kind."""
        return self._loop.cache

    @property
    def on_full(self) -> OnFull:
        """What happens when the budget is used up.

        'evict'; or 'stop', which ends the answer there; or 'error', which raises
        `MemoryCapExceeded`. With the last two nothing is ever evicted, and a message that does not
        fit is refused before any of it is read.
        """
        return self._loop.on_full

    @on_full.setter
    def on_full(self, value: OnFull) -> None:
        if value not in get_args(OnFull):
            raise ValueError(f"on_full is {value!r}; use one of {', '.join(get_args(OnFull))}")
        self._loop.on_full = value

    @property
    def stats(self) -> Stats:
        """Tokens, bytes and the last turn's timing, now."""
        cache, plan = self.cache, self.runtime.plan
        return Stats(
            policy=plan.policy,
            budget_tokens=plan.budget_tokens,
            seen_tokens=cache.seen,
            held_tokens=cache.held,
            evicted_tokens=cache.seen - cache.held,
            bytes=cache.used_bytes,
            cap_bytes=self.runtime.cap_bytes,
            peak_bytes=self._loop.peak_bytes,
            recomputed=cache.recomputed,
            execution=self._loop.execution,
            turn=self.turn,
        )

    @classmethod
    def load(cls, runtime: Engine, path: str | os.PathLike[str]) -> Session:
        """The conversation saved in `path`, with memory of its own: a file may be loaded often.

        A larger budget takes it as it is. A smaller one evicts, by scores that need no queries,
        else the oldest tokens; so can another policy that needs nothing of the past it lacks.

        Raises:
            SessionFileCorrupt, SessionFileForeign, SessionFileNewer: it cannot be taken.
            PinsTooLarge: its pinned tokens do not fit the budget.
        """
        session = cls(runtime)
        session.restore(path)
        return session

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Become the conversation saved in `path`, or refuse as `load` does and stay as it is.

        A Ctrl-C takes effect afterwards, as in `save`.
        """
        with interrupts_deferred():
            self.runtime.restore(self, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save everything the conversation needs to go on as if nothing had been.

        The file is replaced whole or not at all.

        Raises:
            SessionNotSaved: it cannot be written; an earlier one is as it was.
            SessionBroken: a forward pass failed half-way.
        """
        with interrupts_deferred():
            self.runtime.save(self, path)

    @property
    def conversation(self) -> dict[str, Any]:
        """What was said and set, as a session's file keeps it."""
        return {
            "messages": self.messages,
            "system": self.system,
            "pinned": sorted(self.pinned),
            "pin_system": self.pin_system,
            "unread": self._unread,
            "unread_since": self._unread_since,
            "seed": self.seed,
        }

    def take(self, conversation: dict[str, Any], draws: Any) -> None:
        """Take over a `conversation` and the state of its draws."""
        self.messages, self.system = conversation["messages"], conversation["system"]
        self.pinned, self.pin_system = set(conversation["pinned"]), conversation["pin_system"]
        self._unread, self._unread_since = conversation["unread"], conversation["unread_since"]
        self.seed, self.draws, self.turn = conversation["seed"], draws, Turn()

    def send(self, text: str, *, pin: bool = False) -> Iterator[str]:
        """Say `text` and stream the answer; `pin` keeps it from ever being evicted.

        Where the cache is empty, as after `cache.reset()`, earlier messages are read again.
        Stopping early (closing the iterator, Ctrl-C) keeps what was said so far as the answer.

        Raises:
            EmptyPrompt: nothing to say.
            ChatTemplateMissing: the tokenizer cannot chat.
            MemoryCapExceeded: nothing may be evicted and the cap is reached.
            PinsTooLarge: pinned tokens need more slots than a head has.
        """
        if not text.strip():
            raise EmptyPrompt("the message is empty; write something to answer")
        tokenizer, message = self.runtime.tokenizer, {"role": "user", "content": text}
        if self.messages and not self.cache.seen:  # the cache is new, or was reset
            turn = render(tokenizer, [*self._opening, *self.messages, message])
        else:
            turn = render_turn(tokenizer, self.system, text, first=not self.cache.seen)
        ids = self._after_unread(self.encode(turn))
        self._loop.check_room(len(ids))
        messages = [*self.messages, message]
        pinned = self.pinned | ({len(self.messages)} if pin else set())
        self._pin(ids, messages, pinned, pin)
        yield from self._answer(ids, messages, pinned)

    def complete(self, text: str) -> Iterator[str]:
        """Read `text` as it is, without a chat template, and stream the continuation."""
        ids = self.encode(text, special=not self.cache.seen)
        if not ids:
            raise EmptyPrompt("the prompt is empty; give at least one token of text")
        ids = self._after_unread(ids)
        self._loop.check_room(len(ids))
        yield from self._generate(ids)

    def regenerate(self) -> Iterator[str]:
        """Answer the last message again, reading the conversation anew: evicted tokens are gone."""
        messages = list(self.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise EmptyPrompt("there is nothing to answer again; say something first")
        ids = self.encode(render(self.runtime.tokenizer, [*self._opening, *messages]))
        self.cache.reset()
        self._loop.check_room(len(ids))
        self._pin(ids, messages, self.pinned)
        yield from self._answer(ids, messages, self.pinned)

    def clear(self) -> None:
        """Forget the conversation; memory and settings stay."""
        self.cache.reset()
        self.messages.clear()
        self.pinned.clear()
        self.turn = Turn()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`; `special` lets the tokenizer add its opening token."""
        ids: list[int] = self.runtime.tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def _pin(
        self, ids: list[int], messages: list[Message], pinned: set[int], this: bool = False
    ) -> None:
        """Pin what is to stay of `ids`, which are read next: of all `messages`, or of one more."""
        if seen := self.cache.seen:
            self.cache.pin([(seen, seen + len(ids))] if this else [])
            return

        def written(some: Sequence[Message]) -> list[int]:
            return self.encode(render(self.runtime.tokenizer, some))

        spans = system_span(written, self.system) if self.pin_system and self.system else []
        self.cache.pin(spans + message_spans(written, self._opening, messages, pinned, ids))

    def _after_unread(self, ids: list[int]) -> list[int]:
        """`ids` behind the last token of an answer that was cut short, said but not yet read."""
        return self._unread + ids if self.cache.seen == self._unread_since else ids

    @property
    def _opening(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _answer(self, ids: list[int], messages: list[Message], pinned: set[int]) -> Iterator[str]:
        """Answer the last of `messages`, which are `ids`; none is without its answer after it."""
        said: list[str] = []
        try:
            self.messages, self.pinned = messages, pinned
            for piece in self._generate(ids):
                said.append(piece)
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": "".join(said)})

    def _generate(self, ids: list[int]) -> Iterator[str]:
        """Read `ids` and stream what follows; `self.turn` is filled as it goes."""
        config, runtime = self.generation, self.runtime
        sampler = runtime.sampler(config, self.draws)
        stream = TextStream(runtime.tokenizer, config.stop_strings or ())
        limit = config.max_new_tokens or MAX_NEW_TOKENS
        ends = _as_list(config.eos_token_id)
        turn = self.turn = Turn(prompt_tokens=len(ids))
        report = self.on_block
        prompt = runtime.ids(ids)
        start = time.perf_counter()
        logits = self._loop.prefill(prompt, report and (lambda done: report(done, len(ids))))
        # A penalty looks back at this turn only: the history of a conversation has no bound.
        history = prompt[:, -runtime.plan.budget_tokens :]
        while True:
            self._warn_beyond()
            token = sampler.next(logits, history)
            number: int = token.item()
            now = time.perf_counter()
            turn.completion_tokens += 1
            if turn.completion_tokens == 1:
                turn.ttft_s = now - start
            turn.decode_s = now - start - turn.ttft_s
            ended = number in ends
            self._unread, self._unread_since = [] if ended else [number], self.cache.seen
            if text := "" if ended else stream.put(number):
                yield text
            if ended or stream.stopped:
                turn.finish_reason = "stop"
                break
            if turn.completion_tokens >= limit:
                turn.finish_reason = "length"
                break
            if self.on_full == "stop" and not self.cache.spare:
                turn.finish_reason = "full"
                break
            history = runtime.joined(history, token)
            logits = self._loop.read(token[:, None])
        if text := stream.end():
            yield text

    def set_generation(self, **options: Any) -> None:
        """Change sampling from the next answer on: temperature, top_p, top_k, min_p, seed, ...

        Raises:
            ValueError: the value is refused.
        """
        if "seed" in options:
            self.seed = options.pop("seed")
            self.draws = self.runtime.draws(self.seed)
        if "temperature" in options:
            self.generation.do_sample = options["temperature"] > 0
        elif options.keys() & {"top_p", "top_k", "min_p"}:
            self.generation.do_sample = True
        self.generation.update(**options)

    def _warn_beyond(self) -> None:
        """Say once that true positions have left what the model was trained on."""
        runtime = self.runtime
        trained = runtime.trained_length
        if self._warned or runtime.plan.positions != "true" or self.cache.seen <= trained:
            return
        self._warned = True
        warnings.warn(
            f"position {self.cache.seen:,} is beyond the {trained:,} tokens that the model was "
            "trained on, so answers will suffer; compact positions stay within them",
            stacklevel=2,
        )


def _as_list(ids: Any) -> list[int]:
    if ids is None:
        return []
    return list(ids) if isinstance(ids, (list, tuple)) else [int(ids)]

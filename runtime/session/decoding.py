"""One answer: a prompt is read, tokens are drawn, their text is streamed. Knows no conversation."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kvcap.runtime.session import settings
from kvcap.runtime.session.text import TextStream

if TYPE_CHECKING:
    from kvcap.runtime.session.engine import Engine, Loop
    from kvcap.runtime.session.stats import Turn

MAX_NEW_TOKENS = 512


class Decoding:
    """Answers through one loop, one after the other.

    Args:
        engine: the model.
        loop: over the cache that prompts and answers are read into.
    """

    def __init__(self, engine: Engine, loop: Loop) -> None:
        self.engine, self.loop = engine, loop
        self._warned = False  # that positions are beyond what the model was trained on

    def check(self, config: Any, draws: Any, tokens: int, *, emptied: bool = False) -> None:
        """Refuse what cannot be answered; nothing is changed.

        Args:
            config: settings of generation.
            draws: random numbers.
            tokens: of the prompt.
            emptied: the cache is reset before it is read.

        Raises:
            ValueError: a setting that cannot be.
            UnsupportedModel: one that needs a cache which can be reordered.
            MemoryCapExceeded: nothing may be evicted, and the prompt does not fit.
            SessionBroken: a forward pass failed half-way.
        """
        settings.check(settings.given(config))
        self.engine.sampler(config, draws)
        self.loop.check_room(tokens, limit(config), emptied=emptied)

    def answer(
        self,
        ids: list[int],
        config: Any,
        draws: Any,
        turn: Turn,
        on_block: Callable[[int, int], None] | None,
    ) -> Iterator[str]:
        """Read `ids` and stream what follows; `turn` is filled as it goes.

        The last token said stays with the cache as `unread`.
        """
        engine, loop, cache = self.engine, self.loop, self.loop.cache
        sampler, most, ends = engine.sampler(config, draws), limit(config), settings.ends(config)
        stream = TextStream(engine.tokenizer, settings.stops(config))
        prompt = engine.ids(ids)
        start = time.perf_counter()
        logits = loop.prefill(prompt, on_block and (lambda done: on_block(done, len(ids))))
        turn.read_tokens = len(ids)
        # A penalty looks back at this turn only: the history of a conversation has no bound.
        history = prompt[:, -engine.plan.budget_tokens :]
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
            cache.unread = None if ended else (number, cache.seen)
            if text := "" if ended else stream.put(number):
                yield text
            if ended or stream.stopped:
                turn.finish_reason = "stop"
                break
            if turn.completion_tokens >= most:
                turn.finish_reason = "length"
                break
            if loop.on_full == "stop" and not cache.spare:
                turn.finish_reason = "full"
                break
            loop.check_room(1, most - turn.completion_tokens)
            history = engine.joined(history, token)
            logits = loop.read(token[:, None])
        if text := stream.end():
            yield text

    def _warn_beyond(self) -> None:
        """Say once that true positions have left what the model was trained on."""
        seen, trained = self.loop.cache.seen, self.engine.trained_length
        if self._warned or self.engine.plan.positions != "true" or seen <= trained:
            return
        self._warned = True
        warnings.warn(
            f"position {seen:,} is beyond the {trained:,} tokens that the model was trained on, so "
            "answers will suffer; compact positions stay within them",
            stacklevel=2,
        )


def limit(config: Any) -> int:
    """The most tokens of an answer."""
    return config.max_new_tokens or MAX_NEW_TOKENS

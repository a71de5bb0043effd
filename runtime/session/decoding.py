"""Makes one answer: reads a prompt, draws tokens and streams their text. Knows no conversation."""

from __future__ import annotations

import time
import warnings
from array import array
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from tokenizers.decoders import DecodeStream

from kvcap.runtime.session import settings
from kvcap.runtime.session.engine import Engine, Loop
from kvcap.runtime.session.stats import Turn

MAX_NEW_TOKENS = 512
UNKNOWN = -1


class Read(NamedTuple):
    """Asks for a token to be read, where somebody reads those of several answers at once.

    To be sent back: logits [1, V] of the next token; or its id, if that is the `likeliest` anyway.
    """

    token: int
    likeliest: bool


class BlockRead(NamedTuple):
    """Says that a block of the prompt was read, where several answers take turns."""

    tokens: int  # of the prompt, read so far


class Decoding:
    """Makes answers through one loop, one after the other.

    Args:
        engine: the model.
        loop: over the cache that prompts and answers are read into.
    """

    def __init__(self, engine: Engine, loop: Loop) -> None:
        self.engine, self.loop = engine, loop
        self.together = False
        """Tokens are asked for (`Read`) rather than read here, and prompts read by turns."""
        self.read_ids = array("i")
        """The tokens that the cache has read, and one that it has yet to: 4 bytes each."""
        self._warned = False  # of positions beyond what the model was trained on

    def check(self, config: Any, rng: Any, tokens: int, *, emptied: bool = False) -> None:
        """Refuse a prompt that cannot be answered; nothing is changed.

        Args:
            config: settings of generation.
            rng: random numbers.
            tokens: the length of the prompt.
            emptied: the cache is reset before the prompt is read.

        Raises:
            ValueError: a setting has a value that it cannot have.
            UnsupportedModel: a setting needs a cache that can be reordered.
            MemoryCapExceeded: nothing may be evicted, and the prompt does not fit.
            SessionBroken: a forward pass failed half-way.
        """
        settings.check(settings.as_dict(config))
        self.engine.sampler(config, rng)
        self.loop.check_room(tokens, answer_limit(config), emptied=emptied)

    def answer(
        self,
        ids: list[int],
        config: Any,
        rng: Any,
        turn: Turn,
        said: list[str],
        on_block: Callable[[int, int], None] | None,
    ) -> Generator[Any, Any, None]:
        """Read `ids` and stream the answer, whose pieces join `said`; fills in figures of `turn`.

        The last token drawn is not read; the cache keeps it as `unread`. Gives pieces of text, and
        if tokens are read `together`, a `BlockRead` after every block of the prompt but the last
        and a `Read` for every token.
        """
        engine, loop, cache = self.engine, self.loop, self.loop.cache
        sampler, most = engine.sampler(config, rng), answer_limit(config)
        ends = settings.end_tokens(config)
        stream = TextStream(engine.tokenizer, settings.stop_strings(config))
        prompt = engine.token_ids(ids)
        self.read_ids = array("i", [*self.ids_read(cache.seen), *ids])
        start = time.perf_counter()
        for done, logits in loop.blocks(prompt):
            if on_block is not None:
                on_block(done, len(ids))
            if self.together and logits is None:
                yield BlockRead(done)
        turn.read_tokens = len(ids)
        # A penalty looks back at this turn only: the history of a conversation has no bound.
        history = prompt[:, -engine.plan.budget_tokens :]
        while True:
            self._warn_beyond()
            token: Any = None
            if isinstance(logits, int):
                number = logits
            else:
                token = sampler.next(logits, history)
                number = token.item()
            now = time.perf_counter()
            turn.completion_tokens += 1
            self.read_ids.append(number)
            if turn.completion_tokens == 1:
                turn.ttft_s = now - start
            turn.decode_s = now - start - turn.ttft_s
            ended = number in ends
            cache.unread = None if ended else (number, cache.seen)
            if text := "" if ended else stream.put(number):
                said.append(text)
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
            if token is None and not self.together:
                token = engine.token_ids([number])[0]
            if not sampler.likeliest:
                history = engine.append_token(history, token)
            if self.together:
                logits = yield Read(number, sampler.likeliest)
            else:
                logits = loop.read(token[:, None])
        if text := stream.end():
            said.append(text)
            yield text

    def ids_read(self, seen: int) -> list[int]:
        """The `seen` tokens that the cache has read; -1 for those that were read elsewhere."""
        return [*self.read_ids[:seen], *[UNKNOWN] * (seen - len(self.read_ids))]

    def _warn_beyond(self) -> None:
        """Warn once where true positions pass the length that the model was trained on."""
        seen, trained = self.loop.cache.seen, self.engine.trained_length
        if self._warned or self.engine.plan.positions != "true" or seen <= trained:
            return
        self._warned = True
        warnings.warn(
            f"position {seen:,} is beyond the {trained:,} tokens that the model was trained on, so "
            "answers will suffer; compact positions stay within them",
            stacklevel=2,
        )


def answer_limit(config: Any) -> int:
    """The most tokens that an answer may have."""
    return config.max_new_tokens or MAX_NEW_TOKENS


class TextStream:
    """Turns generated tokens into text piece by piece, and ends before a stop string.

    Text that may begin a stop string is held back until it is clear that it does not.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = [s for s in stop if s]
        self._held = ""
        self.stopped = False

    def put(self, token: int) -> str:
        """The text that is certain after this token, perhaps none."""
        self._held += self._decoder.step(self._tokenizer, token) or ""
        for stop in self._stop:
            head, found, _ = self._held.partition(stop)
            if found:
                self.stopped, self._held = True, ""
                return head
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return text

    def end(self) -> str:
        """The text that was still held back."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)

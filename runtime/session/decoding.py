"""Makes one answer: reads a prompt, draws tokens and streams their text. Knows no conversation."""

from __future__ import annotations

import copy
import math
import time
import warnings
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvcap.runtime.errors import TokenUnknown
from kvcap.runtime.session import settings
from kvcap.runtime.session.detokenizer import Detokenizer
from kvcap.runtime.session.engine import Engine, Loop
from kvcap.runtime.session.guide import Guide
from kvcap.runtime.session.logprobs import Logprob, Pending, TokenTexts
from kvcap.runtime.session.stats import Turn

MAX_NEW_TOKENS = 512
UNKNOWN = -1


class Read(NamedTuple):
    """Asks for a token to be read, where somebody reads those of several answers at once.

    To be sent back: logits [1, V] of the next token, or the id of the one that the sampler draws.
    """

    token: int
    sampler: Any = None
    """The engine's `Sampler` that may draw the next token; None: nobody else may."""
    ends: frozenset[int] | None = None
    """The next token is asked for in its turn unless it is one of these; None: that depends."""


class Insertion(NamedTuple):
    """Tokens that are read amid a prompt, and are only known once those before them are."""

    at: int  # tokens of the prompt that stand before them
    tokens: Callable[[], list[int]]
    prepare: Callable[[int], None]
    """Called with the tokens of the prompt that are read, after every block before them."""


class BlockRead(NamedTuple):
    """Says that a block of the prompt was read, where several answers take turns."""

    tokens: int  # of the prompt, read so far


@dataclass
class Written:
    """An answer as far as it was written."""

    pieces: list[str] = field(default_factory=list)  # of text
    tokens: list[int] = field(default_factory=list)  # without one that ended it
    logprobs: list[Logprob] = field(default_factory=list)  # of the tokens of `pieces`, if asked for
    prompt: Sequence[int] = ()  # the last tokens of what it answers
    place: int = 0  # of the answer among the conversation's messages
    held: bool = False  # to a JSON schema or a regular expression

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)


class Decoding:
    """Makes answers through one loop, one after the other.

    Args:
        engine: the model.
        loop: over the cache that prompts and answers are read into.
    """

    def __init__(self, engine: Engine, loop: Loop) -> None:
        self.engine, self.loop = engine, loop
        self.read_ids = array("i")
        """The tokens that the cache has read, and one that it has yet to: 4 bytes each."""
        self._warned = False  # of positions beyond what the model was trained on
        self._guide: tuple[Any, Guide] | None = None  # the last one, and what it was made from
        self._texts: TokenTexts | None = None

    def check(self, config: Any, rng: Any, ids: Sequence[int], *, emptied: bool = False) -> None:
        """Refuse a prompt that cannot be answered; nothing is changed.

        Args:
            config: settings of generation.
            rng: random numbers.
            ids: the tokens of the prompt.
            emptied: the cache is reset before the prompt is read.

        Raises:
            ValueError: a setting has a value that it cannot have.
            TokenUnknown: the model has no embedding of a token.
            UnsupportedModel: a setting needs a cache that can be reordered.
            SchemaRefused, ExtraMissing: answers cannot be held to the schema or expression.
            MemoryCapExceeded: nothing may be evicted, and the prompt does not fit.
            SessionBroken: a forward pass failed half-way.
        """
        settings.check(settings.as_dict(config))
        self.guide(settings.end_tokens(config), settings.shapes(config))
        self.engine.sampler(config, rng)
        self._check_known(ids)
        self.loop.check_room(len(ids), answer_limit(config), emptied=emptied)

    def _check_known(self, ids: Sequence[int]) -> None:
        """Refuse tokens that a tokenizer has beyond the model's embedding, such as added ones."""
        known, tokenizer = self.engine.vocabulary, self.engine.tokenizer
        if (largest := max(ids, default=0)) >= known:
            text = tokenizer.backend_tokenizer.id_to_token(largest)
            raise TokenUnknown(
                f"the text has {text!r}, token {largest:,} of the tokenizer, and the model has "
                f"embeddings of {known:,} tokens (0 to {known - 1:,}); leave it out of messages, "
                "or use the tokenizer that belongs to the model"
            )

    def guide(self, ends: frozenset[int], shapes: dict[str, Any]) -> Guide | None:
        """What holds answers to a schema or an expression; None: nothing does.

        Args:
            ends: the tokens that end an answer.
            shapes: those of the settings, by name; see `settings.shapes`.

        Raises:
            SchemaRefused, ExtraMissing: they cannot be held to it.
        """
        if not shapes:
            self._guide = None
            return None
        if self._guide is None or self._guide[0] != (ends, shapes):
            made = Guide(self.engine.tokenizer, ends, **shapes)
            self._guide = ((ends, copy.deepcopy(shapes)), made)
        return self._guide[1]

    def answer(
        self,
        ids: list[int],
        config: Any,
        rng: Any,
        turn: Turn,
        written: Written,
        on_block: Callable[[int, int], None] | None,
        insertion: Insertion | None = None,
    ) -> Generator[Any, Any, None]:
        """Read `ids` with an `insertion`, and stream the answer, which joins `written`.

        Fills in figures of `turn`. The last token drawn is not read; the cache keeps it as
        `unread`. Gives pieces of text, and where others have their turn, a `BlockRead` after every
        block of the prompt but the last and a `Read` for every token.
        """
        engine, loop, cache = self.engine, self.loop, self.loop.cache
        sampler, most = engine.sampler(config, rng), answer_limit(config)
        ends, stops = settings.end_tokens(config), settings.stop_strings(config)
        guide = self.guide(ends, settings.shapes(config))
        if guide is not None:
            guide.restart()
            ends |= guide.ends
        named = special_tokens(engine.tokenizer, stops)  # text streams leave these out
        noted = getattr(config, "logprobs", None)
        if noted is not None and self._texts is None:
            self._texts = TokenTexts(engine.tokenizer)
        pending = Pending(written.logprobs)
        start = time.perf_counter()
        for done, logits in self._blocks(ids, insertion, turn):
            if on_block is not None:
                on_block(done, turn.prompt_tokens)
            if loop.in_turns and logits is None:
                yield BlockRead(done)
        turn.read_tokens = turn.prompt_tokens
        stream = TextStream(engine.tokenizer, stops, self.read_ids)
        # A penalty looks back at this turn only: the history of a conversation has no bound.
        most_looked_at = min(turn.prompt_tokens, engine.plan.budget_tokens)
        history = engine.token_ids(list(self.read_ids[-most_looked_at:]))
        # Whoever reads tokens may draw the next one, too.
        free = sampler.recipe is not None and guide is None and noted is None
        drawing, foreseen = sampler if free else None, free and not stops and not loop.may_be_full
        while True:
            self._warn_beyond()
            token: Any = None
            begun: Callable[[], Any] | None = None
            if isinstance(logits, int):
                number = logits
            else:
                allowed = None if guide is None else guide.allowed()
                token = sampler.next(logits, history, allowed, written.tokens)
                number = token.item()
            now = time.perf_counter()
            turn.completion_tokens += 1
            self.read_ids.append(number)
            if turn.completion_tokens == 1:
                turn.ttft_s = now - start
            turn.decode_s = now - start - turn.ttft_s
            ended = number in ends or number in named
            cache.unread = None if ended else (number, cache.seen)
            if ended:
                turn.stop_string = named.get(number)
            else:
                written.tokens.append(number)
                # A device reads on while text is made and taken; the first is not to wait for it.
                ahead = foreseen and loop.lags and not loop.in_turns
                if ahead and 1 < turn.completion_tokens < most:
                    begun = _begin(loop, token[:, None])
                begins, place, text = stream.begins, stream.decoded, stream.put(number)
                if noted is not None:
                    assert self._texts is not None
                    likely = sampler.logprobs(logits, number, noted)
                    one = self._texts.noted(likely, begins=begins)
                    pending.add(one, place, max(place + 1, stream.decoded))
                    pending.give(stream.given, stopped=stream.stopped is not None)
                turn.stop_string = stream.stopped
                if guide is not None:
                    guide.take(number)
                if text:
                    written.pieces.append(text)
                    yield text
            if ended or stream.stopped is not None or (guide is not None and guide.complete):
                turn.finish_reason = "stop"
                break
            if turn.completion_tokens >= most:
                turn.finish_reason = "length"
                break
            if loop.on_full == "stop" and not cache.spare:
                turn.finish_reason = "full"
                break
            if loop.may_be_full:  # all else is checked as the token is read
                loop.check_room(1, most - turn.completion_tokens)
            if token is None and not loop.in_turns:
                token = engine.token_ids([number])[0]
            if sampler.recipe is None:
                history = engine.append_token(history, token)
            if begun is not None:
                logits = begun()
            elif loop.in_turns:
                last = turn.completion_tokens + 1 >= most
                logits = yield Read(number, drawing, ends if foreseen and not last else None)
            else:
                logits = loop.read(token[:, None])
        text = stream.end()
        if stream.stopped is None:
            pending.give(math.inf)
        else:  # perhaps only by this: a letter that was begun ends as U+FFFD
            turn.stop_string, turn.finish_reason = stream.stopped, "stop"
            pending.give(stream.given, stopped=True)
        if text:
            written.pieces.append(text)
            yield text

    def _blocks(
        self, ids: list[int], insertion: Insertion | None, turn: Turn
    ) -> Iterator[tuple[int, Any]]:
        """Read a prompt block by block, as `Loop.blocks` does; notes its tokens in `read_ids`."""
        loop, engine = self.loop, self.engine
        before = self.ids_read(loop.cache.seen)
        self.read_ids = array("i", [*before, *ids])
        done = 0
        if insertion is not None:
            # Of a few tokens none is evicted before a block is whole: they need no block alone.
            if insertion.at > engine.plan.block_size:
                for done, _ in loop.blocks(engine.token_ids(ids[: insertion.at])):
                    insertion.prepare(done)
                    yield done, None
            found = insertion.tokens()
            ids = [*ids[: insertion.at], *found, *ids[insertion.at :]]
            self.read_ids = array("i", [*before, *ids])
            turn.prompt_tokens, turn.recalled_tokens = len(ids), len(found)
        for more, logits in loop.blocks(engine.token_ids(ids[done:])):
            yield done + more, logits

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

    Args:
        tokenizer: decodes.
        stop: the strings.
        before: tokens that were read before, of which the last say how the text begins.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, before)
        self._stop = [s for s in stop if s]
        self._held = ""
        self.decoded = 0
        """Letters that the tokens so far stand for, held back or not."""
        self.given = 0
        """Letters that were given out."""
        self.stopped: str | None = None
        """The stop string that was found."""

    @property
    def begins(self) -> bool:
        """Return whether no text was read or written so far."""
        return self._detokenizer.begins

    def put(self, token: int) -> str:
        """The text that is certain after this token, perhaps none."""
        return self._take(self._detokenizer.put(token))

    def end(self) -> str:
        """The text that was still held back."""
        text = "" if self.stopped else self._take(self._detokenizer.end())
        return text + self._give(len(self._held))

    def _take(self, piece: str) -> str:
        """Add a piece; return what is certain of the text."""
        self.decoded += len(piece)
        self._held += piece
        found = [(place, stop) for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            place, self.stopped = min(found)
            return self._give(place, dropped=True)
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        return self._give(len(self._held) - keep)

    def _give(self, count: int, *, dropped: bool = False) -> str:
        """So many letters of what is held back; the others stay so, or are dropped."""
        text, self._held = self._held[:count], "" if dropped else self._held[count:]
        self.given += len(text)
        return text


def _begin(loop: Loop, ids: Any) -> Callable[[], Any]:
    """Begin to read a block; returns what gives its logits, or raises why it was not read."""
    try:
        logits = loop.read(ids)
    except Exception as error:
        failed = [error]

        def fail() -> Any:
            raise failed.pop()  # kept here it would keep itself, as its traceback has this frame

        return fail
    return lambda: logits


def special_tokens(tokenizer: Any, texts: Sequence[str]) -> dict[int, str]:
    """Those of the texts that are special tokens, by their ids."""
    if not texts:
        return {}
    known = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {id: token.content for id, token in known.items() if token.content in texts}


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)

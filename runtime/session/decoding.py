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

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.errors import LogitsBroken, TokenUnknown
from kvcap.runtime.session import settings
from kvcap.runtime.session.detokenizer import Detokenizer
from kvcap.runtime.session.engine import CacheCopy, Engine, Loop, TokenSampler
from kvcap.runtime.session.guide import Guide
from kvcap.runtime.session.listener import AnswerLimits, LeastTokens, Listener
from kvcap.runtime.session.logprobs import Logprob, Logprobs, TokenTexts
from kvcap.runtime.session.stats import FinishReason, Turn
from kvcap.runtime.session.thoughts import Thoughts

MAX_NEW_TOKENS = 512
UNKNOWN = -1


class Step(NamedTuple):
    """A step of an answer: a piece of its text, or a token that it asks to be read.

    One that has neither says that a block of the prompt was read, and the next one is to be.
    """

    text: str = ""
    token: int | None = None
    """Asks for this token to be read. The logits [1, V] behind it are sent back, or the next token
    if `sampler` has drawn it, or the error that kept it from being read.
    """
    sampler: Any = None
    """Holds the sampler by which a batch may draw the next token; None: a batch may not."""
    ends: frozenset[int] | None = None
    """Holds the tokens that end the answer, so that any other one is read next; None: unknown."""


class Pieces(Iterator[str]):
    """An iterator that yields an answer's text; a `Batch` goes through its `steps` instead.

    Closing it, or dropping it, stops the answer.
    """

    def __init__(self, steps: Generator[Step, Any, None]) -> None:
        self.steps, self.close = steps, steps.close

    def __next__(self) -> str:
        try:
            for step in self.steps:
                if step.text:
                    return step.text
        except BaseException:
            self.close()  # a Ctrl-C may come between its steps
            raise
        raise StopIteration


class Insertion(NamedTuple):
    """A gap in a prompt, whose tokens are known only once those before it are read."""

    at: int  # tokens of the prompt that stand before them
    tokens: Callable[[], list[int]]
    prepare: Callable[[int], None]
    """Holds a function called after every block before the gap, with the tokens read so far."""


class SharedPrefix(NamedTuple):
    """The first tokens of a prompt, which other conversations may begin with as well.

    They are read as a step of their own, or what a cache held behind them is copied: so the rest
    is read in the same blocks either way.
    """

    tokens: int
    find: Callable[[], CacheCopy | None]
    keep: Callable[[Callable[[], CacheCopy]], None]
    """Holds a function that is called behind the prefix with one that copies the cache."""


@dataclass
class Written:
    """A record that grows with an answer as it is written."""

    pieces: list[str] = field(default_factory=list)  # of text
    tokens: list[int] = field(default_factory=list)  # without one that ended it
    logprobs: list[Logprob] = field(default_factory=list)  # of the tokens of `pieces`, if asked for
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # of the prompt's, likewise
    prompt: Sequence[int] = ()  # the last tokens of what it answers
    place: tuple[int, int] = (0, 0)  # among the messages, and the conversation's `number`
    held: bool = False  # True: the answer is held to a JSON schema or a regular expression

    @property
    def text(self) -> str:
        """Return the pieces joined."""
        return "".join(self.pieces)


class Decoding:
    """A maker of answers that reads prompts and draws tokens through one loop.

    Args:
        engine: the model.
        loop: over the cache that prompts and answers are read into.
    """

    def __init__(self, engine: Engine, loop: Loop) -> None:
        self.engine, self.loop = engine, loop
        self.read_ids = array("i")
        """Holds the tokens that the cache has read, and one that it is yet to read."""
        self._warned = False  # True once it has compared positions beyond the trained length
        self._guide: tuple[Any, Guide] | None = None  # the last one, and what it was made from

    def check(
        self, config: Any, ids: Sequence[int], *, emptied: bool = False, freed: int = 0
    ) -> None:
        """Refuse a prompt that cannot be answered, and change nothing.

        Args:
            config: settings of generation.
            ids: the tokens of the prompt.
            emptied: the cache is reset before the prompt is read.
            freed: slots that are freed before the prompt is read.

        Raises:
            ValueError: a setting has a value that it cannot have.
            TokenUnknown: the model has no embedding of a token.
            UnsupportedModel: a setting needs a cache that can be reordered.
            SchemaRefused, ExtraMissing: answers cannot be held to the schema or expression.
            MemoryCapExceeded: nothing may be evicted, and the prompt does not fit.
            SessionBroken: a forward pass failed half-way.
        """
        settings.check(settings.as_dict(config))
        self.guide(settings.end_tokens(config), settings.forms(config))
        self.engine.sampler(config, None)
        self._check_known(ids)
        if (token := max(settings.biases(config), default=0)) >= self.engine.vocabulary:
            raise ValueError(
                f"logit_bias names token {token:,}, and the model has tokens up to "
                f"{self.engine.vocabulary - 1:,}"
            )
        self._check_scored(config)
        budget, most = getattr(config, "thinking_budget", None) or 0, answer_limit(config)
        if budget and most and budget >= most:
            raise ValueError(
                f"thinking_budget={budget} leaves no token of an answer of at most {most:,} "
                "(max_new_tokens); lower it, or raise max_new_tokens"
            )
        self.loop.check_room(len(ids), most, emptied=emptied, freed=freed)

    def _check_known(self, ids: Sequence[int]) -> None:
        """Refuse tokens that a tokenizer has beyond the model's embedding, such as added ones."""
        vocabulary, tokenizer = self.engine.vocabulary, self.engine.tokenizer
        if (largest := max(ids, default=0)) >= vocabulary:
            backend = tokenizer.backend_tokenizer
            named = f"token {largest:,}"
            if largest < backend.get_vocab_size():
                named = f"{backend.id_to_token(largest)!r}, {named} of the tokenizer"
            raise TokenUnknown(
                f"the text has {named}, and the model has embeddings of {vocabulary:,} tokens "
                f"(0 to {vocabulary - 1:,}); leave it out of messages, or use the tokenizer that "
                "belongs to the model"
            )

    def _check_scored(self, config: Any) -> None:
        """Refuse log probabilities of a prompt's tokens where memory is not planned for them."""
        if getattr(config, "prompt_logprobs", None) is None:
            return
        if getattr(self.engine, "memory_cap", None) is not None:
            raise ValueError(
                "prompt_logprobs need the logits of whole blocks, for which a memory cap plans no "
                "memory; leave it out, or give a KV budget instead"
            )
        if not hasattr(self.loop, "read_every"):
            raise ValueError(
                "prompt_logprobs need the logits of all tokens, which this backend does not give; "
                "use --backend torch"
            )

    def guide(self, ends: frozenset[int], forms: dict[str, Any]) -> Guide | None:
        """Return the guide that holds answers to a schema or an expression, or None.

        Args:
            ends: the tokens that end an answer.
            forms: those of the settings, by name; see `settings.forms`.

        Raises:
            SchemaRefused, ExtraMissing: they cannot be held to it.
        """
        if not forms:
            self._guide = None
            return None
        if self._guide is None or self._guide[0] != (ends, forms):
            guide = Guide(self.engine.tokenizer, ends, **forms)
            self._guide = ((ends, copy.deepcopy(forms)), guide)
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
        prefix: SharedPrefix | None = None,
    ) -> Generator[Step, Any, None]:
        """Read `ids` with an `insertion` behind a `prefix`, draw an answer, add it to `written`.

        While the model thinks, the prompt leaves the cache last; thoughts that are closed go first.
        Fills in the figures of `turn`. The last token drawn is not read; the cache keeps it as
        `unread`. Yields pieces of text and blocks of the prompt, and in a `Batch` every token that
        is to be read.
        """
        engine, cache, most = self.engine, self.loop.cache, answer_limit(config)
        sampler, stops = engine.sampler(config, rng), settings.stop_strings(config)
        guide = self.guide(settings.end_tokens(config), settings.forms(config))
        start = time.perf_counter()
        top, logits = getattr(config, "prompt_logprobs", None), None
        blocks = (
            self._blocks(ids, insertion, prefix, turn)
            if top is None
            else self._scored(ids, sampler, top, written.prompt_logprobs)
        )
        for done, logits in blocks:
            if on_block is not None:
                on_block(done, turn.prompt_tokens)
            if logits is None:
                yield Step()
        turn.read_tokens = turn.prompt_tokens
        self._check_numbers(logits)
        least = getattr(config, "min_tokens", None) or 0
        stream = TextStream(engine.tokenizer, stops, self.read_ids, least)
        listeners = self._listeners(config, sampler, guide, stream, written, turn.prompt_tokens)
        ends = dict.fromkeys(
            settings.end_tokens(config).union(*(listener.ends for listener in listeners))
        )
        ends |= special_tokens(engine.tokenizer, stops)  # streams of text leave these out
        if least:
            listeners.append(LeastTokens(least, frozenset(ends), engine.vocabulary))
        # A penalty looks back at this turn only: the history of a conversation has no bound.
        most_looked_at = min(turn.prompt_tokens, engine.plan.budget_tokens)
        history = engine.token_ids(list(self.read_ids[-most_looked_at:]))
        source = TokenSource(
            engine, self.loop, sampler, listeners, frozenset(ends), most, history, written.tokens
        )
        reason: FinishReason | None = None if most else "length"
        while reason is None:
            self._warn_beyond()
            number = source.draw(logits)
            turn.count_token(time.perf_counter() - start)
            self.read_ids.append(number)
            cache.unread = None if number in ends else (number, cache.seen)
            if number in ends:
                turn.stop_string, reason = ends[number], "stop"
                break
            written.tokens.append(number)
            source.begin()
            for listener in listeners:
                reason = listener.token(number, logits) or reason
            turn.stop_string = stream.stopped
            if stream.piece:
                written.pieces.append(stream.piece)
                yield Step(stream.piece)
            if reason is None:
                logits = yield from source.read()
        turn.finish_reason = reason
        for listener in listeners:
            turn.finish_reason = listener.finish() or turn.finish_reason
        turn.stop_string = stream.stopped or turn.stop_string
        if stream.piece:
            written.pieces.append(stream.piece)
            yield Step(stream.piece)

    def _listeners(
        self,
        config: Any,
        sampler: TokenSampler,
        guide: Guide | None,
        stream: TextStream,
        to: Written,
        read: int,
    ) -> list[Listener]:
        """Choose the listeners of an answer; of their reasons to end it the last one counts.

        `read` tokens of a prompt were read for it.
        """
        listeners: list[Listener] = [AnswerLimits(answer_limit(config), self.loop), stream]
        if (top := getattr(config, "logprobs", None)) is not None:
            texts = TokenTexts(self.engine.tokenizer)
            listeners.append(Logprobs(to.logprobs, sampler, top, texts, stream))
        if guide is not None:
            guide.restart()
            listeners.append(guide)
        budget = getattr(config, "thinking_budget", None)
        regions, seen = self.loop.cache.regions, self.loop.cache.seen

        listeners.append(
            Thoughts(
                self.engine.tokenizer,
                to.prompt,
                budget,
                lambda first: regions.open_thoughts((seen - read, seen), seen + first),
                lambda stop: regions.close_thoughts(seen + stop),
            )
        )
        return listeners

    def _blocks(
        self,
        ids: list[int],
        insertion: Insertion | None,
        prefix: SharedPrefix | None,
        turn: Turn,
    ) -> Iterator[tuple[int, Any]]:
        """Read a prompt block by block, as `Loop.blocks` does; note its tokens in `read_ids`."""
        loop, engine = self.loop, self.engine
        before = self.ids_read(loop.cache.seen)
        self.read_ids = array("i", [*before, *ids])
        done = 0
        if prefix is not None:
            for done in self._prefix_blocks(ids, prefix, turn):
                yield done, None
        if insertion is not None:
            # Fewer tokens than a block evict few, so they are read with those behind the gap.
            first = done
            if insertion.at - first > engine.plan.block_size:
                for more, _ in loop.blocks(engine.token_ids(ids[first : insertion.at])):
                    done = first + more
                    insertion.prepare(done)
                    yield done, None
            recalled = insertion.tokens()
            ids = [*ids[: insertion.at], *recalled, *ids[insertion.at :]]
            self.read_ids = array("i", [*before, *ids])
            turn.prompt_tokens, turn.recalled_tokens = len(ids), len(recalled)
        for more, logits in loop.blocks(engine.token_ids(ids[done:])):
            yield done + more, logits

    def _prefix_blocks(self, ids: list[int], prefix: SharedPrefix, turn: Turn) -> Iterator[int]:
        """Read the prefix of a prompt, or copy it; yield the tokens read so far."""
        shared = prefix.find()
        if shared is not None:
            self.loop.go_on_from(shared)
            turn.copied_tokens = prefix.tokens
            yield prefix.tokens
            return
        for done, _ in self.loop.blocks(self.engine.token_ids(ids[: prefix.tokens])):
            yield done
        prefix.keep(self.loop.copied)

    def _scored(
        self, ids: list[int], sampler: TokenSampler, top: int, noted: list[Logprob]
    ) -> Iterator[tuple[int, Any]]:
        """Read a prompt as `_blocks` does, and note how likely each of its tokens was.

        The first of a text has no token before it, and so no probability.
        """
        loop: Any = self.loop  # of a backend that gives all logits
        texts, begins = TokenTexts(self.engine.tokenizer), not loop.cache.seen
        self.read_ids = array("i", [*self.ids_read(loop.cache.seen), *ids])
        loop.check_room(len(ids))
        done, last = 0, None
        while done < len(ids):
            block = ids[done : done + loop.cache.room]
            logits = loop.read_every(self.engine.token_ids(block))  # [1, T, V]
            for index, token in enumerate(block):
                before = logits[:, index - 1] if index else last
                if before is None:
                    noted.append(texts.noted([(token, None)], begins=begins))
                    continue
                likely = sampler.logprobs(before, token, top)
                noted.append(texts.noted(likely))
            done, last = done + len(block), copy.deepcopy(logits[:, -1])
            yield done, last if done == len(ids) else None

    def ids_read(self, seen: int) -> list[int]:
        """Return the ids of the `seen` tokens that the cache has read; -1: not known."""
        return [*self.read_ids[:seen], *[UNKNOWN] * (seen - len(self.read_ids))]

    def _check_numbers(self, logits: Any) -> None:
        """Refuse to draw from logits [1, V] that are no numbers, as damaged weights give them.

        Raises:
            LogitsBroken: the largest is NaN or infinite.
        """
        if logits is None or math.isfinite(float(logits.max())):
            return
        raise LogitsBroken(
            f"the model's logits are no numbers (NaN or infinite) behind {self.loop.cache.seen:,} "
            "tokens: its weights are damaged, or too large for the type that it computes in; fetch "
            "its files again, or give --dtype float32"
        )

    def _warn_beyond(self) -> None:
        """Warn once where positions pass the length that the model was trained on."""
        if self._warned or (seen := self.loop.cache.seen) <= self.engine.trained_length:
            return
        self._warned = True
        plan, trained = self.engine.plan, self.engine.trained_length
        if plan.positions == "true":
            advice = "compact positions stay within them"
        elif plan.budget_tokens > trained:
            advice = f"a budget of at most {trained:,} tokens keeps compact positions within them"
        else:
            return
        warnings.warn(
            f"position {seen:,} is beyond the {trained:,} tokens that the model was trained on, so "
            f"answers will suffer; {advice}",
            stacklevel=2,
        )


@dataclass
class TokenSource:
    """A source that draws the tokens of an answer, and has each one read to draw the next."""

    engine: Engine
    loop: Loop
    sampler: TokenSampler
    listeners: Sequence[Listener]
    ends: frozenset[int]  # tokens by which the model ends the answer
    most: int  # tokens that the answer may have
    history: Any  # token ids [1, T] before it, which a repetition penalty looks at
    tokens: Sequence[int]  # the answer's so far; whoever makes the answer adds to them
    _token: Any = None  # the last one as an array [1], if it was drawn here
    _begun: Any = None  # the result of reading it, if that has begun: logits, or an error

    def __post_init__(self) -> None:
        self._ending = any(listener.may_end for listener in self.listeners)

    @property
    def _free(self) -> bool:
        """Return whether whoever reads a token may draw the next one."""
        return self.sampler.recipe is not None and not any(x.reads_logits for x in self.listeners)

    @property
    def _certain(self) -> bool:
        """Return whether moreover the next token is read, unless it ends the answer."""
        return self._free and not self._ending

    def draw(self, result: Any) -> int:
        """Draw the next token from logits [1, V], or return the one that a batch has drawn."""
        if isinstance(result, int):
            self._token = None
            return result
        allowed: NDArray[np.bool_] | None = None
        for listener in self.listeners:
            mask = listener.allowed() if listener.reads_logits else None
            if allowed is not None and mask is not None:
                size = min(len(allowed), len(mask))
                both = allowed[:size] & mask[:size]
                mask = both if both.any() else None  # thoughts cannot be closed within a call
            allowed = allowed if mask is None else mask
        self._token = self.sampler.next(result, self.history, allowed, self.tokens)
        if self.sampler.recipe is None:
            self.history = self.engine.append_token(self.history, self._token)
        return int(self._token.item())

    def begin(self) -> None:
        """Begin to read the last token early, so that a device computes while the host writes.

        Not so for the first token, whose text must not wait, nor for the last, which is not read.
        """
        alone = self.loop.asynchronous and not self.loop.in_batch
        if self._certain and alone and 1 < len(self.tokens) < self.most:
            try:
                self._begun = self.loop.read(self._token[:, None])
            except Exception as error:
                self._begun = error

    def read(self) -> Generator[Step, Any, Any]:
        """Read the last token, or let a batch read it; return the input of the next `draw`.

        Raises:
            Exception: why it was not read; `MemoryCapExceeded` where nothing may be evicted for it.
        """
        loop, number, left = self.loop, self.tokens[-1], self.most - len(self.tokens)
        result, self._begun = self._begun, None
        if result is None:
            if loop.may_be_full:  # all else is checked as the token is read
                loop.check_room(1, left)
            if loop.in_batch:
                ends = self.ends if self._certain and left > 1 else None
                drawer = self.sampler if self._free else None
                result = yield Step(token=number, sampler=drawer, ends=ends)
            else:
                token = self.engine.token_ids([number])[0] if self._token is None else self._token
                result = loop.read(token[:, None])
        if isinstance(result, Exception):
            try:
                raise result
            finally:
                del result  # its traceback refers to this frame: a cycle would keep both alive
        return result


def answer_limit(config: Any) -> int:
    """Return the most tokens that an answer may have, its thoughts included."""
    if getattr(config, "only_read", None):
        return 0
    return config.max_new_tokens or MAX_NEW_TOKENS + (getattr(config, "thinking_budget", None) or 0)


class TextStream(Listener):
    """A listener that makes text of tokens piece by piece, and ends before a stop string.

    Text that may begin a stop string is held back until it is clear that it does not.

    Args:
        tokenizer: decodes.
        stop: the strings.
        before: tokens that were read before, of which the last say how the text begins.
        least: tokens in which a stop string does not count.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        before: Sequence[int] = (),
        least: int = 0,
    ) -> None:
        self._least = least
        self._detokenizer = Detokenizer(tokenizer, before)
        self._stop = [s for s in stop if s]
        self._held = ""
        self.decoded = 0
        """Holds how many letters the tokens so far stand for, held back or not."""
        self.given = 0
        """Holds how many letters were given out."""
        self.stopped: str | None = None
        """Holds the stop string that was found."""
        self.piece = ""
        """Holds the text that became certain with the last token; it may be empty."""
        self.may_end = bool(self._stop)

    @property
    def begins(self) -> bool:
        """Return whether no text was read or written so far."""
        return self._detokenizer.begins

    def token(self, number: int, logits: Any) -> FinishReason | None:
        """Turn the next token into text, up to a stop string."""
        self.piece = self.put(number)
        return None if self.stopped is None else "stop"

    def finish(self) -> FinishReason | None:
        """Give the text still held back; an incomplete letter in it may complete a stop string."""
        self.piece = self.end()
        return None if self.stopped is None else "stop"

    def put(self, token: int) -> str:
        """Take a token; return the text that is certain after it, which may be empty."""
        self._least -= 1
        return self._take(self._detokenizer.put(token))

    def end(self) -> str:
        """Return the text that was held back, since no token follows."""
        text = "" if self.stopped else self._take(self._detokenizer.end())
        return text + self._give(len(self._held))

    def _take(self, piece: str) -> str:
        """Add a piece to the text held back; return the part that belongs to no stop string."""
        self.decoded += len(piece)
        self._held += piece
        if self._least >= 0:
            return self._give(len(self._held))
        matches = [(offset, stop) for stop in self._stop if (offset := self._held.find(stop)) >= 0]
        if matches:
            offset, self.stopped = min(matches)
            return self._give(offset, dropped=True)
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        return self._give(len(self._held) - keep)

    def _give(self, count: int, *, dropped: bool = False) -> str:
        """Return the first `count` letters held back; keep the rest held back, or drop it."""
        text, self._held = self._held[:count], "" if dropped else self._held[count:]
        self.given += len(text)
        return text


def special_tokens(tokenizer: Any, texts: Sequence[str]) -> dict[int, str]:
    """Return the texts that are special tokens, by their ids."""
    if not texts:
        return {}
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {id: token.content for id, token in added.items() if token.content in texts}


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest ending of `text` with which `stop` begins."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)

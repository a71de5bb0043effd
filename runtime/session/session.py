"""Holds a conversation in fixed memory: takes messages, streams answers, keeps figures."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args
from weakref import ref

from kvcap.runtime.cache.pinned_slots import clipped, covered, merged
from kvcap.runtime.cache.regions import within
from kvcap.runtime.errors import (
    ChatTemplateMissing,
    EmptyPrompt,
    MemoryCapExceeded,
    MessagesInvalid,
    SessionNotSaved,
)
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.recall.recall import Passage
from kvcap.runtime.session import settings
from kvcap.runtime.session.decoding import (
    Decoding,
    Insertion,
    Pieces,
    SharedPrefix,
    Step,
    Written,
)
from kvcap.runtime.session.detokenizer import Detokenizer
from kvcap.runtime.session.encoding import check_letters, encode_with
from kvcap.runtime.session.engine import Engine, recall_of
from kvcap.runtime.session.logprobs import Logprob
from kvcap.runtime.session.messages import (
    ChatWriter,
    checked_messages,
    checked_tools,
    common_prefix,
    common_suffix,
    first_tokens,
    message_spans,
    result_spans,
    results_by_age,
    system_message,
    system_span,
)
from kvcap.runtime.session.prefixes import Prefixes, prefix_key
from kvcap.runtime.session.stats import FinishReason, Stats, Turn
from kvcap.runtime.session.template_forms import with_thoughts_closed
from kvcap.runtime.session.thoughts import mark_opened, with_marks
from kvcap.runtime.session.tool_calls import Parsed, parsed_by_template, parsed_text
from kvcap.runtime.types import Message, OnFull, SlotUse, Span, Tool

REREAD = "the conversation is read again with the next message"
PROMPT_SEEN = 256  # tokens of a prompt by which an answer is parsed


@dataclass(frozen=True)
class Transcript:
    """A record that has a conversation's messages, and says which of them are pinned."""

    messages: list[Message]
    system: str | None
    pinned: frozenset[int]  # indices of `messages`
    pin_system: bool
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt that was checked, to read next; the conversation changes only once it is read."""

    ids: list[int]
    transcript: Transcript | None  # the conversation once it is read; None: a text, no message
    spans: Sequence[Span]  # tokens to pin when it is read
    options: dict[str, Any] = field(default_factory=dict)  # of the chat template
    emptied: bool = False  # the cache is reset first, and the whole conversation read again
    reread: bool = False  # it begins with earlier messages, which are read again
    question: int | None = None  # index in `ids` in front of which evicted text is read again
    prefix: int = 0  # first tokens of `ids` that are looked for in `Session.prefixes`
    begin: str = ""  # text that the answer begins with, at the end of `ids`
    regions: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    """Holds tokens that leave the cache before or after others, by their kind; see `Regions`."""


class ReadBefore(NamedTuple):
    """A record of the tokens of a conversation as they are to be read once more."""

    ids: list[int]
    pins: list[Span]  # tokens of them that are pinned
    regions: dict[str, list[Span]]  # that leave before or after others, by kind


@dataclass(frozen=True)
class AnsweredPrompt:
    """A record of the prompt of the last answer, so that `regenerate` reads the same prompt."""

    transcript: Transcript  # without the answer
    options: dict[str, Any]  # of the chat template
    held: bool  # the answer was held to a form
    tokens: int  # that were read before the answer, recalled ones too
    begin: str = ""  # text that the answer began with


class Session:
    """A conversation that lives in one cache, made by `Runtime.session`.

    It works with any backend, since it imports no library that runs models.

    >>> from kvcap import Runtime
    >>> session = Runtime.from_pretrained("pocket", budget_tokens=256).session()
    >>> print("".join(session.send("Hello!")))  # doctest: +SKIP
    """

    def __init__(
        self,
        runtime: Engine,
        system: str | None = None,
        seed: int | None = None,
        generation: Any = None,
    ) -> None:
        check_letters(system or "")
        self.runtime = runtime
        self.system = system
        self.messages: list[Message] = []
        self.generation = settings.copied(generation or runtime.generation)
        self.turn: Turn | None = None
        """Holds the figures of the last answer, once it has begun; None before the first."""
        self.notice: str | None = None
        """Says what became of a message whose reading was cut short; else None."""
        self.on_block: Callable[[int, int], None] | None = None
        """Holds a function called while a prompt is read: (tokens read, tokens of the prompt)."""
        self.pinned: set[int] = set()
        """Holds the indices of `messages` that are never evicted."""
        self.pin_system = False
        """Says whether the system prompt is never evicted, from the next time that it is read."""
        self.files: dict[str, str | None] = {}
        """Maps files that the conversation was loaded from or saved in to their digests then."""
        self.tools: tuple[Tool, ...] = ()
        """Holds the tools that the model may call, once all is read again; see `send`."""
        self.number = 0
        """Says which of several conversations with these messages it is: ids of calls have it."""
        self.seed = settings.seeded(seed)
        self.loop = runtime.loop()
        """Holds the loop that reads into the conversation's cache."""
        self.cache_away: Callable[[], None] | None = None
        """Holds a function that brings the cache's content back from elsewhere, if it is there."""
        self.prefixes: Prefixes | None = None
        """Holds copies of caches behind system prompts, to begin conversations from; None: none."""
        plan = runtime.plan
        self.recall = recall_of(runtime, plan.budget_tokens, plan.recall_store)
        """Finds evicted text that a message asks about, to be read again in front of it."""
        self.recall.regions = self.loop.cache.regions
        self._decoding = Decoding(runtime, self.loop)
        self._unusual = False  # True: `loop` is not of the kind that the runtime makes
        self._open: ref[Generator[Step, Any, None]] | None = None  # the answer being written
        self._written = Written()  # the last answer
        self._read_with: dict[str, Any] = {}  # options of the chat template of the last message
        self._answered: AnsweredPrompt | None = None  # None: not known, or not read to its end

    def __repr__(self) -> str:
        plan, count = self.runtime.plan, len(self.messages)
        return (
            f"<Session of {self.runtime.name or 'a model'}: {count} message{'s' * (count != 1)}, "
            f"{plan.policy} holds {SlotUse.of(self.cache.held, plan.budget_tokens)}>"
        )

    @cached_property
    def rng(self) -> Any:
        """Return the conversation's random numbers, which greedy answers do without."""
        return self.runtime.rng(self.seed)

    @property
    def cache(self) -> Any:
        """Return the conversation's cache, of the backend's own kind."""
        self.fetch_cache()
        return self.loop.cache

    def fetch_cache(self) -> None:
        """Bring the conversation back into its own cache, if it is elsewhere."""
        if self.cache_away is not None:
            with interrupts_deferred():
                self.cache_away()
                self.cache_away = None

    def read_by(self, loop: Any) -> None:
        """Use another loop's cache, under the same settings, until `clear`."""
        if loop is self.loop:
            return
        self.fetch_cache()
        loop.on_full, loop.in_batch = self.loop.on_full, self.loop.in_batch
        loop.cache.guard = self.loop.cache.guard
        self.loop = self._decoding.loop = loop
        self.recall.regions = loop.cache.regions
        self._unusual = True

    @property
    def read_ids(self) -> list[int]:
        """Return the ids of the tokens that the cache has read, in order; -1: not known.

        Those of messages and answers are known, also in a conversation that was loaded.
        """
        return self._decoding.ids_read(self.loop.cache.seen)

    @property
    def on_full(self) -> OnFull:
        """Return what the session does when the budget is used up.

        'evict' evicts tokens, 'stop' ends the answer there, and 'error' raises `MemoryCapExceeded`.
        With the last two nothing is ever evicted, and a message that does not fit is refused
        before any of it is read.
        """
        return self.loop.on_full

    @on_full.setter
    def on_full(self, value: OnFull) -> None:
        if value not in get_args(OnFull):
            raise ValueError(f"on_full is {value!r}; use one of {', '.join(get_args(OnFull))}")
        self.loop.on_full = value

    @property
    def logprobs(self) -> list[Logprob]:
        """Return the log probability of each token of the last answer.

        Empty unless `set_generation(logprobs=N)` asks for each token with the N likeliest in its
        place, 0 to 20. It grows as the answer is streamed: a token is in it before the piece is
        given that has the end of its text. It is of the model's own distribution, as in OpenAI's
        API: temperature, penalties, a JSON schema and the other settings change only what is drawn.
        """
        return self._written.logprobs

    @property
    def parsed(self) -> Parsed:
        """Return the last answer as its text and the tools that it calls.

        It is parsed by the `response_template` of transformers' tokenizers where they have one,
        else by the forms of Hermes and Qwen, Llama 3 and Mistral; see `parsed_text`. An answer that
        was held to a JSON schema or a regular expression is in no tokenizer's form.
        """
        written, tokenizer = self._written, self.runtime.tokenizer
        if not written.pieces:
            last = self.messages[-1] if self.messages else {}
            if last.get("role") != "assistant":
                return Parsed("")
            if last.get("tool_calls"):
                return Parsed.of_message(last)
            return parsed_text(last["content"], last["content"], self.tools)
        whole = Detokenizer(tokenizer, written.prompt, special=True)
        raw = "".join(map(whole.put, written.tokens)) + whole.end()
        stop = self.turn.stop_string if self.turn is not None else None
        if stop is not None:
            raw = raw.partition(stop)[0]
        prompt = tokenizer.backend_tokenizer.decode(list(written.prompt), skip_special_tokens=False)
        parsed = None
        if not written.held:
            parsed = parsed_by_template(tokenizer, raw, prompt, self.tools)
        return (parsed or parsed_text(written.text, raw, self.tools)).with_ids(written.place)

    @property
    def prompt_logprobs(self) -> list[Logprob]:
        """Return the log probability of each token of the last prompt, the first's being None.

        Empty unless `set_generation(prompt_logprobs=N)` asks for them; see `logprobs`. A prompt's
        blocks are read with all logits then, for which a memory cap plans no memory.
        """
        return self._written.prompt_logprobs

    @property
    def thoughts_opened(self) -> str:
        """Return the mark by which the last prompt opened thoughts; "": it did not."""
        return mark_opened(self.runtime.tokenizer, self._written.prompt)

    @property
    def stats(self) -> Stats:
        """Return the conversation's current figures: tokens, bytes, and the last turn's timing."""
        cache, plan = self.cache, self.runtime.plan
        slots = SlotUse.of(cache.held, plan.budget_tokens)
        return Stats(
            policy=plan.policy,
            budget_tokens=plan.budget_tokens,
            seen_tokens=cache.seen,
            held_tokens=slots.held,
            waiting_tokens=slots.waiting,
            evicted_tokens=cache.seen - cache.held,
            bytes=cache.used_bytes,
            cap_bytes=self.runtime.cap_bytes,
            peak_bytes=max(self.loop.peak_bytes, cache.nbytes),
            recomputed=cache.recomputed,
            execution=self.loop.execution,
            turn=self.turn,
        )

    @property
    def graph_bytes(self) -> int:
        """Return the bytes of device memory that captured CUDA graphs hold besides the cache."""
        return self.loop.graph_bytes

    @classmethod
    def load(cls, runtime: Engine, path: str | os.PathLike[str]) -> Session:
        """Return the conversation saved in `path`, with a cache of its own.

        A larger budget takes it as it is. A smaller one evicts by the policy's scores, or where
        these need past queries, the oldest tokens. Another policy can take it over if it needs no
        figures of past tokens that the file lacks.

        Raises:
            SessionFileCorrupt, SessionFileForeign, SessionFileNewer: it cannot be taken.
            PinsTooLarge: its pinned tokens do not fit the budget.
        """
        session = cls(runtime)
        session.restore(path)
        return session

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Become the conversation saved in `path`, or refuse as `load` does and change nothing.

        A Ctrl-C takes effect afterwards, as in `save`.
        """
        from kvcap.runtime.session.file import digest_in  # NumPy stands behind it

        self._close()
        with interrupts_deferred():
            written = digest_in(path)
            self.runtime.restore(self, path)
            self.files[os.path.realpath(path)] = written

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save everything that the conversation needs to go on as if it had never stopped.

        The file is replaced whole or not at all.

        Raises:
            SessionNotSaved: it cannot be written, or others changed it since the conversation was
                loaded from it or saved in it; an earlier one is as it was.
            SessionBroken: a forward pass failed half-way.
        """
        from kvcap.runtime.session.file import digest_in  # NumPy stands behind it

        with interrupts_deferred():
            name = os.path.realpath(path)
            if name in self.files and digest_in(path) not in (None, self.files[name]):
                raise SessionNotSaved(
                    f"the session cannot be saved in {str(path)!r}, where another conversation was "
                    "saved meanwhile; give another file (in chat: /save FILE)"
                )
            self.runtime.save(self, path)
            self.files[name] = digest_in(path)

    @property
    def conversation(self) -> dict[str, Any]:
        """Return messages and settings as a session's file keeps them."""
        unread, answered = self._unread, self._answered
        return {
            "messages": self.messages,
            "system": self.system,
            "pinned": sorted(self.pinned),
            "pin_system": self.pin_system,
            "tools": list(self.tools),
            "template_options": self._read_with,
            "unread": unread,
            "unread_since": self.cache.seen if unread else 0,
            "seed": self.seed,
            "read_ids": self.read_ids,
            "read_before_answer": 0 if answered is None else answered.tokens,
            "answer_begins": "" if answered is None else answered.begin,
            "recalled_spans": self.recall.spans,
            "regions": self.loop.cache.regions.facts,
        }

    def take_over(self, conversation: dict[str, Any], rng: Any) -> None:
        """Continue a saved `conversation`, whose tokens are in the cache, and its `rng`."""
        self.messages, self.system = conversation["messages"], conversation["system"]
        self.pinned, self.pin_system = set(conversation["pinned"]), conversation["pin_system"]
        self.tools = tuple(conversation.get("tools", ()))
        self._read_with = conversation.get("template_options", {})
        self.seed, self.rng = conversation["seed"], rng
        self.turn = self.notice = None
        self._written = Written()
        unread, since = conversation["unread"], conversation["unread_since"]
        self.cache.unread = (unread[0], since) if unread else None
        self._decoding.read_ids = array("i", conversation.get("read_ids", ()))
        self.recall.clear()
        self.recall.spans = [
            (start, stop) for start, stop in conversation.get("recalled_spans", ())
        ]
        self.loop.cache.regions.cut(0)
        regions = conversation.get("regions", {})
        self.loop.cache.regions.add({kind: [(a, b) for a, b in regions[kind]] for kind in regions})
        self._answered = None
        if tokens := conversation.get("read_before_answer", 0):
            begin = conversation.get("answer_begins", "")
            self._answered = AnsweredPrompt(self._unanswered, self._read_with, False, tokens, begin)

    def send(
        self,
        said: str | Sequence[Message],
        *,
        pin: bool = False,
        tools: Sequence[Tool] | None = None,
        begin: str = "",
    ) -> Iterator[str]:
        """Send a message and stream the answer; a pinned message is never evicted.

        This call refuses a message that cannot be answered. Reading and writing happen as the
        iterator is read, and nothing happens if it never is. If the cache is empty, as after
        `cache.reset()`, earlier messages are read again. Stopping early (closing the iterator,
        Ctrl-C) keeps the answer so far; if the message itself was not read to its end, `notice`
        says what became of it.

        Args:
            said: a text; or a list of messages to add to the conversation, dictionaries with 'role'
                ('system', 'user', 'assistant' or 'tool') and 'content'. The last one is not the
                assistant's; a first one of the system is the system prompt of a new conversation,
                and may be alone. An assistant's may have 'tool_calls', a tool's a 'tool_call_id',
                and others a 'name'.
            pin: whether the given messages are never evicted.
            tools: functions that the model may call, as OpenAI's API describes them; give them
                with the first message, before which templates write them. Where a template writes
                none, the system prompt has them, and calls and results are texts. None: those of
                the conversation so far. The calls of the answer are in `parsed`, and its message
                has them as `tool_calls`. If the template writes a result together with its call,
                the conversation is read again.
            begin: text that the answer begins with; only what follows it is streamed.

        Raises:
            EmptyPrompt: there is nothing to answer.
            TokenUnknown: the model has no embedding of a token of the message.
            MessagesInvalid: these are no such messages, hold a lone surrogate, or come with other
                tools than the conversation's.
            ChatTemplateMissing: the tokenizer has no chat template, or its template does not write
                tools, their results, or later messages of the system.
            MemoryCapExceeded: nothing may be evicted and the cap is reached.
            SchemaRefused, ExtraMissing: answers cannot be held to what `set_generation` was given.
            PinsTooLarge: pinned tokens need more slots than a head has.
            ValueError, UnsupportedModel: a setting of generation cannot have its value.
            SessionBroken: a forward pass failed half-way.
        """
        messages = checked_messages(said)
        called = None if tools is None else tuple(checked_tools(tools))
        check_letters(begin)
        return self._begin(lambda: self._message_prompt(messages, pin, called, begin))

    def complete(self, text: str | Sequence[int], *, recall: bool = False) -> Iterator[str]:
        """Read `text` as it is, without a chat template, and stream the continuation.

        Args:
            text: the text to continue, or its token ids.
            recall: read evicted text again, in front of the last lines of `text`; see `recall`.

        Raises:
            EmptyPrompt: `text` has no token.
            TokenUnknown: the model has no embedding of one of its tokens.
            MessagesInvalid: it is no text, or holds a lone surrogate.
            MemoryCapExceeded, ValueError, UnsupportedModel, SessionBroken: as in `send`.
        """
        tokens = isinstance(text, (list, tuple)) and all(type(x) is int and x >= 0 for x in text)
        if not tokens and not isinstance(text, str):
            raise MessagesInvalid(f"a {type(text).__name__} was given; give the text to continue")
        return self._begin(lambda: self._text_prompt(text, recall))

    def regenerate(self) -> Iterator[str]:
        """Answer the last message again, after reading the conversation again.

        The tokens that were read before its answer are read as they are, unless messages, pins or
        options of the chat template have changed, or the cache was emptied: then all messages are
        written anew.

        If this is stopped before the new answer begins, the former one stays.

        Raises:
            EmptyPrompt: nothing was said.
            ChatTemplateMissing, MemoryCapExceeded, PinsTooLarge, ValueError, UnsupportedModel: as
                in `send`.
        """
        return self._begin(self._repeated_prompt)

    def search(self, words: str) -> list[Passage]:
        """Return the passages of the conversation that have these words, the best first.

        Both evicted and held text is searched; a conversation that was not read yet has none.
        `recall` reads such passages again in front of a message.
        """
        return self.recall.search(words, self.read_ids)

    def undo(self) -> str:
        """Take back the last message and its answer; returns the message.

        The cache is emptied: earlier messages are read again with the next one.

        Raises:
            EmptyPrompt: nothing was said.
        """
        self._close()
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not users:
            raise EmptyPrompt("there is nothing to take back; say something first")
        with interrupts_deferred():
            last = users[-1]
            text: str = self.messages[last]["content"]
            self.messages = self.messages[:last]
            self.pinned = {index for index in self.pinned if index < last}
            self.turn = self.notice = None
            self._written = Written()
            self.cache.reset()
        return text

    def clear(self) -> None:
        """Forget the conversation; the cache's memory and the settings stay."""
        self._close()
        with interrupts_deferred():
            if self._unusual:
                self.read_by(self.runtime.loop())
                self._unusual = False
            self.cache.reset()
            self.recall.clear()
            self.messages, self.pinned = [], set()
            self._read_with, self._answered = {}, None
            self.turn = self.notice = None
            self._written = Written()

    def set_generation(self, **options: Any) -> None:
        """Change settings from the next answer on; None is the model's default.

        temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty,
        dry_multiplier (0 or more: keeps an answer from saying a passage of its own again),
        logit_bias (numbers added to logits, by token id), max_new_tokens, min_tokens (no token and
        no stop string ends the answer before), thinking_budget (at so many tokens of thoughts these
        are closed, and the answer begins), only_read (the prompt is read and nothing written),
        do_sample, seed, eos_token_id, stop_strings, logprobs,
        prompt_logprobs, json_schema, regex, call_schema: a JSON schema of the calls that an answer
        may have between `<tool_call>` and `</tool_call>`, template_options: further names that the
        chat template gets, such as `{"enable_thinking": False}`; `chat_template` names one of
        several templates. Where they change what stands before the last answer, the conversation is
        read again.

        An answer fits `json_schema`, or matches the whole of `regex`, if `turn.finish_reason` is
        'stop' and `turn.stop_string` None; otherwise it was cut short, as by `max_new_tokens`. For
        such an answer `enable_thinking` is False unless it was given, and thoughts that the chat
        template opens are closed.

        Raises:
            ValueError: there is no such setting, or it cannot have this value; nothing is changed.
            SchemaRefused, ExtraMissing: answers cannot be held to the form; nothing is changed.
        """
        settings.check(options)
        if any(options.get(name) is not None for name in settings.FORMS):
            held = settings.as_dict(self.generation) | options
            settings.check(held)
            ends = settings.end_tokens(SimpleNamespace(**held))
            self._decoding.guide(ends, settings.forms(SimpleNamespace(**held)))
        if "seed" in options:
            self.seed = settings.seeded(options.pop("seed"))
            self.rng = self.runtime.rng(self.seed)
        if (temperature := options.get("temperature")) is not None:
            options.setdefault("do_sample", temperature > 0)
        elif any(options.get(name) is not None for name in ("top_p", "top_k", "min_p")):
            options.setdefault("do_sample", True)
        self.generation.update(**options)

    def encode(self, text: str, *, special: bool = False, follows: bool = False) -> list[int]:
        """Return the token ids of `text`; `special` lets the tokenizer add its opening token.

        A text that `follows` another has no space that some tokenizers begin texts with.

        Raises:
            MessagesInvalid: it holds a lone surrogate, which is no letter.
        """
        return encode_with(self.runtime.tokenizer, text, special=special, follows=follows)

    @property
    def _transcript(self) -> Transcript:
        """Return the conversation as it is now."""
        pinned, messages = frozenset(self.pinned), list(self.messages)
        return Transcript(messages, self.system, pinned, self.pin_system, tuple(self.tools))

    @_transcript.setter
    def _transcript(self, other: Transcript) -> None:
        self.messages, self.system = other.messages, other.system
        self.pinned, self.pin_system = set(other.pinned), other.pin_system
        self.tools = other.tools

    @property
    def _unread(self) -> list[int]:
        """Return the last token of an answer that was cut short, if it was not read yet."""
        token, since = self.cache.unread or (0, -1)
        return [token] if since == self.cache.seen else []

    def _message_prompt(
        self, added: list[Message], pin: bool, called: tuple[Tool, ...] | None, begin: str
    ) -> PreparedPrompt:
        """Return the prompt of new messages, with the tools that were given, if any.

        The answer begins with the text `begin`.
        """
        before, seen = self._transcript, self.cache.seen
        tools = before.tools if called is None else called
        if seen and tools != before.tools:
            raise MessagesInvalid(
                "other tools were given than the conversation began with; clear it first, or set "
                "session.tools and reset its cache"
            )
        system, pin_system = before.system, before.pin_system
        if added[0]["role"] == "system" and not before.messages:
            if seen:
                raise MessagesInvalid(
                    "a system prompt was given behind a text that was continued; clear it first"
                )
            if len(added) > 1 or self._is_answered(added[0], tools):
                system, added, pin_system = added[0]["content"], added[1:], pin_system or pin
            else:
                added = [{**added[0], "role": "user"}]
        messages = [*before.messages, *added]
        new = range(len(before.messages), len(messages))
        pinned = before.pinned | frozenset(new if pin else ())
        after = Transcript(messages, system, pinned, pin_system, tools)
        writer = self._writer(tools)
        if (
            seen
            and writer.opens_as(self._read_with, system)
            and writer.turn_has_results(system, before.messages[-1:], added)
        ):
            text = self._ready(writer.render_turn(system, added, begin))
            ids = self._unread + self.encode(text, follows=True)
            spans = [(seen, seen + len(ids))] if pin else []
            question = self._question(ids, text, added[-1], seen)
            regions = results_by_age(
                added, result_spans(self._encoded, text, added, seen + len(self._unread))
            )
            return self._checked(
                PreparedPrompt(
                    ids,
                    after,
                    spans,
                    self._template_options,
                    question=question,
                    begin=begin,
                    regions=regions,
                )
            )
        if seen and not before.messages:
            raise MessagesInvalid(
                "the text that was continued would be forgotten, as these messages, or the options "
                "of the chat template, need the whole conversation to be read again; clear it first"
            )
        writer.check_tools_read([*system_message(system), *messages])
        whole = self._whole_prompt(after, begin)
        return self._checked(replace(whole, emptied=seen > 0, reread=bool(before.messages)))

    def _is_answered(self, system: Message, tools: Sequence[Tool]) -> bool:
        """Return whether the chat template writes a message of the system without any other."""
        with suppress(ChatTemplateMissing):
            return system["content"].strip() in self._writer(tools).render([system])
        return False

    def _text_prompt(self, text: str | Sequence[int], recall: bool) -> PreparedPrompt:
        """Return the prompt of a text that is no message."""
        follows = bool(self.cache.seen)
        if isinstance(text, str):
            ids = self.encode(text, special=not follows, follows=follows)
        else:
            ids = list(text)
        if not ids:
            raise EmptyPrompt("the prompt is empty; give at least one token of text")
        ids = self._unread + ids
        question_index = self._question_index(ids, 0, len(ids), self.cache.seen) if recall else None
        return self._checked(PreparedPrompt(ids, None, [], question=question_index))

    def _repeated_prompt(self) -> PreparedPrompt:
        """Return the prompt of the conversation without its last answer."""
        after = self._unanswered
        if not after.messages and not (self.messages and after.system):
            raise EmptyPrompt("there is nothing to answer again; say something first")
        answered, read, begin = self._answered, None, ""
        now = (after, self._template_options, self._held)
        if answered is not None and now == (answered.transcript, answered.options, answered.held):
            read, begin = self._read_before(answered.tokens), answered.begin
        whole = self._whole_prompt(after, begin if read else "", read)
        return self._checked(replace(whole, emptied=True, reread=True))

    @property
    def _unanswered(self) -> Transcript:
        """Return the conversation without its last answer."""
        after = self._transcript
        while after.messages and after.messages[-1]["role"] == "assistant":
            after.messages.pop()
        pinned = frozenset(index for index in after.pinned if index < len(after.messages))
        return replace(after, pinned=pinned)

    def _read_before(self, tokens: int) -> ReadBefore | None:
        """Return the first tokens that the cache has read, without recalled and dropped ones.

        None: it has not read so many, or not all are known.
        """
        ids = self.read_ids[:tokens]
        if len(ids) < tokens or min(ids) < 0:
            return None
        regions = self.loop.cache.regions
        left_out = merged([*clipped(self.recall.spans, tokens), *clipped(regions.dropped, tokens)])
        gone = [index for span in left_out for index in range(*span)]
        for index in reversed(gone):
            del ids[index]

        def moved(spans: Iterable[Span]) -> list[Span]:
            some = clipped(spans, tokens)
            return [(a - bisect_left(gone, a), b - bisect_left(gone, b)) for a, b in some]

        kinds = {kind: moved(spans) for kind, spans in regions.facts.items()}
        return ReadBefore(ids, moved(self.cache.pinned_spans), kinds)

    def _whole_prompt(
        self,
        whole: Transcript,
        begin: str = "",
        read: ReadBefore | None = None,
    ) -> PreparedPrompt:
        """Return the prompt of a whole conversation.

        Args:
            whole: the conversation.
            begin: text that its answer begins with.
            read: its tokens as they were read before; None: it is written anew.
        """
        writer, options = self._writer(whole.tools), self._template_options

        def write(some: Sequence[Message]) -> str:
            return self._ready(writer.render(some, begin=begin))

        def encode(some: Sequence[Message]) -> list[int]:
            return self.encode(write(some))

        @lru_cache
        def opening() -> list[int]:
            return first_tokens(encode, first)

        first = system_message(whole.system)
        writer.check_written(first, whole.messages)
        text = write([*first, *whole.messages])
        if read is not None:
            ids, spans = read.ids, read.pins
        else:
            ids = self.encode(text)
            spans = system_span(encode, whole.system) if whole.pin_system and whole.system else []
            spans += message_spans(encode, first, whole.messages, whole.pinned, ids)
        question_index = (
            self._question(ids, text, whole.messages[-1], 0) if whole.messages else None
        )
        prefix = self._prefix_of(ids[:question_index], opening)
        if read is None:
            results = result_spans(self._encoded, text, whole.messages)
            regions = results_by_age(whole.messages, results)
            if first or whole.tools:
                with suppress(ChatTemplateMissing):  # of a message that the user did not write
                    regions["system prompt and tools"] = [(0, common_prefix(opening(), ids))]
        else:
            regions = read.regions
        return PreparedPrompt(
            ids,
            whole,
            spans,
            options,
            question=question_index,
            prefix=prefix,
            begin=begin,
            regions=regions,
        )

    def _prefix_of(self, ids: Sequence[int], first: Callable[[], list[int]]) -> int:
        """Return how many tokens of a conversation are looked for in `prefixes`; 0: it has none.

        One shorter than a block would take as long to read by itself as together with the rest.

        Args:
            ids: tokens of the conversation.
            first: returns those that it begins with, whatever the user says.
        """
        least, length = self.runtime.plan.block_size, 0
        if self.prefixes is not None and len(ids) > least:
            with suppress(ChatTemplateMissing):  # of a message that the user did not write
                length = min(common_prefix(first(), ids), len(ids) - 1)
        return length if length >= least else 0

    def _question(self, ids: list[int], text: str, last: Message, seen: int) -> int | None:
        """Return where in `ids` the user's question begins; None: nothing is recalled for it.

        Args:
            ids: the tokens to be read.
            text: what they were made of, at the end of which the last message stands.
            last: that message.
            seen: tokens that the cache holds or has evicted before them.
        """
        content = last["content"].strip()
        begins = text.rfind(content)
        if last["role"] != "user" or not content or begins < 0:
            return None
        first, stop = (
            len(ids) - common_suffix(ids, self._encoded(text[offset:]))
            for offset in (begins, begins + len(content))
        )
        return self._question_index(ids, first, stop, seen)

    def _question_index(self, ids: list[int], first: int, stop: int, seen: int) -> int | None:
        """Return where the question begins in a message whose text is from `first` to `stop`."""
        index = self.recall.question_start(ids, first, stop)
        return index if self.recall.limit and self._evicts(seen + index) else None

    def _evicts(self, tokens: int) -> bool:
        """Return whether so many tokens do not all fit, and some leave."""
        dropped = covered(self.loop.cache.regions.dropped)
        return not self.loop.may_be_full and tokens - dropped > self.runtime.plan.budget_tokens

    def _encoded(self, text: str) -> list[int]:
        return self.encode(text, follows=True)

    def _recalled(self, prompt: PreparedPrompt, start: int) -> list[int]:
        """Return the evicted text to read again in front of a question, and pin it for the answer.

        Args:
            prompt: that is being read.
            start: tokens that were read before it.
        """
        assert prompt.question is not None
        cache, question = self.cache, prompt.ids[prompt.question :]
        before = self._decoding.ids_read(cache.seen)
        return self.recall.insert(cache, question, before, start + prompt.question, prompt.spans)

    @property
    def _template_options(self) -> dict[str, Any]:
        """Return the names that the chat template gets for the next message."""
        return settings.template_options(self.generation)

    def _writer(self, tools: Sequence[Tool]) -> ChatWriter:
        """Return what writes the next message by the chat template."""
        return ChatWriter(self.runtime.tokenizer, tools, self._template_options)

    def _ready(self, text: str) -> str:
        """Return the prompt, with its thoughts closed where the answer is held to a form."""
        return with_thoughts_closed(text) if self._held else text

    @property
    def _held(self) -> bool:
        """Return whether the next answer is held to a form."""
        return bool(settings.shapes(self.generation))

    def _checked(self, prompt: PreparedPrompt) -> PreparedPrompt:
        """Return the prompt if it can be answered; else refuse it."""
        emptied = prompt.emptied
        freed = 0 if emptied else covered(self._thoughts_left_out(prompt.transcript))
        self._decoding.check(self.generation, prompt.ids, emptied=emptied, freed=freed)
        self.cache.pinned_with(prompt.spans, emptied=emptied)
        return prompt

    def _begin(self, prepare: Callable[[], PreparedPrompt]) -> Iterator[str]:
        """Prepare or refuse a prompt at once; return its answer, which begins as it is read."""
        return Pieces(self._stream(prepare, self._prompt_inputs, prepare()))

    def _stream(
        self, prepare: Callable[[], PreparedPrompt], before: tuple[Any, ...], prompt: PreparedPrompt
    ) -> Generator[Step, Any, None]:
        """Answer a prompt that was prepared when `_prompt_inputs` was `before`."""
        self._close()
        if self._prompt_inputs != before:  # the conversation went on since
            prompt = prepare()
        steps = self._answer(prompt)
        # A weak reference: an answer that is dropped ends at once, and not when the next begins.
        self._open = mine = ref(steps)
        try:
            yield from steps
        finally:
            if self._open is mine:
                self._open = None

    def _close(self) -> None:
        """End an answer that is not read to its end, as if it had been stopped."""
        steps = None if self._open is None else self._open()
        if steps is not None:
            steps.close()

    @property
    def _prompt_inputs(self) -> tuple[Any, ...]:
        """Return everything that a prompt depends on."""
        return (
            self._transcript,
            self.on_full,
            self.cache.seen,
            self._unread,
            self._held,
            self._template_options,
            self._read_with,
        )

    def _answer(self, prompt: PreparedPrompt) -> Generator[Step, Any, None]:
        """Answer a prompt; however that ends, the conversation can go on."""
        before, ended = self._transcript, False
        message_index = 0 if prompt.transcript is None else len(prompt.transcript.messages)
        tail, at = prompt.ids[-PROMPT_SEEN:], (message_index, self.number)
        written = Written(prompt=tail, place=at, held=self._held)
        turn = Turn(prompt_tokens=len(prompt.ids))
        start = (0, 0)

        def settle() -> None:
            nonlocal ended
            with interrupts_deferred():
                if self.turn is turn and not ended:
                    self._settle(prompt, before, start, written.text)
                ended = True

        try:
            try:
                with interrupts_deferred():
                    if prompt.emptied:
                        self.cache.reset()
                    self.cache.pin(prompt.spans)
                    self._weigh(prompt)
                    if prompt.transcript is not None:
                        self._transcript, self._read_with = prompt.transcript, prompt.options
                    self.turn, self.notice, self._written = turn, None, written
                    start = self.cache.seen, self.cache.held
                    if prompt.transcript is not None or not start[0]:
                        self._answered = None
                    spans = self._thoughts_left_out(prompt.transcript)
                    if spans and self.loop.drop(spans):
                        self.loop.cache.regions.drop_thoughts(spans)
                    turn.reused_tokens = start[0]
                    self.recall.begin(start[0])
                insertion = None
                if prompt.question is not None:
                    insertion = Insertion(
                        prompt.question,
                        lambda: self._recalled(prompt, start[0]),
                        lambda done: self.recall.index(self._decoding.read_ids[: start[0] + done]),
                    )
                yield from self._decoding.answer(
                    prompt.ids,
                    self.generation,
                    None if settings.greedy(self.generation) else self.rng,
                    turn,
                    written,
                    self.on_block,
                    insertion,
                    self._shared_prefix(prompt),
                )
            except BaseException as error:
                turn.finish_reason = turn.finish_reason or _reason(error)
                raise
            finally:
                settle()
        finally:
            settle()  # a Ctrl-C can come before the first has begun

    def _weigh(self, prompt: PreparedPrompt) -> None:
        """Note the regions of a prompt, whose tokens leave the cache before or after others."""
        regions, after, seen = self.loop.cache.regions, prompt.transcript, self.loop.cache.seen
        regions.cut(seen)
        if after is not None and after.messages and after.messages[-1]["role"] != "tool":
            regions.age()
        regions.add(prompt.regions)
        if after is not None and self._evicts(seen + len(prompt.ids)):
            known = [*self._decoding.ids_read(seen), *prompt.ids]
            regions.set_repeated(self.recall.dialogue.repeated_replies(known))

    def _thoughts_left_out(self, after: Transcript | None) -> list[Span]:
        """Return the thoughts that the template leaves out `after` the next message is read.

        They are those whose slots were not freed before, and that nothing pins.
        """
        regions, ids = self.loop.cache.regions, self.read_ids
        known = [span for span in regions.thoughts if not within(span, regions.dropped)]
        if not known or after is None or after.messages[-1]["role"] == "tool":
            return []
        tokenizer, cache = self.runtime.tokenizer, self.cache
        if not ChatWriter(tokenizer, after.tools, self._template_options).abilities.forgets:
            return []
        whole = [span for one in known if (span := with_marks(tokenizer, ids, one)) is not None]
        pins = [(0, cache.sinks), *cache.pinned_spans]
        return [span for span in whole if not any(a < span[1] and span[0] < b for a, b in pins)]

    def _shared_prefix(self, prompt: PreparedPrompt) -> SharedPrefix | None:
        """Return the first tokens of a prompt that other conversations may begin with as well."""
        if self.prefixes is None or not prompt.prefix:
            return None
        key = prefix_key(prompt.ids[: prompt.prefix], prompt.spans)
        find, keep = partial(self.prefixes.find, key), partial(self.prefixes.keep, key)
        return SharedPrefix(prompt.prefix, find, keep)

    def _settle(
        self, prompt: PreparedPrompt, before: Transcript, start: tuple[int, int], answer: str
    ) -> None:
        """Make messages and cache agree after an answer, and say in `notice` what changed.

        Args:
            prompt: that was answered.
            before: the conversation before it.
            start: tokens seen and held when it began.
            answer: the text so far.
        """
        turn, cache = self.turn, self.cache
        assert turn is not None
        (seen, held), total = start, turn.prompt_tokens
        self.recall.release(cache)
        cache.regions.cut(cache.seen)
        turn.read_tokens = turn.read_tokens or max(0, min(cache.seen - seen, total))
        turn.evicted_tokens = max(0, (cache.seen - cache.held) - (seen - held))
        failed = turn.finish_reason in ("cap", "error")
        stopped, whole = turn.finish_reason == "interrupted", turn.read_tokens == total
        notice = None
        if prompt.transcript is None:
            pass
        elif prompt.emptied and not answer and (failed or stopped):
            self._transcript = before
            cache.reset()
            notice = f"no new answer began, so the former one stays; {REREAD}"
            if len(prompt.transcript.messages) > len(before.messages):
                notice = f"the message was not read and is taken back; {REREAD}"
        elif not whole and (failed or not turn.read_tokens):
            self._transcript = before
            if cache.seen != seen:
                cache.reset()
            notice = "the message was not read and is taken back"
            if before.messages and not cache.seen:
                notice += f"; {REREAD}"
        else:
            if whole:
                unanswered, read = self._unanswered, seen + total
                held = self._written.held
                self._answered = AnsweredPrompt(
                    unanswered, prompt.options, held, read, prompt.begin
                )
            reply = Parsed(prompt.begin + answer).as_message()
            if self.tools and (parsed := self.parsed).tool_calls:
                called = parsed._replace(content=prompt.begin + parsed.content).as_message()
                writer = ChatWriter(self.runtime.tokenizer, self.tools, prompt.options)
                if writer.calls_are_written(called):
                    reply = called
            self.messages.append(reply)
            if prompt.reread and not whole:
                cache.reset()
                notice = f"stopped while earlier messages were read; {REREAD}"
        if turn.finish_reason == "error":  # layers may have read different tokens
            cache.reset()
            notice = notice or f"what was read is forgotten; {REREAD}"
        elif stopped and not whole:
            notice = notice or (
                f"stopped after {turn.read_tokens:,} of {total:,} tokens; the rest was not read"
            )
        self.notice = notice


def _reason(error: BaseException) -> FinishReason:
    """Return why an answer ended that an error or Ctrl-C cut short."""
    if isinstance(error, (KeyboardInterrupt, GeneratorExit)):
        return "interrupted"
    return "cap" if isinstance(error, MemoryCapExceeded) else "error"

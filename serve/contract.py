"""Defines the requests that the API makes of conversations, and their replies.

Knows neither HTTP nor a model: `app.py` is written against these types, `scheduler.py` fulfils
them, and a test of either can put a small stand-in in the place of the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvcap.runtime.session.logprobs import Logprob
from kvcap.runtime.session.stats import FinishReason
from kvcap.runtime.session.tool_calls import Parsed
from kvcap.runtime.types import Message
from kvcap.serve.model_facts import ModelFacts

if TYPE_CHECKING:
    from kvcap.serve.strip import Strip


@dataclass(frozen=True)
class Ask:
    """A request for an answer that brings either `messages` or a `prompt`."""

    messages: tuple[Message, ...] | None = None
    """Holds a whole chat, as OpenAI's clients send it every time; messages held are not read again.

    A user's message (or a tool's result) comes last.
    """
    prompt: str | tuple[int, ...] | None = None
    """Holds a text to continue, or its tokens, without a chat template.

    It is kept for nobody afterwards."""
    begin: str = ""
    """Holds the text that the answer to `messages` begins with; only what follows it is sent."""
    echo: bool = False
    """Says whether the text of `prompt` is the first piece of the answer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Holds settings as `Session.set_generation` takes them: temperature, top_p, stop_strings, ...

    What is left out has the model's own default, whatever an earlier request said.
    """
    owner: str = ""
    """Says whose request it is, such as by a digest of the API key.

    Nothing of one owner is ever matched with, or shown to, another.
    """
    session_id: str | None = None
    """Names the conversation outright: only what is held under this id is gone on with. Requests
    that name one conversation are answered one after the other. None: the longest conversation of
    the owner that `messages` begin with, if it is idle."""
    fresh_id: str | None = None
    """Holds the id of a conversation that begins without a name: 16 hexadecimal digits.

    None: one is made.
    """
    must_call: bool = False
    """Says that the answer is held to a call of a tool, so that it is one even if it is cut."""
    number: int = 0
    """Says which of several answers to the same messages this is, by which its calls have ids."""
    admitted: bool = False
    """Says that the request has an answer already, so that a full queue does not refuse this."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Holds tools as the chat template takes them; others begin another conversation."""
    pins: frozenset[int] = frozenset()
    """Holds the indices of `messages`, of the system or the user, that are never evicted.

    To be sent with every request: where they differ from earlier ones, all messages are read again.
    """
    progress: bool = False
    """Says whether pieces without text tell how much of the prompt is read."""
    recall: str | int | None = None
    """Says how much evicted text is read again in front of the last message.

    'auto', 'off' or so many tokens at most, as `RecallSettings.parse` takes it. None: as the server
    was started, and none for a `prompt`."""


class PromptProgress(NamedTuple):
    """A count of how far a prompt is read, under the names that llama.cpp's server gives."""

    total: int  # tokens of the whole request
    cache: int  # of these, tokens that need not be read
    processed: int  # of these, tokens that are read by now, or need not be
    time_ms: int  # since the first block was begun


class Piece(NamedTuple):
    """A piece of an answer that carries its next text."""

    text: str
    logprobs: tuple[Logprob, ...] | None = None
    """Holds the log probabilities of the tokens of `text`, where they were asked for."""
    prompt_tokens: int = 0  # of the whole request
    completion_tokens: int = 0  # of the answer up to here
    opened: str = ""  # the mark by which the prompt opened thoughts, in which the answer begins
    reused_tokens: int = 0  # of `prompt_tokens`: those that need not be read
    progress: PromptProgress | None = None
    """Says how far the prompt is read, in a piece before the first text; None: it is a text."""


@dataclass(frozen=True)
class Usage:
    """A count of the tokens of one request and its answer; `cap_bytes` are bytes."""

    prompt_tokens: int  # the whole request's: those that were read, and those reused
    reused_tokens: int  # those that it, or one with its system prompt, had read; evicted ones too
    completion_tokens: int
    held: int  # slots in use afterwards, per KV head and layer, at most the budget
    waiting: int  # slots in use above the budget, until the next eviction
    evicted: int  # tokens that were read and are not held
    cap_bytes: int  # the cap of the conversation's cache
    recalled_tokens: int = 0  # prompt tokens that are evicted text, read again
    recalled_passages: int = 0  # passages of evicted text that these tokens are
    stop_string: str | None = None  # the text that ended the answer, if one of `stop` did


class Reply(ABC):
    """An answer that is being written: `async for piece in reply`.

    What refuses the request only once its prompt is made (`PinsTooLarge`, `ChatTemplateMissing`,
    `MemoryCapExceeded`, `EmptyPrompt`) is raised by the first `__anext__`, so wait for that before
    a status is sent. Later ones: `ReaderTooSlow`, `LogitsBroken`, `SessionBroken`,
    `MemoryCapExceeded`.

    An answer that nobody reads waits in a bounded buffer, and does not hold others up. A reply that
    is let go of is closed.
    """

    session_id: str | None = None
    """Names the conversation, its own id or one made for it; known with the first piece.

    None for a completion.
    """
    finish_reason: FinishReason | None = None
    """Says why the answer ended; None while it is written."""
    usage: Usage | None = None
    """Counts the tokens that the answer took; None while it is written."""
    parsed: Parsed | None = None
    """Holds the answer's text and the tools it calls; None where no tools were offered."""

    def __aiter__(self) -> Reply:
        """Return the reply itself."""
        return self

    @abstractmethod
    async def __anext__(self) -> Piece:
        """Return the next piece, as soon as there is one."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop the answer within a block, keeping what there is; nothing where it has ended."""


def _shown(kind: str, help: str, default: Any = 0) -> Any:
    """Return a field that `/metrics` shows: a `size` of this moment, or a `count` since the begin.

    Args:
        kind: which of both.
        help: a sentence for Prometheus.
        default: of the field.
    """
    return field(default=default, metadata={kind: help})


_size, _count = partial(_shown, "size"), partial(_shown, "count")


@dataclass(frozen=True)
class Figures:
    """Figures of what a server holds and has done: sizes as they are, and counts since it began."""

    policy: str = ""
    budget_tokens: int = _size("Slots per KV head and layer that stay after an eviction.")
    places: int = _size("Conversations that fit in memory.")
    in_memory: int = _size("Conversations in memory, idle ones too.")
    answering: int = _size("Conversations that are being answered.")
    paused: int = _size("Answers that wait for their reader.")
    waiting: int = _size("Requests in the queue.")
    most_waiting: int = _size("Requests that the queue takes.")
    on_disk: int = _size("Conversations on disk.")
    memory_bytes: int = _size("Bytes of all caches that were made.")
    shared_prompts: int = _size("System prompts whose slots are kept for further conversations.")
    shared_prompt_bytes: int = _size("Bytes of the copies of these slots, beside the caches.")
    index_bytes: int = _size("Bytes of the indexes by which evicted text is found, beside caches.")
    disk_bytes: int = _size("Bytes of conversations on disk.")
    disk_cap: int = _size("Bytes that conversations on disk may take.")
    process_bytes: int = _size("Bytes that the process holds.")
    memory_cap: int | None = _size("Bytes that the process may hold; 0: there is no cap.", None)
    closing: bool = False
    asked: int = _count("Requests for an answer, refused ones too.")
    answered: int = _count("Answers that were written to their end.")
    stopped: int = _count("Answers that were stopped by their reader, or that nobody read.")
    failed: int = _count("Answers that failed.")
    refused: int = _count("Requests that were refused as too many waited.")
    prompt_tokens: int = _count("Tokens of prompts that were read.")
    reused_tokens: int = _count("Tokens of prompts that were held and need not be read again.")
    completion_tokens: int = _count("Tokens that were written.")
    evicted_tokens: int = _count("Tokens that were evicted.")
    recalled_tokens: int = _count("Tokens of prompts that were evicted text, read again.")
    prompts_shared: int = _count("Conversations that began from a system prompt's kept slots.")
    shared_tokens: int = _count("Tokens of system prompts that these need not read; reused, too.")
    saved: int = _count("Conversations that were saved to disk.")
    restored: int = _count("Conversations that were brought back from disk.")
    dropped: int = _count("Files that could not be taken, or conversations that were not saved.")
    chat_template: bool = True  # says whether messages can be written for the model
    model: ModelFacts = field(default_factory=ModelFacts)


COUNTS = tuple(each.name for each in fields(Figures) if "count" in each.metadata)
"""Names the figures that only grow."""


class Conversations(Protocol):
    """A server's conversations, called within the event loop that reads the replies."""

    def submit(self, ask: Ask) -> Reply:
        """Put a request into the queue.

        Raises:
            Busy: the queue is full, or the server is closing; `retry_after_s` says when to ask
                again.
            MessagesInvalid, EmptyPrompt, ValueError: nothing that can be answered.
        """

    async def encode(self, ask: Ask, *, special: bool = True) -> list[int]:
        """Return the tokens of a text or of messages; `special` adds those that open a text.

        Raises:
            ChatTemplateMissing, MessagesInvalid: messages cannot be written.
        """

    async def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens.

        Raises:
            TokenUnknown: one is not in the vocabulary.
        """

    async def strip(self, owner: str, session_id: str) -> Strip:
        """Return which tokens of a conversation are held, evicted and pinned, at any time.

        Raises:
            ConversationUnknown: the owner has none of that id in memory.
        """

    async def delete(self, owner: str, session_id: str) -> None:
        """Forget a conversation and remove its files; an answer that is written of it ends.

        Raises:
            ConversationUnknown: the owner has none of that id, in memory or on disk.
        """

    def figures(self) -> Figures:
        """Return figures of what is held and was done, for /metrics and /health."""

    async def aclose(self) -> None:
        """Stop all answers, save every idle conversation, and end the worker."""

"""Keeps the conversations that a server holds, and finds the one that a request continues.

A request brings a whole chat. Its messages are known by a digest of the first, of the first two,
and so on; the conversation whose messages are the longest of these beginnings is continued, with
its cache as it was left. Nothing is matched across owners, templates or tools.

Used by the scheduler's thread alone, but for `begin` and `blank`, which are handed to another one
together with the session that they change.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kvcap.runtime.errors import ExtraMissing, MessagesInvalid
from kvcap.runtime.recall.settings import RecallSettings
from kvcap.runtime.session import settings
from kvcap.runtime.session.engine import Engine
from kvcap.runtime.session.guide import library
from kvcap.runtime.session.messages import ChatWriter, checked_messages
from kvcap.runtime.session.prefixes import Prefixes
from kvcap.runtime.session.session import Session
from kvcap.runtime.types import Message
from kvcap.serve.contract import Ask
from kvcap.serve.saved import ConversationFile, SavedConversations, tag
from kvcap.serve.thoughts import without_thoughts

State = Literal["idle", "answering", "moving"]
"""Says what a conversation does; `moving`: it is read from or written to disk."""


@dataclass(eq=False)
class Conversation:
    """A conversation that has a place in memory, or is about to."""

    owner: str
    id: str
    key: str = ""  # stands for its messages; empty while there are none
    session: Session | None = None  # None until it is made
    state: State = "answering"
    used: float = field(default_factory=time.monotonic)
    file: str | None = None  # the name of its last saved file
    clean: bool = False  # says that the file is up to date


class MatchedConversation(NamedTuple):
    """A conversation that a request goes on, in memory or on disk; empty where none does."""

    conversation: Conversation | None = None  # one in memory
    saved: ConversationFile | None = None  # or one on disk
    messages: int = 0  # how many messages need not be read again
    wait: bool = False  # says that it is being answered or moved: look again afterwards


class OfferedPlace(NamedTuple):
    """A place in memory that is offered to a conversation."""

    session: Session | None  # None: make a new session
    leaving: Conversation | None = None  # the conversation that must be saved and leave it first


class ConversationPool:
    """A store that has the places in memory, and the conversations in them and on disk.

    Args:
        runtime: whose sessions they are.
        places: sessions that are made, at most.
        disk: keeps what has no place; None: it is forgotten.
    """

    def __init__(self, runtime: Engine, places: int, disk: SavedConversations | None) -> None:
        self.runtime, self.places, self.disk = runtime, places, disk
        self.conversations: list[Conversation] = []
        self.free: list[Session] = []
        self.made = 0

    @property
    def index_bytes(self) -> int:
        """Return the bytes of the indexes of all sessions; any thread may ask."""
        sessions = [
            *self.free,
            *(conversation.session for conversation in list(self.conversations)),
        ]
        by_id = {id(session): session for session in sessions if session is not None}
        return sum(session.recall.store.nbytes for session in by_id.values())

    def find(self, ask: Ask, counts: Mapping[str, int]) -> MatchedConversation:
        """Find the longest conversation that a request goes on.

        One that is named is waited for, whatever it does: every round of the worker asks here for
        all that wait, so that takes no time that grows with a request. Of others those are passed
        over that are being answered, so that two requests never share a conversation. A completion
        goes on none.

        Args:
            ask: the request.
            counts: its `beginnings`.
        """
        held = MatchedConversation()
        if ask.messages is None:
            return held
        named = None if ask.session_id is None else tag(ask.session_id)
        for conversation in self.conversations:
            if conversation.owner != ask.owner or named not in (None, tag(conversation.id)):
                continue
            if named is not None and conversation.state != "idle":
                return MatchedConversation(wait=True)
            count = counts.get(conversation.key, 0)
            if conversation.state == "answering" or count < max(1, held.messages):
                continue
            if (
                count == held.messages
                and held.conversation
                and conversation.used < held.conversation.used
            ):
                continue
            held = MatchedConversation(
                conversation, None, count, wait=conversation.state == "moving"
            )
        on_disk = (
            None if self.disk is None else self.disk.find(ask.owner, ask.session_id, [*counts])
        )
        if on_disk is not None and (count := counts[on_disk[0].key]) > held.messages:
            return MatchedConversation(None, on_disk[0], count)
        return held

    def named(self, ask: Ask) -> Conversation | None:
        """Find the idle conversation in memory that a request names."""
        if ask.messages is None or ask.session_id is None:
            return None
        return self.known(ask.owner, ask.session_id, "idle")

    def known(self, owner: str, id_: str, state: State | None = None) -> Conversation | None:
        """Find the conversation in memory of that owner and id, if it is in that state."""
        for conversation in self.conversations:
            if (
                conversation.owner == owner
                and tag(conversation.id) == tag(id_)
                and state in (None, conversation.state)
            ):
                return conversation
        return None

    def place(self, ask: Ask, room: bool = True) -> OfferedPlace | None:
        """Offer a place to a conversation that has none; None: all are in use.

        It is that of the conversation whose messages the request changes, a free one, a new one if
        there is `room`, or that of the conversation that is idle the longest.
        """
        if (same := self.named(ask)) is not None:
            self.conversations.remove(same)
            return OfferedPlace(same.session)
        if self.free:
            return OfferedPlace(self.free.pop())
        if self.made < self.places and (room or not self.made):
            self.made += 1
            return OfferedPlace(None)
        idle = [conversation for conversation in self.conversations if conversation.state == "idle"]
        if not idle:
            return None
        oldest = min(idle, key=lambda conversation: conversation.used)
        if oldest.clean or self.disk is None:
            self.conversations.remove(oldest)
            return OfferedPlace(oldest.session)
        oldest.state = "moving"
        return OfferedPlace(oldest.session, oldest)

    def open(
        self, ask: Ask, session: Session | None, saved: ConversationFile | None
    ) -> Conversation:
        """Put a conversation into a place, to be answered."""
        named = None if ask.messages is None else ask.session_id
        new_id = ask.fresh_id or secrets.token_hex(8)
        if saved is not None and self.known(ask.owner, saved.tag) is None:
            new_id = saved.tag  # else another conversation with the same beginning has that id
        conversation = Conversation(ask.owner, named or new_id, session=session)
        if saved is not None:
            conversation.key, conversation.file, conversation.clean = saved.key, saved.name, True
        self.conversations.append(conversation)
        return conversation

    def close(self, conversation: Conversation) -> None:
        """Give up a conversation and its place."""
        self.conversations.remove(conversation)
        if conversation.session is not None:
            self.free.append(conversation.session)
            conversation.session = None

    def save(self, conversation: Conversation, needed: ConversationFile | None = None) -> None:
        """Write a conversation to disk, and set its `file` and `clean`.

        The file `needed` is restored next, and kept if that can be.
        """
        assert self.disk is not None
        name = self.disk.save(
            conversation.session,
            conversation.owner,
            conversation.id,
            conversation.key,
            conversation.file,
            needed,
        )
        conversation.clean = True  # if writing failed, too, as it would fail again
        conversation.file = name or conversation.file


def salt_of(runtime: Engine) -> str:
    """Return a text that all conversations of a runtime have in common, to mix into their keys."""
    return json.dumps([runtime.name, getattr(runtime.tokenizer, "chat_template", None)])


def keys_of(ask: Ask, salt: str) -> list[str]:
    """Return a key for the first message, for the first two, and so on; a completion has none.

    A message counts with its role, all that it says and whether it is pinned.
    """
    total = hashlib.blake2b(digest_size=16)
    _add(total, [salt, ask.tools])
    keys = []
    for index, message in enumerate(ask.messages or ()):
        _add(total, [_known(message), index in ask.pins])
        keys.append(total.copy().hexdigest())
    return keys


def key_of(session: Session, tools: Sequence[Mapping[str, Any]], salt: str) -> str:
    """Return the key of a session's messages, its last answer included."""
    first: list[Message] = []
    if session.system is not None:
        first = [{"role": "system", "content": session.system}]
    pins = {index + len(first) for index in session.pinned}
    if first and session.pin_system:
        pins.add(0)
    whole = Ask((*first, *session.messages), tools=tuple(tools), pins=frozenset(pins))
    return keys_of(whole, salt)[-1]


def _known(message: Message) -> dict[str, Any]:
    fields = {
        name: value for name, value in message.items() if value or name in ("role", "content")
    }
    if fields["role"] == "assistant":  # clients send answers back without thoughts, and stripped
        fields["content"] = without_thoughts(fields["content"]).strip()
    return fields


def _add(total: Any, part: Any) -> None:
    data = json.dumps(part, sort_keys=True, default=list).encode()
    total.update(len(data).to_bytes(8, "little") + data)


def beginnings(ask: Ask, keys: Sequence[str]) -> dict[str, int]:
    """Return the number of messages by key, of conversations that a request can go on.

    A session pins all messages that it is sent at once, or none of them, so that those behind a
    beginning must all be pinned, or none.
    """
    counts, total = dict[str, int](), len(keys)
    pinned = total - 1 in ask.pins
    same = next((n for n in range(1, total + 1) if (total - n in ask.pins) != pinned), total + 1)
    for count, key in enumerate(keys[:-1], 1):
        if total - count < same:  # so many messages at the end are all pinned, or none is
            counts[key] = count
    return counts


def check(ask: Ask) -> None:
    """Refuse a request that cannot be answered, as far as that is known without its tokens.

    Raises:
        MessagesInvalid, EmptyPrompt: there is nothing to answer, or pins of what cannot be pinned.
        ValueError: a setting cannot have its value.
    """
    settings.check(ask.options)
    if (ask.messages is None) == (ask.prompt is None):
        raise MessagesInvalid("give messages, or a prompt to continue, and not both")
    if ask.messages is None:
        if ask.tools or ask.pins:
            raise MessagesInvalid("a prompt has no tools and no messages to pin; give messages")
        return
    messages = checked_messages(list(ask.messages))
    for index in ask.pins:
        if index not in range(len(messages)) or messages[index]["role"] == "assistant":
            raise MessagesInvalid(
                f"message {index} cannot be pinned; pin messages of the system or the user, by "
                "their index from 0"
            )


def recall_of(ask: Ask, usual: RecallSettings) -> RecallSettings:
    """Return how much evicted text is read again for a request.

    Args:
        ask: the request.
        usual: how much where it does not say.

    Raises:
        ValueError: it says what cannot be, or asks for an index that was not planned.
    """
    if ask.recall is None:
        return usual
    chosen = RecallSettings.parse(ask.recall, usual.store_bytes)
    if chosen.nbytes > usual.nbytes:
        raise ValueError(
            f"recall {ask.recall!r} will not work, as the server was started with --recall off and "
            "has no memory for an index; leave recall out, or start it with --recall auto"
        )
    return chosen


def blank(session: Session) -> None:
    """Let a session forget everything that was said and set."""
    session.clear()
    session.system, session.pin_system = None, False
    session.on_full = "evict"


def _options(session: Session, ask: Ask) -> Mapping[str, Any]:
    """Return a request's settings, without constraints that calls of tools cannot be held to.

    They cannot where the chat template writes them in another form than `call_schema` is of, or
    llguidance is not installed.
    """
    if ask.options.get("call_schema") is None:
        return ask.options
    further = ask.options.get("template_options") or {}
    if ChatWriter(session.runtime.tokenizer, ask.tools, further).calls_are_marked:
        with suppress(ExtraMissing):
            library()
            return ask.options
    return {**ask.options, "call_schema": None}


def begin(
    session: Session, ask: Ask, count: int, recall: RecallSettings, prefixes: Prefixes
) -> Iterator[str]:
    """Begin the answer of a session that holds the first `count` messages of a request.

    Args:
        session: that answers.
        ask: the request.
        count: messages that it holds.
        recall: how much evicted text is read again for the last one.
        prefixes: the owner's copies of caches behind system prompts.

    Raises:
        KvcapError, ValueError: as `Session.send` and `Session.complete`.
    """
    budget = session.runtime.plan.budget_tokens
    session.turn = None
    session.generation = settings.copied(session.runtime.generation)
    session.set_generation(**{"seed": None, **_options(session, ask)})
    session.recall.limit, session.prefixes = recall.limit(budget), prefixes
    if session.recall.limit and session.cache.seen > budget:
        session.recall.index(session.read_ids)  # here, as it does not delay other answers
    if ask.messages is None:
        assert ask.prompt is not None
        return session.complete(ask.prompt, recall=ask.recall is not None)
    messages = list(ask.messages)
    session.tools, session.number = tuple(ask.tools), ask.number
    if count:
        pin = len(messages) - 1 in ask.pins
        return session.send(messages[count:], pin=pin, begin=ask.begin)
    first = int(messages[0]["role"] == "system")
    session.pin_system = bool(first and 0 in ask.pins)
    session.pinned = {index - first for index in ask.pins if index >= first}
    return session.send(messages, begin=ask.begin)

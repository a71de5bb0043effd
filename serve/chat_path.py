"""Answers chats and texts by one path, which translators of other APIs use as well."""

from __future__ import annotations

import asyncio
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from kvcap.serve import schemas
from kvcap.serve.contract import Ask, Conversations, Piece, Reply
from kvcap.serve.errors import NO_TEMPLATE, NONE, ApiError, of_body
from kvcap.serve.limits import Bodies, RequestLimits
from kvcap.serve.metrics import Metrics
from kvcap.serve.series import Series
from kvcap.serve.streaming import SESSION, ChatForm, Form, SeveralForm, streamed, whole

LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "::1")
SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
Body = TypeVar("Body", bound=schemas.Strict)
Chat = TypeVar("Chat", schemas.ChatRequest, schemas.CompletionRequest)


@dataclass(frozen=True)
class Settings:
    """A group of settings that say how a server answers."""

    model: str
    """Names the model as clients call it."""
    limits: RequestLimits = field(default_factory=RequestLimits)
    keys: Sequence[str] = ()
    """Lists the API keys; with none, everybody may ask."""
    hosts: Sequence[str] | None = LOOPBACK
    """Lists the names that the server may be called by; None: any.

    Other names are tricks of other sites to reach it through a browser.
    """
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Holds settings of generation for what a request leaves out."""
    open_paths: Collection[str] = ()
    """Lists further addresses that ask for no key, such as those of a page."""
    origins: Sequence[str] = ()
    """Lists the sites whose pages may ask through a browser; `*` is every site."""


class ChatPath:
    """A path that answers chats and continues texts, of any API.

    Args:
        conversations: that answer.
        settings: names and limits.
    """

    def __init__(self, conversations: Conversations, settings: Settings) -> None:
        self.conversations, self.settings = conversations, settings
        self.name, self.limits = settings.model, settings.limits
        self.metrics = Metrics(conversations.figures)
        self.bodies = Bodies(settings.limits)
        self.one_at_a_time = asyncio.Lock()
        """Is held while a body is understood, so that streams send tokens between two of them."""

    async def answer(
        self, request: Request, body: schemas.ChatRequest, form: Callable[[], Form]
    ) -> Response:
        """Answer a chat in any form: of OpenAI's API, or of another that was translated to it."""
        self.check_model(body.model)
        if not self.conversations.figures().chat_template:
            raise ApiError(400, f"{self.name} {NO_TEMPLATE}", code="no_chat_template")
        return await self._answer(request, body.asks(body.ask(*self._given(request))), form, body)

    def ask(
        self,
        request: Request,
        make_body: Callable[[], Mapping[str, Any]],
        names: Mapping[str, str] = NONE,
    ) -> Ask:
        """Return the request of a chat's body that is translated from another API.

        Raises:
            ApiError: nothing that could be answered.
        """
        body = request_of(schemas.ChatRequest, make_body, names)
        self.check_model(body.model)
        return body.ask(*self._given(request))

    async def go_on(
        self, request: Request, body: schemas.CompletionRequest, form: Callable[[], Form]
    ) -> Response:
        """Continue texts in any form: of OpenAI's API, or of another that was translated to it."""
        self.check_model(body.model)
        context = self._given(request)
        asks = [ask for prompt in body.prompt for ask in body.asks(body.ask(prompt, *context))]
        return await self._answer(request, asks, form, body)

    async def body_of(self, request: Request, kind: type[Body]) -> Body:
        """Return a request's body.

        Raises:
            ApiError: it is none of this kind.
        """
        async with self.bodies.of(request) as body, self.one_at_a_time:
            await asyncio.sleep(0)
            try:
                parsed = kind.model_validate_json(body)
            except ValidationError as error:
                given = cache(partial(from_json, body))
                raise of_body(error, lambda *step: _place(given(), *step)) from error
        return parsed

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model; None: it names none.

        Raises:
            ApiError: naming the one there is.
        """
        if name not in (None, self.name):
            text = f"there is no model {str(name)[:80]!r} here; use {self.name!r}"
            raise ApiError(404, text, param="model", code="model_not_found")

    def _given(self, request: Request) -> tuple[str, str | None, RequestLimits, Mapping[str, Any]]:
        """Return the owner and conversation of a request, and the server's limits and defaults."""
        settings = self.settings
        return request.user.username, _session_id(request), settings.limits, settings.defaults

    async def _answer(
        self,
        request: Request,
        asks: list[Ask],
        make_form: Callable[[], Form],
        body: schemas.Request,
    ) -> Response:
        """Answer one request, or several one after the other, each in a form of its own."""
        reply: Reply
        async with self.one_at_a_time:
            await asyncio.sleep(0)
            if len(asks) == 1:
                reply, form = self.conversations.submit(asks[0]), make_form()
            else:
                reply = series = Series(self.conversations.submit, asks, body.n or 1)
                form = SeveralForm([make_form() for _ in asks], series)
        if body.stream:
            quiet = self.limits.quiet_seconds
            return await streamed(request, reply, form, self.metrics, quiet)
        return await whole(request, reply, form, self.metrics)


class TranslatedPart(dict[str, Any]):
    """A part of OpenAI's body that knows its path in the client's body, for errors."""

    def __init__(self, path: str, **fields: Any) -> None:
        super().__init__(fields)
        self.place = path


def joined(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join messages of the system, and of the user, that follow each other.

    Chat templates of several models take no other order than that of turns.
    """
    merged = list[dict[str, Any]]()
    for role, group in groupby(messages, lambda message: message["role"]):
        first, *others = group
        if others and role in ("system", "user"):
            text = "\n\n".join([first["content"], *(message["content"] for message in others)])
            first, others = copy(first), []
            first["content"] = text
        merged += [first, *others]
    return merged


class TranslatedForm(ChatForm):
    """A form that puts each part of a chat's stream into the words of another API."""

    @abstractmethod
    def delta(self, delta: Mapping[str, Any]) -> bytes:
        """Write one delta of a chat's stream."""

    def written(self, piece: Piece) -> bytes:
        """Write what a piece brings."""
        return self._deltas(self.put(piece))

    def rest(self, reply: Reply) -> bytes:
        """Write what was held back, and the calls."""
        return self._deltas(self.end(reply))

    def _deltas(self, choices: Sequence[Mapping[str, Any]]) -> bytes:
        return b"".join([self.delta(choice["delta"]) for choice in choices])


def request_of(
    kind: type[Chat], make_body: Callable[[], Mapping[str, Any]], names: Mapping[str, str] = NONE
) -> Chat:
    """Return the chat, or the text to continue, that another API's body asks for.

    Args:
        kind: which of both.
        make_body: makes OpenAI's body of it, or raises a `ValueError`.
        names: fields of that API by OpenAI's names, where these differ.

    Raises:
        ApiError: it cannot be answered.
    """
    try:
        body = make_body()
        return kind.model_validate(body).named(names)
    except ValidationError as error:
        raise of_body(error, partial(_place, body, names=names)) from error
    except ValueError as error:
        raise ApiError(400, str(error)) from error


def _place(
    body: Any, path: Sequence[int | str], missing: bool, names: Mapping[str, str] = NONE
) -> str:
    """Return the path in the client's body of a field of OpenAI's body.

    Args:
        body: OpenAI's, with parts that were translated, or the client's own.
        path: to the field. Steps that lead to no part of the body are only within the schema.
        missing: from the body, so that its name is one of these.
        names: of the client's fields by OpenAI's.
    """
    steps, inner = list[int | str](), list[int | str]()
    for step in path:
        if _has(body, step):
            body = body[step]
            inner.append(step)
            if isinstance(body, TranslatedPart):
                steps, inner = [body.place], []
        elif missing and step == path[-1]:
            inner.append(step)
    # Between a translated part and the last step, names are others there.
    steps += inner[-1:] if steps else inner
    return ".".join(names.get(str(step), str(step)) for step in steps)


def _has(body: Any, step: int | str) -> bool:
    """Return whether a part of a body has a further part there."""
    if isinstance(step, int):
        return isinstance(body, list)
    return isinstance(body, dict) and step in body


def _session_id(request: Request) -> str | None:
    """Return the conversation that a request names.

    Raises:
        ApiError: it is no such name.
    """
    session_id = request.headers.get(SESSION)
    if session_id is not None and not SESSION_ID.fullmatch(session_id):
        raise ApiError(
            400,
            f"{SESSION} is {session_id[:40]!r}; use up to 128 letters, digits, dots, dashes and "
            "underscores, a letter or digit first",
        )
    return session_id

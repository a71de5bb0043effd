"""Defines the one path that answers chats, as translators of other APIs use it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from itertools import groupby
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from kvcap.serve import schemas
from kvcap.serve.contract import Ask, Conversations, Piece, Reply
from kvcap.serve.errors import NONE, ApiError, of_body
from kvcap.serve.limits import RequestLimits
from kvcap.serve.streaming import ChatForm, Form

Body = TypeVar("Body", bound=schemas.Strict)
Chat = TypeVar("Chat", schemas.ChatRequest, schemas.CompletionRequest)


class ChatPath(Protocol):
    """A protocol of objects that answer chats of any API."""

    conversations: Conversations

    @property
    def name(self) -> str:
        """Return the name that clients call the model by."""

    @property
    def limits(self) -> RequestLimits:
        """Return the limits on requests."""

    async def body_of(self, request: Request, kind: type[Body]) -> Body:
        """Return a request's body.

        Raises:
            ApiError: it is none of this kind.
        """

    async def answer(
        self, request: Request, body: schemas.ChatRequest, form: Callable[[], Form]
    ) -> Response:
        """Answer a chat in any form."""

    async def go_on(
        self, request: Request, body: schemas.CompletionRequest, form: Callable[[], Form]
    ) -> Response:
        """Continue texts in any form."""

    def ask(
        self,
        request: Request,
        make_body: Callable[[], Mapping[str, Any]],
        names: Mapping[str, str] = NONE,
    ) -> Ask:
        """Return what the body of a chat asks for, which is made of another API's.

        Raises:
            ApiError: nothing that could be answered.
        """

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model; None: it names none.

        Raises:
            ApiError: naming the one there is.
        """


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
        raise of_body(error, lambda path: _place(body, path, names)) from error
    except ValueError as error:
        raise ApiError(400, str(error)) from error


def _place(body: Any, path: Sequence[int | str], names: Mapping[str, str]) -> str:
    """Return the path in the client's body of a field of OpenAI's body."""
    steps = list(path)
    for count, step in enumerate(path, 1):
        try:
            body = body[step]
        except (LookupError, TypeError):  # it is missing, or a step within the schema
            break
        if isinstance(body, TranslatedPart):
            # Between it and the last step, names are others there.
            steps = [body.place, *path[count:][-1:]]
    return ".".join(names.get(str(step), str(step)) for step in steps)

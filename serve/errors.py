"""Maps errors to the error format of the API that was asked, with their status.

A message says what was given and what would work, as everywhere in kvcap. Nothing of the server's
own state, such as a path or a traceback, is ever part of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from kvcap.runtime.errors import (
    Busy,
    ConversationUnknown,
    KvcapError,
    LogitsBroken,
    MemoryCapExceeded,
    ReaderTooSlow,
    ReplicaLost,
    SessionBroken,
)

NO_TEMPLATE = (
    "has no chat template, so messages cannot be answered; continue a text by /v1/completions, or "
    "start the server with --chat-template FILE or NAME, such as chatml"
)
EMBEDDINGS = ("/v1/embeddings", "/api/embed", "/api/embeddings")  # addresses of other servers
MESSAGES, OLLAMA = "/v1/messages", "/api/"  # what addresses of other APIs begin with
KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Holds Anthropic's types of errors by status; others are `api_error` or invalid requests."""
NONE: Mapping[str, str] = MappingProxyType({})
SHOWN = 80  # letters of what was given, in a message about it
ADVICE = {  # pydantic's kinds of errors whose own words say little, by what is to be done
    "extra_forbidden": "is no parameter that this server knows; leave it out",
    "missing": "is missing; give it",
}


class ApiError(Exception):
    """A request that is refused, or an answer that failed.

    Args:
        status: of HTTP.
        message: what was given, and what would work.
        param: the field of the body that is wrong, if it is one: `messages.0.content`.
        code: OpenAI's word for what is wrong, for programs.
        retry_after_s: seconds after which to ask again, where that may help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """Return OpenAI's type of the error, which follows from its status."""
        special = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        return special.get(self.status, usual)

    @property
    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI's API has it, sent alone or as the last event of a stream."""
        fields = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": fields}

    @property
    def anthropic(self) -> dict[str, Any]:
        """Return the error in Anthropic's format, sent alone or as the last event of a stream."""
        usual = "api_error" if self.status >= 500 else "invalid_request_error"
        fields = {"type": KINDS.get(self.status, usual), "message": self.message}
        details = {"details": {"error_code": self.code}} if self.code else {}
        return {"type": "error", "error": {**fields, **details}}

    @property
    def ollama(self) -> dict[str, Any]:
        """Return the error in ollama's format, sent alone or as the last line of a stream."""
        return {"error": self.message}

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the answer to a request."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def answer(self, path: str) -> JSONResponse:
        """Return the whole answer to a request for an address, in the form of its API."""
        body = self.body
        if f"{path}/".startswith(f"{MESSAGES}/"):
            body = self.anthropic
        elif path.startswith(OLLAMA):
            body = self.ollama
        return JSONResponse(body, self.status, self.headers)


def as_api_error(error: Exception) -> ApiError:
    """Map any error to the API's; an `ApiError` stays as it is."""
    if isinstance(error, ApiError):
        return error
    text = str(error)
    if isinstance(error, Busy):
        return ApiError(429, text, code="busy", retry_after_s=error.retry_after_s)
    if isinstance(error, ConversationUnknown):
        return ApiError(404, text, code="conversation_not_found")
    if isinstance(error, MemoryCapExceeded):
        return ApiError(503, text, code="memory_cap_exceeded", retry_after_s=1)
    if isinstance(error, ReplicaLost):
        return ApiError(503, text, code="replica_lost", retry_after_s=1)
    if isinstance(error, ReaderTooSlow):
        return ApiError(408, text, code="reader_too_slow")
    if isinstance(error, (LogitsBroken, SessionBroken)):
        return ApiError(500, text, code=_words(type(error).__name__))
    if isinstance(error, KvcapError) and isinstance(error, ValueError):
        return ApiError(400, text, code=_words(type(error).__name__))
    if isinstance(error, ValueError):  # the house rule: what a user can get wrong
        return ApiError(400, text)
    return ApiError(500, "the server failed; its log says why")


def of_body(error: ValidationError, place: Callable[[Sequence[int | str], bool], str]) -> ApiError:
    """Return the API's error for a body that is not valid; it names the first thing wrong.

    Args:
        error: of the schema.
        place: returns where a field of the schema stands in the client's body, from which it may
            be missing.
    """
    errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        message = first["msg"].removeprefix("Invalid JSON: ")
        if "escape" in message or "code point" in message:
            message += "; give UTF-8, and whole letters: no half of a surrogate pair"
        return ApiError(400, f"the body is no JSON: {message}")
    places = [place(each["loc"], each["type"] == "missing") for each in errors]
    # What has one of several types has an error for each, of which the one within it knows best.
    where = max((x for x in places if f"{x}.".startswith(f"{places[0]}.")), key=len)
    first, *others = [each for x, each in zip(places, errors, strict=True) if x == where]
    where = where if len(where) <= SHOWN else f"{where[:SHOWN]}..."
    texts = [each["msg"].removeprefix("Value error, ") for each in (first, *others)]
    text = " or ".join(f"{text[:1].lower()}{text[1:]}" for text in dict.fromkeys(texts))
    if first["type"] == "value_error" and isinstance(first["input"], (dict, list)):
        # The text says by itself what of the object is wrong.
        return ApiError(400, f"{where}: {text}" if where else text, param=where or None)
    message = ADVICE.get(first["type"], f"is {_shown(first['input'])}: {text}")
    if not where:
        return ApiError(400, f"the body {message}")
    code = "unknown_parameter" if first["type"] == "extra_forbidden" else None
    return ApiError(400, f"{where} {message}", param=where, code=code)


def _shown(value: Any) -> str:
    """Return a given value in a few letters."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value[: SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _words(name: str) -> str:
    """Return `PinsTooLarge` as `pins_too_large`."""
    return "".join(f"_{x.lower()}" if x.isupper() else x for x in name).lstrip("_")


def _of_address(request: Request, error: HTTPException) -> JSONResponse:
    """Return the answer to a request for an address that there is not, or not by its method."""
    where, allowed = _shown(request.url.path), dict(error.headers or {})
    if error.status_code == 404:
        message = (
            f"there is nothing at {where}; use /v1/chat/completions, /v1/completions, /v1/models"
        )
        if request.url.path in EMBEDDINGS:
            message = (
                f"{where} is not answered: kvcap writes text; ask a server of an embedding model"
            )
        return ApiError(404, message, code="unknown_url").answer(request.url.path)
    methods = " or ".join(sorted(allowed.get("Allow", "").split(", ")))
    message = f"{where} does not answer {request.method}; use {methods}"
    refused = ApiError(error.status_code, message, code="method_not_supported")
    response = refused.answer(request.url.path)
    response.headers.update(allowed)
    return response


async def respond_unforeseen(request: Request, error: Exception) -> JSONResponse:
    """Answer an unforeseen error; the header says that uvicorn will close the connection."""
    response = await respond(request, error)
    response.headers["Connection"] = "close"
    return response


async def respond(request: Request, error: Exception) -> JSONResponse:
    """Handle every error that reaches Starlette."""
    if isinstance(error, HTTPException):
        return _of_address(request, error)
    return as_api_error(error).answer(request.url.path)

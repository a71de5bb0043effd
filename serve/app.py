"""Serves the addresses of OpenAI's API over conversations, and what watches the server.

Knows neither models nor sockets. Every address but `OPEN` asks for a key where there are keys; none
touches a file.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from time import time
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.authentication import (
    AuthCredentials,
    AuthenticationBackend,
    AuthenticationError,
    SimpleUser,
)
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvcap.runtime.errors import KvcapError
from kvcap.serve import schemas
from kvcap.serve.chat_path import Body, request_of
from kvcap.serve.contract import Ask, Conversations, Reply
from kvcap.serve.errors import NO_TEMPLATE, NONE, ApiError, of_body, respond, respond_unforeseen
from kvcap.serve.limits import Bodies, RequestLimits
from kvcap.serve.messages import Messages
from kvcap.serve.metrics import Metrics
from kvcap.serve.ollama import Ollama
from kvcap.serve.openapi import openapi_of
from kvcap.serve.responses import Responses
from kvcap.serve.series import Series
from kvcap.serve.streaming import (
    SESSION,
    ChatForm,
    Form,
    SeveralForm,
    TextForm,
    streamed,
    whole,
)
from kvcap.serve.tokens import Tokens

OPEN = frozenset({"/health"})  # paths that need no API key
LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "::1")
HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(:\d*)?")  # a name or an address, and a port
SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
GONE = 499  # status of an answer whose client has left


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


def application(
    conversations: Conversations, settings: Settings, routes: Sequence[BaseRoute] = ()
) -> Starlette:
    """Make the server, to be run by any ASGI server. When that ends, conversations are saved.

    Args:
        conversations: that answer.
        settings: names, keys and limits.
        routes: further addresses; their requests find `conversations` in `request.app.state`, and
            whose they are by `owner_of`.
    """
    api = Api(conversations, settings)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await conversations.aclose()

    keys = Keys(settings.keys, OPEN.union(settings.open_paths))
    refused: Any = respond
    app = Starlette(
        routes=[*api.routes, *routes],
        lifespan=lifespan,
        exception_handlers={
            ApiError: refused,
            HTTPException: refused,
            KvcapError: refused,
            ValueError: refused,
            Exception: respond_unforeseen,
            ClientDisconnect: _to_nobody,
        },
        middleware=[
            Middleware(Counted, metrics=api.metrics, paths=frozenset(api.paths)),
            Middleware(KnownHosts, hosts=settings.hosts),
            *_other_sites(settings.origins),
            Middleware(AuthenticationMiddleware, backend=keys, on_error=_without_key),
        ],
    )
    app.state.conversations = conversations
    return app


def _other_sites(origins: Sequence[str]) -> list[Middleware]:
    """Return the CORS middleware, which answers a browser's preflight before a key is checked."""
    if not origins:
        return []
    shown = [SESSION, "Retry-After"]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=shown,
        max_age=600,
    )
    return [cors]


def owner_of(connection: HTTPConnection) -> str:
    """Return who a request is from: a digest of its key, or nobody where there are no keys."""
    return connection.user.username  # type: ignore[no-any-return]


class Api:
    """An application that answers at OpenAI's addresses.

    Args:
        conversations: that answer.
        settings: names and limits.
    """

    def __init__(self, conversations: Conversations, settings: Settings) -> None:
        self.conversations, self.settings = conversations, settings
        self.metrics = Metrics(conversations.figures)
        self.bodies = Bodies(settings.limits)
        self.one_at_a_time = asyncio.Lock()
        """Is held while a body is understood, so that streams send tokens between two of them."""
        self.created = int(time())
        self.messages, self.responses = Messages(self), Responses(self)
        self.tokens, self.ollama = Tokens(self), Ollama(self)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """Return the document of `/docs`, made when it is first asked for."""
        return openapi_of(self.settings.model)

    @property
    def name(self) -> str:
        """Return the name that clients call the model by."""
        return self.settings.model

    @property
    def limits(self) -> RequestLimits:
        """Return the limits on requests."""
        return self.settings.limits

    @property
    def routes(self) -> list[Route]:
        """Return all routes; those of OpenAI's API are also there without `/v1`."""
        openai = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/responses", self.responses.create, methods=["POST"]),
            Route("/v1/responses/{id}", self.responses.read, methods=["GET"]),
            Route("/v1/responses/{id}", self.responses.delete, methods=["DELETE"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.one_model, methods=["GET"]),
        ]
        short = [Route(x.path[len("/v1") :], x.endpoint, methods=x.methods) for x in openai]
        return [
            *openai,
            *short,
            Route("/v1/messages", self.messages.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.messages.count, methods=["POST"]),
            Route("/tokenize", self.tokens.tokenize, methods=["POST"]),
            Route("/detokenize", self.tokens.detokenize, methods=["POST"]),
            *self.ollama.routes,
            Route("/docs", self.docs, methods=["GET"]),
            Route("/openapi.json", self.docs, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.show_metrics, methods=["GET"]),
        ]

    @property
    def model(self) -> dict[str, Any]:
        """Return the model as OpenAI's and vLLM's API has it, and whether it can chat."""
        figures = self.conversations.figures()
        return {
            "id": self.settings.model,
            "object": "model",
            "created": self.created,
            "owned_by": "kvcap",
            "max_model_len": figures.model.context_length,
            "chat_template": figures.chat_template,
        }

    @property
    def paths(self) -> list[str]:
        """Return the addresses that can be asked for."""
        return [route.path for route in self.routes]

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        body = await self.body_of(request, schemas.ChatRequest)

        def form() -> Form:
            return ChatForm(
                self.settings.model, body.include_usage, body.usage_each, most_calls=body.most_calls
            )

        return await self.answer(request, body, form)

    async def answer(
        self, request: Request, body: schemas.ChatRequest, form: Callable[[], Form]
    ) -> Response:
        """Answer a chat in any form: of OpenAI's API, or of another that was translated to it."""
        self.check_model(body.model)
        if not self.conversations.figures().chat_template:
            raise ApiError(400, f"{self.settings.model} {NO_TEMPLATE}", code="no_chat_template")
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

    async def complete(self, request: Request) -> Response:
        """Continue a text: `POST /v1/completions`."""
        body = await self.body_of(request, schemas.CompletionRequest)

        def form() -> Form:
            return TextForm(self.settings.model, body.include_usage, body.usage_each)

        return await self.go_on(request, body, form)

    async def go_on(
        self, request: Request, body: schemas.CompletionRequest, form: Callable[[], Form]
    ) -> Response:
        """Continue texts in any form: of OpenAI's API, or of another that was translated to it."""
        self.check_model(body.model)
        context = self._given(request)
        asks = [ask for prompt in body.prompt for ask in body.asks(body.ask(prompt, *context))]
        return await self._answer(request, asks, form, body)

    async def models(self, _: Request) -> Response:
        """List the one model that there is."""
        return JSONResponse({"object": "list", "data": [self.model]})

    async def one_model(self, request: Request) -> Response:
        """Describe a model by its name."""
        self.check_model(request.path_params["name"])
        return JSONResponse(self.model)

    async def docs(self, _: Request) -> Response:
        """Describe all addresses and their bodies in OpenAPI's form."""
        return JSONResponse(self.schema)

    async def health(self, _: Request) -> Response:
        """Answer whether the server runs; nothing more, as it asks for no key."""
        if self.conversations.figures().closing:
            return JSONResponse({"status": "closing"}, 503, {"Retry-After": "5"})
        return JSONResponse({"status": "ok"})

    async def show_metrics(self, _: Request) -> Response:
        """Show figures for Prometheus."""
        return Response(self.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

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
                raise of_body(error) from error
        return parsed

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model; None: it names none.

        Raises:
            ApiError: naming the one there is.
        """
        if name not in (None, self.settings.model):
            text = f"there is no model {str(name)[:80]!r} here; use {self.settings.model!r}"
            raise ApiError(404, text, param="model", code="model_not_found")

    def _given(self, request: Request) -> tuple[str, str | None, RequestLimits, Mapping[str, Any]]:
        """Return the owner and conversation of a request, and the server's limits and defaults."""
        settings = self.settings
        return owner_of(request), _session_id(request), settings.limits, settings.defaults

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
            quiet = self.settings.limits.quiet_seconds
            return await streamed(request, reply, form, self.metrics, quiet)
        return await whole(request, reply, form, self.metrics)


class Keys(AuthenticationBackend):
    """Lets in who has a key.

    Args:
        keys: API keys; with none, everybody is let in.
        open_paths: addresses that ask for none.
    """

    def __init__(self, keys: Sequence[str], open_paths: Collection[str]) -> None:
        self.digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self.open_paths = open_paths

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, SimpleUser]:
        """Find who a request is from.

        Raises:
            AuthenticationError: it has no key, or a wrong one.
        """
        owner = ""
        if self.digests and conn.scope["path"] not in self.open_paths:
            named = conn.headers.get("authorization", "")
            if not named and "x-api-key" in conn.headers:  # as Anthropic's clients send it
                named = f"Bearer {conn.headers['x-api-key']}"
            scheme, _, key = named.partition(" ")
            digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
            # Every key is compared in constant time, so that timing does not show how near one is.
            same = [hmac.compare_digest(digest, key_digest) for key_digest in self.digests]
            if scheme.lower() != "bearer" or not any(same):
                fault = "a wrong API key was" if key else "no API key was"
                raise AuthenticationError(f"{fault} given; send Authorization: Bearer KEY")
            owner = digest.hex()[:32]
        return AuthCredentials(), SimpleUser(owner)


class KnownHosts:
    """Refuses requests that reach the server by a name that is not its own.

    Args:
        app: that answers.
        hosts: names; None: any.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] | None) -> None:
        self.app = app
        self.hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self.hosts is not None and scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            match = HOST.fullmatch(host)
            if match is None or match[1].lower() not in self.hosts:
                text = (
                    f"the request is for host {host[:80]!r}, which is not this server's name; use "
                    f"{' or '.join(sorted(self.hosts))}, or start it with --allow-host NAME"
                )
                refused = ApiError(400, text, code="unknown_host").answer(scope["path"])
                await refused(scope, receive, send)
                return
        await self.app(scope, receive, send)


HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
"""Holds the headers of every answer that has no others."""


class Counted:
    """Counts requests by address and status, and puts `HEADERS` on what is answered.

    Args:
        app: that answers.
        metrics: that count.
        paths: addresses; others are counted together, so that no client makes up new ones.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self.app, self.metrics, self.paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self.paths else "other"

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(path, str(message["status"])).inc()
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, counting)


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


def _without_key(connection: HTTPConnection, error: Exception) -> Response:
    return ApiError(401, str(error), code="invalid_api_key").answer(connection.url.path)


async def _to_nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=GONE)

"""Serves the addresses of OpenAI's API over conversations, and what watches the server.

Knows neither models nor sockets. Every address but `OPEN` asks for a key where there are keys; none
touches a file.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from time import time
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
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
from kvcap.serve.chat_path import ChatPath, Settings
from kvcap.serve.contract import Conversations
from kvcap.serve.errors import ApiError, respond, respond_unforeseen
from kvcap.serve.messages import Messages
from kvcap.serve.metrics import Metrics
from kvcap.serve.ollama import Ollama
from kvcap.serve.openapi import openapi_of
from kvcap.serve.responses import Responses
from kvcap.serve.streaming import (
    SESSION,
    ChatForm,
    Form,
    TextForm,
)
from kvcap.serve.tokens import Tokens

OPEN = frozenset({"/health"})  # paths that need no API key
HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(:\d*)?")  # a name or an address, and a port
GONE = 499  # status of an answer whose client has left


def application(
    conversations: Conversations, settings: Settings, routes: Sequence[BaseRoute] = ()
) -> Starlette:
    """Make the server, to be run by any ASGI server. When that ends, conversations are saved.

    Args:
        conversations: that answer.
        settings: names, keys and limits.
        routes: further addresses; their requests find `conversations` in `request.app.state`, and
            whose they are in `request.user`.
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


class Api(ChatPath):
    """An application that answers at OpenAI's addresses.

    Args:
        conversations: that answer.
        settings: names and limits.
    """

    def __init__(self, conversations: Conversations, settings: Settings) -> None:
        super().__init__(conversations, settings)
        self.created = int(time())
        self.messages, self.responses = Messages(self), Responses(self)
        self.tokens, self.ollama = Tokens(self), Ollama(self)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """Return the document of `/docs`, made when it is first asked for."""
        return openapi_of(self.name)

    @property
    def routes(self) -> list[Route]:
        """Return all routes; those of OpenAI's API are also there without `/v1`."""
        openai = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/responses", self.responses.create, methods=["POST"]),
            Route("/v1/responses/{id}", self.responses.one, methods=["GET", "DELETE"]),
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
            "id": self.name,
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
                self.name, body.include_usage, body.usage_each, most_calls=body.most_calls
            )

        return await self.answer(request, body, form)

    async def complete(self, request: Request) -> Response:
        """Continue a text: `POST /v1/completions`."""
        body = await self.body_of(request, schemas.CompletionRequest)

        def form() -> Form:
            return TextForm(self.name, body.include_usage, body.usage_each)

        return await self.go_on(request, body, form)

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


def _without_key(connection: HTTPConnection, error: Exception) -> Response:
    return ApiError(401, str(error), code="invalid_api_key").answer(connection.url.path)


async def _to_nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=GONE)

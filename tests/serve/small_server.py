"""A server at the size of a test: the page, and what it asks for of OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.authentication import (
    AuthCredentials,
    AuthenticationBackend,
    AuthenticationError,
    SimpleUser,
)
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvcap.runtime.errors import ConversationUnknown
from kvcap.runtime.session.session import Session
from kvcap.serve.contract import Figures
from kvcap.serve.page_routes import OPEN_PATHS, page_routes
from kvcap.serve.strip import Strip, strip_of


class SmallConversations:
    """Sessions by their ids, answered one after the other in a thread of their own."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self.sessions: dict[tuple[str, str], Session] = {}
        self.thread = ThreadPoolExecutor(1)

    def figures(self) -> Figures:
        plan = self.runtime.plan
        return Figures(policy=plan.policy, budget_tokens=plan.budget_tokens)

    async def strip(self, owner: str, session_id: str) -> Strip:
        if (session := self.sessions.get((owner, session_id))) is None:
            raise ConversationUnknown(f"there is no conversation {session_id!r}")
        return await self._within(strip_of, session, session_id)

    async def answer(self, owner: str, session_id: str, given: Any) -> AsyncIterator[str | None]:
        *before, last = ({"role": m["role"], "content": m["content"]} for m in given)
        pinned = {i for i, message in enumerate(given) if message.get("pin")}
        session = self.sessions.get((owner, session_id))
        earlier = pinned - {len(before)}
        if session is None or session.messages != before or session.pinned != earlier:
            session = self.sessions[owner, session_id] = self.runtime.session()
            session.messages, session.pinned = before, earlier
            session.set_generation(max_new_tokens=64)
        pieces = session.send(last["content"], pin=len(before) in pinned)
        try:
            while (piece := await self._within(next, pieces, None)) is not None:
                yield piece
        finally:
            self.thread.submit(pieces.close)  # type: ignore[attr-defined]

    async def _within(self, call: Any, *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, call, *given)


class Keys(AuthenticationBackend):
    def __init__(self, key: str) -> None:
        self.key = key

    async def authenticate(self, conn: Any) -> Any:
        given = conn.headers.get("authorization", "").removeprefix("Bearer ")
        if self.key and conn.scope["path"] not in OPEN_PATHS and given != self.key:
            raise AuthenticationError("no such key")
        return AuthCredentials(), SimpleUser(given)


def refused(status: int) -> Any:
    def respond(_: Any, error: Exception) -> Response:
        return JSONResponse({"error": {"message": str(error)}}, status)

    return respond


def application(conversations: SmallConversations, key: str = "") -> Starlette:
    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": "pocket"}]})

    async def chat(request: Request) -> Response:
        session_id, said = request.headers["x-session-id"], (await request.json())["messages"]
        pieces = conversations.answer(request.user.username, session_id, said)

        async def stream() -> AsyncIterator[str]:
            async for piece in pieces:
                yield event({"content": piece}, None)
            yield event({}, "stop") + "data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    def event(delta: Any, reason: Any) -> str:
        return f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': reason}]})}\n\n"

    keys = Middleware(AuthenticationMiddleware, backend=Keys(key), on_error=refused(401))
    app = Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            *page_routes(),
        ],
        middleware=[keys],
        exception_handlers={ConversationUnknown: refused(404)},
    )
    app.state.conversations = conversations
    return app


class Serving:
    """An application that runs, in a thread of its own."""

    def __init__(self, app: Any) -> None:
        config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self) -> Serving:
        self.thread.start()
        while not self.server.started and self.thread.is_alive():
            time.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/"
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()

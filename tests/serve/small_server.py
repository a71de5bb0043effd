"""A server at the size of a test: the chat page, and of OpenAI's API what the page asks for."""

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
from starlette.authentication import AuthCredentials, AuthenticationBackend, AuthenticationError, SimpleUser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from kvcap.runtime.errors import ConversationUnknown
from kvcap.serve.contract import Figures
from kvcap.serve.page_routes import OPEN_PATHS, page_routes
from kvcap.serve.strip import strip_of


class Small:
    def __init__(self, runtime):
        self.runtime, self.sessions = runtime, {}
        self.pool = ThreadPoolExecutor(1)
        self.delay = 0.0

    def figures(self):
        plan = self.runtime.plan
        return Figures(policy=plan.policy, budget_tokens=plan.budget_tokens)

    async def strip(self, owner, session_id):
        session = self.sessions.get((owner, session_id))
        if session is None:
            raise ConversationUnknown("no such conversation")
        return await asyncio.get_running_loop().run_in_executor(self.pool, strip_of, session, session_id)


class Keys(AuthenticationBackend):
    def __init__(self, key):
        self.key = key

    async def authenticate(self, conn):
        given = conn.headers.get("authorization", "").partition(" ")[2]
        if self.key and conn.scope["path"] not in OPEN_PATHS and given != self.key:
            raise AuthenticationError(f"{'a wrong' if given else 'no'} API key was given; send Authorization: Bearer KEY")
        return AuthCredentials(), SimpleUser(given)


def said(status, text):
    return JSONResponse({"error": {"message": text}}, status)


def app_of(small, key=""):
    async def models(request):
        return JSONResponse({"data": [{"id": "pocket"}]})

    async def chat(request):
        body = await request.json()
        messages = body["messages"]
        pins = {i for i, m in enumerate(messages) if m.pop("pin", False)}
        session_id = (request.user.username, request.headers["x-session-id"])
        session = small.sessions.get(session_id)
        fresh = session is None or session.messages != messages[:-1] or session.pinned != {p for p in pins if p < len(messages) - 1}
        if fresh:
            session = small.runtime.session()
            session.messages = messages[:-1]
            session.pinned = {p for p in pins if p < len(messages) - 1}
            small.sessions[session_id] = session
        session.set_generation(max_new_tokens=64)
        try:
            pieces = session.send(messages[-1]["content"], pin=len(messages) - 1 in pins)
        except Exception as e:
            return said(400, str(e))
        loop = asyncio.get_running_loop()

        async def stream() -> AsyncIterator[str]:
            try:
                while True:
                    piece = await loop.run_in_executor(small.pool, next, pieces, None)
                    if piece is None:
                        break
                    await asyncio.sleep(small.delay)
                    yield f"data: {json.dumps({'choices': [{'delta': {'content': piece}, 'finish_reason': None}]})}\n\n"
                yield f"data: {json.dumps({'choices': [{'delta': {}, 'finish_reason': session.turn.finish_reason}]})}\n\ndata: [DONE]\n\n"
            finally:
                small.pool.submit(pieces.close)

        return StreamingResponse(stream(), media_type="text/event-stream")

    app = Starlette(
        routes=[Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"]), *page_routes()],
        middleware=[Middleware(AuthenticationMiddleware, backend=Keys(key), on_error=lambda c, e: said(401, str(e)))],
        exception_handlers={ConversationUnknown: lambda r, e: said(404, str(e))},
    )
    app.state.conversations = small
    return app


class Serving:
    def __init__(self, app: Any) -> None:
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self):
        self.thread.start()
        while not self.server.started and self.thread.is_alive():
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}/"
        return self

    def __exit__(self, *_):
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()

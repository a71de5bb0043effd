"""Serves the chat page at `/`, the strip that it shows, and conversations by their ids.

What the page consists of is read when the server starts, and every file has a route of its own: no
path of a request reaches the file system. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from kvcap.serve.contract import Conversations

PAGE = Path(__file__).parent / "page"
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {"": ("index.html", "text/html")}  # by their paths, with their types
for file in sorted(PAGE.rglob("*")):
    if file.suffix in TYPES:
        name = file.relative_to(PAGE).as_posix()
        FILES[f"page/{name}"] = (name, TYPES[file.suffix])
HEADERS = {
    # Nothing is loaded from, sent to or framed by anywhere else; no text becomes markup or code.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # a newer server's page is seen at once
}


OPEN_PATHS = frozenset(f"/{path}" for path in FILES)
"""Lists the paths that need no key: files that say nothing of the server."""


def page_routes() -> list[BaseRoute]:
    """Return the routes of the page's files, and of the page's own requests beside OpenAI's API.

    `conversations` are found in the application's state, and whose a request is in `request.user`.
    """
    return [
        *(_file(f"/{path}", PAGE / name, kind) for path, (name, kind) in FILES.items()),
        Route("/v1/kvcap/memory", _memory, methods=["GET"]),
        Route("/v1/kvcap/sessions/{session_id}/strip", _strip, methods=["GET"]),
        Route("/v1/kvcap/sessions/{session_id}", _delete, methods=["DELETE"]),
    ]


def _file(path: str, source: Path, kind: str) -> Route:
    content = source.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'

    async def give(request: Request) -> Response:
        headers = {**HEADERS, "ETag": tag}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    return Route(path, give, methods=["GET"])


async def _memory(request: Request) -> Response:
    """Return the policy and the slots of every conversation, as `{policy, budget_tokens}`."""
    conversations: Conversations = request.app.state.conversations
    figures = conversations.figures()
    return JSONResponse({"policy": figures.policy, "budget_tokens": figures.budget_tokens})


async def _strip(request: Request) -> Response:
    """Return a `Strip`, to its owner alone."""
    conversations: Conversations = request.app.state.conversations
    strip = await conversations.strip(request.user.username, request.path_params["session_id"])
    headers = {"Cache-Control": "no-store"}
    return Response(strip.model_dump_json(), media_type="application/json", headers=headers)


async def _delete(request: Request) -> Response:
    """Forget a conversation, of its owner alone."""
    conversations: Conversations = request.app.state.conversations
    name = request.path_params["session_id"]
    await conversations.delete(request.user.username, name)
    return JSONResponse({"id": name, "object": "kvcap.session.deleted", "deleted": True})

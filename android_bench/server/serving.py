"""Serves the pages over HTTP, with a plan or a decoder, and no other file.

The files are a fixed table made when the server starts, so that no request can name another one.
`Serving` hands out a plan and takes results; `ChatServer` hands out a decoder and takes nothing.
Knows nothing of commands or terminals.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvcap.android_bench.decoders import decoder_for_a_page
from kvcap.android_bench.documents import PLAN_FILE, parsed, read_plan
from kvcap.android_bench.errors import ResultBroken, ResultsFull, ServerEnded
from kvcap.android_bench.results.source import origin
from kvcap.android_bench.server import vendor
from kvcap.android_bench.server.landing import ClientLimits, Results
from kvcap.runtime.errors import PortTaken
from kvcap.runtime.types import MANIFEST

if TYPE_CHECKING:
    from typing import Self

PAGE = Path(__file__).parents[1] / "page"
HEAD_BYTES, SIGNS_BYTES = 2**15, 2**16  # most bytes of a request's headers, of a browser's signs
TYPES = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript",
    ".svg": "image/svg+xml", ".wasm": "application/wasm", ".json": "application/json",
}  # fmt: skip
HEADERS = {
    # Isolation gives the page threads and a clock of 5 µs, where the origin is secure.
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    # The page loads nothing from other servers and sends nothing to them.
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; "
    "worker-src 'self' blob:; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Headers:
    """Middleware that adds `HEADERS` to every response, refusals too."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                there = {name for name, _ in message["headers"]}
                message["headers"] += [
                    (name.lower().encode(), value.encode())
                    for name, value in HEADERS.items()
                    if name.lower().encode() not in there
                ]
            await send(message)

        await self.app(scope, receive, sending)


class Patience:
    """Middleware that ends a request if its response is not read in time, or the client leaves."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self.app, self.seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            with anyio.move_on_after(self.seconds):
                await self.app(scope, receive, send)
        except ClientDisconnect:
            pass  # there is no client to answer


class Connection(H11Protocol):
    """A connection that closes if a request's headers do not arrive in time.

    Uvicorn's own would wait for ever.
    """

    head_seconds = ClientLimits.head_seconds
    waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer."""
        super().connection_made(transport)
        self.waiting = self.loop.call_later(self.head_seconds, transport.close)

    def data_received(self, data: bytes) -> None:
        """Run the timer while no request is under way."""
        super().data_received(data)
        under_way = self.cycle is not None and not self.cycle.response_complete
        if under_way and self.waiting is not None:
            self.waiting.cancel()
            self.waiting = None
        elif not under_way and self.waiting is None:
            self.waiting = self.loop.call_later(self.head_seconds, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        if self.waiting is not None:
            self.waiting.cancel()
        super().connection_lost(exc)


class AsciiJson(JSONResponse):
    """A JSON response in ASCII, as clients may send lone surrogates, which UTF-8 cannot encode."""

    def render(self, content: Any) -> bytes:
        """Encode the body."""
        return json.dumps(content, allow_nan=False).encode("ascii")


def handed_out(page: str, prefix: str, folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Return every path that a client can request, with its file.

    Args:
        page: name of the page at the address itself.
        prefix: prefix of the paths of `names`.
        folder: the folder that these files lie in.
        names: names of a plan's or a decoder's files.
    """
    pages = [path for path in PAGE.iterdir() if path.suffix in TYPES]
    libraries = [path for at in vendor.FOLDERS for path in at.iterdir() if path.is_file()]
    return {
        "": PAGE / page,
        **{path.name: path for path in pages},
        **{f"{path.parent.name}/{path.name.removesuffix('.gz')}": path for path in libraries},
        **{f"{prefix}/{name}": folder / name for name in names},
    }


class Files:
    """The files that the server hands out, and their routes."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files

    @property
    def routes(self) -> list[BaseRoute]:
        """Return the routes of the files."""
        return [Route("/{name:path}", self.give, methods=["GET"])]

    async def give(self, request: Request) -> Response:
        """Return a file of the page, the plan or the decoder."""
        name = request.path_params["name"]
        path = self.files.get(name)
        if path is None or not path.is_file():
            return _refused(404, f"there is no {name!r} here")
        coding = {"Content-Encoding": "gzip"} if path.suffix == ".gz" else {}
        kind = TYPES.get(Path(path.name.removesuffix(".gz")).suffix, "application/octet-stream")
        if name.startswith("ort/"):
            # Every worker of the page loads the library again.
            coding["Cache-Control"] = "private, max-age=600"
        return FileResponse(path, media_type=kind, headers=coding)


class Answers(Files):
    """The routes of the page that measures: its files, its judgement, and uploads of results."""

    def __init__(self, files: Mapping[str, Path], results: Results, limits: ClientLimits) -> None:
        super().__init__(files)
        self.results, self.limits = results, limits
        self.uploads = 0  # uploads under way
        self.judging = anyio.Semaphore(1)  # a large result takes memory and a whole core

    @property
    def routes(self) -> list[BaseRoute]:
        """Return the routes of files, and those that the page posts to."""
        return [
            Route("/device", self.judge, methods=["POST"]),
            Route("/results", self.take, methods=["POST"]),
            *super().routes,
        ]

    async def judge(self, request: Request) -> Response:
        """Return the origin of the page's device and the library's version, before it measures."""
        try:
            body = await _body(request, SIGNS_BYTES, self.limits.body_seconds)
            signs = parsed(body, "what the browser says", ResultBroken)
            verdict = origin(signs, request.headers.get("user-agent", ""))
        except (ValueError, AttributeError, RecursionError):
            return _refused(400, "signs of the browser are expected, as a JSON object")
        except TimeoutError:
            return _refused(408, "it took too long to arrive")
        return AsciiJson({**verdict._asdict(), "version": vendor.VERSION})

    async def take(self, request: Request) -> Response:
        """Take a result; return its file and its flags, or the reason why it is refused."""
        if request.headers.get("content-type", "").split(";")[0] != "application/json":
            return _refused(415, "a result is sent as application/json")
        if self.uploads >= self.limits.uploads:
            return _refused(503, "other results are arriving; send it again in a moment")
        self.uploads += 1
        try:
            return await self._take(request)
        finally:
            self.uploads -= 1

    async def _take(self, request: Request) -> Response:
        limits = self.limits
        try:
            body = await _body(request, limits.result_bytes, limits.body_seconds)
        except ValueError:
            return _refused(413, f"a result has at most {limits.result_bytes:,} bytes")
        except TimeoutError:
            return _refused(408, f"the result did not arrive within {limits.body_seconds:g} s")
        agent = request.headers.get("user-agent", "")
        try:
            async with self.judging:
                landed = await run_in_threadpool(self.results.take, body, agent)
        except ResultBroken as error:
            return _refused(422, str(error))
        except ResultsFull as error:
            return _refused(507, str(error))
        except OSError as error:
            return _refused(507, f"the result cannot be written: {error.strerror}")
        flags = landed.result["validity"]["flags"]
        return AsciiJson({"file": landed.path.name, "flags": flags}, status_code=201)


def application(
    files: Files, token: str | None, hosts: list[str], limits: ClientLimits
) -> Starlette:
    """Make the server's application.

    Args:
        files: the routes to serve.
        token: the first part of every path; None for paths without one.
        hosts: host names that requests may have; others could come from another site (DNS
            rebinding).
        limits: limits on the time of a request.
    """
    routes = files.routes
    if token:
        routes = [Mount(f"/{token}", routes=routes), Route("/{name:path}", _without_token)]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(Patience, seconds=limits.request_seconds),
            Middleware(Headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts),
        ],
    )


def _without_token(request: Request) -> Response:
    """Return a page that explains that the token is missing, and its style sheet."""
    if request.path_params["name"] == "style.css":
        return FileResponse(PAGE / "style.css")
    return FileResponse(PAGE / "refused.html", status_code=403)


def _refused(status: int, why: str) -> Response:
    return AsciiJson({"error": why}, status_code=status)


async def _body(request: Request, limit: int, seconds: float) -> bytes:
    """Return a request's body, and stop reading at the limit.

    Raises:
        ValueError: the body is longer than `limit` bytes.
        TimeoutError: the body did not arrive within `seconds`.
    """
    if int(request.headers.get("content-length", 0)) > limit:
        raise ValueError("too long")
    body = bytearray()
    with anyio.fail_after(seconds):
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise ValueError("too long")
    return bytes(body)


class PageServer:
    """A server that runs in a thread of its own.

    Args:
        port: the port to listen on; 0 takes a free one.
        lan: this machine's address in its network, where others may connect with a token; None
            lets in this machine alone.
        limits: limits on memory, disk and time that clients may use.

    Raises:
        VendorError: the page's libraries are missing.
        PortTaken: another program listens on the port.
    """

    def __init__(self, port: int, lan: str | None, limits: ClientLimits) -> None:
        vendor.require()
        self.lan, self.limits = lan, limits
        self.token = secrets.token_urlsafe(16) if lan else None
        self.socket = _bound(lan or "127.0.0.1", port)
        self.port: int = self.socket.getsockname()[1]
        token = f"{self.token}/" if self.token else ""
        self.url = f"http://{lan or 'localhost'}:{self.port}/{token}"

    def _hand_out(self, files: Files) -> None:
        """Set up the application that the server will run."""
        limits, hosts = self.limits, [self.lan] if self.lan else ["localhost", "127.0.0.1"]
        config = uvicorn.Config(
            application(files, self.token, hosts, limits),
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="none",
            http=type("Patient", (Connection,), {"head_seconds": limits.head_seconds}),
            timeout_keep_alive=int(limits.head_seconds),
            limit_concurrency=limits.connections,
            h11_max_incomplete_event_size=HEAD_BYTES,
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True
        )

    def __enter__(self) -> Self:
        """Start the server."""
        self.thread.start()
        while not self.server.started and self.thread.is_alive():
            time.sleep(0.01)
        return self

    def check(self) -> None:
        """Raise if the server ended by itself.

        Raises:
            ServerEnded: the server's thread has ended.
        """
        if not self.thread.is_alive():
            raise ServerEnded("the server ended by itself; start it again")

    def __exit__(self, *_: object) -> None:
        """Stop, without waiting for browsers that hold connections."""
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()
        self.socket.close()


class Serving(PageServer):
    """Serves the page that measures a plan, and takes its results.

    >>> with Serving(folder, results) as serving:  # doctest: +SKIP
    ...     print(serving.url)
    ...     print(serving.landed.get(timeout=600).path)
    """

    def __init__(
        self,
        folder: Path,
        results: Path,
        *,
        port: int = 0,
        lan: str | None = None,
        limits: ClientLimits | None = None,
    ) -> None:
        """Check everything and bind the port.

        Args:
            folder: the folder of a plan.
            results: the folder for results, which is made if it is missing.
            port: see `PageServer`.
            lan: see `PageServer`.
            limits: see `PageServer`.

        Raises:
            PlanBroken: the folder holds no whole plan.
            VendorError, PortTaken: see `PageServer`.
        """
        vendor.require()
        self.plan = read_plan(folder)
        super().__init__(port, lan, limits or ClientLimits())
        try:
            self.results = Results(results, self.plan, self.limits)
        except OSError:
            self.socket.close()
            raise
        self.landed = self.results.landed
        names = [PLAN_FILE, *(entry["file"] for entry in self.plan["files"])]
        files = handed_out("index.html", "plan", folder.resolve(), names)
        self._hand_out(Answers(files, self.results, self.limits))


class ChatServer(PageServer):
    """A server of the page that chats with a decoder, all on the device that opens it."""

    def __init__(self, folder: Path, *, port: int = 0, lan: str | None = None) -> None:
        """Check everything and bind the port.

        Args:
            folder: the folder of a decoder that `kvcap export decoder` wrote.
            port: see `PageServer`.
            lan: see `PageServer`.

        Raises:
            ModelNotFound, NotExportable, ManifestError, ModelFilesBroken, GraphBroken,
            ChatTemplateMissing: the folder holds no decoder that a page can chat with.
            VendorError, PortTaken: see `PageServer`.
        """
        self.manifest = decoder_for_a_page(folder)
        # Weights are hundreds of megabytes, and Wi-Fi may be slow.
        super().__init__(port, lan, ClientLimits(request_seconds=3600))
        names = sorted({MANIFEST, *self.manifest.listed})
        self._hand_out(Files(handed_out("chat.html", "decoder", folder.resolve(), names)))


def _bound(address: str, port: int) -> socket.socket:
    # asyncio sets TCP_NODELAY only on sockets made for TCP; without it responses take 40 ms more.
    bound = socket.socket(proto=socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((address, port))
    except OSError as error:
        bound.close()
        raise PortTaken(
            f"cannot listen on {address} port {port}: {error.strerror}; --port 0 takes a free port"
        ) from error
    return bound

"""Listens on an address and serves an application there, until it has to stop."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import socket
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from kvcap.runtime.errors import PortTaken
from kvcap.serve.contract import Conversations
from kvcap.serve.errors import ApiError
from kvcap.serve.limits import HEAD_BYTES, Patient, RequestLimits

if TYPE_CHECKING:
    from typing import Self

BACKLOG = 512  # connections that may wait to be accepted
ANSWERS_S = 5.0  # seconds that answers have to end, of 8 in all: Docker kills after 10
ERRORS_S = 3  # seconds in which clients are sent the error that ends their answers
LOG = logging.getLogger("kvcap.serve")


class Ending(uvicorn.Server):
    """A server of uvicorn that ends answers by an error, and at once at a second signal.

    Args:
        config: uvicorn's.
        patience_s: seconds that answers have to come to their end.
        conversations: that write them.
    """

    def __init__(
        self, config: uvicorn.Config, patience_s: float, conversations: Conversations
    ) -> None:
        super().__init__(config)
        self.patience_s, self.conversations = patience_s, conversations
        self._closing: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; at a second signal, whichever, do not wait for anything."""
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and wait for answers before they are ended by an error."""
        timer = asyncio.get_running_loop().call_later(self.patience_s, self._end_answers)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _end_answers(self) -> None:
        figures = self.conversations.figures()
        LOG.warning(
            "the server ends after %g s; answers cut short: %d, requests not answered: %d",
            self.patience_s,
            figures.answering,
            figures.waiting,
        )
        # As it is kept, nobody takes it away while it runs.
        self._closing = asyncio.ensure_future(self.conversations.aclose())


class Server:
    """A server that runs an application in this thread (`run`) or, as a context, in another.

    Args:
        app: the application.
        listening: a socket of `bound`.
        limits: on connections.
        patience_s: seconds that answers have to end once the server has to stop; then they end
            by an error.
        tls: the files of a certificate and its key; None: it speaks HTTP.
    """

    def __init__(
        self,
        app: Starlette,
        listening: socket.socket,
        limits: RequestLimits,
        patience_s: float = ANSWERS_S,
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        self.app, self.limits, self.socket, self.tls = app, limits, listening, tls
        listening.listen(BACKLOG)  # clients that connect before `run` wait, and are not refused
        config = uvicorn.Config(
            self._answered,
            interface="asgi3",
            log_level="error",
            access_log=False,
            lifespan="on",
            ws="none",
            loop="asyncio",
            http=type("Connection", (Patient,), {"limits": limits}),
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=int(limits.head_seconds),
            timeout_graceful_shutdown=math.ceil(patience_s + ERRORS_S),
            h11_max_incomplete_event_size=HEAD_BYTES,
            ssl_certfile=tls and tls[0],
            ssl_keyfile=tls and tls[1],
        )
        self.server = Ending(config, patience_s, app.state.conversations)
        self.thread = threading.Thread(target=self.run, daemon=True)

    @property
    def url(self) -> str:
        """Return the address at which the server is found."""
        host, port, *_ = self.socket.getsockname()
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> None:
        """Serve until a signal, or `stop`; a second signal waits for nothing."""
        self.server.run(sockets=[self.socket])

    @property
    def forced(self) -> bool:
        """Return whether a second signal has ended the server."""
        return self.server.force_exit

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it where there are more connections than may be."""
        app: ASGIApp = self.app
        open_now = len(self.server.server_state.connections)
        if scope["type"] == "http" and open_now >= self.limits.connections:
            message = f"the server has {open_now} connections, and takes no more; ask again"
            busy = ApiError(503, message, code="busy", retry_after_s=1)
            app = refused = busy.answer(scope["path"])
            refused.headers["Connection"] = "close"
        await app(scope, receive, send)

    def stop(self) -> None:
        """Begin to end: no connection is taken any more, and answers come to their end."""
        self.server.should_exit = True

    def __enter__(self) -> Self:
        """Start the server in a thread, and wait until it accepts requests."""
        self.thread.start()
        while not self.server.started and self.thread.is_alive():
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server, and wait until it has ended."""
        self.stop()
        self.thread.join()


def bound(host: str, port: int) -> socket.socket:
    """Bind a socket to an address; it does not listen yet.

    Args:
        host: a name or an address of this machine.
        port: 0 takes a free one.

    Raises:
        PortTaken: something listens there already, or the address is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )[0]
        # asyncio sets TCP_NODELAY only on what is said to be TCP; without it answers are 40 ms late
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise PortTaken(
            f"--host {host} is no address ({error.strerror}); give one of this machine, such as "
            "127.0.0.1"
        ) from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise PortTaken(
            f"cannot listen on {host} port {port}: {error.strerror}; --port 0 takes a free port"
        ) from error
    return listener


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

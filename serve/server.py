"""Listens on an address and serves an application there, until it has to stop."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from kvcap.runtime.errors import PortTaken
from kvcap.serve.errors import ApiError
from kvcap.serve.limits import HEAD_BYTES, Patient, RequestLimits

if TYPE_CHECKING:
    from typing import Self

BACKLOG = 512  # connections that may wait to be accepted


class Server:
    """A server that runs an application in this thread (`run`) or, as a context, in another.

    Args:
        app: the application.
        listening: a socket of `bound`.
        limits: on connections.
        patience_s: seconds that answers have to end once the server has to stop; then they are
            stopped.
        tls: the files of a certificate and its key; None: it speaks HTTP.
    """

    def __init__(
        self,
        app: Starlette,
        listening: socket.socket,
        limits: RequestLimits,
        patience_s: int = 30,
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        self.app, self.limits, self.socket, self.tls = app, limits, listening, tls
        listening.listen(BACKLOG)  # clients that connect before `run` wait, and are not refused
        config = uvicorn.Config(
            self._answered, interface="asgi3", log_level="error", access_log=False, lifespan="on",
            ws="none", loop="asyncio", http=type("Connection", (Patient,), {"limits": limits}),
            server_header=False, proxy_headers=False, backlog=BACKLOG,
            timeout_keep_alive=int(limits.head_seconds), timeout_graceful_shutdown=patience_s,
            h11_max_incomplete_event_size=HEAD_BYTES,
            ssl_certfile=tls and tls[0], ssl_keyfile=tls and tls[1],
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.run, daemon=True)

    @property
    def url(self) -> str:
        """Return the address at which the server is found."""
        host, port, *_ = self.socket.getsockname()
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> None:
        """Serve until a signal, or `stop`; a second Ctrl-C does not wait for answers."""
        self.server.run(sockets=[self.socket])

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it where there are more connections than may be."""
        app: ASGIApp = self.app
        open_now = len(self.server.server_state.connections)
        if scope["type"] == "http" and open_now >= self.limits.connections:
            said = f"the server has {open_now} connections, and takes no more; ask again"
            app = refused = ApiError(503, said, code="busy", retry_after_s=1).response
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
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise PortTaken(f"--host {host} is no address: {error.strerror}") from error
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
    except OSError as error:
        found.close()
        raise PortTaken(
            f"cannot listen on {host} port {port}: {error.strerror}; --port 0 takes a free port"
        ) from error
    return found


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

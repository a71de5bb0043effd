"""How much of the server one client may take, and connections that are ended past it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import anyio
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvcap.serve.errors import ApiError

MIB = 2**20
HEAD_BYTES = 2**15  # of a request's first lines


@dataclass(frozen=True)
class Limits:
    """Bounds on what a request may be, and on how long it may take."""

    body_bytes: int = 4 * MIB  # a token has a byte at least, so that prompts are bounded as well
    messages: int = 4096
    answer_tokens: int = 32768
    connections: int = 1024
    head_seconds: float = 20.0  # until a request's first lines are there
    body_seconds: float = 60.0  # until its body is
    write_seconds: float = 30.0  # that a client may read nothing of what was written
    quiet_seconds: float = 10.0  # after which a stream without a token says that it is alive


async def body_of(request: Request, limits: Limits) -> bytes:
    """A request's body; it is not read further than it may be.

    Raises:
        ApiError: it is too long, took too long, or is said to be no JSON.
    """
    # A page of another site can send anything but this without asking first, which is refused.
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be sent with Content-Type: application/json")
    too_long = ApiError(413, f"the body has more than {limits.body_bytes:,} bytes")
    body = bytearray()
    said = request.headers.get("content-length", "")
    if said.isdecimal() and len(said) < 20 and int(said) > limits.body_bytes:
        raise too_long
    try:
        with anyio.fail_after(limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limits.body_seconds:g} s") from None
    return bytes(body)


class Patient(H11Protocol):
    """uvicorn's connection, which would wait for ever for a client that says or reads nothing."""

    limits = Limits()
    waiting: asyncio.TimerHandle | None = None  # for a request's first lines
    unread: asyncio.TimerHandle | None = None  # what was written

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait."""
        super().connection_made(transport)
        self.waiting = self.loop.call_later(self.limits.head_seconds, transport.close)

    def data_received(self, data: bytes) -> None:
        """Wait for as long as no request is under way."""
        super().data_received(data)
        under_way = self.cycle is not None and not self.cycle.response_complete
        if under_way and self.waiting is not None:
            self.waiting.cancel()
            self.waiting = None
        elif not under_way and self.waiting is None:
            self.waiting = self.loop.call_later(self.limits.head_seconds, self.transport.close)

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        self.unread = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads."""
        super().resume_writing()
        if self.unread is not None:
            self.unread.cancel()
            self.unread = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        for timer in (self.waiting, self.unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

"""Limits how much of the server one client may take, and ends connections beyond that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import h11
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvcap.serve.errors import ApiError

MIB = 2**20
UNSAID = ("", "application/x-www-form-urlencoded")
"""Holds the types that programs send whose user named none, such as curl."""
HEAD_BYTES = 2**15  # the most bytes of a request's line and headers


@dataclass(frozen=True)
class RequestLimits:
    """Limits on what a request may be, and on how long it may take."""

    body_bytes: int = 4 * MIB  # a token has a byte at least, so that prompts are bounded as well
    messages: int = 4096
    answer_tokens: int = 32768
    connections: int = 256  # each may have some 128 KiB of what is read and written
    bodies_bytes: int = 16 * MIB  # of all bodies that are being received
    head_seconds: float = 20.0  # for a request's line and headers to arrive
    body_seconds: float = 60.0  # for its body to arrive
    write_seconds: float = 30.0  # how long a client may leave everything unread
    quiet_seconds: float = 10.0  # after which a stream without a token sends a comment


class Bodies:
    """Reads requests' bodies, and holds no more of them at a time than it may."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits, self.held = limits, 0

    @asynccontextmanager
    async def of(self, request: Request) -> AsyncIterator[bytes]:
        """Read a request's body, which counts as held until the context is left.

        Raises:
            ApiError: it is too long, took too long, is said to be no JSON, or too many are read.
        """
        _check_head(request, self.limits)
        limits, body = self.limits, bytearray()
        try:
            with anyio.fail_after(limits.body_seconds):
                async for part in request.stream():
                    body += part
                    self.held += len(part)
                    if len(body) > limits.body_bytes:
                        raise _too_long(limits)
                    if self.held > limits.bodies_bytes:
                        raise ApiError(
                            429,
                            "the server reads as many requests as it can; send this one again",
                            code="busy",
                            retry_after_s=1,
                        )
            yield bytes(body)
        except TimeoutError:
            message = f"the body did not arrive within {limits.body_seconds:g} s"
            raise ApiError(408, message) from None
        finally:
            self.held -= len(body)


def from_browser(request: Request) -> bool:
    """Return whether a request is a browser's, as far as it says: all say it of another site's."""
    return any(name in request.headers for name in ("origin", "sec-fetch-site"))


def _too_long(limits: RequestLimits) -> ApiError:
    return ApiError(413, f"the body has more than {limits.body_bytes:,} bytes")


def _check_head(request: Request, limits: RequestLimits) -> None:
    """Refuse a body by its headers: its length, its type or its encoding.

    Raises:
        ApiError: it is too long, no JSON, or compressed.
    """
    # A page of another site can send anything but this without asking first, which is refused.
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and (kind not in UNSAID or from_browser(request)):
        raise ApiError(415, "the body must be sent with Content-Type: application/json")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        message = f"the body is sent with Content-Encoding: {encoding[:40]}; send it uncompressed"
        raise ApiError(415, message)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) >= 20 or int(length) > limits.body_bytes):
        raise _too_long(limits)


class Patient(H11Protocol):
    """A connection of uvicorn that would otherwise wait for ever for a silent client."""

    limits = RequestLimits()
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

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP with an error, unless an answer has begun; end the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            message = "what was sent is no request of HTTP/1.1; use a client that speaks it"
            response = ApiError(400, message).answer("")
            headers = [*response.raw_headers, (b"connection", b"close")]
            for event in (
                h11.Response(status_code=400, reason=b"Bad Request", headers=headers),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        self.unread = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Note that the client reads again."""
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

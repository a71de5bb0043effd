"""Sends an answer to the client: as one body, or as events while it is written (SSE).

`Form` puts pieces into OpenAI's words; `ChatForm` and `TextForm` are its two kinds. `streamed` and
`whole` read a reply and let go of it as soon as the client has gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvcap.runtime.session.logprobs import Logprob
from kvcap.runtime.session.stats import FinishReason
from kvcap.runtime.session.tool_calls import Parsed
from kvcap.serve.contract import Piece, Reply, Usage
from kvcap.serve.errors import ApiError, as_api_error
from kvcap.serve.metrics import Metrics
from kvcap.serve.series import Series
from kvcap.serve.thoughts import ThoughtGate, without_thoughts
from kvcap.serve.tool_calls import CallGate, as_calls

LOG = logging.getLogger("kvcap.serve")
SESSION = "X-Session-Id"
WRITTEN = json.JSONEncoder(separators=(",", ":")).encode  # made once, as every token needs it
DONE = b"data: [DONE]\n\n"
ALIVE = b": the prompt is being read\n\n"  # a comment, which every client of SSE passes over
ENDS: Mapping[FinishReason | None, str] = {"stop": "stop"}  # all others: "length"

Result = TypeVar("Result")


def usage_of(usage: Usage, reasoning: int) -> dict[str, Any]:
    """Return OpenAI's figures, with the cache's under `kv`, and what was recalled.

    Args:
        usage: of the answer.
        reasoning: tokens of thoughts in it.
    """
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.reused_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
        "kv": {
            "held": usage.held,
            "waiting": usage.waiting,
            "evicted": usage.evicted,
            "cap_bytes": usage.cap_bytes,
            "reused": usage.reused_tokens,
        },
        "recalled": usage.recalled_tokens,
        "recalled_passages": usage.recalled_passages,
    }


class Form(ABC):
    """A form that puts one answer into OpenAI's words.

    Args:
        model: the name that the server has for it.
        include_usage: a stream ends with the usage.
        usage_each: every part of a stream has the usage so far.
    """

    prefix: str
    whole_object: str
    part_object: str
    media_type = "text/event-stream"
    alive = ALIVE
    """Holds what a stream has while a prompt is read, so that no proxy takes it for dead."""

    def __init__(self, model: str, include_usage: bool, usage_each: bool = False) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.model, self.created, self.include_usage = model, int(time.time()), include_usage
        fields = {
            "id": self.id,
            "object": self.part_object,
            "created": self.created,
            "model": model,
        }
        self._opening = WRITTEN(fields)[:-1]  # the fields that every part of the stream begins with
        self.texts: list[str] = []
        self.so_far = _usage_so_far(0, 0) if usage_each else None

    @property
    def reasoning_tokens(self) -> int:
        """Return how many of the tokens are thoughts."""
        return 0

    @abstractmethod
    def begin(self) -> list[dict[str, Any]]:
        """Return the choices of the parts before the first text."""

    @abstractmethod
    def put(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the choices of the parts that a piece brings."""

    @abstractmethod
    def end(self, reply: Reply) -> list[dict[str, Any]]:
        """Return the choices of the last parts."""

    @abstractmethod
    def choice(self, reply: Reply) -> dict[str, Any]:
        """Return the choice of the whole answer, once it was ended."""

    def choices(self, reply: Reply) -> list[dict[str, Any]]:
        """Return all choices of the whole answer, once it was ended."""
        return [self.choice(reply)]

    def count(self, piece: Piece) -> None:
        """Note the usage up to the piece that is put next."""
        if self.so_far is not None:
            self.so_far = _usage_so_far(piece.prompt_tokens, piece.completion_tokens)

    def opening(self) -> bytes:
        """Write the first part of a stream."""
        return b"".join([self.part([choice]) for choice in self.begin()])

    def written(self, piece: Piece) -> bytes:
        """Write the parts of a stream for one piece."""
        if piece.progress is not None:
            return self.part([], prompt_progress=piece.progress._asdict())
        return b"".join([self.part([choice]) for choice in self.put(piece)])

    def closing(self, reply: Reply) -> bytes:
        """Write the last part of a stream."""
        last = b"".join([self.part([choice]) for choice in self.end(reply)])
        if self.include_usage and reply.usage is not None:
            last += self.part([], usage=usage_of(reply.usage, self.reasoning_tokens))
        return last + DONE

    def failed(self, error: ApiError) -> bytes:
        """Write the last part of a stream whose answer failed."""
        return event(error.body)

    def part(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """Write one event of the stream."""
        fields = {"choices": choices, **more}
        if self.include_usage or self.so_far is not None:
            fields.setdefault("usage", self.so_far)
        return _line(f"{self._opening},{WRITTEN(fields)[1:]}")

    def body(self, reply: Reply) -> dict[str, Any]:
        """Return the whole answer, with its usage."""
        fields = {
            "id": self.id,
            "object": self.whole_object,
            "created": self.created,
            "model": self.model,
            "choices": self.choices(reply),
        }
        if reply.usage is not None:
            fields["usage"] = usage_of(reply.usage, self.reasoning_tokens)
        return fields


class ChatForm(Form):
    """A form that a chat's answer has.

    Args:
        model: the name that the server has for it.
        include_usage: a stream ends with the usage.
        usage_each: every part of a stream has the usage so far.
        most_calls: of tools that it may have, of which further ones are left out; with 0 no tools
            were offered, and all is text.
    """

    prefix, whole_object, part_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, model: str, include_usage: bool, usage_each: bool = False, *, most_calls: int
    ) -> None:
        super().__init__(model, include_usage, usage_each)
        self.gate, self.most_calls = CallGate() if most_calls else None, most_calls
        self.thinking = ThoughtGate()
        self.content = self.thoughts = ""
        self.cut = False  # the last call is not whole
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []

    @property
    def reasoning_tokens(self) -> int:
        """Return how many of the tokens are thoughts, for all APIs."""
        return self.thinking.tokens

    def begin(self) -> list[dict[str, Any]]:
        """Return a choice with the role."""
        return [_delta({"role": "assistant", "content": ""})]

    def put(self, piece: Piece) -> list[dict[str, Any]]:
        """Return a choice with the piece's text; none while it may be a call."""
        self.texts.append(piece.text)
        thoughts, text = self.thinking.put(piece.text, piece.opened, piece.completion_tokens)
        parts = self._thought(thoughts)
        text = self._certain(text)
        logprobs: dict[str, Any] | None = None
        if piece.logprobs:
            content = [logprob.as_dict() for logprob in piece.logprobs]
            self.logprobs += content
            logprobs = {"content": content, "refusal": None}
        return [*parts, _delta({"content": text}, logprobs)] if text or logprobs else parts

    def _thought(self, text: str) -> list[dict[str, Any]]:
        """Return a choice with thoughts, if there are any."""
        self.thoughts += text
        return [_delta({"reasoning_content": text})] if text else []

    def _certain(self, text: str) -> str:
        """Return the part of further content that cannot be the beginning of a call."""
        self.content += text
        return text if self.gate is None else self.gate.put(text)

    def end(self, reply: Reply) -> list[dict[str, Any]]:
        """Return choices with the text held back, the calls, and the reason of the end."""
        thoughts, text = self.thinking.end()
        deltas = self._thought(thoughts)
        if text := self._certain(text):
            deltas.append(_delta({"content": text}))
        if self.gate is not None:
            parsed = reply.parsed or Parsed(self.content)
            if self.thoughts:
                parsed = parsed._replace(content=without_thoughts(parsed.content))
            if text := self.gate.end(parsed):
                deltas.append(_delta({"content": text}))
            if not parsed.content:
                self.content = ""
            if parsed.tool_calls:
                self.calls = as_calls(parsed)[: self.most_calls]
                self.content = parsed.content
                self.cut = any(call.cut is not None for call in parsed.tool_calls)
                numbered = [{"index": i, **call} for i, call in enumerate(self.calls)]
                deltas.append(_delta({"tool_calls": numbered}))
        return [*deltas, _delta({}, finish_reason=self._reason(reply))]

    def choice(self, reply: Reply) -> dict[str, Any]:
        """Return the choice with the message, once `end` was called."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        if self.calls:
            message |= {"content": self.content or None, "tool_calls": self.calls}
        logprobs = {"content": self.logprobs, "refusal": None} if self.logprobs else None
        return {
            "index": 0,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._reason(reply),
        }

    def _reason(self, reply: Reply) -> str:
        whole = self.calls and not self.cut
        return "tool_calls" if whole else ENDS.get(reply.finish_reason, "length")


class TextForm(Form):
    """A form that a text's continuation has."""

    prefix, whole_object, part_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, include_usage: bool, usage_each: bool = False) -> None:
        super().__init__(model, include_usage, usage_each)
        self.columns = dict[str, list[Any]]()  # what was sent of log probabilities
        self.letters = 0  # of the text so far

    def begin(self) -> list[dict[str, Any]]:
        """Return no choices, as a completion has no first part."""
        return []

    def put(self, piece: Piece) -> list[dict[str, Any]]:
        """Return a choice with the piece's text."""
        self.texts.append(piece.text)
        logprobs = None
        if piece.logprobs:
            logprobs = _columns(piece.logprobs, piece.text, self.letters)
            for name, more in logprobs.items():
                self.columns.setdefault(name, []).extend(more)
        self.letters += len(piece.text)
        return [_text(piece.text, logprobs)]

    def end(self, reply: Reply) -> list[dict[str, Any]]:
        """Return a choice with why the answer ended."""
        return [_text("", None, ENDS.get(reply.finish_reason, "length"))]

    def choice(self, reply: Reply) -> dict[str, Any]:
        """Return the choice with the whole text."""
        return _text(
            "".join(self.texts), self.columns or None, ENDS.get(reply.finish_reason, "length")
        )


class SeveralForm(Form):
    """A form that several answers have, each as a choice with its number.

    Args:
        forms: of each.
        series: the answers.
    """

    def __init__(self, forms: Sequence[Form], series: Series) -> None:
        first = forms[0]
        self.prefix = first.prefix
        self.whole_object, self.part_object = first.whole_object, first.part_object
        super().__init__(first.model, first.include_usage, first.so_far is not None)
        self.forms, self.series, self.current = forms, series, 0

    @property
    def reasoning_tokens(self) -> int:
        """Return how many tokens of all answers are thoughts."""
        return sum(form.reasoning_tokens for form in self.forms)

    def begin(self) -> list[dict[str, Any]]:
        """Return the first choices of the first answer."""
        return self._numbered(self.forms[0].begin())

    def put(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the choices that a piece brings, behind the ends of answers before its own."""
        ended = self._ended(len(self.series.replies) - 1)
        before = [
            reply.usage.completion_tokens for reply in self.series.replies[:-1] if reply.usage
        ]
        piece = piece._replace(completion_tokens=piece.completion_tokens - sum(before))
        return ended + self._numbered(self.forms[self.current].put(piece))

    def end(self, reply: Reply) -> list[dict[str, Any]]:
        """Return the last choices of all answers that have not ended."""
        choices = self._ended(len(self.forms) - 1)
        return choices + self._numbered(self.forms[-1].end(self.series.replies[-1]))

    def choice(self, reply: Reply) -> dict[str, Any]:
        """Return the choice of the last answer."""
        return self.choices(reply)[-1]

    def choices(self, reply: Reply) -> list[dict[str, Any]]:
        """Return a choice of each answer."""
        both = zip(self.forms, self.series.replies, strict=True)
        return [{**form.choice(each), "index": i} for i, (form, each) in enumerate(both)]

    def _ended(self, index: int) -> list[dict[str, Any]]:
        """Return the last choices of answers before that at `index`, and the first of others."""
        choices = list[dict[str, Any]]()
        while self.current < index:
            choices += self._numbered(
                self.forms[self.current].end(self.series.replies[self.current])
            )
            self.current += 1
            choices += self._numbered(self.forms[self.current].begin())
        return choices

    def _numbered(self, choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**choice, "index": self.current} for choice in choices]


def _usage_so_far(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _columns(logprobs: Sequence[Logprob], text: str, start: int) -> dict[str, list[Any]]:
    """Return how likely tokens were, as completions have it: one list for each fact.

    Args:
        logprobs: of the tokens of a piece of text.
        text: the piece. What they write before it, such as an opening token, is at its start.
        start: letters before it.
    """
    letters = getincrementaldecoder("utf-8")("replace")  # a token may be a part of a letter
    ends = [*accumulate((len(letters.decode(token.bytes)) for token in logprobs), initial=0)]
    beyond = ends[-1] + len(letters.decode(b"", final=True)) - len(text)
    return {
        "tokens": [token.text for token in logprobs],
        "token_logprobs": [token.logprob for token in logprobs],
        "top_logprobs": [
            None if token.logprob is None else {each.text: each.logprob for each in token.top}
            for token in logprobs
        ],
        "text_offset": [start + max(0, end - beyond) for end in ends[:-1]],
    }


def _delta(
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _text(
    text: str, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def event(fields: Mapping[str, Any]) -> bytes:
    """Write one event of SSE."""
    return _line(WRITTEN(fields))


def _line(text: str) -> bytes:
    """Return an event of JSON, which has no line breaks of its own."""
    return f"data: {text}\n\n".encode("ascii")


async def whole(request: Request, reply: Reply, form: Form, metrics: Metrics) -> Response:
    """Send the answer in one body.

    Raises:
        ApiError: it failed.
        ClientDisconnect: the client has gone, and the answer was stopped.
    """

    async def read() -> None:
        async for piece in metrics.timed(reply):
            form.put(piece)

    try:
        await _unless_gone(request.receive, read())
    except ClientDisconnect:
        raise
    except Exception as error:
        raise _refusal(error) from error
    finally:
        await _let_go(reply)
    form.end(reply)
    return JSONResponse(form.body(reply), headers=_session(reply))


async def streamed(
    request: Request, reply: Reply, form: Form, metrics: Metrics, quiet_seconds: float
) -> Response:
    """Stream the answer as soon as its first piece is there, or after a short wait for one.

    Raises:
        ApiError: it failed before its first piece.
        ClientDisconnect: the client has gone, and the answer was stopped.
    """
    pieces = metrics.timed(reply)
    first = asyncio.ensure_future(_next(pieces))
    try:
        await _unless_gone(request.receive, _wait(first, quiet_seconds))
        if first.done():
            await first
    except ClientDisconnect:
        await _let_go(reply, first)
        raise
    except BaseException as error:
        await _let_go(reply, first)
        if isinstance(error, Exception):
            raise _refusal(error) from error
        raise
    events = _events(reply, first, pieces, form, quiet_seconds)
    return AnswerStream(reply, first, events, form.media_type)


class AnswerStream(StreamingResponse):
    """A stream of events that lets go of its answer when it ends, however that is.

    Args:
        reply: the answer.
        first: the wait for its first piece.
        events: what is sent.
        media_type: of the stream.
    """

    def __init__(
        self,
        reply: Reply,
        first: asyncio.Future[Piece | None],
        events: AsyncIterator[bytes],
        media_type: str,
    ) -> None:
        # Proxies must not buffer the answer, which would undo the stream.
        headers = {"X-Accel-Buffering": "no", **_session(reply)}
        super().__init__(events, headers=headers, media_type=media_type)
        self.reply, self.first = reply, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, and end the reply when the client is gone or all is sent."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await _let_go(self.reply, self.first)


async def _events(
    reply: Reply,
    first: asyncio.Future[Piece | None],
    pieces: AsyncIterator[Piece],
    form: Form,
    quiet_seconds: float,
) -> AsyncIterator[bytes]:
    """Yield the stream as its form has it."""
    if first.done() and not first.exception() and (piece := first.result()) is not None:
        form.count(piece)
    opening = form.opening()
    if not first.done():
        yield opening + form.alive
        opening = b""
    try:
        while not await _wait(first, quiet_seconds):
            yield form.alive
        if (piece := await first) is not None:
            form.count(piece)
            opening += form.written(piece)
        if opening:
            yield opening
        async for piece in pieces:
            form.count(piece)
            if parts := form.written(piece):
                yield parts
        yield form.closing(reply)
    except Exception as error:
        yield form.failed(_refusal(error))


def _refusal(error: Exception) -> ApiError:
    """Return the error to send; log one that nobody foresaw."""
    refusal = as_api_error(error)
    if refusal.status == 500:
        LOG.error("an answer failed", exc_info=error)
    return refusal


def _session(reply: Reply) -> dict[str, str]:
    """Return the header that names the conversation, where that is known."""
    return {SESSION: reply.session_id} if reply.session_id is not None else {}


async def _next(pieces: AsyncIterator[Piece]) -> Piece | None:
    """Return the next piece; None: there is none."""
    async for piece in pieces:
        return piece
    return None


async def _wait(future: asyncio.Future[Any], seconds: float) -> bool:
    """Wait, but not longer than this; whether it is done. Nothing is raised or cancelled."""
    await asyncio.wait({future}, timeout=seconds)
    return future.done()


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do `work` for a client.

    Raises:
        ClientDisconnect: the client has gone, and the work was cancelled.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        await _cancelled(working)
        await _cancelled(leaving)


async def _cancelled(future: asyncio.Future[Any]) -> None:
    """End a task, whatever comes of it."""
    future.cancel()
    await asyncio.wait({future})
    if not future.cancelled():
        future.exception()  # seen: asyncio need not warn of it


async def _let_go(reply: Reply, first: asyncio.Future[Any] | None = None) -> None:
    """Stop an answer that has not ended, also while the request itself is being cancelled."""
    with anyio.CancelScope(shield=True):
        if first is not None:
            await _cancelled(first)
        await reply.aclose()

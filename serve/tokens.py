"""Turns texts and messages into the model's tokens, and tokens into text, for who asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcap.runtime.session.encoding import encode_with
from kvcap.runtime.session.messages import render
from kvcap.serve import schemas
from kvcap.serve.chat_path import ChatPath
from kvcap.serve.contract import Ask


def encoded(tokenizer: Any, ask: Ask, *, special: bool = True) -> list[int]:
    """Return the tokens of a request, if all of it were read.

    Raises:
        ChatTemplateMissing, MessagesInvalid: its messages cannot be written.
    """
    if ask.messages is None:
        assert isinstance(ask.prompt, str)
        return encode_with(tokenizer, ask.prompt, special=special)
    options = ask.options.get("template_options") or {}
    text = render(tokenizer, ask.messages, ask.tools, options, begin=ask.begin)
    return encode_with(tokenizer, text)


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of tokens, special ones too."""
    text: str = tokenizer.backend_tokenizer.decode(list(tokens), skip_special_tokens=False)
    return text


class TokenizeRequest(schemas.Strict):
    """A body that `POST /tokenize` takes: a text, under vLLM's or llama.cpp's name, or messages."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: schemas.Items[dict[str, Any]] | None = None
    tools: schemas.Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None

    @model_validator(mode="after")
    def _has_one(self) -> TokenizeRequest:
        if sum(field is not None for field in (self.prompt, self.content, self.messages)) != 1:
            raise ValueError("give prompt, content or messages, and one of them")
        return self

    @property
    def special(self) -> bool:
        """Return whether the tokens are added that open a text: as vLLM, or llama.cpp, has it."""
        special = self.add_special if self.content is not None else self.add_special_tokens
        return self.content is None if special is None else special


class DetokenizeRequest(schemas.Strict):
    """A body that `POST /detokenize` takes."""

    model: str | None = None
    tokens: schemas.Items[Annotated[int, Field(ge=0, lt=schemas.TOKENS)]]


class Tokens:
    """An application that answers at `/tokenize` and `/detokenize`.

    Args:
        api: that answers chats.
    """

    def __init__(self, api: ChatPath) -> None:
        self.api = api

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text, or of messages as the chat template writes them."""
        request_body = await self.api.body_of(request, TokenizeRequest)
        text = request_body.content if request_body.prompt is None else request_body.prompt
        if request_body.messages is None:
            ask = Ask(prompt=text)
        else:
            body = {"messages": request_body.messages, "tools": request_body.tools}
            ask = self.api.ask(request, lambda: body)
        ids = await self.api.conversations.encode(ask, special=request_body.special)
        return JSONResponse({"tokens": ids, "count": len(ids)})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        body = await self.api.body_of(request, DetokenizeRequest)
        text = await self.api.conversations.decode(body.tokens)
        return JSONResponse({"prompt": text, "content": text})

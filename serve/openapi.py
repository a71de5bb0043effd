"""Describes the server's API in OpenAPI's form, from the schemas of its bodies."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvcap import __version__
from kvcap.serve import messages, ollama, responses, schemas, tokens

BODIES: dict[str, tuple[str, type[schemas.Strict]]] = {
    "/v1/chat/completions": ("Answer a chat", schemas.ChatRequest),
    "/v1/completions": ("Continue texts", schemas.CompletionRequest),
    "/v1/responses": ("Answer an input, as OpenAI's newer API does", responses.ResponseBody),
    "/v1/messages": ("Answer messages, as Anthropic's API does", messages.MessageBody),
    "/v1/messages/count_tokens": ("Count the tokens of messages", messages.CountBody),
    "/api/chat": ("Answer messages, as ollama does", ollama.ChatBody),
    "/api/generate": ("Answer a prompt, as ollama does", ollama.GenerateBody),
    "/api/show": ("Describe the model, as ollama does", ollama.ShowBody),
    "/tokenize": ("Return the tokens of a text", tokens.TokenizeRequest),
    "/detokenize": ("Return the text of tokens", tokens.DetokenizeRequest),
}
READ = {
    "/v1/models": "List the one model",
    "/v1/responses/{id}": "Return a response that is kept",
    "/api/tags": "List the one model, as ollama does",
    "/api/ps": "List the one model and its memory, as ollama does",
    "/api/version": "Return the version of ollama's API that is spoken",
    "/health": "Say whether the server runs",
    "/metrics": "Show figures for Prometheus",
}


def openapi_of(model: str) -> dict[str, Any]:
    """Return the document, of a server of that model."""
    kinds: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (kind, "validation") for _, kind in BODIES.values()
    ]
    named, defined = models_json_schema(kinds, ref_template="#/components/schemas/{model}")
    answers = {"200": {"description": "The answer"}, "4XX": {"description": "An error"}}
    paths: dict[str, Any] = {
        path: {"get": {"summary": summary, "responses": answers}} for path, summary in READ.items()
    }
    for path, (summary, kind) in BODIES.items():
        content = {"application/json": {"schema": named[(kind, "validation")]}}
        body = {"required": True, "content": content}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": answers}}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"kvcap serve {model}", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": defined["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }

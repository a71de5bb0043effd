"""Makes small runtimes and chats for tests of the server, and reads replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
from tools import PATIENCE, pocket_runtime

import kvcap
from kvcap.runtime.cli.options import Budget, Output, Recalling, Run, Running, Sampling
from kvcap.serve.admission import Opened, open_conversations
from kvcap.serve.app import Settings, application
from kvcap.serve.commands import Address, EngineOptions, Load, opened
from kvcap.serve.contract import Ask, Reply
from kvcap.serve.scheduler import Limits, Scheduler
from kvcap.serve.server import Server, bound

NEVER = 1_000_000  # a token that is never sampled


HELLO: Any = [{"role": "user", "content": "Hello!"}]
BEGUN: Any = {"role": "assistant", "content": "Well, "}
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def post(url: str, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    messages = {} if "prompt" in body else {"messages": HELLO}
    return httpx.post(url + path, json={**messages, **body})


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def ask(*messages: dict[str, str], tokens: int = 12, **more: Any) -> Ask:
    options = {"max_new_tokens": tokens, "temperature": 0.0, **more.pop("options", {})}
    return Ask(messages, options=options, **more)


def pocket(policy: str = "keydiff", budget: int = 64) -> kvcap.Runtime:
    return pocket_runtime(policy, budget)


def serving(conversations: Any, routes: Any = (), **settings: Any) -> Server:
    """Return a server of the model `pocket`, still to be begun, on a free port of this machine."""
    configured = Settings("pocket", **settings)
    return Server(
        application(conversations, configured, routes), bound("127.0.0.1", 0), configured.limits
    )


@contextmanager
def client_of(scheduler: Scheduler) -> Iterator[openai.OpenAI]:
    """Serve conversations as the model `pocket`, and return OpenAI's client of that server."""
    with (
        serving(scheduler) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def text_of(reply: Reply) -> str:
    return "".join([piece.text async for piece in reply])


async def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def serve(scheduler: Scheduler, chat: Callable[[Scheduler], Any]) -> Any:
    """Run a coroutine that uses a scheduler, and close the scheduler."""

    async def run() -> Any:
        try:
            return await chat(scheduler)
        finally:
            await scheduler.aclose()

    return asyncio.run(run())


def limits(**given: Any) -> Limits:
    return Limits(**{"places": 4, "together": 2, "save_after_s": 1e9, **given})


def plain(runtime: Any, messages: list[dict[str, str]], tokens: int = 12) -> Any:
    """Return a session of its own, before its answer to `messages`."""
    session = runtime.session()
    session.set_generation(max_new_tokens=tokens, temperature=0.0)
    return session, "".join(session.send(messages))


def small(folder: str) -> kvcap.Runtime:
    """Load the model that `tiny_chat` saved."""
    return kvcap.Runtime.from_pretrained(
        folder, budget_tokens=48, block_size=16, dtype="float32", device="cpu"
    )


def served(
    model: str,
    running: Running | None = None,
    *,
    load: Load | None = None,
    engine: EngineOptions | None = None,
    budget: Budget | None = None,
    recalling: Recalling | None = None,
    **address: Any,
) -> Server:
    """Start the server of `kvcap serve MODEL` on a free port, with these groups of its options."""
    run = Run(
        model,
        budget=budget or Budget(budget_tokens=64, block_size=16, dtype="float32"),
        running=running or Running(device="cpu"),
    )
    return opened(
        run,
        Address(port=0, **address),
        load or Load(),
        engine or EngineOptions(),
        Sampling(),
        recalling or Recalling(),
    )


def admitted(
    model: str, budget: Budget | None = None, running: Running | None = None, **more: Any
) -> Opened:
    """Return the conversations of a model as `kvcap serve` plans and opens them."""
    budget, running = budget or Budget(budget_tokens=64), running or Running(device="cpu")
    run = Run(model, budget=budget, running=running, output=Output(quiet=True))
    return open_conversations(run, **more)

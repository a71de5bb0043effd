"""Makes small runtimes and chats for tests of the server, and reads replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from tools import PATIENCE

import kvcap
from kvcap.runtime.cli.options import Backend, Budget, Output, Recalling, Running, Sampling
from kvcap.serve.commands import Address, EngineOptions, Load, opened
from kvcap.serve.contract import Ask, Reply
from kvcap.serve.scheduler import Limits, Scheduler
from kvcap.serve.server import Server

NEVER = 1_000_000  # a token that is never sampled


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def ask(*messages: dict[str, str], tokens: int = 12, **more: Any) -> Ask:
    options = {"max_new_tokens": tokens, "temperature": 0.0, **more.pop("options", {})}
    return Ask(messages, options=options, **more)


def pocket(policy: str = "keydiff", budget: int = 64) -> kvcap.Runtime:
    return kvcap.Runtime.from_pretrained(
        "pocket", policy, budget_tokens=budget, block_size=16, dtype="float32", device="cpu"
    )


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


def served(model: str, running: Running | None = None, **address: Any) -> Server:
    """Start the server of `kvcap serve MODEL` on a free port."""
    return opened(
        model,
        Address(port=0, **address),
        Load(),
        EngineOptions(),
        Backend(),
        Budget(budget_tokens=64, block_size=16, dtype="float32"),
        running or Running(device="cpu"),
        Sampling(),
        Output(),
        Recalling(),
    )

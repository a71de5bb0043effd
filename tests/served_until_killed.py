"""Answers conversations and saves them, over and over, until the process is killed.

It prints a JSON line for each answer, with the files on disk by then, and continues the
conversations of its third argument.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from server_chats import ask, limits, small, text_of, until, user

from kvcap.serve.saved import SavedConversations
from kvcap.serve.scheduler import Scheduler


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


async def main(model: str, folder: str, known: dict[str, list[dict[str, str]]]) -> None:
    disk = SavedConversations(folder, 64 << 20)
    say(found=len(disk))
    scheduler = Scheduler(small(model), limits(places=2, save_after_s=0.0), disk)
    turn = 0
    while True:
        turn += 1
        for name in ("ada", "bob", "eve"):
            messages = [*known.get(name, []), user(f"{name} says {turn} and {len(known)}.")]
            reply = scheduler.submit(ask(*messages, tokens=5, session_id=name))
            answer = await text_of(reply)
            assert reply.usage is not None
            known[name] = [*messages, {"role": "assistant", "content": answer}]
            say(name=name, messages=known[name], reused=reply.usage.reused_tokens)
        await until(lambda: scheduler._wound_up())
        say(saved=known, dropped=disk.dropped)


asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))

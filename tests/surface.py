"""A conversation by one small interface: in Python, on the command line, and over HTTP."""

from __future__ import annotations

import io
import json
from abc import ABC, abstractmethod
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from server_chats import limits, serving
from tools import PATIENCE

from kvcap.runtime.cli.chat import Chat
from kvcap.runtime.cli.options import Output
from kvcap.runtime.recall.settings import RecallSettings
from kvcap.runtime.session.session import Session
from kvcap.serve.page_routes import page_routes
from kvcap.serve.saved import SavedConversations
from kvcap.serve.scheduler import Scheduler
from kvcap.serve.strip import Strip, strip_of

TOKENS = 16  # of an answer


class Answered(NamedTuple):
    """Holds an answer, and what is told of it: tokens recalled, slots in use, bytes at most."""

    text: str
    recalled: int
    held: int
    waiting: int
    evicted: int
    cap_bytes: int


class Surface(ABC):
    """A conversation with a runtime, which goes on until it is closed.

    Args:
        runtime: that answers.
        folder: for what is saved.
    """

    def __init__(self, runtime: Any, folder: Path) -> None:
        self.runtime, self.folder, self.open = runtime, folder, ExitStack()

    @abstractmethod
    def say(self, text: str, *, pin: bool = False) -> Answered:
        """Send a message, and return its answer."""

    @abstractmethod
    def recall(self, most: str) -> None:
        """Say how much is recalled for the messages to come: `auto`, `off`, or so many tokens."""

    @abstractmethod
    def again(self) -> Answered:
        """Answer the last message again."""

    @abstractmethod
    def undo(self) -> None:
        """Take back the last message."""

    @abstractmethod
    def forget(self) -> None:
        """Forget the whole conversation."""

    @abstractmethod
    def restart(self) -> None:
        """Go on with what was saved, in an engine that knows nothing else."""

    @property
    @abstractmethod
    def strip(self) -> Strip:
        """Say which tokens were read, and which of them are held."""

    def close(self) -> None:
        """End it."""
        self.open.close()

    @property
    def pinned(self) -> str:
        """Return the text that is never evicted."""
        return self._text(self.strip.pinned)

    @property
    def read_again(self) -> str:
        """Return the evicted text that was read again."""
        return self._text(self.strip.recalled)

    def _text(self, spans: list[tuple[int, int]]) -> str:
        tokens = self.strip.tokens
        return "".join(str(token) for span in spans for token in tokens[slice(*span)])

    def holds(self, *tokens: int) -> bool:
        """Return whether every capped head holds these tokens."""
        groups = [group for group in self.strip.groups if group.capped]
        return all(group.held[token] == group.heads for group in groups for token in tokens)


class InPython(Surface):
    """A session."""

    def __init__(self, runtime: Any, folder: Path) -> None:
        super().__init__(runtime, folder)
        self.session: Session = runtime.session(seed=0)
        self.session.set_generation(max_new_tokens=TOKENS, temperature=0.0)

    def say(self, text: str, *, pin: bool = False) -> Answered:
        return self._answered("".join(self.session.send(text, pin=pin)))

    def _answered(self, text: str) -> Answered:
        stats, turn = self.session.stats, self.session.turn
        slots = stats.held_tokens, stats.waiting_tokens, stats.evicted_tokens
        return Answered(text, turn.recalled_tokens, *slots, stats.cap_bytes)

    def recall(self, most: str) -> None:
        self.session.recall.limit = RecallSettings.parse(most).limit(
            self.runtime.plan.budget_tokens
        )

    def again(self) -> Answered:
        return self._answered("".join(self.session.regenerate()))

    def undo(self) -> None:
        self.session.undo()

    def forget(self) -> None:
        self.session.clear()

    def restart(self) -> None:
        self.session.save(self.folder / "s")
        limit = self.session.recall.limit
        self.session = Session.load(self.runtime, self.folder / "s")
        self.session.recall.limit = limit

    @property
    def strip(self) -> Strip:
        return strip_of(self.session, "")


class OnTheCommandLine(InPython):
    """A chat, of which the documents are read that it writes with `--json`."""

    def __init__(self, runtime: Any, folder: Path) -> None:
        super().__init__(runtime, folder)
        self.chat = Chat(self.session, Output(json=True, quiet=True))

    def _run(self, line: str) -> str:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()):
            assert self.chat.handle(line) == 0, line
        self.session = self.chat.session
        return out.getvalue()

    def say(self, text: str, *, pin: bool = False) -> Answered:
        return self._read(f"/pin {text}" if pin else text)

    def _read(self, line: str) -> Answered:
        printed = json.loads(self._run(line))
        recalled, kv = printed["usage"]["recalled"], printed["kv"]
        assert bool(recalled) == bool(printed["recalled"])
        for passage in printed["recalled"]:  # its text is what was read again
            read = self.session.read_ids[slice(*passage["tokens"])]
            assert passage["text"] in self.runtime.tokenizer.decode(read)
            assert passage["score"] > 0
        assert kv["bytes"] <= kv["cap_bytes"]
        slots = (kv[f"{name}_tokens"] for name in ("held", "waiting", "evicted"))
        return Answered(printed["text"], recalled, *slots, kv["cap_bytes"])

    def recall(self, most: str) -> None:
        self._run(f"/recall {most}")

    def again(self) -> Answered:
        return self._read("/regen")

    def undo(self) -> None:
        self._run("/undo")

    def forget(self) -> None:
        self._run("/clear")

    def restart(self) -> None:
        self._run(f"/save {self.folder / 's'}")
        limit = self.session.recall.limit
        super().__init__(self.runtime, self.folder)
        self._run(f"/load {self.folder / 's'}")
        self._run(f"/recall {limit or 'off'}")


class OverHttp(Surface):
    """A server's conversation, whose messages the client keeps and sends every time."""

    def __init__(self, runtime: Any, folder: Path) -> None:
        super().__init__(runtime, folder)
        self.messages, self.most = list[Any](), "auto"
        self._start()

    def _start(self) -> None:
        disk = SavedConversations(self.folder, 64 << 20)
        scheduler = Scheduler(self.runtime, limits(), disk)
        server = self.open.enter_context(serving(scheduler, routes=page_routes()))
        client = httpx.Client(
            base_url=server.url, headers={"X-Session-Id": "mine"}, timeout=PATIENCE
        )
        self.client = self.open.enter_context(client)

    def say(self, text: str, *, pin: bool = False) -> Answered:
        self.messages.append({"role": "user", "content": text, **({"pin": True} if pin else {})})
        request = {"messages": self.messages, "max_tokens": TOKENS, "temperature": 0}
        most = self.most if self.most in ("auto", "off") else int(self.most)
        body = self.client.post("/v1/chat/completions", json={**request, "recall": most}).json()
        answer, usage = body["choices"][0]["message"]["content"], body["usage"]
        assert bool(usage["recalled"]) == bool(usage["recalled_passages"])
        self.messages.append({"role": "assistant", "content": answer})
        slots = (usage["kv"][name] for name in ("held", "waiting", "evicted", "cap_bytes"))
        return Answered(answer, usage["recalled"], *slots)

    def recall(self, most: str) -> None:
        self.most = most

    def again(self) -> Answered:
        question = self.messages[-2]
        self.undo()
        return self.say(question["content"], pin="pin" in question)

    def undo(self) -> None:
        del self.messages[-2:]

    def forget(self) -> None:
        self.client.delete("/v1/kvcap/sessions/mine").raise_for_status()
        self.messages.clear()

    def restart(self) -> None:
        self.close()
        self._start()

    @property
    def strip(self) -> Strip:
        return Strip.model_validate(self.client.get("/v1/kvcap/sessions/mine/strip").json())


SURFACES = (InPython, OnTheCommandLine, OverHttp)

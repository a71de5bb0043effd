"""The chat: lines in, answers and commands out. Knows no terminal, see `terminal.py`."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import psutil  # type: ignore[import-untyped]

import kvcap
from kvcap.runtime.answer import answer
from kvcap.runtime.decoding import MAX_NEW_TOKENS
from kvcap.runtime.errors import KvcapError
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.meter import figures, kv
from kvcap.runtime.option_groups import pairs
from kvcap.runtime.options import POCKET, Output, Sampling
from kvcap.runtime.screen import INTERRUPTED, OK, complain, dim, exit_code, size
from kvcap.runtime.session import Session

SETTINGS = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "seed", "stop")


@dataclass
class Chat:
    """One conversation and its commands.

    Answers go to stdout, all else to stderr. What a command refuses is said and ends nothing.
    """

    session: Session
    output: Output
    file: str | None = None
    """Where the conversation is saved after every answer, if anywhere."""
    code: int = OK
    """The first exit code that was not 0."""
    over: bool = False

    def script(self, lines: Iterable[str]) -> int:
        """Take every line as a turn; a final backslash continues it. Returns the exit code."""
        for turn in joined(lines):
            self.take(turn)
            if self.over or self.code == INTERRUPTED:
                break
        return self.code

    def take(self, text: str) -> None:
        """One turn: a command if it starts with a slash, else something to answer."""
        if not text.strip():
            return
        try:
            code = self._command(text) if text.startswith("/") else self._say(text)
        except (KvcapError, ValueError) as error:
            complain(error)
            code = exit_code(error)
        self.code = self.code or code

    def keep(self) -> None:
        """Save the conversation where it has a file.

        Raises:
            SessionNotSaved: it cannot be written.
        """
        if self.file is not None:
            self.session.save(self.file)

    def banner(self) -> list[str]:
        """What a user should know at the start."""
        runtime = self.session.runtime
        plan = runtime.plan
        lines = [
            f"kvcap {kvcap.__version__} · {runtime.name} · {runtime.where}",
            f"{plan.policy} keeps {plan.budget_tokens:,} slots in {size(runtime.cap_bytes)} of KV "
            f"memory · {plan.positions} positions",
        ]
        if runtime.name == POCKET:
            lines.append(
                "pocket is a small test and demonstration model: it only knows what it is told"
            )
        return [*lines, "/help lists the commands · Ctrl-C stops an answer · Ctrl-D leaves"]

    def _say(self, text: str, *, pin: bool = False) -> int:
        return self._answer(lambda: self.session.send(text, pin=pin))

    def _answer(self, say: Callable[[], Iterator[str]]) -> int:
        code = answer(self.session, say, self.output)
        self.keep()
        return code

    def _command(self, text: str) -> int:
        name, _, rest = text[1:].partition(" ")
        if name not in self.COMMANDS:
            close = difflib.get_close_matches(name, self.COMMANDS, n=1)
            hint = f"did you mean /{close[0]}?" if close else "/help lists all"
            raise ValueError(f"no command /{name}; {hint} (a space before it makes it a message)")
        return self.COMMANDS[name][2](self, rest.strip()) or OK

    def _help(self, _: str) -> None:
        usages = {f"/{name} {usage}": says for name, (usage, says, _) in self.COMMANDS.items()}
        width = max(map(len, usages))
        dim("\n".join(f"{usage:<{width}}  {says}" for usage, says in usages.items()))

    def _clear(self, _: str) -> None:
        self.session.clear()
        dim("the conversation is forgotten; settings stay")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not name:
            dim("\n".join(map(self._setting, SETTINGS)))
            return
        if name not in SETTINGS:
            close = difflib.get_close_matches(name, SETTINGS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(SETTINGS)}"
            raise ValueError(f"no setting {name!r}; {hint}")
        if name == "stop" and not value:
            self.session.generation.stop_strings = None
        else:
            self.session.set_generation(**Sampling.parse(name, value.strip()).given())
        dim(self._setting(name))

    def _setting(self, name: str) -> str:
        generation = self.session.generation
        value = getattr(generation, "stop_strings" if name == "stop" else name, None)
        if name == "seed":
            value = self.session.seed
        elif name == "max_new_tokens":
            value = value or MAX_NEW_TOKENS
        elif name == "temperature" and not generation.do_sample:
            value = 0
        return f"{name} = {'not set' if value is None else value}"

    def _stats(self, _: str) -> None:
        stats = self.session.stats
        turns = sum(message["role"] == "user" for message in self.session.messages)
        lines = [f"turns {turns:,} · policy {stats.policy} · {figures(stats)}"]
        if turn := stats.turn:
            lines.append(
                f"last answer: read {turn.read_tokens:,} tokens, first word after "
                f"{turn.ttft_s:.2f} s, wrote {turn.completion_tokens:,} tokens at "
                f"{turn.decode_tok_s:,.0f} tok/s, ended by {turn.finish_reason}"
            )
        dim("\n".join(lines + ([f"blocks: {stats.execution}"] if stats.execution else [])))

    def _mem(self, _: str) -> None:
        stats, plan = self.session.stats, self.session.runtime.plan
        dim(
            f"{kv(stats)} in use, {size(stats.peak_bytes)} allocated at the peak\n"
            f"weights {size(plan.weights)} · workspace of a block about {size(plan.workspace)} · "
            f"this process {size(psutil.Process(os.getpid()).memory_info().rss)}"
        )

    def _policy(self, rest: str) -> None:
        if not rest:
            raise ValueError("give a policy, such as /policy snapkv window=16; see kvcap policies")
        name, *texts = shlex.split(rest)
        old = self.session
        runtime = old.runtime.under(name, pairs(texts))
        messages, system, seed, generation = old.messages, old.system, old.seed, old.generation
        pinned, pin_system, on_full = old.pinned, old.pin_system, old.on_full
        with interrupts_deferred():
            del self.session, old  # their memory first: two caches would be over the cap
            self.session = runtime.session(system, seed=seed, generation=generation)
            self.session.messages, self.session.pinned = messages, pinned
            self.session.pin_system, self.session.on_full = pin_system, on_full
        cap = f"policy {name}, {runtime.plan.budget_tokens:,} slots in {size(runtime.cap_bytes)}"
        dim(f"{cap}{REREAD if messages else ''}")

    def _system(self, rest: str) -> None:
        if rest:
            self.session.system = None if rest in ('""', "''") else rest
            self.session.cache.reset()
            dim(f"system prompt set{REREAD if self.session.messages else ''}")
        else:
            dim(self.session.system or 'no system prompt; /system TEXT sets one, /system "" none')

    def _regen(self, _: str) -> int:
        return self._answer(self.session.regenerate)

    def _pin(self, rest: str) -> int:
        if rest:
            return self._say(rest, pin=True)
        pinned = [self.session.messages[index]["content"] for index in sorted(self.session.pinned)]
        dim("\n".join(pinned) or "nothing is pinned; /pin TEXT says TEXT and never evicts it")
        return OK

    def _save(self, rest: str) -> None:
        if not rest:
            raise ValueError("give a file, such as /save chat.safetensors")
        self.session.save(os.path.expanduser(rest))
        dim(f"saved in {rest}; /load or --session goes on from there")

    def _load(self, rest: str) -> None:
        if not rest:
            raise ValueError("give a file that /save or --session wrote")
        self.session.restore(os.path.expanduser(rest))
        turns = sum(message["role"] == "user" for message in self.session.messages)
        dim(f"loaded {turns:,} turns · {figures(self.session.stats)}")

    def _exit(self, _: str) -> None:
        self.over = True

    COMMANDS: ClassVar[dict[str, tuple[str, str, Callable[[Chat, str], int | None]]]] = {
        "help": ("", "list the commands", _help),
        "clear": ("", "forget the conversation", _clear),
        "set": ("[KEY VALUE]", f"show or change sampling: {', '.join(SETTINGS)}", _set),
        "stats": ("", "tokens seen, kept and evicted", _stats),
        "mem": ("", "memory in use", _mem),
        "policy": ("NAME [K=V ...]", "switch the policy; reads the conversation again", _policy),
        "pin": ("[TEXT]", "say something that is never evicted, or show what is pinned", _pin),
        "system": ("[TEXT]", "show or set the system prompt", _system),
        "regen": ("", "answer again; reads the conversation again", _regen),
        "save": ("FILE", "save the conversation, to the bit", _save),
        "load": ("FILE", "go on with a saved conversation", _load),
        "exit": ("", "leave", _exit),
    }


REREAD = "; the next message reads the conversation again"


def joined(lines: Iterable[str]) -> Iterator[str]:
    """Lines without their ends; a line that ends with a backslash goes on in the next."""
    held = ""
    for line in lines:
        text = line.rstrip("\r\n")
        if text.endswith("\\"):
            held += text[:-1] + "\n"
        else:
            yield held + text
            held = ""
    if held:
        yield held

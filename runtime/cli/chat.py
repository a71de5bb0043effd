"""Runs the chat and its commands: takes lines, prints answers. Knows no keyboard."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
import textwrap
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from kvcap import __version__
from kvcap.runtime.cli.answer import print_answer, recalled
from kvcap.runtime.cli.console import (
    INTERRUPTED,
    OK,
    columns,
    complain,
    dim,
    exit_code,
    say,
    styled,
)
from kvcap.runtime.cli.live_meter import Meter, figures, kv
from kvcap.runtime.cli.options import Output, Sampling, pairs
from kvcap.runtime.errors import KvcapError, MemoryCapExceeded, PlanInfeasible, first_line
from kvcap.runtime.files import read_text
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.memory.free_memory import free_memory, process_bytes
from kvcap.runtime.recall.recall import Passage, held_shares, mostly_held
from kvcap.runtime.recall.settings import AUTO, OFF, RecallSettings
from kvcap.runtime.session.decoding import MAX_NEW_TOKENS
from kvcap.runtime.session.encoding import check_letters
from kvcap.runtime.session.engine import Engine
from kvcap.runtime.session.session import Session
from kvcap.runtime.types import BUILT_IN
from kvcap.runtime.units import format_bytes, parse_bytes

YOU = "cyan"  # the colour of the user's words
SETTINGS = (*(field.name for field in fields(Sampling)), "markdown")
COMMAND = re.compile(r"/([A-Za-z]*)(?:\s+(.*))?", re.DOTALL)
LEAVING = ("quit", "bye", "q")  # as other programs call /exit
SHOWN_LINES, SHOWN = 8, 600  # lines and characters of a message that is shown again
MATCHES, PASSAGE = 5, 240  # passages that /recall shows, and letters of one
REREAD = "; the next message reads the conversation again"
KEYS = """\
Enter sends · Alt+Enter or a final backslash: new line · Tab completes
Ctrl-C stops an answer · Ctrl-D leaves"""
ENDED = {
    "stop": "ended by the model",
    "length": "ended at max_new_tokens",
    "interrupted": "stopped by Ctrl-C",
    "cap": "ended at the cap",
    "full": "ended as the cache was full",
    "error": "failed",
}
UNSET = {
    "stop": "stop_strings",
    "json_schema": "json_schema",
    "regex": "regex",
    "template_option": "template_options",
    "thinking_budget": "thinking_budget",
}
"""Maps settings that `/set NAME` without a value resets to the names that a session uses."""
SWITCH = {"on": True, "off": False}
# A name in quotes, or one whose spaces have backslashes before them; then the question.
FILE = re.compile(r"""("[^"]+"|'[^']+'|(?:\\ |\S)+)\s*(.*)""", re.DOTALL)


@dataclass
class Chat:
    """A conversation on a terminal or in a script, with commands that change it.

    Answers go to stdout, all else to stderr. An error is printed, and the chat goes on.
    """

    session: Session
    output: Output
    file: str | None = None
    """Names the file where the conversation is saved after every answer, if any."""
    commands: bool = True
    """Says whether a line that begins with a slash and a word is a command."""
    markdown: bool = True
    """Says whether answers are drawn as Markdown, where stdout is a terminal."""
    spaced: bool = False
    """Says whether an empty line goes before an answer, as is easier to read on a terminal."""
    draft: str = ""
    """Holds a text for the next prompt, to be changed and sent again."""
    code: int = OK
    """Holds the first exit code that was not 0."""
    over: bool = False

    def run_script(self, lines: Iterable[str]) -> int:
        """Handle every line; a final backslash continues it. Return the exit code."""
        for line in join_continued(lines):
            self.handle(line)
            if self.over or self.code == INTERRUPTED:
                break
        return self.code

    def handle(self, text: str) -> int:
        """Run a command, which is a slash and a word of letters, or send a message.

        Returns the exit code of this line alone.
        """
        if not text.strip():
            return OK
        command = COMMAND.fullmatch(text) if self.commands else None
        count = len(self.session.messages)
        try:
            code = self._command(command[1], command[2] or "") if command else self._send(text)
        except (KvcapError, ValueError) as error:
            complain(error)
            code = exit_code(error)
        if not command and len(self.session.messages) == count:
            self.draft = text  # the message was refused, or taken back
        self.code = self.code or code
        return code

    def save(self) -> None:
        """Save the conversation, if it has a file.

        Raises:
            SessionNotSaved: it cannot be written.
        """
        if self.file is not None:
            self.session.save(self.file)

    def banner(self) -> list[str]:
        """Return the lines that greet the user."""
        runtime = self.session.runtime
        plan = runtime.plan
        lines = [
            f"kvcap {__version__} · {runtime.name} · {runtime.device_label}",
            f"{plan.policy} keeps {plan.budget_tokens:,} slots in "
            f"{format_bytes(runtime.cap_bytes)} of KV memory",
        ]
        if runtime.name in BUILT_IN:
            lines.append(
                f"{runtime.name} is a small test and demonstration model: it only knows what it is "
                "told"
            )
        return [*lines, "/help lists the commands · Ctrl-C stops · Ctrl-D leaves"]

    def show_resumed(self) -> None:
        """Say that a saved conversation goes on; on a terminal, show its last exchange."""
        if self.output.quiet or not self.session.messages:
            return
        dim(f"continued: {self._turns} · {figures(self.session.stats)}")
        self._show_last()

    @property
    def _turns(self) -> str:
        count = sum(message["role"] == "user" for message in self.session.messages)
        return f"{count:,} turn{'' if count == 1 else 's'}"

    def _show_last(self) -> None:
        if not self.spaced:
            return
        for message in self.session.messages[-2:]:
            text = shortened(message["content"])
            say("")
            say((f"> {text}", YOU) if message["role"] == "user" else text)

    def _send(self, text: str, *, pin: bool = False) -> int:
        return self._answer(lambda: self.session.send(text, pin=pin))

    def _answer(self, begin: Callable[[], Iterator[str]]) -> int:
        def begun() -> Iterator[str]:
            pieces = begin()
            if self.spaced:
                say("")
            return pieces

        code = print_answer(self.session, begun, self.output, self._meter)
        self.save()
        return code

    @property
    def _meter(self) -> type[Meter]:
        if self.markdown and not self.output.json and sys.stdout.isatty() and styled():
            from kvcap.runtime.cli.markdown import MarkdownMeter

            return MarkdownMeter
        return Meter

    def _command(self, name: str, rest: str) -> int:
        known = "exit" if name.lower() in LEAVING else name.lower()
        if known not in self.COMMANDS:
            close = difflib.get_close_matches(known, self.COMMANDS, n=1)
            hint = f"did you mean /{close[0]}?" if close else "/help lists all"
            raise ValueError(f"no command /{name}; {hint} (a space before it makes it a message)")
        return self.COMMANDS[known][2](self, rest.strip()) or OK

    def _help(self, _: str) -> None:
        usages = {f"/{name} {usage}": says for name, (usage, says, _) in self.COMMANDS.items()}
        width = min(columns() or 80, 80)
        indent = min(max(map(len, usages)) + 2, width // 2)
        for usage, says in usages.items():
            text = f"{usage.ljust(indent - 2)}  {says}"
            dim(textwrap.fill(text, width, subsequent_indent=" " * indent))
        if self.spaced:
            dim(KEYS)

    def _clear(self, _: str) -> None:
        self.session.clear()
        dim("the conversation is forgotten; settings stay")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        value = value.strip()
        if not name:
            dim("\n".join(map(self._setting, SETTINGS)))
            return
        if name not in SETTINGS:
            close = difflib.get_close_matches(name, SETTINGS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(SETTINGS)}"
            raise ValueError(f"no setting {name!r}; {hint}")
        if name == "markdown":
            if value not in SWITCH:
                raise ValueError(f"markdown takes on or off; got {value!r}")
            self.markdown = SWITCH[value]
        elif name in UNSET and not value:
            self.session.set_generation(**{UNSET[name]: None})
        else:
            self.session.set_generation(**Sampling.parse(name, value).given())
        dim(self._setting(name))

    def _setting(self, name: str) -> str:
        if name == "markdown":
            return f"markdown = {'on' if self.markdown else 'off'}"
        generation = self.session.generation
        value = getattr(generation, UNSET.get(name, name), None)
        if name == "seed":
            value = self.session.seed
        elif name == "max_new_tokens":
            value = value or MAX_NEW_TOKENS
        elif name == "temperature" and not generation.do_sample:
            value = 0
        return f"{name} = {'not set' if value is None else value}"

    def _stats(self, _: str) -> None:
        stats, plan = self.session.stats, self.session.runtime.plan
        lines = [
            f"{self._turns} · policy {stats.policy} · {plan.positions} positions",
            figures(stats),
        ]
        if stats.turn is None:
            lines.append("no answer yet")
        else:
            turn = stats.turn
            lines += [
                f"last answer: {turn.read_tokens:,} tokens read, {turn.completion_tokens:,} "
                f"written; {ENDED.get(turn.finish_reason or '', 'not finished')}",
                f"first word after {turn.ttft_s:.2f} s, then {turn.decode_tok_s:,.0f} tok/s",
            ]
        if stats.execution:
            lines.append(stats.execution)
        if nbytes := self.session.recall.store.nbytes:
            lines.append(f"index of evicted text {format_bytes(nbytes)}")
        dim("\n".join(lines))

    def _mem(self, _: str) -> None:
        stats, plan = self.session.stats, self.session.runtime.plan
        graphs, store = self.session.graph_bytes, self.session.recall.store
        index = f"index of evicted text {format_bytes(store.nbytes)} of {format_bytes(store.limit)}"
        dim(
            f"{kv(stats)} in use, {format_bytes(stats.peak_bytes)} allocated at the peak\n"
            + (f"CUDA graphs {format_bytes(graphs)} · " if graphs else "")
            + (f"{index} · " if store.nbytes else "")
            + f"weights {format_bytes(plan.weights)} · workspace of a block about "
            f"{format_bytes(plan.workspace)} · this process {format_bytes(process_bytes())}"
        )

    def _policy(self, rest: str) -> None:
        if not rest:
            raise ValueError("give a policy, such as /policy snapkv window=16; see kvcap policies")
        name, *texts = shlex.split(rest)
        self._switch(self.session.runtime.with_policy_name(name, pairs(texts)))

    def _budget(self, rest: str) -> None:
        runtime = self.session.runtime
        if rest:
            resized = with_budget(runtime, rest)
            more = resized.plan.cache_bytes - runtime.plan.cache_bytes
            if "cuda" not in runtime.device_label and more > (free := free_memory().nbytes):
                raise PlanInfeasible(
                    f"{resized.plan.budget_tokens:,} slots take "
                    f"{format_bytes(resized.plan.cache_bytes)}, which is {format_bytes(more)} more "
                    f"than now, and {format_bytes(free)} are free; give a smaller budget"
                )
            self._switch(resized)
        else:
            dim(
                f"{runtime.plan.budget_tokens:,} slots in {format_bytes(runtime.cap_bytes)}; "
                "/budget 512 or /budget 4MiB changes it"
            )

    def _switch(self, runtime: Engine) -> None:
        """Continue the conversation under another policy or budget."""
        old = self.session
        before, messages, system, seed = old.runtime, old.messages, old.system, old.seed
        generation, pinned, pin_system = old.generation, old.pinned, old.pin_system
        on_full, tools, recall, files = old.on_full, old.tools, old.recall.settings, old.files

        def new(runtime: Engine) -> Session:
            session: Session = runtime.session(system, seed=seed, generation=generation)
            session.messages, session.pinned = messages, pinned
            session.pin_system, session.on_full, session.tools = pin_system, on_full, tools
            session.files = files
            session.recall.set(recall)
            return session

        with interrupts_deferred():
            del self.session, old  # their memory first: two caches would be over the cap
            try:
                self.session = new(runtime)
            except BaseException as error:
                self.session = new(before)
                if isinstance(error, (MemoryError, RuntimeError)):  # torch raises the latter
                    raise MemoryCapExceeded(
                        f"the memory for {runtime.plan.budget_tokens:,} slots cannot be had "
                        f"({first_line(error)}); the chat goes on as it was, give a smaller budget"
                    ) from error
                raise
        plan = runtime.plan
        kept = f"{plan.budget_tokens:,} slots in {format_bytes(runtime.cap_bytes)}"
        dim(f"policy {plan.policy}, {kept}{REREAD if messages else ''}")

    def _system(self, rest: str) -> None:
        check_letters(rest)
        if rest:
            self.session.system = None if rest in ('""', "''") else rest
            self.session.cache.reset()
            done = "set" if self.session.system else "removed"
            dim(f"system prompt {done}{REREAD if self.session.messages else ''}")
        else:
            dim(self.session.system or 'no system prompt; /system TEXT sets one, /system "" none')

    def _regen(self, _: str) -> int:
        code = self._answer(self.session.regenerate)
        if code == INTERRUPTED and self.session.notice is None and not self.output.quiet:
            dim("what was written of the new answer replaces the former one")
        return code

    def _undo(self, _: str) -> None:
        self.draft = self.session.undo()
        self.save()
        reread = REREAD if self.session.messages else ""
        dim(f"taken back: {shortened(self.draft, lines=1)}{reread}")

    def _read(self, rest: str) -> int:
        match = FILE.fullmatch(rest)
        if not match:
            raise ValueError(
                "give a file, such as /read notes.txt, and perhaps a question after it"
            )
        file, question = match[1].strip("\"'").replace("\\ ", " "), match[2]
        text = read_text(file)
        if not text.strip():
            raise ValueError(f"{file!r} is empty")
        lines = text.count("\n") + 1
        dim(f"read {lines:,} line{'' if lines == 1 else 's'} of {file}")
        return self._send(f"{text}\n\n{question}" if question else text)

    def _pin(self, rest: str) -> int:
        if rest:
            return self._send(rest, pin=True)
        session = self.session
        pinned = [session.messages[index]["content"] for index in sorted(session.pinned)]
        if session.pin_system and session.system:
            pinned.insert(0, f"system prompt: {session.system}")
        dim("\n".join(pinned) or "nothing is pinned; /pin TEXT says TEXT and never evicts it")
        return OK

    def _recall(self, rest: str) -> None:
        recall = self.session.recall
        if rest.lower() in (AUTO, OFF) or (rest.isascii() and rest.isdigit()):
            self._set_recall(rest)
        elif not rest:
            turn = self.session.turn
            tokens = 0 if turn is None else turn.recalled_tokens
            count = len(recall.passages) if tokens else 0
            dim(
                f"{self._recall_setting}\n"
                f"last message: {recalled(count, tokens) if tokens else 'nothing'} recalled · "
                f"index of evicted text {format_bytes(recall.store.nbytes)}"
            )
        elif not recall.limit:
            raise ValueError("recall is off, so that nothing is indexed; /recall auto turns it on")
        elif matches := self.session.search(rest):
            held = held_shares(self.session.cache.kept_tokens(), len(self.session.read_ids))
            dim("\n".join(shown_passage(one, held) for one in matches[:MATCHES]))
        else:
            dim("no passage of the conversation has enough of these words")

    def _set_recall(self, setting: str) -> None:
        """Change how much is recalled; the index keeps the bytes that were planned for it."""
        plan, recall = self.session.runtime.plan, self.session.recall
        wanted = RecallSettings.parse(setting, recall.settings.nbytes or plan.recall_store or None)
        if plan.baseline and wanted.nbytes > plan.recall_store:
            raise ValueError(
                "--memory-cap has no room for an index of evicted text, as the chat began with "
                "--recall off; begin it with --recall auto, and switch that off when you like"
            )
        recall.set(wanted)
        dim(self._recall_setting)

    @property
    def _recall_setting(self) -> str:
        recall = self.session.recall
        if not recall.limit:
            return "recall off: evicted text stays forgotten"
        requested = recall.settings.tokens
        kind = " (auto)" if requested is None else ""
        if requested is not None and requested > recall.limit:
            kind = f": no more than there are slots, though {requested:,} were asked for"
        return f"recall at most {recall.limit:,} tokens of evicted text for a message{kind}"

    def _save(self, rest: str) -> None:
        if not rest:
            raise ValueError("give a file, such as /save chat.safetensors")
        self.session.save(os.path.expanduser(rest))
        dim(f"saved in {rest}; /load or --session goes on from there")

    def _load(self, rest: str) -> None:
        if not rest:
            raise ValueError("give a file that /save or --session wrote")
        self.session.restore(os.path.expanduser(rest))
        dim(f"loaded {self._turns} · {figures(self.session.stats)}")
        self._show_last()

    def _exit(self, _: str) -> None:
        self.over = True

    COMMANDS: ClassVar[dict[str, tuple[str, str, Callable[[Chat, str], int | None]]]] = {
        "help": ("", "list the commands", _help),
        "read": ("FILE [QUESTION]", "say what is in a text file, and ask about it", _read),
        "undo": ("", "take back the last message and its answer", _undo),
        "regen": ("", "answer again; reads the conversation again", _regen),
        "pin": ("[TEXT]", "send a message that is never evicted, or show the pinned", _pin),
        "recall": (
            "[WORDS|auto|off|N]",
            "find passages of the conversation; or show or change how much is recalled",
            _recall,
        ),
        "system": ("[TEXT]", "show or set the system prompt", _system),
        "clear": ("", "forget the conversation", _clear),
        "save": ("FILE", "save the conversation, to the bit", _save),
        "load": ("FILE", "go on with a saved conversation", _load),
        "set": ("[KEY VALUE]", f"show or change settings: {', '.join(SETTINGS)}", _set),
        "policy": ("NAME [K=V ...]", "switch the policy; reads the conversation again", _policy),
        "budget": ("[TOKENS|SIZE]", "show or change the KV budget; reads again, too", _budget),
        "stats": ("", "tokens seen, kept and evicted", _stats),
        "mem": ("", "memory in use", _mem),
        "exit": ("", "leave", _exit),
    }


def with_budget(runtime: Engine, text: str) -> Engine:
    """Return the runtime with a budget in slots (512), or the most slots in bytes (4MiB).

    Raises:
        ValueError: neither a number of slots nor a size, or nothing fits.
    """
    if (slots := text.replace(",", "")).isdecimal():
        if not int(slots):
            raise ValueError("a budget has 1 slot or more; such as /budget 512 or /budget 4MiB")
        return runtime.with_budget(int(slots))
    try:
        most = parse_bytes(text)
    except PlanInfeasible as error:
        raise ValueError(
            f"{text!r} is no budget; give slots, such as 512, or bytes, such as 4MiB"
        ) from error

    def taken(slots: int) -> int:
        return runtime.with_budget(slots).plan.cache_bytes

    over = 2 * runtime.plan.budget_tokens
    while taken(over) <= most:
        over *= 2
    most_slots = bisect_right(range(1, over), most, key=taken)
    if not most_slots:
        raise ValueError(
            f"one slot takes {format_bytes(taken(1))}, and the budget is {format_bytes(most)}; "
            "give a larger one"
        )
    return runtime.with_budget(most_slots)


def shortened(text: str, lines: int = SHOWN_LINES) -> str:
    """Return the beginning of a message, by which people recognise it."""
    head = "\n".join(text.strip().split("\n")[:lines])[:SHOWN]
    return head if head == text.strip() else f"{head} ..."


def shown_passage(passage: Passage, held: Sequence[float]) -> str:
    """Return one line for a passage: its place, whether it is evicted, and its text.

    Args:
        passage: that was found.
        held: how many of the first 0, 1, ... tokens are held.
    """
    start, stop = passage.span
    text = " ".join(passage.text.split())
    end = " ..." if len(text) > PASSAGE else ""
    state = "held" if mostly_held(held, passage.span) else "mostly evicted"
    where = f"tokens {start:,} to {stop:,}, {state}"
    return f"{where}: {text[:PASSAGE]}{end}"


def join_continued(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines without their ends; one that ends with a backslash is joined to the next."""
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

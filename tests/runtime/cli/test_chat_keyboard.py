"""The chat's keyboard: pastes, Tab, history, and what is typed while it answers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_input, create_pipe_input
from prompt_toolkit.layout.processors import TransformationInput
from prompt_toolkit.output import DummyOutput

from kvcap.runtime.cli.chat import SETTINGS, Chat
from kvcap.runtime.cli.console import INTERRUPTED, OK
from kvcap.runtime.cli.options import Output
from kvcap.runtime.cli.terminal import (
    ChatCompleter,
    Pastes,
    Prompt,
    TypeAhead,
    converse,
    history,
    text_of,
)

LONG = "\n".join(f"line {number}" for number in range(120))
POLICIES = {"keydiff": ["anchor", "recent_tokens"], "knorm": ["recent_tokens"]}


class Listener(Chat):
    """Notes what it is told in place of answering."""

    def __init__(self) -> None:
        runtime = SimpleNamespace(policies=lambda: POLICIES)
        super().__init__(SimpleNamespace(runtime=runtime), Output(quiet=True))  # type: ignore[arg-type]
        self.lines: list[str] = []

    def handle(self, text: str) -> int:
        self.lines.append(text)
        self.draft = text.removeprefix("/draft ") if text.startswith("/draft ") else ""
        self.over = text == "/exit"
        return OK


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(keys: str) -> list[str]:
    """Return what the chat is told by `keys`."""
    chat = Listener()
    with create_pipe_input() as keyboard:
        keyboard.send_text(keys + "/exit\r")
        assert converse(chat, keyboard, DummyOutput()) == 0
    return chat.lines[:-1]


def paste(text: str) -> str:
    return f"\x1b[200~{text}\x1b[201~"


def test_a_long_paste_is_sent_whole() -> None:
    assert typed(f"What is{paste(LONG)}about?\r") == [f"What is{LONG}about?"]
    assert typed(paste("a\r\nb\rc") + "\r") == ["a\nb\nc"]


def test_a_long_paste_is_taken_away_by_one_backspace() -> None:
    assert typed(f"short{paste(LONG)}\x7f\r") == ["short"]


def test_lines_are_continued() -> None:
    assert typed("one\\\rtwo\x1b\rthree\r") == ["one\ntwo\nthree"]


def test_what_a_command_leaves_is_in_the_next_prompt() -> None:
    assert typed(f"/draft {paste(LONG)}\r and more\r") == [f"/draft {LONG}", f"{LONG} and more"]


def test_a_paste_is_shown_by_its_size() -> None:
    pastes = Pastes()
    line = f"see {pastes.fold(LONG)}{pastes.fold('x' * 1000)}!"
    shown = pastes.apply_transformation(
        TransformationInput(None, Document(line), 0, lambda i: i, [("", line)], 80, 1)  # type: ignore[arg-type]
    )
    text = "".join(fragment[1] for fragment in shown.fragments)
    assert text == "see [pasted 120 lines][pasted 1,000 characters]!"
    xs = [shown.source_to_display(index) for index in range(len(line) + 1)]
    assert [text[x : x + 1] for x in xs] == ["s", "e", "e", " ", "[", "[", "!", ""]
    assert [shown.display_to_source(x) for x in xs] == list(range(len(line) + 1))
    assert shown.display_to_source(10) == 4  # within the label
    assert pastes.unfold(line) == f"see {LONG}{'x' * 1000}!"
    assert pastes.fold("two\nlines") == "two\nlines"


def test_history_is_without_pastes_and_pins(home: Path) -> None:
    typed(f"a question\r/pin the code is 4821\r{paste('a password')}\r{paste(LONG)}\r")
    file = home / "kvcap" / "history"
    kept = [line for line in file.read_text().splitlines() if line.startswith("+")]
    assert kept == ["+a question", "+/exit"]
    assert file.stat().st_mode & 0o077 == 0


def test_what_is_private_stays_so_when_it_is_brought_back(home: Path) -> None:
    typed_before = history()
    typed_before.pasted = True
    typed_before.append_string("a password")
    typed_before.pasted = False
    for text in ("a password", "/pin secret", "/PIN secret", "hello"):
        typed_before.append_string(text)
    kept = (home / "kvcap" / "history").read_text()
    assert "+hello" in kept
    assert "password" not in kept
    assert "secret" not in kept
    assert typed_before.get_strings()[0] == "a password"


def test_a_pasted_and_emptied_prompt_is_typed_anew(home: Path) -> None:
    typed(f"{paste('a password')}\x03typed\r")
    assert "+typed" in (home / "kvcap" / "history").read_text()


def test_history_that_others_could_read_is_closed(home: Path) -> None:
    (home / "kvcap").mkdir()
    (home / "kvcap" / "history").touch(mode=0o644)
    typed("hello\r")
    assert (home / "kvcap" / "history").stat().st_mode & 0o077 == 0


def test_history_that_cannot_be_a_file_is_in_memory(home: Path) -> None:
    (home / "kvcap" / "history").mkdir(parents=True)
    assert typed("hello\r") == ["hello"]


@pytest.mark.parametrize(
    ("text", "completions"),
    [
        ("/", [*(f"{n} " if usage else n for n, (usage, _, _) in Chat.COMMANDS.items())]),
        ("/st", ["stats"]),
        ("/PO", ["policy "]),
        ("/set to", ["top_p ", "top_k "]),
        ("/set ", [f"{name} " for name in SETTINGS]),
        ("/set markdown o", ["on", "off"]),
        ("/set top_p 0", []),
        ("/policy k", ["keydiff", "knorm"]),
        ("/policy keydiff an", ["anchor="]),
        ("/policy keydiff anchor=median rec", ["recent_tokens="]),
        ("/policy nothing an", []),
        ("/load te", ["xt.md"]),
        ("/read te", ["xt.md "]),
        ("/read my", ["\\ notes.txt "]),
        ("/read my\\ no", ["tes.txt "]),
        ("/save my no", ["tes.txt"]),
        ("/read fol", ["der/"]),
        ("/read folder/", ["inner "]),
        ("Tell me /st", []),
        ("two lines\n/st", []),
    ],
)
def test_tab_completes(text: str, completions: list[str], home: Path) -> None:
    (home / "my notes.txt").touch()
    (home / "text.md").touch()
    (home / "folder").mkdir()
    (home / "folder" / "inner").touch()
    completer = ChatCompleter(Listener())
    offered = completer.get_completions(Document(text), CompleteEvent(completion_requested=True))
    assert [completion.text for completion in offered] == completions


def test_no_commands_completes_none() -> None:
    chat = Listener()
    chat.commands = False
    assert not list(ChatCompleter(chat).get_completions(Document("/st"), CompleteEvent()))


def test_ctrl_c_where_nothing_is_answered_ends_no_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(chat: Listener, text: str) -> None:
        chat.over = text == "/exit"
        if not chat.over:
            raise KeyboardInterrupt

    monkeypatch.setattr(Listener, "handle", take)
    assert typed("/load file\r") == []


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are Unix's")
@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("and another\r", "and another"),
        ("abd\x7fc", "abc"),
        ("\r\r", ""),
        ("lost\x15kept", "kept"),
        ("\x1b[A\x1b[Dup", "up"),
        ("two\rlines", "two\nlines"),
        (paste("pasted\rtext"), "pasted\ntext"),
        ("é日本", "é日本"),
    ],
)
def test_what_is_typed_while_it_answers_is_kept_and_not_shown(keys: str, text: str) -> None:
    import pty
    import termios

    def mode() -> Any:
        return termios.tcgetattr(slave)[3]

    master, slave = pty.openpty()
    with os.fdopen(slave, closefd=True) as terminal:
        before = mode()
        with TypeAhead(create_input(terminal), DummyOutput()) as ahead:
            assert not mode() & (termios.ECHO | termios.ICANON)
            assert mode() & termios.ISIG  # Ctrl-C is a signal still
            os.write(master, keys.encode())
            assert text_of(ahead.take()) == text
            assert ahead.take() == []
        assert mode() == before
    os.close(master)


def meanwhile(
    monkeypatch: pytest.MonkeyPatch, before: str, during: dict[str, tuple[str, int]]
) -> tuple[list[str], list[str]]:
    """Return what the chat took on a terminal, and what prompts held, where Enter is typed then.

    Args:
        monkeypatch: of the test.
        before: is typed before it begins.
        during: what is typed while it handles a line, and the exit code of that.
    """
    import pty

    drafts, plain = list[str](), Prompt.ask

    class Busy(Listener):
        def handle(self, text: str) -> int:
            super().handle(text)
            keys, code = during.pop(text, ("", OK))
            os.write(master, keys.encode())
            return code

    def ask(prompt: Prompt, typed: str = "") -> str:
        if typed:
            drafts.append(typed)
            os.write(master, b"\r")
        return plain(prompt, typed)

    monkeypatch.setattr(Prompt, "ask", ask)
    master, slave = pty.openpty()
    chat = Busy()
    with os.fdopen(slave, closefd=True) as terminal:
        os.write(master, before.encode())
        assert converse(chat, create_input(terminal), DummyOutput()) == 0
    os.close(master)
    assert not during
    return chat.lines, drafts


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are Unix's")
def test_lines_typed_ahead_are_taken_one_by_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which they were typed, and as a prompt takes them: keys, pastes, history."""
    during = {
        "one": ("lf\rthree\\\rfour\r", OK),
        "half": (f"{paste(LONG)}\r/pin 4821\rabd\x7fc\r\r", OK),
        "abc": ("five\x1b\rsix\r/exit\r", 2),
    }
    taken, drafts = meanwhile(monkeypatch, "one\rtwo\rha", during)
    lines = ["one", "two", "half", "three\nfour", LONG, "/pin 4821", "abc", "", "five\nsix"]
    assert taken == [*lines, "/exit"]
    assert drafts == []
    kept = (home / "kvcap" / "history").read_text()
    assert "+two" in kept
    assert "line 7" not in kept
    assert "4821" not in kept


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are Unix's")
@pytest.mark.parametrize(
    ("line", "code", "draft"), [("one", INTERRUPTED, ""), ("/draft one", OK, "one\n")]
)
def test_after_a_stop_or_a_refusal_lines_typed_ahead_wait_in_the_prompt(
    line: str, code: int, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nothing is sent before its author has seen why."""
    shown = f"{draft}two\nthree\nfou"
    during = {
        "begin": (f"{line}\rtwo\r", OK), line: (f"{paste('three')}\rfou", code),
        shown: ("/exit\r", OK),
    }  # fmt: skip
    taken, drafts = meanwhile(monkeypatch, "begin\r", during)
    assert taken == ["begin", line, shown, "/exit"]
    assert drafts == [shown]

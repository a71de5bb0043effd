"""The chat: scripted, interrupted, and typed into on a real pseudo-terminal."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_chat

from kvcap import Runtime, cli, pocket
from kvcap.runtime.chat import Chat, joined
from kvcap.runtime.meter import Meter
from kvcap.runtime.options import Output, Sampling

ROOT = Path(cli.__file__).parents[1]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_chat.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def runtime(model: str) -> Runtime:
    return Runtime.from_pretrained(model, kv_budget_tokens=32, block_size=16)


@pytest.fixture
def chat(runtime: Runtime) -> Chat:
    session = runtime.session(seed=0)
    session.set_generation(max_new_tokens=6)
    return Chat(session, Output())


def consistent(chat: Chat) -> bool:
    cache = chat.session.cache
    return cache.consistent and chat.session.messages[-1]["role"] == "assistant"


def test_a_script_answers_every_line(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    code = chat.script(["Hello!\n", "\n", "How are\\\n", "you? And you?\n"])
    out, err = capsys.readouterr()
    assert code == 0
    said = [m["content"] for m in chat.session.messages]
    assert said[0::2] == ["Hello!", "How are\nyou? And you?"]
    assert out == "".join(f"{text}\n" for text in said[1::2])
    assert err.count("seen ") == 2
    seen = chat.session.stats.seen_tokens
    assert f"seen {seen} · kept 32 · evicted {seen - 32}" in err


def test_a_script_in_json(runtime: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(runtime.session(), Output(json=True, quiet=True))
    chat.script(["/set max_new_tokens 4", "One", "/stats", "Two"])
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [d["usage"]["completion_tokens"] for d in documents] == [4, 4]
    assert documents[1]["kv"]["evicted_tokens"] >= documents[0]["kv"]["evicted_tokens"]


def test_what_each_turn_evicted_is_reported(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.script([f"{'many words ' * 20}{turn}" for turn in range(3)] + ["/regen"])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("seen")]
    figures = [re.search(r"evicted ([\d,]+) \(\+([\d,]+) now\)", line) for line in lines]
    total, now = zip(
        *([int(n.replace(",", "")) for n in f.groups()] for f in figures if f), strict=True
    )
    assert list(now[:3]) == [total[0], total[1] - total[0], total[2] - total[1]]
    assert now[3] == total[3]  # everything was read again


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/help", "/policy NAME [K=V ...]"),
        ("/stats", "turns 1 ·"),
        ("/mem", "this process"),
        ("/set", "max_new_tokens = 6"),
        ("/set temperature 0.5", "temperature = 0.5"),
        ("/set top_k 3", "top_k = 3"),
        ("/set seed 7", "seed = 7"),
        ("/set stop END", "stop = ['END']"),
        ("/set stop", "stop = not set"),
        ("/system", "no system prompt"),
        ("/system Be kind.", "the next message reads the conversation again"),
        ("/policy snapkv window=4", "policy snapkv"),
        ("/clear", "forgotten"),
    ],
)
def test_commands(line: str, says: str, chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take("Hello!")
    capsys.readouterr()
    chat.take(line)
    out, err = capsys.readouterr()
    assert (chat.code, out) == (0, "")
    assert says in err
    chat.take("And now?")
    assert chat.code == 0
    assert consistent(chat)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/polcy full", "did you mean /policy?"),
        ("/xyzzy", "/help lists all"),
        ("/set temprature 1", "did you mean 'temperature'?"),
        ("/set temperature", "takes a number"),
        ("/set temperature -1", "0 or more"),
        ("/set temperature nan", "0 or more"),
        ("/set top_p 2", "from 0 to 1"),
        ("/set max_new_tokens 1.5", "takes a whole number"),
        ("/set max_new_tokens 0", "1 or more"),
        ("/policy", "give a policy"),
        ("/policy snapvk", "did you mean 'snapkv'?"),
        ("/policy snapkv windo=4", "did you mean 'window'?"),
        ("/policy streaming_llm sinks=99", "at least 99"),
        ("/policy 'snapkv", "quotation"),
        ("/regen", "nothing to answer again"),
    ],
)
def test_refused_commands_change_nothing(
    line: str, says: str, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    before = chat.session, chat.session.generation.to_dict()
    code = chat.script([line, "Hello!"])
    out, err = capsys.readouterr()
    assert code == 2
    assert err.startswith("kvcap: ")
    assert says in err
    assert out.count("\n") >= 1
    assert (chat.session, chat.session.generation.to_dict()) == before


def test_a_space_makes_a_message_of_a_command(chat: Chat) -> None:
    chat.take(" /help is what I typed")
    assert chat.session.messages[0]["content"] == " /help is what I typed"


def test_policy_keeps_messages_settings_and_pins(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = Chat(runtime.session("Be kind.", seed=3), Output())
    chat.script(["/set max_new_tokens 6", "Hello!", "/policy h2o sink_tokens=2", "/policy knorm"])
    assert chat.session.cache.seen == 0
    assert [m["role"] for m in chat.session.messages] == ["user", "assistant"]
    eviction = chat.session.runtime.eviction
    assert (eviction.name, eviction.sink_tokens) == ("knorm", 2)
    read = len(chat.session.encode("Be kind. Hello! And?"))
    chat.take("And?")
    assert chat.session.turn.prompt_tokens > read + 6  # the first turn again, too
    assert chat.session.turn.completion_tokens == 6
    assert chat.session.system == "Be kind."


def test_system_and_exit(chat: Chat) -> None:
    assert chat.script(["/system You are terse.", "Hi", "/exit", "not read"]) == 0
    assert chat.session.system == "You are terse."
    assert len(chat.session.messages) == 2
    chat.take('/system ""')
    assert chat.session.system is None


def test_a_full_cache_ends_the_turn_not_the_chat(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = Runtime.from_pretrained(model, "full", kv_budget_tokens=24, block_size=16)
    chat = Chat(runtime.session(), Output(json=True, quiet=True))
    code = chat.script(["Hi", "and so on " * 30, "/policy keydiff", "/set max_new_tokens 4", "Hi"])
    out, err = capsys.readouterr()
    documents = [json.loads(line) for line in out.splitlines()]
    assert code == 4
    assert [d["finish_reason"] for d in documents] == ["cap", "cap", "length"]
    assert documents[0]["text"]
    assert documents[1]["usage"] == {"prompt_tokens": 0, "completion_tokens": 0}
    assert err.count("kvcap: policy 'full' never evicts") == 2


class Interrupting:
    """A stdout on which the user presses Ctrl-C after some text."""

    def __init__(self, after: int) -> None:
        self.after, self.text = after, ""

    def write(self, text: str) -> None:
        self.text += text
        self.after -= 1
        if self.after == 0:
            signal.raise_signal(signal.SIGINT)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


def test_ctrl_c_keeps_what_was_said(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Interrupting(after=4)
    monkeypatch.setattr(sys, "stdout", screen)
    assert chat.script(["Hello!", "not read"]) == 130
    assert chat.session.turn.finish_reason == "interrupted"
    assert chat.session.messages[-1]["content"] + "\n" == screen.text
    assert len(chat.session.messages) == 2
    assert consistent(chat)
    chat.take("Go on.")
    assert chat.session.turn.finish_reason == "length"
    assert consistent(chat)


def test_ctrl_c_while_reading(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(done: int, total: int) -> None:
        if done >= 32:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("kvcap.runtime.meter.Meter.reading", lambda _, *counts: press(*counts))
    chat.take("many words " * 50)
    assert chat.code == 130
    assert chat.session.stats.seen_tokens == 32
    assert consistent(chat)


def test_ctrl_c_in_generate(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(*_: int) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("kvcap.runtime.meter.Meter.write", press)
    assert cli.run(["generate", model, "Hello!", "--json", "-q"]) == 130
    assert json.loads(capsys.readouterr().out)["finish_reason"] == "interrupted"


def test_a_model_cannot_speak_escape_sequences(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    Meter(lambda: chat.session.stats).write("a\x1b[2J\tb\n")
    assert capsys.readouterr().out == "a\N{REPLACEMENT CHARACTER}[2J\tb\n"


@pytest.mark.skipif(
    not (pocket.path() / "model.safetensors").exists(), reason="pocket's weights are not here"
)
def test_pocket_recalls(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(Runtime.from_pretrained("pocket").session(), Output(quiet=True))
    told = "Please remember: the code for the blue door is 4821."
    chat.script([told, "What is the code for the blue door?"])
    assert "4821" in capsys.readouterr().out
    assert "small test and demonstration model" in "".join(chat.banner())


def test_settings_have_the_bounds_of_their_options() -> None:
    assert Sampling.parse("top_p", "0.5").given() == {"top_p": 0.5}
    assert Sampling.parse("seed", "0").given() == {"seed": 0}
    assert Sampling.parse("stop", "a b").given() == {"stop_strings": ["a b"]}


def test_lines_are_joined() -> None:
    assert list(joined(["a\\\r\n", "b\n", "c\\"])) == ["a\nb", "c\n"]


PROGRAM = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches the process as a signal
from kvcap.cli import main
main()
"""
READY = "\x1b[?2004h"  # prompt_toolkit awaits input


class Terminal:
    """`kvcap` on a pseudo-terminal: type, and wait for what must appear."""

    def __init__(self, home: Path, *arguments: str) -> None:
        import pty

        self.master, slave = pty.openpty()
        self.seen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "XDG_STATE_HOME": str(home),
                "TERM": "xterm",
                "PROMPT_TOOLKIT_NO_CPR": "1",
                "COLUMNS": "100",
            },
        )
        os.close(slave)

    def type(self, text: str) -> None:
        self.seen = ""
        os.write(self.master, text.encode())

    def wait_for(self, text: str, seconds: float = 60) -> str:
        end = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0, end - time.monotonic()))
            assert ready, f"{text!r} did not appear in {self.seen!r}"
            self.seen += os.read(self.master, 65536).decode(errors="replace")
        return self.seen

    def ends_with(self, code: int) -> None:
        while True:  # what is still written must be read for the process to end
            try:
                if not os.read(self.master, 65536):
                    break
            except OSError:
                break
        assert self.process.wait(20) == code


@pytest.fixture
def terminal(model: str, tmp_path: Path) -> Iterator[Any]:
    opened: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal(tmp_path, "chat", model, *arguments))
        return opened[-1]

    yield start
    for one in opened:
        one.process.kill()
        one.process.wait()
        os.close(one.master)


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are Unix's")
def test_a_conversation_on_a_terminal(terminal: Any, tmp_path: Path) -> None:
    at = terminal("--kv-budget-tokens", "64", "--block-size", "16")
    at.wait_for(READY)
    assert "keydiff keeps 64 slots" in at.seen
    at.type("/set max_new_tokens 8\r")
    at.wait_for("max_new_tokens = 8")
    at.type("Hello there\\\rmy friend\r")
    at.wait_for("at max_new_tokens")
    assert "\x1b[2K\x1b[2mKV " in at.seen  # the meter was below the answer
    at.type("/stats\r")
    at.wait_for("turns 1 ·")
    at.type("/set max_new_tokens 100000\r")
    at.wait_for("max_new_tokens = 100000")
    at.type("Tell me everything.\r")
    at.wait_for("tok/s")
    at.type("\x03")
    at.wait_for("· stopped")
    at.type("\x1b[200~pasted\nlines\x1b[201~\r")
    at.wait_for("tok/s")
    at.type("\x03")
    at.wait_for("· stopped")
    at.type("/stats\r")
    at.wait_for("turns 3 ·")
    at.type("/exit\r")
    at.ends_with(0)
    assert "+my friend" in (tmp_path / "kvcap" / "history").read_text()
    assert (tmp_path / "kvcap" / "history").stat().st_mode & 0o077 == 0


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are Unix's")
def test_ctrl_c_twice_leaves(terminal: Any) -> None:
    at = terminal()
    at.wait_for(READY)
    at.type("half a line\x03")
    at.type("\x03")
    at.wait_for("Ctrl-C again leaves")
    at.type("\x03")
    at.ends_with(130)

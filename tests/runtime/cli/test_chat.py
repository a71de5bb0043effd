"""The chat: scripted, interrupted, and typed into on a real pseudo-terminal."""

from __future__ import annotations

import io
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
from tools import PATIENCE

from kvcap import Runtime, cli, pocket
from kvcap.runtime.cli.chat import Chat, join_continued, with_budget
from kvcap.runtime.cli.live_meter import Meter
from kvcap.runtime.cli.options import Output, Sampling
from kvcap.runtime.errors import MemoryCapExceeded

ROOT = Path(cli.__file__).parents[1]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_chat.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def runtime(model: str) -> Runtime:
    return Runtime.from_pretrained(model, budget_tokens=32, block_size=16)


@pytest.fixture
def chat(runtime: Runtime) -> Chat:
    session = runtime.session(seed=0)
    session.set_generation(max_new_tokens=6)
    return Chat(session, Output())


def consistent(chat: Chat) -> bool:
    cache = chat.session.cache
    return cache.consistent and chat.session.messages[-1]["role"] == "assistant"


def test_a_script_answers_every_line(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    code = chat.run_script(["Hello!\n", "\n", "How are\\\n", "you? And you?\n"])
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
    chat.run_script(["/set max_new_tokens 4", "One", "/stats", "Two"])
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [d["usage"]["completion_tokens"] for d in documents] == [4, 4]
    assert documents[1]["kv"]["evicted_tokens"] >= documents[0]["kv"]["evicted_tokens"]


def test_what_each_turn_evicted_is_reported(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.run_script([f"{'many words ' * 20}{turn}" for turn in range(3)] + ["/regen"])
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
        ("/stats", "1 turn ·"),
        ("/mem", "this process"),
        ("/set", "max_new_tokens = 6"),
        ("/set temperature 0.5", "temperature = 0.5"),
        ("/set top_k 3", "top_k = 3"),
        ("/set seed 7", "seed = 7"),
        ("/set stop END", "stop = ['END']"),
        ("/set stop", "stop = not set"),
        ("/set json_schema", "json_schema = not set"),
        ("/set regex", "regex = not set"),
        ("/set logprobs 2", "logprobs = 2"),
        ("/set template_option a=[1, 2]", "template_option = {'a': [1, 2]}"),
        ("/set template_option", "template_option = not set"),
        ("/system", "no system prompt"),
        ("/system Be kind.", "the next message reads the conversation again"),
        ("/policy snapkv window=4", "policy snapkv"),
        ("/clear", "forgotten"),
        ("/HELP", "/undo"),
        ("/budget", "32 slots in"),
        ("/budget 48", "policy lagkv, 48 slots in"),
        ("/budget 1,024", "1,024 slots in"),
        ("/budget 64KiB", "; the next message reads the conversation again"),
        ("/undo", "taken back: Hello!"),
        ("/pin", "nothing is pinned"),
    ],
)
def test_commands(line: str, says: str, chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.handle("Hello!")
    capsys.readouterr()
    chat.handle(line)
    out, err = capsys.readouterr()
    assert (chat.code, out) == (0, "")
    assert says in err
    chat.handle("And now?")
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
        ("/undo", "nothing to take back"),
        ("/budget 0", "1 slot or more"),
        ("/budget much", "'much' is no budget"),
        ("/budget 1B", "give a larger one"),
        ("/set markdown perhaps", "on or off"),
        ("/read", "give a file"),
        ("/read nowhere.txt", "'nowhere.txt': No such file"),
        ("/", "/help lists all"),
    ],
)
def test_refused_commands_change_nothing(
    line: str, says: str, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    before = chat.session, chat.session.generation.to_dict()
    code = chat.run_script([line, "Hello!"])
    out, err = capsys.readouterr()
    assert code == 2
    assert err.startswith("kvcap: ")
    assert says in err
    assert out.count("\n") >= 1
    assert (chat.session, chat.session.generation.to_dict()) == before


def test_a_space_makes_a_message_of_a_command(chat: Chat) -> None:
    chat.handle(" /help is what I typed")
    assert chat.session.messages[0]["content"] == " /help is what I typed"


def test_answers_are_held_to_a_schema_until_it_is_let_go_of(
    chat: Chat, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("llguidance")
    (tmp_path / "s.json").write_text('{"enum": ["yes", "no"]}')
    chat.run_script([f"/set json_schema {tmp_path / 's.json'}", "Hello!", "/policy knorm", "And?"])
    answers = chat.session.messages[1::2]
    assert {answer["content"] for answer in answers} <= {'"yes"', '"no"'}
    chat.handle("/set regex (")
    assert "one of them to None" in capsys.readouterr().err
    chat.run_script(["/set json_schema", "/set regex [0-9]{3}", "And now?"])
    assert chat.session.messages[-1]["content"].isdecimal()


def test_policy_keeps_messages_settings_and_pins(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = Chat(runtime.session("Be kind.", seed=3), Output())
    chat.run_script(
        ["/set max_new_tokens 6", "Hello!", "/policy h2o sink_tokens=2", "/policy knorm"]
    )
    assert chat.session.cache.seen == 0
    assert [m["role"] for m in chat.session.messages] == ["user", "assistant"]
    eviction = chat.session.runtime.settings.eviction
    assert (eviction.name, eviction.sink_tokens) == ("knorm", 2)
    read = len(chat.session.encode("Be kind. Hello! And?"))
    chat.handle("And?")
    assert chat.session.turn.prompt_tokens > read + 6  # the first turn again, too
    assert chat.session.turn.completion_tokens == 6
    assert chat.session.system == "Be kind."


@pytest.mark.parametrize("leave", ["/exit", "/quit", "/Bye"])
def test_system_and_exit(chat: Chat, leave: str) -> None:
    assert chat.run_script(["/system You are terse.", "Hi", leave, "not read"]) == 0
    assert chat.session.system == "You are terse."
    assert len(chat.session.messages) == 2
    chat.handle('/system ""')
    assert chat.session.system is None


def test_a_full_cache_ends_the_turn_not_the_chat(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = Runtime.from_pretrained(model, "full", budget_tokens=24, block_size=16)
    chat = Chat(runtime.session(), Output(json=True, quiet=True))
    code = chat.run_script(
        ["Hi", "and so on " * 30, "/policy keydiff", "/set max_new_tokens 4", "Hi"]
    )
    out, err = capsys.readouterr()
    documents = [json.loads(line) for line in out.splitlines()]
    assert code == 4
    assert [d["finish_reason"] for d in documents] == ["cap", "cap", "length"]
    assert documents[0]["text"]
    assert documents[1]["usage"] == {"prompt_tokens": 0, "completion_tokens": 0, "recalled": 0}
    assert err.count("kvcap: policy 'full' never evicts") == 2


@pytest.mark.parametrize("line", ["/etc/hosts is a file", "// no", "/read-only?", "/2", "/*"])
def test_a_path_is_no_command(line: str, chat: Chat) -> None:
    assert chat.run_script([line]) == 0
    assert chat.session.messages[0]["content"] == line


def test_every_line_can_be_a_message(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = io.TextIOWrapper(io.BytesIO(b"/stats\n/exit\n"))
    monkeypatch.setattr(sys, "stdin", lines)
    chat = ["chat", model, "--max-new-tokens", "2", "--json", "--no-commands"]
    assert cli.run(chat) == 0
    assert capsys.readouterr().out.count("\n") == 2


def test_budget_takes_the_most_slots_that_fit(chat: Chat) -> None:
    runtime = with_budget(chat.session.runtime, "64KiB")
    slots = runtime.plan.budget_tokens
    assert runtime.plan.cache_bytes <= 64 * 1024
    assert runtime.with_budget(slots + 1).plan.cache_bytes > 64 * 1024
    chat.handle("Hello!")
    chat.handle("/budget 64KiB")
    assert chat.session.stats.budget_tokens == slots
    assert chat.session.messages[0]["content"] == "Hello!"
    chat.handle("And now?")
    assert consistent(chat)


@pytest.mark.parametrize("refusal", [MemoryCapExceeded("none left"), RuntimeError("none left")])
def test_a_budget_that_cannot_be_had_leaves_the_chat_as_it_was(
    refusal: Exception,
    chat: Chat,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat.handle("Hello!")
    before = list(chat.session.messages)
    make = Runtime.session

    def scarce(runtime: Runtime, *given: Any, **options: Any) -> Any:
        if runtime.plan.budget_tokens > 32:
            raise refusal
        return make(runtime, *given, **options)

    monkeypatch.setattr(Runtime, "session", scarce)
    chat.handle("/budget 4096")
    assert "none left" in capsys.readouterr().err
    assert chat.session.stats.budget_tokens == 32
    assert chat.session.messages == before
    chat.handle("Still here?")
    assert consistent(chat)


def test_a_budget_beyond_the_memory_is_refused(
    chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.handle("/budget 1,000,000,000,000")
    assert "are free" in capsys.readouterr().err
    assert chat.code == 3
    assert chat.session.stats.budget_tokens == 32


def test_undo_leaves_the_message_for_the_next_prompt(
    chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.run_script(["First.", "Second,\\", "in two lines."])
    assert chat.draft == ""
    chat.handle("/undo")
    assert "taken back: Second, ...; the next message reads" in capsys.readouterr().err
    assert chat.draft == "Second,\nin two lines."
    assert [m["content"] for m in chat.session.messages if m["role"] == "user"] == ["First."]
    chat.handle("/undo")
    assert not chat.session.messages
    assert "reads" not in capsys.readouterr().err


def test_a_file_is_read_into_the_conversation(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my notes.txt").write_bytes(b"\xef\xbb\xbfOne.\r\nTwo.\n")
    for line in ["/read 'my notes.txt'", "/read my\\ notes.txt What's  this?"]:
        chat.handle(line)
    said = [m["content"] for m in chat.session.messages if m["role"] == "user"]
    assert said == ["One.\nTwo.", "One.\nTwo.\n\nWhat's  this?"]
    assert "read 2 lines of my notes.txt" in capsys.readouterr().err
    assert (chat.code, chat.draft) == (0, "")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nul.txt", "holds NUL bytes"),
        ("picture.png", "is not UTF-8 text (at byte 1)"),
        ("huge.txt", "'huge.txt' has 5.0 MiB, and the most is 4.0 MiB"),
        ("folder", "it is a directory"),
        ("pipe", "it is no regular file"),
        ("empty.txt", "is empty"),
        ("gone.txt", "No such file"),
    ],
)
def test_files_that_are_not_read(
    name: str,
    says: str,
    chat: Chat,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nul.txt").write_bytes(b"a\0b")
    Path("picture.png").write_bytes(b"a\xff\xfe")
    Path("empty.txt").write_text(" \n")
    Path("folder").mkdir()
    if name == "pipe":
        if sys.platform == "win32":
            pytest.skip("Windows has no such files")
        os.mkfifo("pipe")  # opened, it would wait for ever
    with Path("huge.txt").open("wb") as huge:
        huge.truncate(5 * 1024**2)
    chat.handle(f"/read {name}")
    assert says in capsys.readouterr().err
    assert chat.code == 2
    assert not chat.session.messages


def test_a_session_that_goes_on_says_so(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat = ["chat", model, "--max-new-tokens", "2", "--session", str(tmp_path / "s")]
    for turn in range(3):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello!\n")))
        assert cli.run(chat) == 0
        out, err = capsys.readouterr()
        assert out.count("\n") == 1
        assert [
            "continued" in err,
            "continued: 1 turn ·" in err,
            "continued: 2 turns ·" in err,
        ] == [
            turn > 0,
            turn == 1,
            turn == 2,
        ]
    chat.append("-q")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert cli.run(chat) == 0
    assert capsys.readouterr().err == ""


def test_people_see_the_last_exchange(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.run_script(["Long ago.", "Lately.\\", *["more\\"] * 20, "end"])
    capsys.readouterr()
    chat.spaced = True
    chat.show_resumed()
    err = capsys.readouterr().err
    assert "continued: 2 turns" in err
    assert "> Lately.\nmore\n" in err
    assert "Long ago" not in err
    assert err.count("more") == 7
    assert chat.session.messages[-1]["content"].strip()[:5] in err


def test_pin_shows_a_pinned_system_prompt(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = Chat(runtime.session("Be kind."), Output())
    chat.session.set_generation(max_new_tokens=2)
    chat.handle("/pin")
    assert "nothing is pinned" in capsys.readouterr().err
    chat.session.pin_system = True
    chat.run_script(["/pin The door is blue.", "/pin"])
    assert capsys.readouterr().err.endswith("system prompt: Be kind.\nThe door is blue.\n")


def test_stats_say_what_there_is(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.handle("/stats")
    err = capsys.readouterr().err
    assert "no answer yet" in err
    chat.run_script(["Hello!", "/stats"])
    err = capsys.readouterr().err
    assert "tokens read, 6 written; ended at max_new_tokens" in err
    assert "eager" not in err
    for change in ("/policy knorm", "/budget 64", "/undo", "/clear"):
        chat.run_script(["Hello!", change])
        capsys.readouterr()
        chat.handle("/stats")
        assert "no answer yet" in capsys.readouterr().err


def test_help_fits_eighty_columns(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.spaced = True
    chat.handle("/help")
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(any(line.startswith(f"/{name}") for line in lines) for name in Chat.COMMANDS)


def test_an_error_begins_a_line_of_its_own(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the cap ends an answer half-way and stdout and stderr are one terminal."""
    chat = Chat(runtime.session(), Output())
    chat.session.on_full = "error"
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    chat.handle("Hello!")
    said = chat.session.messages[-1]["content"]
    assert said
    assert sys.stdout.getvalue().startswith(f"{said}\nkvcap: ")
    assert chat.code == 4


def test_an_empty_answer_is_said_to_be_one(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = list(range(len(chat.session.runtime.tokenizer)))
    chat.session.generation.eos_token_id = ends
    chat.handle("Hello!")
    out, err = capsys.readouterr()
    assert out == "\n"
    assert "the answer is empty" in err


def test_what_was_not_taken_is_kept_for_the_next_prompt(
    chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.session.on_full = "error"
    chat.handle("too much " * 100)
    assert chat.draft == "too much " * 100
    assert not chat.session.messages


def test_regen_that_is_stopped_says_what_remains(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.handle("Hello!")
    before = list(chat.session.messages)

    def press(*_: int) -> None:
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("kvcap.runtime.cli.live_meter.Meter.reading", press)
        chat.handle("/regen")
    assert "the former one stays" in capsys.readouterr().err
    assert chat.session.messages == before
    monkeypatch.setattr("kvcap.runtime.cli.live_meter.Meter.write", press)
    chat.handle("/regen")
    assert "replaces the former one" in capsys.readouterr().err
    assert consistent(chat)


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
    assert chat.run_script(["Hello!", "not read"]) == 130
    assert chat.session.turn.finish_reason == "interrupted"
    assert chat.session.messages[-1]["content"] + "\n" == screen.text
    assert len(chat.session.messages) == 2
    assert consistent(chat)
    chat.handle("Go on.")
    assert chat.session.turn.finish_reason == "length"
    assert consistent(chat)


def test_ctrl_c_while_reading(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(done: int, total: int) -> None:
        if done >= 32:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(
        "kvcap.runtime.cli.live_meter.Meter.reading", lambda _, *counts: press(*counts)
    )
    chat.handle("many words " * 50)
    assert chat.code == 130
    assert chat.session.stats.seen_tokens == 32
    assert consistent(chat)


def test_ctrl_c_in_generate(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(*_: int) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("kvcap.runtime.cli.live_meter.Meter.write", press)
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
    chat.run_script([told, "What is the code for the blue door?"])
    assert "4821" in capsys.readouterr().out
    assert "small test and demonstration model" in "".join(chat.banner())


def test_settings_have_the_bounds_of_their_options() -> None:
    assert Sampling.parse("top_p", "0.5").given() == {"top_p": 0.5}
    assert Sampling.parse("seed", "0").given() == {"seed": 0}
    assert Sampling.parse("stop", "a b").given() == {"stop_strings": ["a b"]}


def test_lines_are_joined() -> None:
    assert list(join_continued(["a\\\r\n", "b\n", "c\\"])) == ["a\nb", "c\n"]


PROGRAM = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches the process as a signal
from kvcap.cli import main
main()
"""
READY = "\x1b[?25l\x1b[0m\x1b[?7l"  # prompt_toolkit draws a prompt for the first time


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

    def enter(self, line: str) -> str:
        """What is seen until the next prompt."""
        self.type(line + "\r")
        return self.wait_for(READY)

    def wait_for(self, text: str, seconds: float = PATIENCE) -> str:
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
        assert self.process.wait(PATIENCE) == code


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
    at = terminal("--budget-tokens", "64", "--block-size", "16")
    at.wait_for(READY)
    assert "lagkv keeps 64 slots" in at.seen
    assert "max_new_tokens = 8" in at.enter("/set max_new_tokens 8")
    answered = at.enter("Hello there\\\rmy friend")
    assert "· at max_new_tokens" in answered
    assert "1 turn ·" in at.enter("/stats")
    at.enter("/set max_new_tokens 100000")
    at.type("Tell me everything.\r")
    at.wait_for("\x1b[2mKV ")  # the meter, below the answer
    at.wait_for("tok/s")
    at.type("typed meanwhile\r")  # must not lie in the answer, nor be lost
    at.wait_for("tok/s")
    at.type("\x03")
    stopped = at.wait_for(READY)
    assert "· stopped" in stopped
    assert "typed meanwhile" not in stopped.partition(READY)[0]
    at.wait_for("typed meanwhile")  # nor be sent, as the answer was stopped
    at.type("\x03\x1b[200~pasted\nlines\x1b[201~\r")
    at.wait_for("tok/s")
    at.type("\x03")
    assert "· stopped" in at.wait_for(READY)
    assert "3 turns ·" in at.enter("/stats")
    at.type("/exit\r")
    at.ends_with(0)
    kept = (tmp_path / "kvcap" / "history").read_text()
    assert "+my friend" in kept
    assert "pasted" not in kept
    assert (tmp_path / "kvcap" / "history").stat().st_mode & 0o077 == 0


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are Unix's")
def test_lines_typed_while_it_loads_are_messages_of_their_own(terminal: Any) -> None:
    at = terminal("--max-new-tokens", "2")
    at.type("first line\rsecond line\r/sta")
    at.wait_for("> \x1b[0;36m/sta")
    assert at.seen.count("at max_new_tokens") == 2
    assert at.seen.index("> \x1b[0;36mfirst line") < at.seen.index("> \x1b[0;36msecond line")
    assert "2 turns ·" in at.enter("ts")
    at.type("/exit\r")
    at.ends_with(0)


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are Unix's")
def test_bytes_that_are_no_utf_8_end_no_chat(terminal: Any) -> None:
    at = terminal()
    at.wait_for(READY)
    at.seen = ""
    os.write(at.master, b"Hell\xe9\r")
    at.wait_for("cannot be read")
    at.wait_for(READY)  # with the line in it, to be changed
    at.type("\x03/exit\r")
    at.ends_with(0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are Unix's")
def test_ctrl_c_twice_leaves(terminal: Any) -> None:
    at = terminal()
    at.wait_for(READY)
    at.type("half a line\x03")
    at.type("\x03")
    at.wait_for("Ctrl-C again leaves")
    at.type("\x03")
    at.ends_with(130)

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
from tools import PATIENCE

from kvcap import Runtime, cli
from kvcap.runtime.cli.chat import Chat, join_continued, with_budget
from kvcap.runtime.cli.live_meter import Meter
from kvcap.runtime.cli.options import Sampling
from kvcap.runtime.errors import MemoryCapExceeded

ROOT = Path(cli.__file__).parents[1]


@pytest.fixture(scope="session")
def runtime(chat_model: str) -> Runtime:
    return Runtime.from_pretrained(chat_model, budget_tokens=32, block_size=16)


@pytest.fixture
def chat(runtime: Runtime, chat_of: Any) -> Any:
    session = runtime.session(seed=0)
    session.set_generation(max_new_tokens=6)
    return chat_of(session)


def consistent(chat: Chat) -> bool:
    cache = chat.session.cache
    return cache.consistent and chat.session.messages[-1]["role"] == "assistant"


def test_a_script_answers_every_line(chat):
    out, err = chat.typed("Hello!\n", "\n", "How are\\\n", "you? And you?\n")
    assert chat.code == 0
    assert chat.contents() == ["Hello!", "How are\nyou? And you?"]
    assert out == "".join(f"{text}\n" for text in chat.contents("assistant"))
    assert err.count("seen ") == 2
    seen = chat.session.stats.seen_tokens
    assert f"seen {seen} · kept 32 · evicted {seen - 32}" in err


def test_a_script_in_json(runtime, chat_of):
    chat = chat_of(runtime.session(), json=True, quiet=True)
    out, _ = chat.typed("/set max_new_tokens 4", "One", "/stats", "Two")
    documents = [json.loads(line) for line in out.splitlines()]
    assert [d["usage"]["completion_tokens"] for d in documents] == [4, 4]
    assert documents[1]["kv"]["evicted_tokens"] >= documents[0]["kv"]["evicted_tokens"]


def test_what_each_turn_evicted_is_reported(chat):
    _, err = chat.typed(*(f"{'many words ' * 20}{turn}" for turn in range(3)), "/regen")
    lines = [line for line in err.splitlines() if line.startswith("seen")]
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
        ('/system ""', "system prompt removed"),
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
def test_commands(line, says, chat):
    chat.handle("Hello!")
    out, err = chat.typed(line)
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
        ("/budget 1,000,000,000,000", "are free"),
        ("/set markdown perhaps", "on or off"),
        ("/read", "give a file"),
        ("/read nowhere.txt", "'nowhere.txt': No such file"),
        ("/", "/help lists all"),
    ],
)
def test_refused_commands_change_nothing(line, says, chat):
    before = chat.session, chat.session.generation.to_dict()
    out, err = chat.typed(line, "Hello!")
    assert chat.code == (3 if says == "are free" else 2)
    assert err.startswith("kvcap: ")
    assert says in err
    assert out.count("\n") >= 1
    assert (chat.session, chat.session.generation.to_dict()) == before


@pytest.mark.parametrize(
    "line",
    [" /help is what I typed", "/etc/hosts is a file", "// no", "/read-only?", "/2", "/*"],
)
def test_a_path_and_what_follows_a_space_are_no_command(line, chat):
    chat.handle(line)
    assert (chat.code, chat.contents()) == (0, [line])


def test_answers_are_held_to_a_schema_until_it_is_let_go_of(chat, tmp_path):
    pytest.importorskip("llguidance")
    (tmp_path / "s.json").write_text('{"enum": ["yes", "no"]}')
    chat.typed(f"/set json_schema {tmp_path / 's.json'}", "Hello!", "/policy knorm", "And?")
    assert set(chat.contents("assistant")) <= {'"yes"', '"no"'}
    assert "one of them to None" in chat.typed("/set regex (")[1]
    chat.typed("/set json_schema", "/set regex [0-9]{3}", "And now?")
    assert chat.contents("assistant")[-1].isdecimal()


def test_policy_keeps_messages_settings_and_pins(runtime, chat_of):
    chat = chat_of(runtime.session("Be kind.", seed=3))
    chat.typed("/set max_new_tokens 6", "Hello!", "/policy h2o sink_tokens=2", "/policy knorm")
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
def test_system_and_exit(chat, leave):
    chat.typed("/system You are terse.", "Hi", leave, "not read")
    assert (chat.code, chat.contents()) == (0, ["Hi"])
    assert chat.session.system == "You are terse."
    chat.handle('/system ""')
    assert chat.session.system is None


def test_a_full_cache_ends_the_turn_not_the_chat(model, chat_of):
    runtime = Runtime.from_pretrained(model, "full", budget_tokens=24, block_size=16)
    chat = chat_of(runtime.session(), json=True, quiet=True)
    out, err = chat.typed("Hi", "and so on " * 30, "/policy keydiff", "/set max_new_tokens 4", "Hi")
    documents = [json.loads(line) for line in out.splitlines()]
    assert chat.code == 4
    assert [d["finish_reason"] for d in documents] == ["cap", "cap", "length"]
    assert documents[0]["text"]
    assert documents[1]["usage"] == {"prompt_tokens": 0, "completion_tokens": 0, "recalled": 0}
    assert err.count("kvcap: policy 'full' never evicts") == 2


def test_every_line_can_be_a_message(model, kvcap):
    given = ("chat", model, "--max-new-tokens", "2", "--json", "--no-commands")
    code, out, _ = kvcap(*given, stdin=b"/stats\n/exit\n")
    assert (code, out.count("\n")) == (0, 2)


def test_budget_takes_the_most_slots_that_fit(chat):
    runtime = with_budget(chat.session.runtime, "64KiB")
    slots = runtime.plan.budget_tokens
    assert runtime.plan.cache_bytes <= 64 * 1024
    assert runtime.with_budget(slots + 1).plan.cache_bytes > 64 * 1024
    chat.typed("Hello!", "/budget 64KiB")
    assert chat.session.stats.budget_tokens == slots
    chat.handle("And now?")
    assert chat.contents() == ["Hello!", "And now?"]
    assert consistent(chat)


@pytest.mark.parametrize("refusal", [MemoryCapExceeded("none left"), RuntimeError("none left")])
def test_a_budget_that_cannot_be_had_leaves_the_chat_as_it_was(refusal, chat, monkeypatch):
    chat.handle("Hello!")
    before = list(chat.session.messages)
    make = Runtime.session

    def scarce(runtime: Runtime, *given: Any, **options: Any) -> Any:
        if runtime.plan.budget_tokens > 32:
            raise refusal
        return make(runtime, *given, **options)

    monkeypatch.setattr(Runtime, "session", scarce)
    assert "none left" in chat.typed("/budget 4096")[1]
    assert chat.session.stats.budget_tokens == 32
    assert chat.session.messages == before
    chat.handle("Still here?")
    assert consistent(chat)


def test_undo_leaves_the_message_for_the_next_prompt(chat):
    chat.typed("First.", "Second,\\", "in two lines.")
    assert chat.draft == ""
    assert "taken back: Second, ...; the next message reads" in chat.typed("/undo")[1]
    assert chat.draft == "Second,\nin two lines."
    assert chat.contents() == ["First."]
    assert "reads" not in chat.typed("/undo")[1]
    assert not chat.session.messages


def test_a_file_is_read_into_the_conversation(chat, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my notes.txt").write_bytes(b"\xef\xbb\xbfOne.\r\nTwo.\n")
    _, err = chat.typed("/read 'my notes.txt'", "/read my\\ notes.txt What's  this?")
    assert chat.contents() == ["One.\nTwo.", "One.\nTwo.\n\nWhat's  this?"]
    assert "read 2 lines of my notes.txt" in err
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
def test_files_that_are_not_read(name, says, chat, tmp_path, monkeypatch):
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
    assert says in chat.typed(f"/read {name}")[1]
    assert chat.code == 2
    assert not chat.session.messages


def test_a_session_that_goes_on_says_so(model, tmp_path, kvcap):
    given = ("chat", model, "--max-new-tokens", "2", "--session", str(tmp_path / "s"))
    for says in ("", "continued: 1 turn ·", "continued: 2 turns ·"):
        code, out, err = kvcap(*given, stdin=b"Hello!\n")
        assert (code, out.count("\n")) == (0, 1)
        assert says in err
        assert ("continued" in err) == bool(says)
    assert kvcap(*given, "-q")[::2] == (0, "")


def test_people_see_the_last_exchange(chat):
    chat.typed("Long ago.", "Lately.\\", *["more\\"] * 20, "end")
    chat.spaced = True
    chat.show_resumed()
    err = chat.capsys.readouterr().err
    assert "continued: 2 turns" in err
    assert "> Lately.\nmore\n" in err
    assert "Long ago" not in err
    assert err.count("more") == 7
    assert chat.session.messages[-1]["content"].strip()[:5] in err


def test_pin_shows_a_pinned_system_prompt(runtime, chat_of):
    chat = chat_of(runtime.session("Be kind."))
    chat.session.set_generation(max_new_tokens=2)
    assert "nothing is pinned" in chat.typed("/pin")[1]
    chat.session.pin_system = True
    _, err = chat.typed("/pin The door is blue.", "/pin")
    assert err.endswith("system prompt: Be kind.\nThe door is blue.\n")


def test_stats_say_what_there_is(chat):
    assert "no answer yet" in chat.typed("/stats")[1]
    _, err = chat.typed("Hello!", "/stats")
    assert "tokens read, 6 written; ended at max_new_tokens" in err
    assert "eager" not in err
    for change in ("/policy knorm", "/budget 64", "/undo", "/clear"):
        chat.typed("Hello!", change)
        assert "no answer yet" in chat.typed("/stats")[1]


@pytest.mark.parametrize("width", [80, 24])
def test_help_fits_the_columns(chat, monkeypatch, width):
    monkeypatch.setattr("kvcap.runtime.cli.chat.columns", lambda: width)
    lines = chat.typed("/help")[1].splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 100  # with words on them, and not a letter each
    assert all(any(line.startswith(f"/{name}") for line in lines) for name in Chat.COMMANDS)


def test_help_is_written_in_one_column_too(chat, monkeypatch):
    monkeypatch.setattr("kvcap.runtime.cli.chat.columns", lambda: 1)
    assert "/policy" in "".join(chat.typed("/help")[1].split())


@pytest.mark.parametrize("change", ["/budget 64", "/policy knorm"])
def test_another_memory_replaces_no_file_that_others_saved(chat, runtime, tmp_path, change):
    chat.typed("Hello!", f"/save {tmp_path / 's'}", change)
    runtime.session().save(tmp_path / "s")
    assert "another conversation was saved" in chat.typed(f"/save {tmp_path / 's'}")[1]


def test_an_error_begins_a_line_of_its_own(runtime, chat_of, monkeypatch):
    """Where the cap ends an answer half-way and stdout and stderr are one terminal."""
    chat = chat_of(runtime.session())
    chat.session.on_full = "error"
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    chat.handle("Hello!")
    answer = chat.session.messages[-1]["content"]
    assert answer
    assert sys.stdout.getvalue().startswith(f"{answer}\nkvcap: ")
    assert chat.code == 4


def test_an_empty_answer_is_said_to_be_one(chat):
    chat.session.generation.eos_token_id = list(range(len(chat.session.runtime.tokenizer)))
    out, err = chat.typed("Hello!")
    assert out == "\n"
    assert "the answer is empty" in err


def test_what_was_not_taken_is_kept_for_the_next_prompt(chat):
    chat.session.on_full = "error"
    chat.handle("too much " * 100)
    assert chat.draft == "too much " * 100
    assert not chat.session.messages


def press(*_: Any) -> None:
    """Press Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


def test_regen_that_is_stopped_says_what_remains(chat, monkeypatch):
    chat.handle("Hello!")
    before = list(chat.session.messages)
    with monkeypatch.context() as patch:
        patch.setattr(Meter, "reading", press)
        assert "the former one stays" in chat.typed("/regen")[1]
    assert chat.session.messages == before
    monkeypatch.setattr(Meter, "write", press)
    assert "replaces the former one" in chat.typed("/regen")[1]
    assert consistent(chat)


class Interrupting:
    """A stdout on which the user presses Ctrl-C after some text."""

    def __init__(self, after: int) -> None:
        self.after, self.text = after, ""

    def write(self, text: str) -> None:
        self.text += text
        self.after -= 1
        if self.after == 0:
            press()

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


def test_ctrl_c_keeps_what_was_said(chat, monkeypatch):
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


def test_ctrl_c_while_reading(chat, monkeypatch):
    monkeypatch.setattr(Meter, "reading", lambda _, done, total: press() if done >= 32 else None)
    chat.handle("many words " * 50)
    assert chat.code == 130
    assert chat.session.stats.seen_tokens == 32
    assert consistent(chat)


def test_ctrl_c_in_generate(model, monkeypatch, kvcap):
    monkeypatch.setattr(Meter, "write", press)
    code, out, _ = kvcap("generate", model, "Hello!", "--json", "-q")
    assert (code, json.loads(out)["finish_reason"]) == (130, "interrupted")


def test_a_model_cannot_speak_escape_sequences(chat, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    Meter(lambda: chat.session.stats).write("a\x1b[2J\tb\n")
    assert capsys.readouterr().out == "a\N{REPLACEMENT CHARACTER}[2J\tb\n"


def test_pocket_recalls(chat_of):
    chat = chat_of(Runtime.from_pretrained("pocket").session(), quiet=True)
    fact = "Please remember: the code for the blue door is 4821."
    assert "4821" in chat.typed(fact, "What is the code for the blue door?")[0]
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
        """Return what is seen until the next prompt."""
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
def test_bytes_that_are_no_utf_8_end_no_chat_and_ctrl_c_twice_does(terminal: Any) -> None:
    at = terminal()
    at.wait_for(READY)
    at.seen = ""
    os.write(at.master, b"Hell\xe9\r")
    at.wait_for("cannot be read")
    at.wait_for(READY)  # with the line in it, to be changed
    at.type("\x03half a line\x03")
    at.type("\x03")
    at.wait_for("Ctrl-C again leaves")
    at.type("\x03")
    at.ends_with(130)

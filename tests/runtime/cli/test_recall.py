"""Commands and the chat say what evicted text is read again, and take its settings."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from make import FACT, QUESTION
from make import filler as words

from kvcap import Runtime, cli
from kvcap.runtime.cli.answer import print_answer
from kvcap.runtime.cli.chat import PASSAGE, Chat, shown_passage
from kvcap.runtime.cli.options import Output
from kvcap.runtime.recall.recall import Passage
from kvcap.runtime.recall.settings import STORE_BYTES

BUDGET = 256
FILLER = words(400)
OPTIONS = ("--policy", "streaming_llm", "--budget-tokens", str(BUDGET), "--max-new-tokens", "16")


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.from_pretrained("pocket", "streaming_llm", budget_tokens=BUDGET)


def chat_of(runtime: Runtime, **output: bool) -> Chat:
    """A chat that was told a fact, and has evicted it."""
    session = runtime.session(seed=0)
    session.set_generation(max_new_tokens=16)
    chat = Chat(session, Output(**output))
    chat.run_script([FACT, FILLER])
    return chat


def test_a_line_says_what_was_recalled(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chat_of(runtime)
    assert "recalled" not in capsys.readouterr().err
    chat.handle(QUESTION)
    out, err = capsys.readouterr()
    assert "7421" in out
    tokens = chat.session.turn.recalled_tokens
    assert err.splitlines()[-1] == f"recalled 1 passage, {tokens} tokens"
    chat.run_script(["Thank you."])
    assert "recalled" not in capsys.readouterr().err
    quiet = chat_of(runtime, quiet=True)
    quiet.handle(QUESTION)
    assert quiet.session.turn.recalled_tokens
    assert capsys.readouterr().err == ""


def test_a_document_has_the_passages(runtime: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    chat = chat_of(runtime, json=True, quiet=True)
    chat.run_script([QUESTION, "Thank you."])
    first, _, asked, last = map(json.loads, capsys.readouterr().out.splitlines())
    for nothing in (first, last):
        assert (nothing["usage"]["recalled"], nothing["recalled"]) == (0, [])
    (passage,) = asked["recalled"]
    assert 0 < asked["usage"]["recalled"] <= BUDGET // 4
    start, stop = passage["tokens"]
    read = chat.session.runtime.tokenizer.decode(chat.session.read_ids[start:stop])
    assert FACT in read
    assert FACT in passage["text"]
    assert passage["score"] > 0


def test_a_refused_message_recalled_nothing(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures of the answer before are not those of one that never began."""
    chat = chat_of(runtime, json=True, quiet=True)
    chat.handle(QUESTION)
    assert chat.session.recall.passages
    capsys.readouterr()

    def refused() -> Any:
        raise KeyboardInterrupt

    print_answer(chat.session, refused, chat.output)
    document = json.loads(capsys.readouterr().out)
    assert (document["usage"]["recalled"], document["recalled"]) == (0, [])


def test_the_command_shows_the_setting_and_changes_it(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chat_of(runtime)
    capsys.readouterr()
    chat.handle("/recall")
    assert "last message: nothing recalled" in capsys.readouterr().err
    chat.handle(QUESTION)
    recall, tokens = chat.session.recall, chat.session.turn.recalled_tokens
    for line, limit, says in (
        (
            "/recall",
            BUDGET // 2,
            f"last message: 1 passage, {tokens} tokens recalled · index of evicted",
        ),
        ("/recall off", 0, "recall off"),
        ("/recall", 0, "tokens recalled · index of evicted text 0 B"),
        ("/recall 96", 96, "recall at most 96 tokens of evicted text for a message\n"),
        (
            "/recall 5000",
            BUDGET,
            f"recall at most {BUDGET} tokens of evicted text for a message: no "
            "more than there are slots, though 5,000 were asked for\n",
        ),
        (
            "/RECALL AUTO",
            BUDGET // 2,
            f"recall at most {BUDGET // 2} tokens of evicted text for a message (auto)\n",
        ),
    ):
        capsys.readouterr()
        assert chat.handle(line) == 0
        assert recall.limit == limit
        assert says in capsys.readouterr().err
        assert recall.store.limit == STORE_BYTES
    chat.run_script([FILLER, QUESTION])
    assert "7421" in capsys.readouterr().out
    chat.run_script(["/recall off", FILLER, QUESTION])
    assert "7421" not in capsys.readouterr().out


def test_the_command_finds_passages(runtime: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    chat = chat_of(runtime)
    capsys.readouterr()
    assert chat.handle("/recall vault code") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tokens 2 to ")
    assert "mostly evicted: " in line
    assert FACT in line
    many = " ".join(f"Lamp {n} of Porto is green. {words(60)}" for n in range(6))
    chat.run_script([f"{many} {FILLER}"])
    capsys.readouterr()
    assert len(chat.session.search("green lamp in Porto")) == 6
    chat.handle("/recall green lamp in Porto")
    found = capsys.readouterr().err.splitlines()
    assert len(found) == 5
    assert all("Porto" in line for line in found)
    assert chat.handle("/recall zebra") == 0
    assert "no passage" in capsys.readouterr().err
    assert chat.handle('/recall "7421"') == 0  # a word; without quotes, a number of tokens
    assert FACT in capsys.readouterr().err
    chat.handle("/recall off")
    assert chat.handle("/recall vault") == 2
    assert "/recall auto turns it on" in capsys.readouterr().err


def test_a_passage_is_one_line_that_says_whether_it_is_held() -> None:
    passage = Passage((2, 4), "one\ntwo " + "x" * 999, 3.0)
    line = shown_passage(passage, [0, 1, 2, 3, 4])
    assert line.startswith("tokens 2 to 4, held: one two xxx")
    assert line.endswith("x ...")
    assert len(line) < PASSAGE + 40
    assert "mostly evicted" in shown_passage(passage, [0, 1, 2, 2.5, 3])


def test_policy_and_budget_keep_the_settings_of_recall(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chat_of(runtime)
    chat.run_script(["/recall 96", "/budget 128"])
    assert chat.session.recall.limit == 96
    chat.run_script(["/recall off", "/policy knorm"])
    assert chat.session.recall.limit == 0
    chat.run_script(["/recall 5000"])
    assert chat.session.recall.limit == 128
    chat.run_script(["/budget 512"])
    assert chat.session.recall.limit == 512
    chat.run_script(["/recall auto"])
    assert chat.session.recall.limit == 512 // 3
    assert chat.session.recall.store.limit == STORE_BYTES


def test_clear_forgets_what_could_be_recalled_and_figures_count_the_index(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chat_of(runtime)
    chat.run_script(["/recall 60", QUESTION])
    capsys.readouterr()
    for line, says in (("/stats", "index of evicted text"), ("/mem", "KiB of 8.0 MiB")):
        chat.handle(line)
        assert says in capsys.readouterr().err
    chat.run_script(["/clear", "/stats", "/mem", FILLER, "/recall vault"])
    err = capsys.readouterr().err
    assert "index of evicted" not in err
    assert "no passage" in err
    assert chat.session.recall.limit == 60  # settings stay


def test_off_from_the_start_can_be_switched_on_where_no_cap_forbids_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for cap, code in ((None, 0), ("4GiB", 2)):
        runtime = Runtime.from_pretrained(
            "pocket", budget_tokens=BUDGET, memory_cap=cap, recall_store=0
        )
        chat = Chat(runtime.session(), Output())
        assert chat.session.recall.limit == 0
        assert chat.handle("/recall auto") == code
        assert chat.session.recall.limit == (BUDGET // 2 if code == 0 else 0)
    assert "no room for an index" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "recalls"),
    [
        ((), True),
        (("--recall", "96"), True),
        (("--recall", "off"), False),
        (("--raw",), False),  # a text as it is
        (("--raw", "--recall", "auto"), False),
        (("--raw", "--recall", "96"), True),
        (("--on-full", "stop"), None),
    ],
)
def test_generate_recalls_amid_its_prompt(
    options: tuple[str, ...],
    recalls: bool | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`None`: it does not fit, and nothing is evicted."""
    (tmp_path / "text").write_text(f"{FACT} {FILLER}\n\n{QUESTION}")
    code = cli.run(("generate", "-f", str(tmp_path / "text"), "--json", *OPTIONS, *options))
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert code == (4 if recalls is None else 0)
    assert (document["usage"]["recalled"] > 0) == bool(recalls)
    assert bool(document["recalled"]) == bool(recalls)
    assert ("recalled 1 passage, " in err) == bool(recalls)


def test_what_cannot_be_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for option, value, says in (
        ("--recall", "much", "use auto, off, or"),
        ("--recall-store", "4KiB", "use 256.0 KiB or more"),
        ("--recall-store", "big", "is not a size"),
    ):
        for command in (("chat",), ("generate", "Hello!"), ("plan",)):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello!\n")))
            assert cli.run((*command, option, value)) == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert says in err


def test_the_plan_shows_and_counts_the_index(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def plan(*options: str) -> str:
        assert cli.run(("plan", "pocket", *options)) == 0
        return capsys.readouterr().out

    without = json.loads(plan("--recall", "off", "--json"))
    assert (without["recall_store"], without["recall_tokens"]) == (0, 0)
    assert json.loads(plan("--budget-tokens", "600", "--json"))["recall_tokens"] == 200
    assert "takes at most 128 of the 256 slots" in plan("--budget-tokens", "256")
    found = json.loads(plan("--recall-store", "1MiB", "--json"))
    assert found["recall_store"] == 1 << 20
    assert found["cache_bytes"] == without["cache_bytes"]
    index = (1 << 20) + found["word_vectors"]
    assert found["total_bytes"] == without["total_bytes"] + index
    assert re.search(r"^index of evicted text +8\.0 MiB +8,388,608 +at most", plan(), re.MULTILINE)

"""Commands and the chat say what evicted text is read again, and take its settings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from make import FACT, QUESTION
from make import filler as words

from kvcap import Runtime
from kvcap.runtime.cli.answer import print_answer
from kvcap.runtime.cli.chat import PASSAGE, shown_passage
from kvcap.runtime.recall.recall import Passage
from kvcap.runtime.recall.settings import STORE_BYTES

BUDGET = 256
FILLER = words(400)
OPTIONS = ("--policy", "streaming_llm", "--budget-tokens", str(BUDGET), "--max-new-tokens", "16")


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.from_pretrained("pocket", "streaming_llm", budget_tokens=BUDGET)


@pytest.fixture
def evicted(runtime: Runtime, chat_of: Any) -> Callable[..., Any]:
    """Return a function that makes a chat that was told a fact, and has evicted it."""

    def make(**output: bool) -> Any:
        session = runtime.session(seed=0)
        session.set_generation(max_new_tokens=16)
        chat = chat_of(session, **output)
        assert "recalled" not in chat.typed(FACT, FILLER)[1]
        return chat

    return make


def test_a_line_says_what_was_recalled(evicted):
    chat = evicted()
    out, err = chat.typed(QUESTION)
    assert "7421" in out
    tokens = chat.session.turn.recalled_tokens
    assert err.splitlines()[-1] == f"recalled 1 passage, {tokens} tokens"
    assert "recalled" not in chat.typed("Thank you.")[1]
    quiet = evicted(quiet=True)
    assert quiet.typed(QUESTION)[1] == ""
    assert quiet.session.turn.recalled_tokens


def test_a_refused_message_recalled_nothing(evicted, capsys):
    """Figures of the answer before are not those of one that never began."""
    chat = evicted(json=True, quiet=True)
    chat.typed(QUESTION)
    assert chat.session.recall.passages

    def refused() -> Any:
        raise KeyboardInterrupt

    print_answer(chat.session, refused, chat.output)
    document = json.loads(capsys.readouterr().out)
    assert (document["usage"]["recalled"], document["recalled"]) == (0, [])


def test_the_command_shows_the_setting_and_changes_it(evicted):
    chat = evicted()
    assert "last message: nothing recalled" in chat.typed("/recall")[1]
    chat.typed(QUESTION)
    recall, tokens = chat.session.recall, chat.session.turn.recalled_tokens
    last = f"last message: 1 passage, {tokens} tokens recalled · index of evicted"
    most = "recall at most {} tokens of evicted text for a message"
    above = f"{most.format(BUDGET)}: no more than there are slots, though 5,000 were asked for\n"
    for line, limit, says in (
        ("/recall", BUDGET // 2, last),
        ("/recall off", 0, "recall off"),
        ("/recall", 0, "tokens recalled · index of evicted text 0 B"),
        ("/recall 96", 96, f"{most.format(96)}\n"),
        ("/recall 5000", BUDGET, above),
        ("/RECALL AUTO", BUDGET // 2, f"{most.format(BUDGET // 2)} (auto)\n"),
    ):
        assert says in chat.typed(line)[1]
        assert (chat.code, recall.limit, recall.store.limit) == (0, limit, STORE_BYTES)


def test_the_command_finds_passages(evicted):
    chat = evicted()
    (line,) = chat.typed("/recall vault code")[1].splitlines()
    assert line.startswith("tokens 2 to ")
    assert "mostly evicted: " in line
    assert FACT in line
    many = " ".join(f"Lamp {n} of Porto is green. {words(60)}" for n in range(6))
    chat.typed(f"{many} {FILLER}")
    assert len(chat.session.search("green lamp in Porto")) == 6
    passages = chat.typed("/recall green lamp in Porto")[1].splitlines()
    assert len(passages) == 5
    assert all("Porto" in line for line in passages)
    assert "no passage" in chat.typed("/recall zebra")[1]
    assert FACT in chat.typed('/recall "7421"')[1]  # a word; without quotes, a number of tokens
    assert chat.code == 0
    assert "/recall auto turns it on" in chat.typed("/recall off", "/recall vault")[1]
    assert chat.code == 2


def test_a_passage_is_one_line_that_says_whether_it_is_held():
    passage = Passage((2, 4), "one\ntwo " + "x" * 999, 3.0)
    line = shown_passage(passage, [0, 1, 2, 3, 4])
    assert line.startswith("tokens 2 to 4, held: one two xxx")
    assert line.endswith("x ...")
    assert len(line) < PASSAGE + 40
    assert "mostly evicted" in shown_passage(passage, [0, 1, 2, 2.5, 3])


def test_policy_and_budget_keep_the_settings_of_recall(evicted):
    chat = evicted()
    for lines, limit in (
        (("/recall 96", "/budget 128"), 96),
        (("/recall off", "/policy knorm"), 0),
        (("/recall 5000",), 128),
        (("/budget 512",), 512),
        (("/recall auto",), 512 // 3),
    ):
        chat.typed(*lines)
        assert chat.session.recall.limit == limit
    assert chat.session.recall.store.limit == STORE_BYTES


def test_clear_forgets_what_could_be_recalled_and_figures_count_the_index(evicted):
    chat = evicted()
    chat.typed("/recall 60", QUESTION)
    assert "index of evicted text" in chat.typed("/stats")[1]
    assert "KiB of 8.0 MiB" in chat.typed("/mem")[1]
    _, err = chat.typed("/clear", "/stats", "/mem", FILLER, "/recall vault")
    assert "index of evicted" not in err
    assert "no passage" in err
    assert chat.session.recall.limit == 60  # settings stay


@pytest.mark.parametrize(("cap", "code"), [(None, 0), ("4GiB", 2)])
def test_off_from_the_start_can_be_switched_on_where_no_cap_forbids_it(cap, code, chat_of):
    runtime = Runtime.from_pretrained(
        "pocket", budget_tokens=BUDGET, memory_cap=cap, recall_store=0
    )
    chat = chat_of(runtime.session())
    assert chat.session.recall.limit == 0
    assert ("no room for an index" in chat.typed("/recall auto")[1]) == bool(code)
    assert chat.code == code
    assert chat.session.recall.limit == (0 if code else BUDGET // 2)


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
def test_generate_recalls_amid_its_prompt(options, recalls, tmp_path, kvcap):
    """`None`: it does not fit, and nothing is evicted."""
    (tmp_path / "text").write_text(f"{FACT} {FILLER}\n\n{QUESTION}")
    code, out, err = kvcap("generate", "-f", str(tmp_path / "text"), "--json", *OPTIONS, *options)
    document = json.loads(out)
    assert code == (4 if recalls is None else 0)
    assert (document["usage"]["recalled"] > 0) == bool(recalls)
    assert bool(document["recalled"]) == bool(recalls)
    assert ("recalled 1 passage, " in err) == bool(recalls)


@pytest.mark.parametrize("command", [("chat",), ("generate", "Hello!"), ("plan",)])
@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--recall", "much", "use auto, off, or"),
        ("--recall-store", "4KiB", "use 256.0 KiB or more"),
        ("--recall-store", "big", "is not a size"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(command, option, value, says, kvcap):
    assert says in kvcap.refused(*command, option, value, stdin=b"Hello!\n")


def test_the_plan_shows_and_counts_the_index(kvcap):
    without = kvcap.document("plan", "pocket", "--recall", "off")
    assert (without["recall_store"], without["recall_tokens"]) == (0, 0)
    larger = kvcap.document("plan", "pocket", "--budget-tokens", "600")
    assert larger["recall_tokens"] == 200
    text = kvcap("plan", "pocket", "--budget-tokens", "256")[1]
    assert "takes at most 128 of the 256 slots" in text
    smaller = kvcap.document("plan", "pocket", "--recall-store", "1MiB")
    assert smaller["recall_store"] == 1 << 20
    assert smaller["cache_bytes"] == without["cache_bytes"]
    index = (1 << 20) + smaller["word_vectors"]
    assert smaller["total_bytes"] == without["total_bytes"] + index
    assert re.search(r"^index of evicted text +8\.0 MiB +8,388,608 +at most", text, re.MULTILINE)

"""The demo, on a random model and on pocket, and the commands that print."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny_gguf
from click.testing import CliRunner
from llama_reference import needs_library
from make import argv

from kvcap.cli import application
from kvcap.evals.commands import (
    _question_line,
    _summary,
)
from kvcap.evals.quality.demo import Demo
from kvcap.pocket.facts import Fact
from kvcap.policies import load_policy
from kvcap.runtime.backends.pytorch.runtime import Runtime

app = application()


def printed(*args: str) -> Any:
    result = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert result.exit_code == 0
    return result


def test_the_demo_gives_one_document(folder):
    out = printed(
        "demo",
        str(folder),
        "--tokens",
        "3000",
        "--facts",
        "3",
        "--budget-tokens",
        "64",
        "--block-size",
        "32",
        "--device",
        "cpu",
        "--json",
    ).stdout
    report = json.loads(out)
    assert 0 <= report["recall"] <= 1
    assert 3000 <= report["filler_tokens"] < 3100
    assert report["tokens"] > report["filler_tokens"]
    kv = report["kv"]
    assert kv["held_tokens"] <= kv["budget_tokens"] == 64
    used = kv["held_tokens"] + kv["waiting_tokens"]
    assert used + kv["evicted_tokens"] == report["tokens"]
    assert kv["bytes"] <= kv["peak_bytes"] == kv["cap_bytes"]
    assert kv["policy"] == "keydiff"
    assert len(report["questions"]) == 3
    assert set(report["questions"][0]) == {"question", "expected", "answer", "found", "right"}
    assert {"seconds", "device", "versions", "threads", "positions", "seed"} <= set(report)


def test_the_demo_prints_answers_and_figures(folder):
    result = printed("demo", str(folder), "--tokens", "500", "--facts", "2", "--device", "cpu")
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == (
        ["wrong", "wrong", "recall", "kv", "bytes", "tokens"]
    )
    assert not result.stderr.startswith("\n")  # the meter's lines are for terminals


@pytest.mark.parametrize(
    ("answer", "found", "right"),
    [
        ("The code for the blue door is 4821.", True, True),
        ("4821", True, True),
        ("It is 4821. Anna Brown told me in Oslo.", True, True),
        ("The number is 4821.", True, True),
        ("The code for the red door is 4821.", True, False),
        ("The code for the blue gate is 4821.", True, False),
        ("Anna Brown's locker code is 4821.", True, False),
        ("I do not know. The code for Zelmar is 4821.", True, False),
        ("The code for the blue door is 48213.", False, False),
        ("The code for the blue door is not known to me.", False, False),
    ],
)
def test_a_value_of_another_key_is_found_but_not_right(answer, found, right, folder, monkeypatch):
    runtime = Runtime.from_pretrained(folder, budget_tokens=48, block_size=32, device="cpu")
    demo = Demo(runtime, tokens=0, facts=1)
    demo._order = [Fact("the code for the blue door", "4821")]
    monkeypatch.setattr(demo, "_say", lambda *_: answer)
    report = demo.run()
    (question,) = report.questions
    assert (question.found, question.right) == (found, right)
    assert report.recall == right
    assert question.expected == "The code for the blue door is 4821."
    line, summary = _question_line(question), _summary(report).splitlines()[0]
    assert line.startswith("right" if right else "value found" if found else "wrong")
    assert ("expected: 'The code for the blue door is 4821.'" in line) != right
    assert f"{int(right)} of 1 right" in summary
    assert ("1 more say the value of something else" in summary) == (found and not right)


def test_the_demo_keeps_no_text_and_never_passes_the_cap(folder):
    runtime = Runtime.from_pretrained(folder, budget_tokens=48, block_size=32, device="cpu")
    demo = Demo(runtime, tokens=4000, facts=2)
    held, kept = [], []

    def look(state: Demo) -> None:
        held.append(state.session.stats.held_tokens)
        kept.append(sum(len(m["content"]) for m in state.session.messages))

    demo.run(look)
    assert max(held) == 48
    assert max(kept[-20:]) <= max(kept[:20])


def test_the_demo_repeats(folder):
    runtime = Runtime.from_pretrained(folder, budget_tokens=48, block_size=32, device="cpu")
    one, two, other = (Demo(runtime, tokens=300, facts=2, seed=s).run() for s in (5, 5, 6))
    assert one.questions == two.questions != other.questions


@pytest.mark.parametrize(("tokens", "facts"), [(-1, 1), (10, 0)])
def test_the_demo_refuses_nonsense(folder, tokens, facts):
    runtime = Runtime.from_pretrained(folder, budget_tokens=48, block_size=32, device="cpu")
    with pytest.raises(ValueError, match="facts="):
        Demo(runtime, tokens=tokens, facts=facts)


def test_eval_prints_the_table_and_writes_it(folder, tmp_path):
    args = argv(
        "eval {} --lengths 96 --samples 2 --budgets 24,32 --positions compact "
        "--block-size 16 --device cpu --out {}",
        folder,
        tmp_path,
    )
    assert printed(*args).stdout == (tmp_path / "results.md").read_text() + "\n"
    cells = json.loads(printed(*args, "--json").stdout)
    assert [cell["budget"] for cell in cells] == [24, 32, 24, 32, None]


def test_bench_ends_with_a_json_line():
    out = printed("bench", "positions", "--budgets", "16", "--evictions", "20", "--repeats", "1")
    assert json.loads(out.stdout.splitlines()[-1])["bench"] == "positions"


def test_pocket_remembers_what_it_no_longer_holds():
    runtime = Runtime.from_pretrained("pocket", "keydiff", budget_tokens=256, device="cpu")
    report = Demo(runtime, tokens=6000, facts=8).run()
    assert report.recall >= 0.75
    assert report.kv["evicted_tokens"] > 5500
    forgetful = runtime.with_policy(load_policy("streaming_llm"))
    assert Demo(forgetful, tokens=6000, facts=8).run().recall <= 0.25


@needs_library
def test_a_demo_of_recall_asks_twice_and_prints_a_table(tmp_path):
    file = str(tiny_gguf.written(tmp_path, template=tiny_gguf.CHATML))
    given = ("demo", file, "--tokens", "600", "--facts", "2", "--budget-tokens", "128")
    lines = printed(*given).stdout.splitlines()
    titles = [title.strip() for title in lines[0].strip("|").split("|")]
    assert titles == ["question", "without recall", "with recall"]
    begins = [line.split()[0] for line in lines if line]
    assert begins == ["|"] * 4 + ["recall", "0", "kv", "bytes", "tokens"]
    report = json.loads(printed(*given, "--json").stdout)
    questions, recalled = report["questions"], report["recalled"]
    assert [q["question"] for q in questions] == [q["question"] for q in recalled]
    assert report["kv"]["evicted_tokens"] > 300
    assert "library" in report

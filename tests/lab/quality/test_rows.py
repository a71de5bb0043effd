"""Tasks from files: rows read, drawn, held to a length, scored, and refused by their line."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from make import argv

from kvcap import cli
from kvcap.evals.quality.prompts import prompt_ids, prompt_parts
from kvcap.lab.quality import metrics
from kvcap.lab.quality.cells import cells_of, read_cells
from kvcap.lab.quality.longbench_sets import EVEN, SETS
from kvcap.lab.quality.table import measured
from kvcap.lab.quality.tasks import files, load_task, make_samples, tasks, unit_of, with_data
from kvcap.lab.quality.tasks.math import ASKS
from kvcap.lab.report.leaderboard import page, sections
from kvcap.runtime.errors import ExtraMissing

TOWN = "The mayor of Lowmere is Ann Ode. The river Alder runs through it."


@pytest.fixture(autouse=True)
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tasks load whatever their metrics need."""
    monkeypatch.setattr(metrics, "find_spec", lambda name: name)
    load_task.cache_clear()


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def own(question: str = "Who is the mayor?", answers: Sequence[str] = ("Ann Ode",)) -> Any:
    return {"context": TOWN, "question": question, "answers": list(answers)}


def longbench(**changes: Any) -> Any:
    row = {"input": "Who is the mayor?", "context": TOWN, "answers": ["Ann Ode", "Ode"]}
    named = {"length": 13, "dataset": "x", "language": "en", "all_classes": None, "_id": "0"}
    return row | named | changes


# A user's own file


def test_rows_of_a_users_file_are_asked_below_their_text(tmp_path, tokenizer):
    path = write(tmp_path / "town.jsonl", own(), "", own("River?", ["Alder", "the Alder"]))
    samples = make_samples(f"file:{path}", tokenizer, 200, 2, seed=0)
    first = next(sample for sample in samples if sample.answers == ("Ann Ode",))
    assert first.messages == [{"role": "user", "content": f"{TOWN}\n\nWho is the mayor?"}]
    task = load_task(f"file:{path}")
    assert task.score(first, "It is ann ode.") == 1
    assert task.score(first, "It is Ann.") == 0
    context, question = prompt_parts(tokenizer, first, "after")
    assert "Alder runs" in tokenizer.decode(context)
    assert tokenizer.decode(question).startswith("Who is the mayor?")


def test_tables_say_how_long_the_prompts_were(tmp_path, capsys):
    """`--lengths` is the most that a row may have, and rows may be shorter."""
    path = write(tmp_path / "town.jsonl", own(), own("River?", ["Alder"]))
    out = tmp_path / "out"
    command = f"eval pocket --tasks file:{path} --lengths 4096 --samples 2 --device cpu --out {out}"
    given = "--policies keydiff --budgets 16 --block-size 16 --positions compact"
    assert cli.run([*command.split(), *given.split()]) == 0
    (cell,) = cells_of([out])
    fewest, most = cell.prompt_tokens or (0, 0)
    assert 16 < fewest < most < 200
    results = (out / "results.md").read_text()
    assert f", prompts of {fewest} to {most} tokens." in results
    assert f"file:{path}, up to 4,096 tokens, question-aware" in results
    assert results in capsys.readouterr().out
    earlier = replace(cell, prompt_tokens=None)
    assert "prompts of" not in measured([cell, earlier])
    assert f"prompts of {most} tokens" in measured([replace(cell, prompt_tokens=(most, most))])
    (part,) = sections([cell])
    assert "### Up to 4,096 tokens, compact positions" in page([part], "", {})


def test_the_last_of_messages_is_the_question(tmp_path, tokenizer):
    messages = [
        {"role": "user", "content": TOWN},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": "Who is the mayor?"},
    ]
    path = write(tmp_path / "a.jsonl", {"messages": messages, "answers": "Ann Ode"})
    (sample,) = make_samples(f"file:{path}", tokenizer, 200, 1, seed=0)
    assert sample.messages == messages
    context, question = prompt_parts(tokenizer, sample, "after")
    assert tokenizer.decode(context).count("I see.") == 1
    assert tokenizer.decode(question).startswith("Who is the mayor?")
    hash(sample)


def test_metrics_are_of_the_row_or_of_the_task(tmp_path, tokenizer):
    rows = own(), own() | {"metric": "exact_match"}
    chosen = own() | {"metric": "classification", "answers": ["Ann"], "classes": ["Ann", "Bob"]}
    path = write(tmp_path / "a.jsonl", *rows, chosen)
    task = load_task(f"file/f1:{path}")
    samples = make_samples(f"file/f1:{path}", tokenizer, 200, 3, seed=0)
    replies = {sample.metric: task.score(sample, "Ann or Bob") for sample in samples}
    assert replies == {"f1": pytest.approx(0.4), "exact_match": 0, "classification": 0.5}
    assert unit_of(task) == "score"
    write(path, own(), own())
    load_task.cache_clear()
    assert unit_of(load_task(f"file/f1:{path}")) == "f1"
    assert unit_of(load_task(f"file:{path}")) == "share"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "a.jsonl is empty"),
        (["", " "], "a.jsonl is empty"),
        ([own(), '{"context": '], "a.jsonl, line 2 is no JSON"),
        (["[1]"], "a.jsonl, line 1 is a list; give a JSON object"),
        ([own(), "", {"context": "x"}], "a.jsonl, line 3 has no 'answers'; it has 'context'"),
        ([{"answers": ["a"]}], "line 1 has no 'question'"),
        ([{"answers": ["a"], "question": "?"}], "line 1 has no 'context'"),
        ([own() | {"context": 3}], "line 1: 'context' is a number; give a text"),
        ([own() | {"question": " "}], "line 1: 'question' is empty"),
        ([own(answers=[])], "line 1: 'answers' holds no text; give at least one"),
        ([own(answers=[""])], "line 1: an answer is empty"),
        ([own() | {"answers": [1.5]}], "line 1: 'answers' holds a number; give texts"),
        ([own() | {"answers": True}], "line 1: 'answers' holds true or false; give texts"),
        ([own() | {"metric": "rogue_l"}], "line 1: no metric is called 'rogue_l'; did you mean"),
        ([own() | {"metric": "classification"}], "line 1 has no 'classes'"),
        ([{"messages": [], "answers": ["a"]}], "line 1: there are no messages"),
        ([{"messages": [{"role": "user"}], "answers": "a"}], "line 1: message 0 has no 'content'"),
    ],
)
def test_broken_files_are_refused_by_line(lines, message, tmp_path):
    path = write(tmp_path / "a.jsonl", *lines)
    with pytest.raises(ValueError, match=message):
        load_task(f"file:{path}")


def test_files_that_are_not_there_are_named(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"cannot read '.*no.jsonl': No such file"):
        load_task(f"file:{tmp_path}/no.jsonl")
    with pytest.raises(ValueError, match="is a folder; give a file"):
        load_task(f"file:{tmp_path}")
    with pytest.raises(ValueError, match="needs a file; give file:PATH, or --data PATH"):
        load_task("file")
    with pytest.raises(ValueError, match="no metric is called 'f11'"):
        load_task(f"file/f11:{tmp_path}")
    (tmp_path / "b.jsonl").write_bytes(b'{"context": "\xff"}\n')
    with pytest.raises(ValueError, match="line 1 is no JSON"):
        load_task(f"file:{tmp_path}/b.jsonl")


def test_a_prompt_beyond_the_length_is_refused(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", own())
    (sample,) = make_samples(f"file:{path}", tokenizer, 500, 1, seed=0)
    size = len(prompt_ids(tokenizer, sample))
    make_samples(f"file:{path}", tokenizer, size, 1, seed=0)
    with pytest.raises(ValueError, match=rf"line 1: the prompt has {size} tokens, more than"):
        make_samples(f"file:{path}", tokenizer, size - 1, 1, seed=0)


def test_rows_are_drawn_by_the_seed_alone(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", *(own(f"Is it {i}?") for i in range(20)))

    def drawn(count: int, seed: int, length: int = 200) -> list[str]:
        samples = make_samples(f"file:{path}", tokenizer, length, count, seed)
        return [sample.question for sample in samples]

    everything = drawn(20, 0)
    assert len(set(everything)) == 20
    assert everything != [f"Is it {i}?" for i in range(20)] != drawn(20, 1) != everything
    assert drawn(7, 0, length=300) == everything[:7]
    with pytest.raises(ValueError, match=r"a\.jsonl has 20 rows, and --samples asks for 21"):
        drawn(21, 0)


def test_a_model_without_a_chat_template_goes_on_from_the_text(tmp_path, tokenizer, monkeypatch):
    path = write(tmp_path / "a.jsonl", own())
    monkeypatch.setattr(tokenizer, "chat_template", None)
    (sample,) = make_samples(f"file:{path}", tokenizer, 200, 1, seed=0)
    assert prompt_ids(tokenizer, sample) == tokenizer(f"{TOWN}\n\nWho is the mayor?")["input_ids"]


# LongBench


@pytest.mark.parametrize("name", SETS)
def test_a_longbench_prompt_is_its_template(name, tmp_path):
    write(tmp_path / f"{name}.jsonl", longbench(all_classes=["Ann Ode", "Ode"]))
    task: Any = load_task(f"longbench/{name}:{tmp_path}")
    (sample,) = task.samples
    (message,) = sample.messages
    expected = SETS[name].template.format(context=TOWN, input="Who is the mayor?")
    assert message["content"] == expected
    assert sample.context.endswith(TOWN)
    assert TOWN not in sample.question
    assert sample.question == sample.question.lstrip() != ""
    assert SETS[name].max_new_tokens == task.MAX_NEW_TOKENS
    assert set(EVEN) < set(SETS)


def test_longbench_scores_are_the_best_of_all_answers(tmp_path, tokenizer):
    write(tmp_path / "hotpotqa.jsonl", longbench())
    write(tmp_path / "triviaqa.jsonl", longbench())
    for name, score in (("hotpotqa", 2 / 3), ("triviaqa", 1)):
        task: Any = load_task(f"longbench/{name}:{tmp_path}")
        assert task.score(task.samples[0], "\nThe Ode\nNo") == pytest.approx(score)
    write(tmp_path / "trec.jsonl", longbench(answers=["City"], all_classes=["City", "Food"]))
    task = load_task(f"longbench/trec:{tmp_path}")
    assert task.score(task.samples[0], "City or Food\nCity") == 0.5


def official_cut(tokenizer: Any, prompt: str, most: int) -> str:
    """LongBench's own way to shorten a prompt."""
    ids = tokenizer(prompt)["input_ids"]
    half = most // 2
    return str(
        tokenizer.decode(ids[:half], skip_special_tokens=True)
        + tokenizer.decode(ids[-half:], skip_special_tokens=True)
    )


@pytest.mark.parametrize("name", ["triviaqa", "hotpotqa", "lcc", "gov_report"])
@pytest.mark.parametrize("length", [300, 301, 512])
def test_a_longbench_prompt_is_cut_in_its_middle(name, length, tmp_path, tokenizer):
    context = " ".join(f"Line {i} of the report is told here." for i in range(200))
    write(tmp_path / f"{name}.jsonl", longbench(context=context))
    (sample,) = make_samples(f"longbench/{name}:{tmp_path}", tokenizer, length, 1, seed=0)
    ids = prompt_ids(tokenizer, sample)
    assert length - 4 < len(ids) <= length
    (task,) = (load_task(f"longbench/{name}:{tmp_path}"),)
    whole = task.samples[0].messages[0]["content"]
    shown = sample.messages[0]["content"]
    around = len(prompt_ids(tokenizer, sample)) - len(tokenizer(shown)["input_ids"])
    assert around == 0 or SETS[name].chat
    assert shown in {official_cut(tokenizer, whole, length - around - less) for less in range(4)}
    read, question = prompt_parts(tokenizer, sample, "after")
    assert read + question == ids
    assert tokenizer.decode(question).startswith(sample.question[:20])


def test_a_length_that_cuts_the_question_is_refused(tmp_path, tokenizer):
    write(tmp_path / "hotpotqa.jsonl", longbench(context=TOWN * 20))
    name = f"longbench/hotpotqa:{tmp_path}"
    with pytest.raises(ValueError, match="leaves no room for the question") as caught:
        make_samples(name, tokenizer, 80, 1, seed=0)
    least = int(str(caught.value).split("give about ")[1].split()[0])
    make_samples(name, tokenizer, least, 1, seed=0)


def test_longbench_is_found_in_folders_archives_and_on_the_hub(tmp_path, monkeypatch):
    rows = json.dumps(longbench()) + "\n"
    (tmp_path / "a").mkdir()
    with zipfile.ZipFile(tmp_path / "a" / "data.zip", "w") as archive:
        archive.writestr("data/hotpotqa_e.jsonl", rows)
    write(tmp_path / "b" / "data" / "hotpotqa_e.jsonl", longbench())
    samples = [
        load_task(f"longbench/hotpotqa_e:{tmp_path}/{where}")
        for where in ("a", "a/data.zip", "b", "b/data/hotpotqa_e.jsonl")
    ]
    assert len({task.digest for task in samples}) == 1
    with pytest.raises(ValueError, match=r"data.zip has no data/musique.jsonl"):
        load_task(f"longbench/musique:{tmp_path}/a")
    with pytest.raises(ValueError, match=r"has none of musique.jsonl, data/musique.jsonl"):
        load_task(f"longbench/musique:{tmp_path}/b")

    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"cannot be fetched from the hub .* give --data FOLDER"):
        load_task("longbench/hotpotqa_e")
    repository = tmp_path / "hub" / "datasets--zai-org--LongBench"
    commit = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    (tmp_path / "a" / "data.zip").rename(repository / "snapshots" / commit / "data.zip")
    assert load_task("longbench/hotpotqa_e").digest == samples[0].digest


def test_a_broken_archive_is_named(tmp_path):
    (tmp_path / "data.zip").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"data\.zip is no zip archive"):
        load_task(f"longbench/musique:{tmp_path}")


# RULER and MATH

QA = (
    "Answer the question based on the given documents. Only give me the answer.\n\nThe following "
    f"are given documents.\n\nDocument 1:\n{TOWN}\n\nAnswer the question based on the given "
    "documents. Only give me the answer.\n\nQuestion: Who is the mayor?"
)


def test_ruler_rows_are_split_where_the_question_begins(tmp_path, tokenizer):
    row = {"index": 0, "input": QA, "outputs": ["Ann Ode", "Mrs Ode"], "answer_prefix": " Answer:"}
    write(tmp_path / "qa_1" / "validation.jsonl", row)
    earlier = row | {"input": f"{QA} Answer:"}
    del earlier["answer_prefix"]
    write(tmp_path / "qa_2.jsonl", earlier)
    (older,) = make_samples(f"ruler/qa_2:{tmp_path}", tokenizer, 300, 1, seed=0)
    (sample,) = make_samples(f"ruler/qa_1:{tmp_path}", tokenizer, 300, 1, seed=0)
    assert prompt_ids(tokenizer, older) == prompt_ids(tokenizer, sample)
    assert sample.messages == [{"role": "user", "content": QA}]
    assert sample.context.endswith(TOWN)
    assert sample.question.startswith("Answer the question based on the given documents.")
    assert tokenizer.decode(prompt_ids(tokenizer, sample)).endswith(" Answer:")
    task = load_task(f"ruler/qa_1:{tmp_path}")
    assert task.MAX_NEW_TOKENS == 32
    assert task.score(sample, " ann ode ") == 1


def test_ruler_needles_are_scored_by_their_share(tmp_path):
    asks = "What are all the special magic numbers for owl and fox mentioned in the provided text?"
    row = {"input": f"Some text. What now?\n{asks}", "outputs": ["11\n2", "33"]}
    path = write(tmp_path / "niah_multiquery.jsonl", row)
    task: Any = load_task(f"ruler/niah_multiquery:{path}")
    assert task.samples[0].question == asks
    assert task.score(task.samples[0], "It is 33, 12") == 0.5
    assert task.score(task.samples[0], "33, 11\t2") == 1  # control characters are line ends


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ruler/qa_3", QA, "RULER has no task 'qa_3'; did you mean 'ruler/qa_"),
        ("ruler/vt", QA, "no 'Question: Find all variables' in 'input'; is it of another task"),
        ("ruler/qa_1", f"[INST] {QA} [/INST]", "prepared with a chat template; prepare it with"),
        ("longbench/hotpot", QA, "LongBench has no set 'hotpot'; did you mean 'longbench/hotpotqa"),
        ("longbench", QA, "LongBench has no set ''; known: narrativeqa, "),
        ("math/x", QA, "'math' has no part 'x'"),
        ("math", QA, "line 1 has no 'problem'"),
        ("niah_single", QA, "'niah_single' reads no file"),
        ("fil", QA, "no task is called 'fil'; did you mean 'file'"),
    ],
)
def test_wrong_names_and_files_of_others(name, text, message, tmp_path):
    path = write(tmp_path / "a.jsonl", {"input": text, "outputs": ["x"]})
    with pytest.raises(ValueError, match=message):
        load_task(f"{name}:{path}")


def test_mathematics_is_asked_without_a_text(tmp_path, tokenizer):
    row = {"problem": "What is $1/2$?", "answer": r"\frac{1}{2}", "level": 1}
    path = write(tmp_path / "test.jsonl", row)
    (sample,) = make_samples(f"math:{path.parent}", tokenizer, 200, 1, seed=0)
    assert sample.messages[0]["content"] == f"What is $1/2$?\n\n{ASKS}"
    assert load_task(f"math:{path}").score(sample, r"So \boxed{\frac12}") == 1
    with pytest.raises(ValueError, match="--question after: this task has a question without"):
        prompt_parts(tokenizer, sample, "after")


def test_a_missing_package_is_named_before_anything_runs(tmp_path, monkeypatch):
    write(tmp_path / "lcc.jsonl", longbench())
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with pytest.raises(ExtraMissing, match="code_similarity needs rapidfuzz"):
        load_task(f"longbench/lcc:{tmp_path}")


def test_a_path_goes_to_the_tasks_that_take_it():
    assert set(files()) == {"file", "longbench", "math", "ruler"}
    assert not set(files()) & set(tasks())
    names = ["longbench/lcc", "niah_single", "file:a.jsonl", "math"]
    assert with_data(names, None) == names
    assert with_data(names, "d") == ["longbench/lcc:d", "niah_single", "file:a.jsonl", "math:d"]
    with pytest.raises(ValueError, match="--data d: no task of this sweep takes it; file, longb"):
        with_data(["niah_single"], "d")


# The command


def test_pocket_answers_a_users_file(tmp_path, tokenizer, capsys, kvcap):
    made = make_samples("niah_single", tokenizer, 150, 2, seed=5)
    rows = [{"context": s.context, "question": s.question, "answers": s.answers} for s in made]
    path, out = write(tmp_path / "facts.jsonl", *rows), tmp_path / "out"
    command = argv(
        "eval pocket --tasks file --data {} --lengths 256 --policies streaming_llm,full "
        "--budgets 48 --positions compact --question both --samples 2 --max-new-tokens 16 "
        "--device cpu --out {}",
        path,
        out,
    )
    assert cli.run(command) == 0
    cells = {(c.setting.policy, c.setting.question): c for c in read_cells(out / "cells.jsonl")}
    assert len(cells) == 4
    assert cells["full", "aware"].score == cells["full", "after"].score == 1
    assert cells["streaming_llm", "after"].score < 1  # what is asked for was evicted
    assert cells["full", "aware"].setting.task == f"file:{path}"
    text = (out / "results.md").read_text()
    assert f"file:{path}, up to 256 tokens, context-only" in text
    assert "answers of up to 16 tokens; file " in text

    write(path, rows[0], own())  # another content: every cell is measured anew
    capsys.readouterr()
    assert cli.run([*command, "--policies", "full", "--question", "aware"]) == 0
    assert len(read_cells(out / "cells.jsonl")) == 5
    assert "facts.jsonl has 2 rows, and --samples asks for 3" in kvcap.refused(
        *command, "--samples", "3"
    )

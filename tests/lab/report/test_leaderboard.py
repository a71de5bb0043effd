"""`kvcap report --leaderboard` and `--compare`: pages of Markdown made of cells."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sweeps import made_cell

from kvcap import cli
from kvcap.lab.plots.leaderboard import drawn_rows, figure
from kvcap.lab.quality.cells import Cell, Setting, add_cell
from kvcap.lab.quality.sweep import Sweep
from kvcap.lab.report.leaderboard import CLOSE, OPEN, commands, sections, write
from kvcap.lab.report.ranking import RankedPolicy, tables
from kvcap.runtime.cli.options import pairs as options

VERSIONS = {"kvcap": "0.1.0", "torch": "2.9"}
RIGHT = {"keydiff": 10, "keydiff-window": 9, "streaming_llm": 2, "full": 10}


def cell(policy: str, budget: int | None, **more: Any) -> Cell:
    """Return a cell of the built-in model with 10 samples, of which some are right."""
    right = more.pop("right", RIGHT.get(policy, 5))
    named = {"model": "pocket", "task": "niah_single", "device": "cpu, x", "versions": VERSIONS}
    return made_cell(policy, budget, (1.0,) * right + (0.0,) * (10 - right), **{**named, **more})


def sweep(folder: Path, cells: list[Cell]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for one in cells:
        add_cell(folder / "cells.jsonl", one)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = "keydiff", "keydiff-window", "streaming_llm"
    cells = [cell(p, b, positions=m) for p, b, m in product(names, (8, 16), ("compact", "true"))]
    return sweep(tmp_path / "one", [*cells, cell("full", None)])


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the table below a heading, its cells as plain text."""
    part = page.split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [
        [c.strip().replace("\u00a0", " ") for c in line.strip("|").split("|")] for line in lines
    ]


def test_a_page_ranks_policies_below_the_uncapped_model(folder, tmp_path):
    target = tmp_path / "board.md"
    assert cli.run(["report", str(folder), "--leaderboard", "-o", str(target)]) == 0
    page = target.read_text()
    assert "## pocket: niah_single, question-aware" in page
    assert "Share of right answers, higher is better; 10 samples, seed 0, block 16" in page
    header, _, *table = rows(page, "### 64 tokens, compact positions")
    assert header == ["policy", "mean", "8", "16"]
    assert table == [
        ["`full`", "1.00 ±.28", "", ""],
        ["`keydiff`", "**1.00** ±.28", "**1.00** ±.28", "**1.00** ±.28"],
        ["`keydiff-window`", "**0.90** ±.30", "**0.90** ±.30", "**0.90** ±.30"],
        ["`streaming_llm`", "0.20 ±.31", "0.20 ±.31", "0.20 ±.31"],
    ]
    assert rows(page, "### Means over budgets")[0] == ["policy", "64 compact", "64 true"]
    assert "kvcap 0.1.0, torch 2.9; cpu, x" in page
    assert "kvcap report out/leaderboard --leaderboard -o board.md    # in a checkout\n" in page


def test_sections_of_several_folders_and_tasks(folder, tmp_path):
    read = {
        "task": "perplexity:/somewhere/book.txt",
        "data": "0123456789ab",
        "question": None,
        "unit": "perplexity",
    }
    other = sweep(
        tmp_path / "two",
        [
            cell("snapkv", 8, right=3, options=(("window", 4),), **read),
            cell("snapkv", 8, right=9, kv_dtype="int8", **read),
            cell("keydiff", 8, model="/somewhere/mine", depth=0.0, right=10),
            cell("keydiff", 8, model="/somewhere/mine", depth=1.0, right=0),
        ],
    )
    target = tmp_path / "board.md"
    write([folder, other], target)
    page = target.read_text()
    assert "/somewhere" not in page
    mine = page.split("## mine: niah_single, question-aware\n")[1]
    assert rows(mine, "### 64 tokens, compact positions")[2][1] == "**0.50** ±.20"  # of 20
    assert "Perplexity, lower is better; 10 samples" in page
    text = page.split("## pocket: perplexity:book.txt\n")[1]
    table = rows(text, "### 64 tokens, compact positions")
    assert [row[:2] for row in table[2:]] == [
        ["`snapkv, window=4`", "**1.35** ±0.47"],
        ["`snapkv, int8 slots`", "2.46 ±0.45"],
    ]


def test_what_an_author_wrote_is_kept(folder, tmp_path):
    target = tmp_path / "board.md"
    write([folder], target)
    first = target.read_text()
    assert "Nobody has written yet" in first
    mine = f"{OPEN}\n\nKeyDiff is best.\n\n- \\d é\n\n{CLOSE}"
    target.write_text(re.sub(f"{OPEN}.*{CLOSE}", lambda _: mine, first, flags=re.DOTALL))
    for _ in range(2):
        write([folder], target)
        assert mine in target.read_text()
    again = re.sub(f"{OPEN}.*{CLOSE}", "", target.read_text(), flags=re.DOTALL)
    assert again == re.sub(f"{OPEN}.*{CLOSE}", "", first, flags=re.DOTALL)


@pytest.mark.parametrize("page", ["", f"{OPEN}", f"{CLOSE} {OPEN}", f"{OPEN}{OPEN}{CLOSE}"])
def test_a_page_without_the_marks_is_not_overwritten(page, folder, tmp_path, kvcap):
    target = tmp_path / "board.md"
    target.write_text(page)
    assert OPEN in kvcap.refused("report", str(folder), "--leaderboard", "-o", str(target))
    assert target.read_text() == page


def test_pictures_lie_beside_the_page(folder, tmp_path):
    target = tmp_path / "docs" / "board.md"
    target.parent.mkdir()
    sweep(folder, [cell("keydiff", 8, question="after"), cell("full", None, model="other")])
    sweep(folder, [cell("keydiff", 8, question="after", samples=5, length=2048)])
    assert cli.run(["report", str(folder), "--leaderboard", "--plot", "-o", str(target)]) == 0
    links = re.findall(r"!\[.*?\]\((.*?)\)", target.read_text())
    assert links == [
        "pictures/board-pocket-niah_single-context-only-64-tokens.png",
        "pictures/board-pocket-niah_single-context-only-2048-tokens.png",
        "pictures/board-pocket-niah_single-question-aware.png",
    ]
    assert "## pocket: niah_single, context-only, 2,048 tokens" in target.read_text()
    for link in links:
        assert (target.parent / link).read_bytes().startswith(b"\x89PNG")


def test_a_picture_has_few_lines_that_can_be_told_apart():
    names = [f"p{i}" for i in range(12)]
    right = {name: 10 - i // 2 for i, name in enumerate([*names, "keydiff"])}
    cells = [
        cell(name, b, right=right[name], length=n)
        for name in right
        for b in (8, 16)
        for n in (64, 128)
    ]
    drawn = figure(tables([*cells, *(cell("full", None, length=n) for n in (64, 128))]), "pocket")
    axes = [axis for axis in drawn.axes if axis.get_visible()]
    assert [axis.get_title() for axis in axes] == ["64 tokens, compact", "128 tokens, compact"]
    (legend,) = drawn.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == [*names[:6], "keydiff", "full (uncapped)"]
    assert "95 % intervals" in legend.get_title().get_text()
    for axis in axes:
        looks = {(c.lines[0].get_color(), c.lines[0].get_marker()) for c in axis.containers}
        assert len(looks) == len(axis.containers) == 7


@pytest.mark.parametrize(("right", "scale"), [(4, "linear"), (10, "log")])
def test_perplexities_far_apart_have_a_logarithmic_axis(right, scale):
    cells = [cell(p, 8, right=n, unit="perplexity") for p, n in (("a", 1), ("b", right))]
    cells = [replace(c, score=c.score**3) for c in cells]
    (axis,) = figure(tables(cells), "m").axes
    assert (axis.get_yscale(), axis.get_xscale()) == (scale, "log")


def test_lines_that_every_reader_asks_for_are_drawn_beside_the_best():
    ranked = [*"abcdefgh", "streaming_llm", "i", "keydiff"]
    assert drawn_rows([RankedPolicy(name, (), None, True) for name in ranked]) == [
        *"abcde",
        "streaming_llm",
        "keydiff",
    ]


def settings_of(lines: list[str]) -> set[Setting]:
    """Return what the printed commands measure."""
    settings = set[Setting]()
    for line in "\n".join(lines).replace("\\\n", "").splitlines():
        _, _, model, *words = shlex.split(line)
        given: dict[str, list[str]] = {}
        for name, value in zip(words[::2], words[1::2], strict=True):
            given.setdefault(name, []).append(value)
        one = {name.removeprefix("--"): values[0] for name, values in given.items()}
        many = {name: value.split(",") for name, value in one.items()}
        request: Any = {
            "policies": many["policies"],
            "budgets": [int(budget) for budget in many.get("budgets", ["1"])],
            "tasks": many["tasks"],
            "lengths": [int(length) for length in many["lengths"]],
            "positions": many.get("positions", ["true"]),
            "questions": many.get("question", ["aware"]),
            "depths": [float(x) for x in many["depths"]] if "depths" in many else (None,),
            "options": options(given.get("--policy-option", [])),
            "kv_dtype": one.get("kv-dtype"),
            "samples": int(one["samples"]),
            "seed": int(one["seed"]),
            "block_size": int(one["block-size"]),
        }
        settings |= set(Sweep(model=model, **request).settings(one["dtype"]))
    return settings


def test_the_commands_of_a_page_measure_its_cells_and_no_others():
    cells = [
        *(
            cell(p, b, length=n, positions=m)
            for p, b, n, m in product(
                ("keydiff", "snapkv"), (64, 128), (256, 512), ("compact", "true")
            )
        ),
        *(cell("full", None, length=n) for n in (256, 512)),
        cell("full", None, length=1024),  # by itself
        cell("h2o", 128, length=256),  # lacks the other budget
        cell("snapkv", 64, length=256, options=(("window", 8),)),
        cell("snapkv", 64, length=256, kv_dtype="int8"),
        *(cell("tova", 64, length=256, depth=d) for d in (0.0, 0.5)),
        cell("tova", 64, length=256, question="after"),
        cell("tova", 64, length=256, task="perplexity", question=None),
        cell("tova", 64, length=256, model="pocket-plain"),
    ]
    lines = commands(cells)
    assert settings_of(lines) == {cell.setting for cell in cells}
    assert sum(line.startswith("kvcap eval") for line in lines) == 9
    assert len(sections(cells)) == 5  # also by asking, task, model, and the depths as one
    assert len(commands(cells[:18])) <= 3  # one command, in lines


# Compare


def test_two_policies_are_compared_in_text_and_json(folder, capsys, kvcap):
    words = ["report", str(folder), "--compare", "keydiff,streaming_llm"]
    assert cli.run(words) == 0
    output = capsys.readouterr().out
    assert "# keydiff against streaming_llm" in output
    table = rows(output, "## niah_single, 64 tokens, question-aware, pocket")
    assert [row[2:4] for row in table[2:]] == [
        ["compact", "8"],
        ["compact", "16"],
        ["true", "8"],
        ["true", "16"],
    ]
    assert table[2][4:6] == ["+0.80 (+0.38 to +0.94)", "0.0078"]
    first, *others = kvcap.document(*words)
    assert len(others) == 3
    assert (first["first"], first["second"]) == ("keydiff", "streaming_llm")
    assert (first["task"], first["length"], first["budget"]) == ("niah_single", 64, 8)
    assert first["difference"] == pytest.approx(0.8)
    assert first["p_value"] == 2 / 2**8
    assert (first["samples"], first["first_higher"], first["second_higher"]) == (10, 8, 0)
    printed = kvcap.document(*words[:-1], "full,keydiff")
    assert [row["budget"] for row in printed] == [8, 16, 8, 16]  # full suits all


# What is refused


def test_reports_that_cannot_be_made(folder, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    other = sweep(tmp_path / "seed", [cell("snapkv", 8, seed=1), cell("h2o", 32)])
    old = sweep(tmp_path / "old", [replace(cell(p, 8), scores=None) for p in ("h2o", "tova")])
    one, board = str(folder), "--leaderboard"
    for words, says in (
        ([str(empty), board], "holds no cells.jsonl with cells"),
        ([str(tmp_path / "none"), board], "there is no folder"),
        ([one, str(other), board], "10 samples of seed 0 and 10 of seed 1 are different prompts"),
        ([one, board, "-o", str(empty)], "cannot write"),
        ([one, board, "-o", str(empty / "no" / "x.md")], "cannot write"),
        ([one, "--json"], "--json needs --compare"),
        ([one, str(other)], "a page is of one folder"),
        ([one, board, "--compare", "keydiff,full"], "give one of them"),
        ([one, "--compare", "keydiff"], "give two policies"),
        ([one, "--compare", "keydiff,keydiff"], "give two policies"),
        ([one, "--compare", "keydiff,nothing"], "there are no cells of 'nothing'; of full, key"),
        ([one, "--compare", "keydiff,full", "-o", "x"], "leave --out out"),
        ([str(empty), "--compare", "keydiff,full"], "holds no cells.jsonl with cells"),
        ([one, str(other), "--compare", "keydiff,snapkv"], "are different prompts"),
        ([one, str(other), "--compare", "keydiff,h2o"], "no cells of keydiff and h2o have the sam"),
        ([str(old), "--compare", "h2o,tova"], "the scores of their samples"),
    ):
        assert cli.run(["report", *words]) == 2, words
        assert says in re.sub(r"\s+", " ", capsys.readouterr().err), words
    assert not [*folder.glob("*.md"), *folder.glob("*.html")]

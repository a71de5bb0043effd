"""`kvcap bench use`: answers of real processes, told apart by what was there before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcap.evals.bench import options_for
from kvcap.lab.bench import use
from kvcap.lab.random_models import directory
from kvcap.runtime.errors import ModelNotFound, PeerFailed

GIVEN: dict[str, Any] = {
    "lengths": (70,), "budgets": (32,), "block_size": 16, "steps": 5, "model": "random-tiny",
}  # fmt: skip
FIGURES = {
    "ttft_ms": 1.0,
    "tok_s": 2.0,
    "load_ms": 3.0,
    "tokens": 5,
    "prompt_tokens": 70,
    "execution": "eager",
    "device": "d",
    "versions": {},
}


@pytest.mark.slow(ci=0)
def test_every_run_is_a_process_or_a_session(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(use, "TOGETHER", 2)
    result = use.run(options_for("use", {**GIVEN, "files": tmp_path}))
    rows = json.loads(json.dumps(result.as_dict()))["rows"]
    runs = {(row["work"], row["run"]): row for row in rows if row["run"] != "warmed"}
    assert len(runs) == 2 * 4 + 4
    assert {run for work, run in runs if (("ttft", run) not in runs)} == set(use.DECODED)
    for (work, run), row in runs.items():
        assert row["sessions"] == (2 if run.startswith("together") else 1)
        assert (row["n"], row["budget"], row["policy"], row["turns"]) == (70, 32, "keydiff", 1)
        assert (row["ms"] is None, row["tok_s"] is None) == (work == "decode", work == "ttft")
        assert 0 < row["least"] == row["most"]
        assert row["device"]
    # A process is loaded once, however many sessions it answers.
    loads = {run: row["load_ms"] for (work, run), row in runs.items() if work == "ttft"}
    assert loads["process"] == loads["session"] == loads["again"] != loads["first"]
    assert all(row["prompt_tokens"] >= 70 for (work, _), row in runs.items() if work == "ttft")
    assert {row["tokens"] for (work, _), row in runs.items() if work == "decode"} == {5, 2 * 2}
    assert len(result.table().splitlines()) == 2 + len(rows)
    assert "keydiff, again: " in capsys.readouterr().err


def test_machines_are_empty_and_turns_are_told_by_their_median(tmp_path, monkeypatch):
    """No run finds what another machine compiled; what is told of several is their middle."""
    folders: list[str] = []
    later = [10.0, 10.0, 10.0, *[None] * len(use.DECODED)]
    times = iter([x for first in (3.0, 9.0, 4.0) for x in (first, *later)])

    def answers(
        settings: Any, kernels: str, sessions: int, together: int = 0
    ) -> list[dict[str, Any]]:
        assert not list(Path(kernels).iterdir()) or sessions > 1
        Path(kernels, "kernel").touch()
        folders.append(kernels)
        figures = {
            "tokens": 5,
            "prompt_tokens": 70,
            "execution": "eager",
            "load_ms": 1.0,
            "device": "d",
            "versions": {},
        }
        count = sessions + (len(use.DECODED) if together else 0)
        return [{**figures, "ttft_ms": next(times), "tok_s": 2.0} for _ in range(count)]

    monkeypatch.setattr(use, "_answers", answers)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = use.run(options_for("use", {**GIVEN, "files": tmp_path, "repeats": 3}))
    first = result.rows[0]
    assert (first["run"], first["ms"], first["least"], first["most"]) == ("first", 4.0, 3.0, 9.0)
    assert len(set(folders)) == 3
    assert [folders.count(folder) for folder in folders] == [2] * 6


def test_other_policies_share_a_process_and_one_that_fails_is_left_out(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(use, "_machine", lambda requests: iter([("first", FIGURES)]))
    given = {**GIVEN, "policies": ("keydiff", "headkv", "cake", "snapkv"), "files": tmp_path}
    answers, requests = use._answers, []

    def noted(*args: Any, **more: Any) -> Iterator[dict[str, Any]]:
        requests.append(more["others"])
        answered = list(answers(*args, **more))
        answered[3] |= {"failed": "no cake"}  # as where it raises an error
        return iter(answered)

    monkeypatch.setattr(use, "_answers", noted)
    rows = use.run(options_for("use", given)).rows
    assert requests == [["headkv", "cake", "snapkv"]]
    assert [(row["policy"], row["run"]) for row in rows[2::2]] == [
        (policy, run) for policy in ("headkv", "snapkv") for run in ("session", "again")
    ]
    assert "cake gave no answer: no cake" in capsys.readouterr().err


def test_an_interrupt_ends_with_the_rows_that_are_there(tmp_path, capsys, monkeypatch):
    def machine(settings: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "first", FIGURES
        raise KeyboardInterrupt

    monkeypatch.setattr(use, "_machine", machine)
    rows = use.run(options_for("use", {**GIVEN, "files": tmp_path})).rows
    assert [(row["work"], row["run"]) for row in rows] == [("ttft", "first"), ("decode", "first")]
    assert "interrupted" in capsys.readouterr().err
    lines = use._process("import time; print(1, flush=True); time.sleep(60)", [], str(tmp_path))
    assert next(lines) == "1\n"
    lines.close()  # ends the process too


def test_a_process_that_fails_says_why(tmp_path):
    model = directory("random-tiny", tmp_path)
    settings = {
        "model": model,
        "policy": "nobody",
        "budget": 32,
        "block_size": 16,
        "n": 5,
        "steps": 1,
    }
    with pytest.raises(PeerFailed, match="no policy is called 'nobody'"):
        list(use._answers(settings, str(tmp_path), 1))
    with pytest.raises(PeerFailed, match="ended with code 3: it said nothing"):
        list(use._process("sys.exit(3)", [], str(tmp_path)))
    assert list(use._process("print(sys.argv[1:])", ["a"], str(tmp_path))) == ["['a']\n"]


def test_models_have_names_or_directories(tmp_path):
    made = directory("random-tiny", tmp_path)
    assert directory("random-tiny", tmp_path) == made == str(tmp_path / "random-tiny")
    assert directory(made, tmp_path) == made
    with pytest.raises(ModelNotFound):
        directory(str(tmp_path / "none"), tmp_path)

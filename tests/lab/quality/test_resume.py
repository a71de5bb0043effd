"""A sweep goes on where it was killed, shares its cells among processes, and outlives bad cells."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from make import in_python
from sweeps import small_sweep

from kvcap import cli
from kvcap.lab.quality import agreement
from kvcap.lab.quality import sweep as runner
from kvcap.lab.quality.cells import Cell, add_cell, mend, read_cells
from kvcap.lab.quality.measuring import measure
from kvcap.lab.quality.sweep import Sweep, run
from kvcap.lab.quality.table import results
from kvcap.lab.quality.workers.crew import Crew
from kvcap.runtime.errors import CellsFailed, PlanInfeasible
from kvcap.runtime.files import locked

# Runs the sweep of argv[1] in the folder argv[2], once in a process of its own for every point of
# argv[3:], at which it is killed; so torch is imported once.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from kvcap.lab.quality import cells, sweep

out = Path(sys.argv[2])
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

def planted(point):
    measure, add_cell, results = sweep.measure, sweep.add_cell, sweep.results
    count = lambda: len(cells.read_cells(out / "cells.jsonl"))
    def measures(*given):
        if point == "measuring" and count() == 1:
            die()
        return measure(*given)
    def adds(path, cell):
        if point == "writing" and count() == 2:
            with path.open("a") as file:
                file.write(json.dumps(cell.as_dict())[:200])
            die()
        add_cell(path, cell)
        if point == "written" and count() == 3:
            die()
    def tables(*given):
        if point == "finishing":
            die()
        return results(*given)
    sweep.measure, sweep.add_cell, sweep.results = measures, adds, tables

for point in sys.argv[3:]:
    child = os.fork()
    if not child:
        planted(point)
        sweep.run(sweep.Sweep(**json.loads(sys.argv[1])), out)
        os._exit(0)
    print(point, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]),
          len(cells.read_cells(out / "cells.jsonl")), flush=True)  # or the next child may, too
"""


@pytest.fixture
def sweep(folder: Path) -> Sweep:
    return small_sweep(folder)


def same(cells: list[Cell]) -> list[tuple[Any, ...]]:
    """Return what does not depend on who measured."""
    return [(cell.setting, cell.score, cell.scores, cell.kv_bytes) for cell in cells]


def planted(monkeypatch: pytest.MonkeyPatch, policy: str, error: BaseException) -> None:
    """Let the measurement of a policy fail."""

    def measures(runtime: Any, setting: Any, *given: Any) -> Cell:
        if setting.policy == policy:
            raise error
        return measure(runtime, setting, *given)

    monkeypatch.setattr(runner, "measure", measures)


@pytest.mark.slow
def test_a_sweep_killed_at_any_point_goes_on(sweep, tmp_path):
    out = tmp_path / "out"
    points = ["measuring", "writing", "written", "finishing"]
    program = in_python(KILLED, json.dumps(asdict(sweep)), out, *points, check=True)
    assert program.stdout.splitlines() == [
        "measuring -9 1",
        "writing -9 2",
        "written -9 3",
        "finishing -9 5",
    ]
    assert not (out / "results.md").exists()
    notes: list[str] = []
    cells = run(sweep, out, note=notes.append)
    rows = (out / "cells.jsonl").read_text().splitlines()
    assert len(rows) == len({cell.setting for cell in cells}) == 5  # none lost, none run twice
    assert (out / "results.md").read_text() == results(cells)
    assert not notes  # the half line was dropped by the run after it
    assert {path.name for path in out.iterdir()} == {"cells.jsonl", "results.md", ".lock"}
    assert same(cells) == same(run(sweep, tmp_path / "at once"))


@pytest.mark.parametrize("rest", [b'{"model": "m", "dty', b"{", b"\0\0\0\0", b"\xff{"])
def test_half_a_line_is_dropped_and_its_cell_run_again(sweep, tmp_path, rest):
    path, notes = tmp_path / "cells.jsonl", list[str]()
    sweep = replace(sweep, budgets=(24,), positions=("true",))
    first, last = run(sweep, tmp_path)
    path.write_bytes((json.dumps(first.as_dict()) + "\n").encode() + rest)
    assert read_cells(path) == [first]
    cells = run(sweep, tmp_path, note=notes.append)
    assert same(cells) == same([first, last])
    assert read_cells(path) == cells
    assert notes == [f"{path}: the last line was cut short and is dropped; its cell is run again"]


def test_a_whole_line_without_its_end_is_kept(sweep, tmp_path):
    sweep = replace(sweep, budgets=(24,), policies=("keydiff",))
    first, last = run(sweep, tmp_path)
    path = tmp_path / "cells.jsonl"
    path.write_text(json.dumps(first.as_dict()))
    assert read_cells(path) == [first]
    assert not mend(path)
    add_cell(path, last)
    assert read_cells(path) == [first, last]
    assert not mend(tmp_path / "missing")


def test_two_sweeps_in_a_folder_are_refused(sweep, tmp_path):
    with (
        locked(tmp_path / ".lock", pytest.fail),
        pytest.raises(ValueError, match="another sweep is running"),
    ):
        run(sweep, tmp_path)
    assert not (tmp_path / "cells.jsonl").exists()


def test_a_cell_that_fails_is_named_and_the_others_go_on(sweep, tmp_path, monkeypatch):
    sweep = replace(sweep, policies=("keydiff", "snapkv", "full"), budgets=(48,))
    planted(monkeypatch, "snapkv", RuntimeError("out of\nmemory"))
    notes: list[str] = []
    with pytest.raises(CellsFailed, match=r"2 of 5 cells failed .*compact: out of; .*the same"):
        run(sweep, tmp_path, note=notes.append)
    name = "niah_single, 96 tokens, question-aware, snapkv, 48 slots"
    assert notes == [f"failed: {name}, {mode}: out of" for mode in ("compact", "true")]
    kept = read_cells(tmp_path / "cells.jsonl")
    assert [cell.setting.policy for cell in kept] == ["keydiff", "keydiff", "full"]
    assert (tmp_path / "results.md").read_text() == results(kept)
    monkeypatch.undo()
    steps: list[int] = []
    run(sweep, tmp_path, lambda done, *_: steps.append(done))
    assert steps == [3, 4, 5]


def test_the_command_shows_what_it_has_and_fails(folder, tmp_path, monkeypatch, capsys):
    planted(monkeypatch, "snapkv", ValueError("planted"))
    command = ["eval", str(folder), "--policies", "keydiff,snapkv,full", "--budgets", "48"]
    command += ["--lengths", "64", "--samples", "2", "--block-size", "16", "--positions", "true"]
    command += ["--compare", "keydiff,full", "--out", str(tmp_path), "--device", "cpu"]
    assert cli.run(command) == 1
    out, err = capsys.readouterr()
    assert "### keydiff against full, on the same samples" in out
    assert "kvcap: failed: niah_single, 64 tokens, question-aware, snapkv" in err
    assert "1 of 3 cells failed" in err


def test_ctrl_c_says_what_is_kept_and_how_to_go_on(folder, tmp_path, monkeypatch, capsys):
    command = ["eval", str(folder), "--policies", "keydiff,full", "--budgets", "48"]
    command += ["--lengths", "64", "--samples", "2", "--block-size", "16", "--positions", "true"]
    command += ["--out", str(tmp_path), "--device", "cpu"]
    with monkeypatch.context() as patched:
        planted(patched, "full", KeyboardInterrupt())
        assert cli.run(command) == 130
    says = (
        f"kvcap: interrupted: 1 of 2 cells are kept in {tmp_path}; the same command runs the rest"
    )
    assert capsys.readouterr().err.splitlines()[-1] == says
    assert cli.run(command) == 0
    text = tmp_path / "text"
    text.write_text("words " * 200)
    monkeypatch.setattr(agreement, "measure", interrupted)
    assert cli.run([*command, "--agreement", "-f", str(text)]) == 130
    assert "nothing is kept, the same command begins again" in capsys.readouterr().err


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("compared", [["keydiff"], ["keydiff", "tova"]])
def test_only_policies_of_the_sweep_are_compared(sweep, tmp_path, compared):
    with pytest.raises(ValueError, match="--compare: "):
        run(sweep, tmp_path / "out", compared=compared)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow(ci=0)
def test_processes_measure_what_one_does(sweep, tmp_path, capfd):
    steps: list[int] = []
    shared = run(sweep, tmp_path / "two", lambda n, *_: steps.append(n), crew=Crew(workers=2))
    assert steps == [0, 1, 2, 3, 4, 5]
    assert same(shared) == same(run(sweep, tmp_path / "one"))
    assert len((tmp_path / "two" / "cells.jsonl").read_text().splitlines()) == 5
    assert all("1 threads" in cell.device for cell in shared)
    assert "leaked" not in capfd.readouterr().err  # as extension modules say of what is frozen


def test_too_many_processes_are_refused_before_anything_runs(sweep, tmp_path):
    with pytest.raises(PlanInfeasible, match="--workers 99999: each takes"):
        run(sweep, tmp_path / "out", crew=Crew(workers=99999))
    assert not (tmp_path / "out").exists()


def test_a_worker_of_another_version_is_refused(sweep):
    job = runner.CellJob(sweep, sweep.settings("float32")[0], version="0.0")
    with pytest.raises(ValueError, match="install the same version"):
        job.load(0)

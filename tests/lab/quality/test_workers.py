"""Work is spread over processes; workers die, and so does who started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from make import eventually
from tools import PATIENCE
from worker_jobs import Chores

from kvcap.lab.quality.workers import Here, WorkerEngine, spread
from kvcap.lab.quality.workers.crew import Crew
from kvcap.lab.quality.workers.processes import Processes
from kvcap.runtime.cluster import Share
from kvcap.runtime.errors import ExtraMissing, PlanInfeasible, WorkersLost

WORDS = ["a", "b", "c", "d", "e"]


@pytest.fixture
def chores(tmp_path: Path) -> Chores:
    return Chores(tmp_path)


def done(engine: WorkerEngine, words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the result of every word, and the notes."""
    notes: list[str] = []
    results = list(spread(engine, words, lambda word: word, notes.append))
    assert sorted(word for word, _ in results) == sorted(words)  # each has one result
    return dict(results), notes


def is_gone(pid: int) -> bool:
    try:  # one call, between whose steps no process can end
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("workers", [0, 2])
def test_every_item_is_done_once_and_errors_are_results(chores, workers):
    engine = Processes(chores, workers) if workers else Here(chores)
    results, notes = done(engine, ["bad", *WORDS, "odd"])
    assert {word: results[word] for word in WORDS} == {word: word.upper() for word in WORDS}
    assert isinstance(results["bad"].error, FileNotFoundError)
    assert str(results["odd"].error) == "Odd: of a class that nobody else knows"
    assert sorted(chores.begun()) == sorted(["bad", *WORDS, "odd"])
    assert not notes
    assert 1 <= len(chores.processes()) <= max(1, workers)
    assert (os.getpid() in chores.processes()) is (workers == 0)
    assert all(is_gone(pid) for pid in chores.processes() if pid != os.getpid())


def test_a_worker_that_dies_has_its_item_done_by_another(chores, tmp_path):
    (tmp_path / "die-at-b").touch()
    results, notes = done(Processes(chores, 2), WORDS)
    assert results == {word: word.upper() for word in WORDS}
    assert sorted(chores.begun()) == sorted([*WORDS, "b"])
    assert len(notes) == 1
    assert "ended at b, which is given to another" in notes[0]


def test_an_item_that_kills_two_workers_fails_and_the_others_go_on(chores, tmp_path):
    (tmp_path / "always-at-c").touch()
    results, _ = done(Processes(chores, 1), WORDS)
    assert isinstance(results.pop("c").error, WorkersLost)
    assert results == {word: word.upper() for word in WORDS if word != "c"}
    assert chores.begun() == ["a", "b", "c", "c", "d", "e"]


def test_a_worker_that_dies_while_it_loads_is_replaced(chores, tmp_path):
    (tmp_path / "die-at-load-0").touch()
    results, notes = done(Processes(chores, 1), ["a"])
    assert (results, notes) == ({"a": "A"}, ["worker 0 ended before it was ready"])


def test_workers_that_all_die_while_they_load_end_the_work(chores, monkeypatch):
    monkeypatch.setattr(Processes, "start", lambda self, number: _Dead(number))
    with pytest.raises(WorkersLost, match="fewer --workers"):
        done(Processes(chores, 2), WORDS)


class _Dead:
    def __init__(self, number: int) -> None:
        from concurrent.futures import Future

        self.number, self.ready = number, Future[None]()
        self.ready.set_exception(RuntimeError("gone"))

    def close(self) -> None:
        pass


def test_what_loading_raises_ends_the_work(tmp_path):
    with pytest.raises(FileNotFoundError):
        done(Processes(Chores(tmp_path / "missing"), 1), WORDS)


def test_ending_early_ends_the_workers(chores):
    with closing(spread(Processes(chores, 2), ["wait", *WORDS], str, print)) as results:
        assert next(results)[0] == "a"
    eventually(lambda: all(map(is_gone, chores.processes())))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_process_that_started_them(chores, tmp_path, how):
    code = (
        "import sys; from pathlib import Path; from worker_jobs import Chores; "
        "from kvcap.lab.quality.workers import spread; "
        "from kvcap.lab.quality.workers.processes import Processes\n"
        "if __name__ == '__main__':\n"
        "    engine = Processes(Chores(Path(sys.argv[1])), 2)\n"
        "    list(spread(engine, ['wait', 'wait '], str.strip, print))\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    program = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    begun = tmp_path / "begun"
    eventually(lambda: begun.exists() and len(begun.read_text().splitlines()) == 2)
    if how is signal.SIGINT:  # as a terminal sends it, to the workers too
        os.killpg(program.pid, how)
    else:
        program.kill()
    err = program.communicate(timeout=PATIENCE)[1]
    eventually(lambda: all(map(is_gone, chores.processes())))
    assert err.count("Traceback") == (how is signal.SIGINT), err  # the program's own


def test_a_cluster_is_shared_by_gpus_or_by_threads():
    nodes = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 1.0}, {"memory": 1.0}]
    assert Share.of(nodes, None, None) == Share(3, 0, 1)
    assert Share.of(nodes, 2, None) == Share(2, 0, 1)
    nodes = [{"CPU": 8.0}, {"CPU": 3.0}, {"CPU": 0.0}]
    assert Share.of(nodes, None, 4) == Share(2, 4, 0)
    assert Share.of(nodes, None, None) == Share(3, 3, 0)
    assert Share.of(nodes, 1, 2) == Share(1, 2, 0)
    with pytest.raises(ValueError, match="16 CPUs for a worker; they have 8, 3"):
        Share.of(nodes, None, 16)


@pytest.mark.parametrize(
    ("crew", "error", "match"),
    [
        (Crew("slurm"), ValueError, "give local or ray"),
        (Crew(workers=0), ValueError, "--workers 0"),
        (Crew(ray_address="x:1"), ValueError, "needs --engine ray"),
    ],
)
def test_crews_that_cannot_be_are_refused(crew, error, match):
    with pytest.raises(error, match=match):
        crew.check()


def test_ray_is_refused_by_name_where_it_is_missing(monkeypatch):
    monkeypatch.setattr("kvcap.lab.quality.workers.ray_cluster.find_spec", lambda _: None)
    with pytest.raises(ExtraMissing, match=r"pip install '\.\[ray\]'"):
        Crew("ray").check()


def test_more_processes_than_memory_holds_are_refused():
    crew = Crew(workers=3, threads=7)
    crew.check_memory("cpu", 1 << 20)
    with pytest.raises(PlanInfeasible, match=r"--workers 3: each takes 1\.0 PiB|1,024\.0 TiB"):
        crew.check_memory("cpu", 1 << 50)
    Crew().check_memory("cpu", 1 << 50)  # one is the process itself
    assert crew.local_threads("cpu") == 2
    assert Crew(workers=64, threads=7).local_threads("cpu") == 1
    assert Crew().local_threads("cpu") is None
    assert isinstance(Crew().start(Chores(Path()), "cpu"), Here)


@pytest.mark.parametrize(
    ("gpus", "device", "workers", "count", "alone"),
    [
        (0, None, 4, 4, True),
        (1, "cpu", 4, 4, True),
        (2, None, None, 2, True),
        (2, "cuda", 2, 2, True),
        (1, "cuda", 12, 12, False),
        (8, "cuda:3", 2, 2, False),
        (8, "cuda:3", None, 1, True),
    ],
)
def test_several_workers_may_share_a_gpu(gpus, device, workers, count, alone, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    crew = Crew(workers=workers)
    assert crew.local_workers(device) == count
    assert crew.alone(device) == alone
    assert Crew("ray", workers).alone(device)

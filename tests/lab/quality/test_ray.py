"""Work is spread over a Ray cluster of several nodes, of which some are killed."""

from __future__ import annotations

from typing import Any

import pytest
from make import argv
from worker_jobs import Chores

from kvcap import cli
from kvcap.lab.quality.cells import read_cells
from kvcap.lab.quality.workers import spread
from kvcap.lab.quality.workers.ray_cluster import RayCluster
from kvcap.runtime.errors import WorkersLost

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="pip install '.[ray]'")
STORE = {"object_store_memory": 100 << 20}
WORDS = ["a", "b", "c", "d", "e", "f"]


def done(chores: Chores, address: str) -> tuple[dict[str, Any], list[str]]:
    notes: list[str] = []
    engine = RayCluster(chores, address=address)
    assert engine.workers == 2
    return dict(spread(engine, WORDS, str, notes.append)), notes


def test_workers_killed_on_a_cluster_lose_nothing(cluster, tmp_path):
    for plant in ("die-at-b", "always-at-d"):
        (tmp_path / plant).touch()
    chores = Chores(tmp_path)
    results, notes = done(chores, cluster.address)
    assert isinstance(results.pop("d").error, WorkersLost)
    assert results == {word: word.upper() for word in WORDS if word != "d"}
    assert sorted(chores.begun()) == sorted([*WORDS, "b", "d"])
    assert sorted(note.split(" at ")[1] for note in notes) == [
        "b, which is given to another",
        "d, which is given to another",
    ]
    assert not ray.is_initialized()  # the cluster is left, and goes on


def test_a_node_killed_in_a_sweep_loses_nothing(cluster, tmp_path):
    node = cluster.add_node(num_cpus=1, **STORE)
    cluster.wait_for_nodes()
    chores, notes = Chores(tmp_path), list[str]()
    engine = RayCluster(chores, address=cluster.address)
    assert engine.workers == 3
    cells: dict[str, Any] = {}
    results = spread(engine, [*WORDS, *(f"{word}2" for word in WORDS)], str, notes.append)
    for word, result in results:
        cells[word] = result
        if len(cells) == 2:
            cluster.remove_node(node, allow_graceful=False)
    assert cells == {word: word.upper() for word in cells}
    assert len(cells) == 12


def test_the_command_spreads_cells_over_a_cluster(cluster, folder, tmp_path):
    command = argv(
        "eval {} --policies keydiff,full --budgets 24,48 "
        "--lengths 64 --samples 2 --block-size 16 --device cpu",
        folder,
    )
    ray_options = ["--engine", "ray", "--ray-address", cluster.address]
    assert cli.run([*command, *ray_options, "--out", str(tmp_path / "ray")]) == 0
    assert cli.run([*command, "--out", str(tmp_path / "here")]) == 0
    there, here = (read_cells(tmp_path / name / "cells.jsonl") for name in ("ray", "here"))
    assert len(there) == 3
    assert {(c.setting, c.scores) for c in there} == {(c.setting, c.scores) for c in here}


def test_a_cluster_that_does_not_answer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"--ray-address 127\.0\.0\.1:1: no Ray cluster answers"):
        RayCluster(Chores(tmp_path), address="127.0.0.1:1")

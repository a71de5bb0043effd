"""The lab's commands are there in a checkout, and named where kvcap is installed without it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from kvcap import cli
from kvcap.evals import bench


@pytest.fixture
def without_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def find_others(name: str, *more: Any) -> Any:
        return None if name == "kvcap.lab" else find(name, *more)

    for module in (cli, bench):
        monkeypatch.setattr(module, "find_spec", find_others)


def test_a_checkout_has_all_commands_and_benchmarks():
    assert {*cli.COMMANDS, *cli.LAB} == {*cli.application().commands}
    assert {"prefill", "kernels"} <= bench.benchmarks().keys()


@pytest.mark.parametrize(
    "line", ["analyze pocket all", "eval pocket", "report out", "bench kernels"]
)
@pytest.mark.usefixtures("without_lab")
def test_without_it_they_are_named(line, capsys):
    assert {*cli.application().commands} == {*cli.COMMANDS}
    assert {*bench.benchmarks()} == {"decode", "prefill"}
    assert cli.run(line.split()) in (1, 2)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "comes with kvcap's repository" in err

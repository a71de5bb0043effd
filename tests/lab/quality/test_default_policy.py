"""Holds the default policy to the measurements that lie beside the leaderboard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvcap.evals.quality.paired import compare
from kvcap.lab.quality.cells import Cell, Setting, cells_of
from kvcap.runtime.types import DEFAULT_POLICY

FOLDERS = sorted((Path(__file__).parents[3] / "docs/cells").iterdir())


@pytest.fixture(scope="module")
def cells() -> dict[Setting, Cell]:
    return {cell.setting: cell for cell in cells_of(FOLDERS)}


def losses(
    cells: dict[Setting, Cell], policy: str, baseline: str, *, flow: bool = False
) -> Iterator[Setting]:
    """Yield where a policy is worse than a baseline by more than chance, on the same samples.

    Args:
        cells: by their settings.
        policy: with the options that it has by default.
        baseline: at the same budget, positions, sinks and recall.
        flow: look at running text alone.
    """
    for setting, cell in cells.items():
        if setting.policy != policy or (flow and cell.unit != "perplexity"):
            continue
        if not as_by_default(setting):
            continue
        other = cells.get(replace(setting, policy=baseline))
        if other is None or cell.scores is None or other.scores is None:
            continue
        comparison = compare(cell.scores, other.scores, cell.of)
        if comparison.ci_low > 1 if cell.unit == "perplexity" else comparison.ci_high < 0:
            yield setting


def as_by_default(setting: Setting) -> bool:
    return not {name for name, _ in setting.options} - {"sink_tokens"}


def budgets(cells: Sequence[Setting], model: str) -> set[int | None]:
    measured = (s for s in cells if s.model == model and s.policy == DEFAULT_POLICY)
    return {s.budget for s in measured if as_by_default(s)}


def test_the_default_policy_is_nowhere_worse_than_random_slots(cells):
    assert not [*losses(cells, DEFAULT_POLICY, "random")]


def test_the_default_policy_keeps_the_flow_of_a_text_as_a_window_of_the_last_tokens_does(cells):
    assert not [*losses(cells, DEFAULT_POLICY, "streaming_llm", flow=True)]


@pytest.mark.parametrize(
    ("model", "measured"),
    [
        ("gemma-3-270m", {128, 256, 512, 1024}),
        ("pocket-plain", {256, 1024}),
        ("pocket-text", {256, 1024}),
    ],
)
def test_the_default_policy_was_measured_on_every_model(cells, model, measured):
    assert budgets([*cells], model) >= measured

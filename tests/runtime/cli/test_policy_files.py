"""The list of `kvcap policies` as it is made from files, without importing policies."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcap import policies
from kvcap.policies import load_policy
from kvcap.runtime.cli import policy_files
from kvcap.runtime.cli.policy_files import read_list
from kvcap.runtime.cli.tables import describe, describe_companions

ONE = '''
from dataclasses import dataclass
import typing
from typing import ClassVar

import torch

from kvcap.policies.base import Policy, Preset, WindowPolicy


def three() -> int:
    return 3


@dataclass(frozen=True)
class One(Policy):
    """Keep something."""

    ratio: float = 0.5
    state: ClassVar = {"seen": torch.float16}
    formula: ClassVar = "something"
    paper: ClassVar = "none"
    presets: ClassVar = {"one-half": Preset("one", {"ratio": 0.25, "recent_tokens": 8}, "for half")}

    def score(self, obs):
        return three() * torch.ones_like(obs.positions)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the policies, whose files are read instead of them."""
    copied = tmp_path / "policies"
    shutil.copytree(Path(policies.__file__).parent, copied)
    spec = SimpleNamespace(origin=str(copied / "__init__.py"))
    monkeypatch.setattr(policy_files, "find_spec", lambda _: spec)
    return copied


def rows() -> dict[str, Any]:
    listed = read_list()
    assert listed is not None
    return {row["name"]: row for row in listed[0]}


def test_rows_are_those_of_the_imported_policies() -> None:
    listed = read_list()
    assert listed is not None
    assert listed[0] == [describe(name, load_policy(name)) for name in policies.policies()]
    assert listed[1] == describe_companions()


def test_a_new_file_is_listed(folder: Path) -> None:
    (folder / "one.py").write_text(ONE)
    by_name = rows()
    assert by_name["one"]["options"] == {"ratio": 0.5, "sink_tokens": 4, "recent_tokens": 0}
    assert by_name["one"]["state_bytes_per_slot"] == 2
    half = by_name["one-half"]
    assert (half["composition"], half["when"]) == ("one", "for half")
    assert half["options"] == {"ratio": 0.25, "sink_tokens": 4, "recent_tokens": 8}
    assert half["preset"] == {"ratio": 0.25, "recent_tokens": 8}
    (folder / "one.py").unlink()
    assert not rows().keys() & {"one", "one-half"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ratio: float = 0.5", "ratio: float = three() / 6"),
        ("ratio: float = 0.5", "ratio: typing.ClassVar[float] = 0.5"),
        ("ratio: float = 0.5", "ratio: float"),
        ("torch.float16", "torch.complex64"),
        ("One(Policy)", "One(SnapKV)"),
        ('Preset("one", {', 'Preset("two", {'),
        ('Preset("one", {', 'Preset("one+adakv", {"unknown": 1, '),
        ("one-half", "snapkv"),
        ("def score(self, obs)", "@property\n    def queries_observed(self)"),
        ("class One", "klass One"),
    ],
)  # fmt: skip
def test_what_a_class_statement_alone_does_not_tell_is_left_to_the_import(
    folder: Path, old: str, new: str
) -> None:
    assert old in ONE
    (folder / "one.py").write_text(ONE.replace(old, new))
    assert read_list() is None
    (folder / "one.py").write_text(f"{ONE}\n\nclass Two(Policy):\n    pass\n")
    assert read_list() is None


def test_other_packages_policies_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_files, "entry_points", lambda group: [group])
    assert read_list() is None

"""A policy or companion is one file: dropped into `policies/` it passes, and no other is edited."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from make import ran

from kvcap.policies import Policy, PolicyError, _class_in, policies
from kvcap.policies.base import Preset
from kvcap.policies.knorm import Knorm

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).relative_to(ROOT / "tests")
HEAD = """from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcap.policies.base import (
    Corrector, HeadBudget, LayerBudget, Observation, Policy, Preset, Rescorer, Saliency, apportion
)


@dataclass(frozen=True)
"""
FILES = {  # the example of CONTRIBUTING.md, a policy of everything it names, one of each companion
    "faded": """class Faded(Policy):
    '''`φ_j <- fade · φ_j + Σ_t A_tj`, the newest tokens pinned.'''

    fade: float = 0.9
    newest: int = 64

    observes: ClassVar = frozenset({"keys", "queries", "attention", "state"})
    state: ClassVar = {"faded": torch.float32}
    paper: ClassVar = "none, an example"
    formula: ClassVar = "fading sum over all queries of A_tj"
    when: ClassVar = "to see how attention that fades is kept"
    small: ClassVar = {"newest": 3}
    presets: ClassVar = {"faded-half": Preset("faded", {"fade": 0.5})}

    def __post_init__(self) -> None:
        self.require("fade", 0 <= self.fade <= 1, "a fraction, 0 to 1")

    @property
    def queries_observed(self) -> None:
        return None

    def recents_pinned(self, budget: int) -> int:
        return self.newest

    def update(self, obs: Observation) -> dict[str, Tensor]:
        return {"faded": self.fade * obs.state["faded"] + obs.weight.sum(-2).mean(2)}

    def score(self, obs: Observation) -> Tensor:
        return obs.state["faded"]
""",
    "saliencies/sharp": """class Sharp(Saliency):
    '''`A²` in place of `A`.'''

    observes: ClassVar = frozenset({"keys", "queries", "attention"})
    paper: ClassVar = "none, an example"
    formula: ClassVar = "in place of A_tj: A²"
    when: ClassVar = "to see how sharper attention is kept"
    presets: ClassVar = {"sharp": Preset("tova+sharp")}

    def weigh(self, obs: Observation) -> Tensor:
        return obs.attention.square()
""",
    "budgets/headstart": """class HeadStart(LayerBudget):
    '''The first layer gets what is over half of each other's.'''

    paper: ClassVar = "none, an example"
    formula: ClassVar = "half for all layers but the first"
    when: ClassVar = "to see how uneven layers are held"
    presets: ClassVar = {"headstart": Preset("keydiff+headstart")}

    def split(self, budget: int, layers: int, pinned: int) -> list[int]:
        least = min(budget, max(budget // 2, pinned + 1))
        return [budget * layers - least * (layers - 1), *[least] * (layers - 1)]
""",
    "budgets/uneven": """class Uneven(HeadBudget):
    '''Later heads get more, by a share of what is not pinned.'''

    share: float = 0.5

    paper: ClassVar = "none, an example"
    formula: ClassVar = "slots in proportion to 1 + share · k"
    when: ClassVar = "to see how uneven heads are held"
    presets: ClassVar = {"uneven": Preset("snapkv+uneven")}

    def allot(self, budgets: list[int], kv_heads: int, pinned: int) -> list[list[int]]:
        found, shares = [], [1 + self.share * k for k in range(kv_heads)]
        for budget in budgets:
            least = min(budget, pinned + 1)
            more = apportion(shares, (budget - least) * kv_heads)
            found.append([least + extra for extra in more])
        return found
""",
    "rescorers/bright": """class Bright(Rescorer):
    '''Scores times the norms of values.'''

    observes: ClassVar = frozenset({"values"})
    paper: ClassVar = "none, an example"
    formula: ClassVar = "S |v_j|"
    when: ClassVar = "to see how large values are kept"
    presets: ClassVar = {"bright": Preset("tova+bright")}

    def rescore(self, scores: Tensor, pinned: Tensor, obs: Observation) -> Tensor:
        return scores * torch.linalg.vector_norm(obs.values.float(), dim=-1)
""",
    "correctors/bystander": """class Bystander(Corrector):
    '''Keeps evicted tokens, and corrects nothing.'''

    kept: int = 512

    paper: ClassVar = "none, an example"
    formula: ClassVar = "attention as it is"
    when: ClassVar = "to see what evicted tokens cost"
    small: ClassVar = {"kept": 20}
    observes: ClassVar = frozenset({"queries", "keys", "values"})
    presets: ClassVar = {"bystander": Preset("tova+bystander")}

    @property
    def size(self) -> int:
        return self.kept

    def decide(self, query: Tensor, cached: Tensor) -> tuple[Tensor, Tensor]:
        no = torch.zeros(query.shape[:-1], dtype=torch.bool, device=query.device)
        return no, no
""",
}


def planted(folder: Path, files: dict[str, str]) -> Path:
    """A copy of this checkout in which `policies/` has more files.

    What Python compiled comes along, so that nothing of it is compiled again.
    """
    written = "*.pyc.*"  # by another process, to be renamed in a moment
    left = shutil.ignore_patterns(".*", "out", "build", "dist", "*.egg-info", written)
    copy = Path(shutil.copytree(ROOT, folder / "copy", symlinks=True, ignore=left))
    for name, body in files.items():
        head = "" if body.startswith('"""') else f'"""{name}: an example."""\n\n{HEAD}'
        (copy / "policies" / f"{name}.py").write_text(head + body)
    return copy


FEWER = """# Of each test one set of parameters for each new name, for half of them if it is slow.
import pytest, re

@pytest.hookimpl(trylast=True)  # of those that -k leaves
def pytest_collection_modifyitems(items):
    sets = {}
    for item in items:
        test, _, parameters = item.nodeid.partition("[")
        of = tuple(name for name in NAMES if re.search(rf"\\b{name}\\b", parameters))
        sets.setdefault((test, of), []).append(item)
    items[:] = [
        several[-(place % 2)]
        for place, ((_, of), several) in enumerate(sets.items())
        if place // 2 % 2 == 0 or not (of and several[0].get_closest_marker("slow"))
    ]
"""


def outcome(copy: Path, *arguments: str) -> tuple[int, str]:
    """The exit code of its tests, and what they say."""
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    done = ran([*command, *arguments], cwd=copy, env=environment)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_new_files_pass_with_no_other_edit(tmp_path):
    """Every test that takes a policy by its name, and every test of all names together."""
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    copy = planted(tmp_path, {"oldest": example, **FILES})
    names = ["oldest", *(name.rpartition("/")[2] for name in FILES)]
    together = [
        "page_on_policies",
        "documents_itself",
        "every_policy_is_listed",
        "presets_hold",
        "companions_stand",
        "shell_completes",
        "graphs_of_their_own",
    ]
    words = " or ".join(names + together)
    (copy / "src" / "fewer.py").write_text(f"NAMES = {names}\n{FEWER}")
    files = [
        str(file.relative_to(copy))
        for file in sorted((copy / "tests").rglob("test_*.py"))
        if file.name != HERE.name and "policies" in file.read_text()
    ]
    code, output = outcome(copy, *files, "--all", "-rA", "-p", "fewer", "-k", words)
    assert code == 0, re.sub(r"^PASSED .*\n", "", output, flags=re.MULTILINE)[-10_000:]
    for name in names:
        passed = re.findall(rf"^PASSED .*\[.*\b{name}\b", output, re.MULTILINE)
        assert len(passed) > 10, f"{name} was in {len(passed)} tests"


@pytest.mark.slow
def test_broken_files_are_reported_by_name(tmp_path):
    score = "    def score(self, obs: Observation) -> Tensor:\n        return obs.positions.float()"
    files = {
        "narrow": f"class Narrow(Policy):\n{score}[:, :1]\n",
        "nowhere": f"class Nowhere(Policy):\n{score} * float('nan')\n",
        "unknown": f"class Unknown(Policy):\n    small: ClassVar = {{'span': 3}}\n\n{score}\n",
    }
    copy = planted(tmp_path, files)
    tests = ["tests/policies/test_policies.py", "tests/runtime/models/test_families.py"]
    code, output = outcome(copy, *tests, "-k", " or ".join(files))
    assert code == 1, output
    assert "Narrow: scores of shape [2, 1, 23]" in output
    assert "Nowhere: scores that are not finite" in output
    assert "policy unknown has no option 'span'" in output


def test_a_file_of_two_policies_is_refused(monkeypatch):
    classes = {name: type(name, (Policy,), {"__module__": "two"}) for name in ("A", "B")}
    monkeypatch.setitem(sys.modules, "two", ModuleType("two"))
    vars(sys.modules["two"]).update(classes, Policy=Policy)
    with pytest.raises(PolicyError, match=r"two must define one policy or companion; it .* A, B"):
        _class_in("two")


def test_a_preset_takes_no_name_that_is_taken(monkeypatch):
    monkeypatch.setattr(Knorm, "presets", {"h2o": Preset("knorm")}, raising=False)
    policies.cache_clear()
    with pytest.raises(
        PolicyError, match=r"policies\.knorm has a preset 'h2o', a name that is tak"
    ):
        policies()
    monkeypatch.undo()
    policies.cache_clear()

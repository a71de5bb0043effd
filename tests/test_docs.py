"""Documents cannot rot: examples run, commands and policies that they name exist."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import kvcap
from kvcap import pocket
from kvcap.cli import app
from kvcap.evals.bench import benchmarks
from kvcap.policies import policies
from kvcap.runtime import errors

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MODULES = [
    m.name
    for m in pkgutil.walk_packages(kvcap.__path__, "kvcap.")
    if not m.name.endswith("__main__")
]


@pytest.mark.slow(keep=92)
@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    if "doctest: +SKIP" in (module.__doc__ or ""):
        return
    names = {n: getattr(kvcap, n) for n in kvcap.__all__}
    failed, _ = doctest.testmod(module, extraglobs=names)
    assert not failed
    assert module.__doc__, f"{name} must say what it is"


def test_examples_in_the_readme(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    exec(blocks[0], {})
    held = re.search(r"(\d+) tokens held, (\d+) bytes at most", capsys.readouterr().out)
    assert int(held[1]) <= 256
    from transformers import AutoModelForCausalLM, AutoTokenizer

    inputs = AutoTokenizer.from_pretrained(pocket.path())(" word" * 300, return_tensors="pt")
    names = {"kvcap": kvcap, "AutoModelForCausalLM": AutoModelForCausalLM, "inputs": inputs}
    inputs["max_new_tokens"] = 4
    for block in blocks[1:]:
        code = block.replace('"Qwen/Qwen3-0.6B"', repr(str(pocket.path())))
        exec(code.replace("budget_tokens=1024", "budget_tokens=64"), names)
    assert "64 held of 64" in capsys.readouterr().out
    assert (names["capped"].cache.held, names["cache"].held) == (64, 64)


def test_the_policy_example_in_contributing():
    """The file shown is a whole policy: it loads and scores."""
    import torch

    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    # A dataclass looks its module up, so the example runs as one.
    module = vars(sys.modules.setdefault("oldest", ModuleType("oldest")))
    exec(compile(code, "oldest.py", "exec"), module)
    obs = kvcap.Observation(
        keys=torch.zeros(1, 1, 3, 2), values=torch.zeros(1, 1, 3, 2),
        positions=torch.tensor([[[5, 1, 3]]]), num_tokens=6, budget=2,
    )  # fmt: skip
    assert kvcap.Eviction(module["Oldest"]()).select(obs, 1).item() == 0


def test_every_command_and_make_target_is_named():
    commands = [c.name for c in (*app.registered_commands, *app.registered_groups)]
    assert commands
    for command in commands:
        assert f"kvcap {command}" in README, f"README does not say what kvcap {command} is for"
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    texts = README + (ROOT / "CONTRIBUTING.md").read_text()
    for name in re.findall(r"make ([a-z-]+) +#", texts):
        assert name in targets


def test_the_page_on_policies():
    """What its tables name is there, and its example runs."""
    page = (ROOT / "docs" / "policies.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`)[^|]* \|", page, re.MULTILINE)
    assert len(rows) > 30
    for name in re.findall(r"`([\w-]+)`", " ".join(rows)):
        assert name in policies(), f"docs/policies.md has a row of {name}, which is no policy"
    for name in re.findall(r"kvcap bench (\w+)", page):
        assert name in benchmarks()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})


def test_the_error_tree_names_every_error():
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert name in errors.__doc__


def test_nothing_here_names_a_machine():
    """No absolute path of a build machine in anything that is shipped."""
    for path in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.rglob("*.py")]:
        if not str(path.relative_to(ROOT)).startswith("."):
            assert not re.search(r"/(work|root|home)/\w", path.read_text()), path

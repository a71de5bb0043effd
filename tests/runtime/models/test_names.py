"""What a model's name means, and what names that mean none are refused as: at once, by what it is.

Nothing here reaches a network: the hub's answers are made up.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from safetensors.torch import save_file
from tiny_chat import save

from kvcap.runtime.errors import KvcapError, ModelNotFound, UnsupportedModel
from kvcap.runtime.models.names import is_export, resolve

REPOSITORY = "Someone/A-Model"


def refused(name: str, kind: type[KvcapError] = ModelNotFound) -> str:
    with pytest.raises(kind) as caught:
        resolve(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working folder, and a hub that must not be asked."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(HfApi, "model_info", fail)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the hub answers, and lists what it was asked."""
    names: list[str] = []

    def answer(reply: Any = None, access: Exception | None = None) -> list[str]:
        def give(what: Any) -> Any:
            if isinstance(what, Exception):
                raise what
            return what

        def info(_: HfApi, name: str, **__: Any) -> Any:
            names.append(name)
            return give(reply)

        monkeypatch.setattr(HfApi, "model_info", info)
        monkeypatch.setattr(HfApi, "auth_check", lambda _, name: give(access))
        return names

    return answer


def http(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind(f"{status} from the hub", response=response)


def listing(*files: str, gated: bool = False) -> Any:
    return SimpleNamespace(gated=gated, siblings=[SimpleNamespace(rfilename=x) for x in files])


def test_files_are_refused_as_what_they_are(unasked: Path) -> None:
    import torch

    with zipfile.ZipFile(unasked / "pytorch_model.bin", "w") as archive:
        archive.writestr("data.pkl", "")
    save_file({"x": torch.zeros(2)}, unasked / "model.safetensors")
    save_file({"x": torch.zeros(2)}, unasked / "blob")
    (unasked / "decoder.onnx").write_bytes(b"\x08\x0a")
    (unasked / "notes.txt").write_text("Hello")
    os.mkfifo(unasked / "pipe")
    for name, says in [
        ("pytorch_model.bin", "pickled"),
        ("model.safetensors", "a file of weights; give the directory"),
        ("blob", "a file of weights; give the directory"),
        ("decoder.onnx", "an ONNX graph; give the directory"),
        ("notes.txt", "a file; give the directory"),
        ("pipe", "no file that could hold a model"),
        ("/dev/zero", "no file that could hold a model"),
    ]:
        assert says in refused(name)


def test_a_gguf_file_is_a_model_by_its_first_bytes(unasked: Path) -> None:
    for name in ("tiny.gguf", "disguised"):
        (unasked / name).write_bytes(b"GGUF\3\0\0\0" + bytes(20))
        assert resolve(name) == name
    (unasked / "zip.gguf").write_bytes(b"PK")
    assert "a zip archive" in refused("zip.gguf")


def test_names_that_are_no_repository_are_refused_without_asking(unasked: Path) -> None:
    (unasked / "my-llama").mkdir()
    (unasked / "tiny.gguf").write_bytes(b"GGUF\3\0\0\0" + bytes(20))
    for name, says in [
        ("model.gguf", "there is no file 'model.gguf'"),
        ("./none/model.gguf", "there is no file './none/model.gguf'"),
        ("tinny.gguf", "did you mean 'tiny.gguf'?"),
        ("", "no model: give 'pocket'"),
        ("./nowhere", "there is no directory './nowhere'"),
        ("../none/x", "is not there either"),
        ("/none/x", "'/none' is not there either"),
        ("~/none-of-that-name", "there is no directory"),
        ("C:\\models\\llama", "there is no directory"),
        ("a/b/c", "'a' is not there either"),
        ("pokcet", "did you mean 'pocket'?"),
        ("Pocket", "did you mean 'pocket'?"),
        ("my-lama", "did you mean 'my-llama'?"),
        ("./my-lama", "did you mean 'my-llama'?"),
        ("gpt2", "as OWNER/NAME, such as Qwen/Qwen3-0.6B"),
        ("two words", "as OWNER/NAME"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "name, Qwen/Qwen3-0.6B"),
    ]:
        assert says in refused(name)


def test_directories_without_a_model_say_what_they_hold(unasked: Path) -> None:
    (unasked / "outer" / "inner").mkdir(parents=True)
    assert "holds no config.json" in refused("outer")
    (unasked / "outer" / "inner" / "config.json").write_text("{}")
    assert f"did you mean {str(Path('outer', 'inner'))!r}?" in refused("outer")
    assert resolve("outer/inner") == str(Path("outer", "inner"))
    (unasked / "outer" / "x.gguf").write_bytes(b"GGUF")
    assert f"give one of them, such as {str(Path('outer', 'x.gguf'))!r}" in refused("outer")


def test_an_export_is_told_from_a_model(unasked: Path) -> None:
    model = Path(save(unasked / "both"))
    (model / "kvcap.json").write_text("{}")
    assert not is_export(model)
    assert resolve(model) == str(model)
    export = unasked / "export"
    export.mkdir()
    (export / "kvcap.json").write_text("{}")
    assert is_export(export)
    assert "--backend onnxruntime" in refused("export", UnsupportedModel)


def test_a_repository_is_asked_for_once(hub: Any) -> None:
    names = hub(listing("config.json", "model.safetensors"))
    assert resolve(REPOSITORY) == REPOSITORY
    assert names == [REPOSITORY]
    hub(listing("config.json", gated=True))
    assert resolve(REPOSITORY) == REPOSITORY  # whose terms were accepted


@pytest.mark.parametrize(
    ("reply", "access", "says"),
    [
        (http(RepositoryNotFoundError, 404), None, "is no repository of"),
        (listing("config.json", gated=True), http(GatedRepoError, 403), "is gated: accept its"),
        (http(HfHubHTTPError, 503), None, "cannot be had now: 503"),
        (ConnectionError("Name or service not known"), None, "cannot be reached"),
        (TimeoutError("timed out"), None, "cannot be reached"),
        (listing("x.Q4_K_M.gguf", "README.md"), None, "holds GGUF"),
        (listing("README.md"), None, "holds no config.json"),
    ],
)
def test_what_the_hub_says_is_told(
    reply: Any, access: Exception | None, says: str, hub: Any
) -> None:
    names = hub(reply, access)
    assert says in refused(REPOSITORY)
    assert names == [REPOSITORY]


def test_without_a_network_the_copy_in_the_cache_is_taken(
    hub: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub(ConnectionError("no network"))
    copy = tmp_path / "snapshot"
    copy.mkdir()
    (copy / "config.json").write_text("{}")
    cached = {(REPOSITORY, "config.json"): str(copy / "config.json")}
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda *name: cached.get(name), raising=True
    )
    assert resolve(REPOSITORY) == str(copy)
    assert "cannot be reached" in refused("Someone/Else")


def test_offline_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub's library itself: with HF_HUB_OFFLINE, as tests run, it asks nobody."""
    monkeypatch.chdir(tmp_path)
    assert "cannot be reached" in refused("someone/no-such-model")
    (tmp_path / "models" / "llama").mkdir(parents=True)
    assert "did you mean 'llama'?" in refused("models/lama")

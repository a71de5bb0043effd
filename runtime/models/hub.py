"""Finds models in the hub's cache, and downloads them there by the hub's own library.

That library shows how far it is, resumes what was interrupted, and heeds `HF_HUB_OFFLINE`, proxies
and `HF_ENDPOINT`. It is imported where a repository is meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvcap.runtime.errors import ModelNotFound, first_line
from kvcap.runtime.models.packaged import PACKAGED

CONFIG = "config.json"
TIMEOUT = 10.0  # seconds within which the hub must answer
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
GGUF_OF = re.compile(r"([\w.-]+/[\w.-]+):([\w.-]+)")
GGUF = ".gguf"
PARTS = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
NO_TEXT = "mmproj"  # in the name of a file that reads images
ENDS = (".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken")
"""Holds how the names of the files end that a model of transformers may consist of."""
SHORT = {
    "qwen3-0.6b": "Qwen/Qwen3-0.6B-GGUF:Q8_0",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B-GGUF:Q8_0",
    "qwen3-4b": "Qwen/Qwen3-4B-GGUF:Q4_K_M",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF:q8_0",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:q4_k_m",
}
"""Maps short names to GGUF files of the hub, all of chat models with open licences."""


class Cached(NamedTuple):
    """A model in the hub's cache."""

    name: str  # that a command takes
    path: Path
    nbytes: int


def names_file(name: str) -> bool:
    """Return whether `name` means a GGUF file of a repository: a short name, or OWNER/NAME:PART."""
    return name in SHORT or GGUF_OF.fullmatch(name) is not None


def kept_gguf(name: str) -> Path | None:
    """Return the GGUF file that `name` means, from the hub's cache; None where it is not there.

    Raises:
        ModelNotFound: several files there may be meant.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, part = _parts(name)
    try:
        folder = Path(snapshot_download(repository, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    there = [path.relative_to(folder).as_posix() for path in folder.rglob(f"*{GGUF}")]
    choices = _meant(there, part)
    if len(choices) > 1:
        raise _several(name, repository, choices)
    return folder / choices[0][0] if choices else None


def gguf_file(name: str) -> Path:
    """Return the GGUF file that `name` means; download it where it is not in the cache.

    Of a model in several files it is the first.

    Raises:
        ModelNotFound: it cannot be had, or the name does not mean one file.
    """
    if (kept := kept_gguf(name)) is not None:
        return kept
    repository, files = _listed(name)
    return _downloaded(repository, list(files)) / min(files)


def pulled(name: str) -> Path:
    """Return where a repository of a model of transformers, or a GGUF file, is once downloaded.

    Raises:
        ModelNotFound: it cannot be had, or holds no model.
    """
    if names_file(name):
        return gguf_file(name)
    if not REPOSITORY.fullmatch(name):
        raise ModelNotFound(
            f"{name!r} is no name of a model that can be downloaded; give OWNER/NAME, "
            f"OWNER/NAME:Q4_K_M for a GGUF file, or one of {', '.join((*PACKAGED, *SHORT))}"
        )
    files = [entry.rfilename for entry in described(name).siblings or []]
    check_files(name, files)
    needed = [
        x
        for x in files
        if x.endswith(ENDS) and ("/" not in x or x.startswith("additional_chat_templates/"))
    ]
    if not any(x.endswith(".safetensors") for x in needed):
        raise ModelNotFound(f"{name!r} holds no safetensors, from which weights are read")
    return _downloaded(name, needed)


def download_bytes(name: str) -> int:
    """Return the bytes of the GGUF file that `name` means, as the hub says.

    Raises:
        ModelNotFound: it cannot be had, or the name does not mean one file.
    """
    return sum(_listed(name)[1].values())


def described(repository: str, *, sizes: bool = False) -> Any:
    """Return the hub's description of a repository that may be read.

    Args:
        repository: as OWNER/NAME.
        sizes: with those of its files.

    Raises:
        ModelNotFound: it cannot be had; the message says why.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        info = hub.model_info(repository, timeout=TIMEOUT, files_metadata=sizes)
        if info.gated:
            hub.auth_check(repository)
    except Exception as error:  # any HTTP library's own; or the hub is set to stay offline
        raise ModelNotFound(
            f"{repository!r} {_refusal(error, hub.endpoint, repository)}"
        ) from error
    return info


def check_files(repository: str, files: list[str]) -> None:
    """Refuse a repository without a config, which is no model of transformers.

    Raises:
        ModelNotFound: the message names GGUF files to give, where it has some.
    """
    if not files or CONFIG in files:
        return
    gguf_files = _meant(files, "")
    if gguf_files:
        raise ModelNotFound(
            f"{repository!r} holds GGUF files; give one of them, {_choices(repository, gguf_files)}"
        )
    raise ModelNotFound(f"{repository!r} holds no {CONFIG}, so it is no model of transformers")


def cached() -> Iterator[Cached]:
    """Yield the models in the hub's cache that kvcap can run, in the order of their names."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda x: x.repo_id.lower()):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        newest = max(repository.revisions, key=lambda x: ("main" in x.refs, x.last_modified))
        folder = newest.snapshot_path
        sizes = {x.file_path.relative_to(folder).as_posix(): x.size_on_disk for x in newest.files}
        if CONFIG in sizes and any(x.endswith(".safetensors") for x in sizes):
            yield Cached(repository.repo_id, folder, sum(sizes.values()))
        for parts in _meant(sizes, ""):
            name = f"{repository.repo_id}:{_stem(parts[0])}"
            yield Cached(name, folder / parts[0], sum(sizes[x] for x in parts))


def _parts(name: str) -> tuple[str, str]:
    """Return the repository that a name means, and the part of a file's name."""
    repository, _, part = SHORT.get(name, name).partition(":")
    return repository, part


def _listed(name: str) -> tuple[str, dict[str, int]]:
    """Return a repository and the bytes of the files of the one GGUF that a name means."""
    repository, part = _parts(name)
    entries = described(repository, sizes=True).siblings or []
    sizes = {entry.rfilename: entry.size or 0 for entry in entries}
    choices = _meant(sizes, part)
    if len(choices) != 1:
        raise _several(name, repository, choices or _meant(sizes, ""))
    return repository, {file: sizes[file] for file in choices[0]}


def _meant(files: Iterable[str], part: str) -> list[list[str]]:
    """Return the GGUF files whose names end with `part`; if none do, those that contain it."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(GGUF) and NO_TEXT not in file.lower():
            models.setdefault(_stem(file), []).append(file)
    suffix = part.lower()
    exact = [x for stem, x in models.items() if stem.lower().endswith(suffix)]
    return exact or [x for stem, x in models.items() if suffix in stem.lower()]


def _stem(file: str) -> str:
    return Path(PARTS.sub("", file)).stem


def _several(name: str, repository: str, choices: list[list[str]]) -> ModelNotFound:
    if not choices:
        return ModelNotFound(f"{repository!r} holds no GGUF file; leave the part behind ':' out")
    return ModelNotFound(
        f"{name!r} does not mean one GGUF file; give {_choices(repository, choices)}"
    )


def _choices(repository: str, choices: list[list[str]]) -> str:
    return " or ".join(f"{repository}:{_stem(files[0])}" for files in choices[:8])


def _downloaded(repository: str, files: list[str]) -> Path:
    """Download files of a repository into the hub's cache; return their folder."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        for file in files:
            path = Path(hf_hub_download(repository, file))
    except Exception as error:  # any HTTP library's own; a full disk
        why = _refusal(error, HfApi().endpoint, repository)
        raise ModelNotFound(f"{repository!r} {why}") from error
    return path.parents[file.count("/")]


def _refusal(error: Exception, hub: str, name: str) -> str:
    """Say why a repository cannot be read, and what to do about it."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"is gated: accept its terms at {hub}/{name}, then run: hf auth login"
    if isinstance(error, RepositoryNotFoundError):
        return f"is no repository of {hub}, or a private one; check its name, or run: hf auth login"
    if isinstance(error, HfHubHTTPError):
        return f"cannot be had now: {first_line(error)}"
    return (
        f"is no directory here, and {hub} cannot be reached to look for a repository of that name "
        f"({first_line(error)})"
    )

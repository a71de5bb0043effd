"""Keeps what is made of a GGUF file in the cache folder: its tokenizer, and its packed weights.

An entry is a folder, named by the file, its size and time, and by the versions that made it. It
appears only when all of it is there. Where nothing can be kept, it is made each time.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import shutil
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedTokenizerFast

from kvcap.dtypes import SAFETENSORS
from kvcap.runtime.errors import first_line
from kvcap.runtime.files import KEPT_FROM, VOCABULARY, cache_home, read_json

FORMAT = 2  # counted up when what is kept changes
SPARE = 64 << 20  # bytes that stay free on the disk
TOKENIZER, SETTINGS, WEIGHTS = "tokenizer.json", "settings.json", "weights.safetensors"


def kept_tokenizer(where: str, make: Callable[[], Any]) -> Any:
    """Return the tokenizer of a GGUF file, which is converted by `make` once."""
    entry = _entry(where, "tokenizer", ("transformers", "tokenizers"))
    if not entry.is_dir():
        made = make()
        _keep(where, entry, lambda folder: _write_tokenizer(made, folder), VOCABULARY)
        return made
    settings = read_json(entry / SETTINGS)
    return PreTrainedTokenizerFast(tokenizer_file=str(entry / TOKENIZER), **settings)


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    names = (
        "model_max_length",
        "padding_side",
        "model_input_names",
        "chat_template",
        "clean_up_tokenization_spaces",
    )
    settings = {name: getattr(tokenizer, name) for name in names}
    settings |= {name: _text(token) for name, token in tokenizer.special_tokens_map.items()}
    tokenizer.backend_tokenizer.save(str(folder / TOKENIZER), pretty=False)
    (folder / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")


def _text(token: Any) -> Any:
    return [str(one) for one in token] if isinstance(token, list | tuple) else str(token)


def weights_file(where: str) -> Path:
    """Return the safetensors file of a GGUF file's packed weights, there once they were kept."""
    how = (torch.backends.cpu.get_cpu_capability(),)  # by which four bits lie in their order
    return _entry(where, "weights", ("transformers", "torch"), how) / WEIGHTS


def keep_weights(where: str, model: nn.Module) -> None:
    """Write the packed weights of a GGUF file that a model has, if there is room."""
    state: dict[str, torch.Tensor] = dict(model.named_parameters())
    nbytes, entry = sum(x.nbytes for x in state.values()), weights_file(where).parent
    _keep(where, entry, lambda folder: _write_weights(state, folder / WEIGHTS), nbytes)


def _write_weights(weights: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensors as safetensors one by one; its own `save_file` holds a copy of all of them."""
    header, end = dict[str, Any](), 0
    for name, weight in weights.items():
        start, end = end, end + weight.nbytes
        kind = SAFETENSORS[str(weight.dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": weight.shape, "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-(len(head) + 8) % 64)  # tensors begin where vectors do
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for weight in weights.values():
            file.write(weight.detach().flatten().view(torch.uint8).numpy().data)


def map_weights(path: Path, model: nn.Module, *, resident: bool = False) -> None:
    """Give a model its weights as a kept file has them.

    They are mapped: the system reads what is used, and can take its memory back.

    Args:
        path: from `weights_file`.
        model: with packed matrices.
        resident: read all of them now, so that the process is as large as it will be.
    """
    weights = load_file(path)
    for weight in weights.values() if resident else ():
        weight.view(torch.uint8).flatten()[:: mmap.PAGESIZE].sum()
    model.load_state_dict(weights, strict=False, assign=True)
    model.requires_grad_(False)


def is_kept(where: str) -> bool:
    """Return whether the tokenizer of a GGUF file was converted before."""
    return _entry(where, "tokenizer", ("transformers", "tokenizers")).is_dir()


def _entry(where: str, what: str, packages: tuple[str, ...], also: tuple[str, ...] = ()) -> Path:
    """Return the folder in which something that was made of a file is kept, or would be."""
    path = Path(where).resolve()
    state = path.stat()
    facts = [str(path), state.st_size, state.st_mtime_ns, FORMAT, *map(version, packages), *also]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_home() / "gguf" / f"{path.stem}-{what}-{digest}"


def _keep(where: str, entry: Path, write: Callable[[Path], None], nbytes: int) -> None:
    """Write an entry, if there is room; a warning says where it cannot be."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(entry.parent).free < nbytes + SPARE:
            raise OSError("the disk is full")
        with tempfile.TemporaryDirectory(prefix=".kvcap-", dir=entry.parent) as part:
            made = Path(part) / entry.name
            made.mkdir()
            write(made)
            facts = json.dumps({"model": str(Path(where).resolve())})
            (made / KEPT_FROM).write_text(facts + "\n", encoding="utf-8")
            made.rename(entry)
    except OSError as error:
        if not entry.is_dir():  # else another process was faster
            warnings.warn(
                f"nothing is kept in {str(entry.parent)!r} ({first_line(error)}), so that "
                f"{where!r} is converted each time; set XDG_CACHE_HOME to a directory with room",
                stacklevel=3,
            )

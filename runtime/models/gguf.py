"""Reads what a GGUF file of llama.cpp says of itself, before transformers loads its model.

Transformers unpacks its weights: what takes 4 or 8 bits in the file takes 16 or 32 in memory.
Knows the file's own fields; needs the package `gguf`, and imports it when a file is read.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kvcap.runtime.errors import (
    ExtraMissing,
    ModelFilesBroken,
    UnsupportedModel,
    first_line,
    how_to_install,
)
from kvcap.runtime.units import format_bytes

MAGIC = b"GGUF"
NEEDED = ("gguf", "accelerate")  # by transformers, to load one


class GgufFile(NamedTuple):
    """What a GGUF file holds."""

    architecture: str  # by llama.cpp's name, such as 'llama'
    numbers: str  # the type of most of its weights, such as 'Q8_0'
    nbytes: int  # of all its weights, as they are in the file
    ends: list[int]  # tokens that end an answer
    scaled: bool  # its rotary embedding is stretched to longer contexts

    def becomes(self, nbytes: int, dtype: str) -> str:
        """Words for what its weights take once they are loaded."""
        return (
            f"{format_bytes(self.nbytes)} of {self.numbers} in the file become "
            f"{format_bytes(nbytes)} of {dtype} in memory"
        )


def is_gguf(where: str | Path) -> bool:
    """Whether `where` is a GGUF file, by its first bytes."""
    path = Path(where)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def source(where: str) -> tuple[str, dict[str, Any]]:
    """What transformers' `from_pretrained` is given for a model: its place, and options."""
    if not is_gguf(where):
        return where, {}
    path = Path(where)
    return str(path.parent), {"gguf_file": path.name}


def read_gguf(where: str) -> GgufFile:
    """Read a GGUF file's fields and the list of its tensors; no weight is read.

    Raises:
        ExtraMissing: a package that reads it is not installed.
        ModelFilesBroken: it is damaged or cut short.
        UnsupportedModel: it is one of several parts, or holds no language model.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ExtraMissing(
            f"{where!r} is a GGUF file, which {' and '.join(missing)} must read; "
            f"{how_to_install('gguf')}"
        )
    try:
        reader = _parsed(where)
        architecture = _field(reader, "general.architecture")
        parts = _field(reader, "split.count") or 0
        tensors = [(x.tensor_type.name, int(x.n_bytes)) for x in reader.tensors]
        scaling = _field(reader, f"{architecture}.rope.scaling.type") or "none"
        factors = any(x.name.startswith(("rope_freqs", "rope_factors")) for x in reader.tensors)
        ends = [_field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    except Exception as error:  # of the package or of NumPy, whatever the bytes make of them
        raise ModelFilesBroken(
            f"{where!r} is a damaged GGUF file or was cut short ({first_line(error)}); get it again"
        ) from error
    if parts > 1:
        raise UnsupportedModel(
            f"{where!r} is one of {parts} parts of a model; join them, by llama.cpp's "
            "llama-gguf-split --merge"
        )
    if not isinstance(architecture, str) or not tensors:
        raise UnsupportedModel(
            f"{where!r} holds no model, but a vocabulary, an adapter or settings alone; give the "
            "GGUF file of a whole language model"
        )
    sizes = Counter[str]()
    for kind, nbytes in tensors:
        sizes[kind] += nbytes
    known = list(dict.fromkeys(token for token in ends if token is not None))
    numbers, scaled = max(sizes, key=lambda kind: sizes[kind]), factors or scaling != "none"
    return GgufFile(architecture, numbers, sizes.total(), known, scaled)


@contextmanager
def parsed_once(where: str) -> Iterator[None]:
    """Give transformers a GGUF file as it was parsed before, if `where` is one.

    It parses the file anew for every config, tokenizer and model, and each time takes some ten
    seconds for a vocabulary of 262,144 tokens. What was parsed is held until `forget`.
    """
    if not is_gguf(where):
        yield
        return
    package: Any = importlib.import_module("gguf")
    package.GGUFReader = _parsed  # called as the class is
    try:
        yield
    finally:
        package.GGUFReader = package.gguf_reader.GGUFReader


def forget() -> None:
    """Give back the memory of the file that was parsed last."""
    _reader.cache_clear()


def _parsed(path: str | Path, mode: str = "r") -> Any:
    """The package's reader of a file that has not changed since it was parsed."""
    assert mode == "r", "nobody writes to a model's file"
    state = Path(path).resolve().stat()
    return _reader(str(Path(path).resolve()), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1)
def _reader(path: str, changed: int, nbytes: int) -> Any:
    package: Any = importlib.import_module("gguf")
    return package.gguf_reader.GGUFReader(path)


def loading() -> dict[str, Any]:
    """Options by which transformers unpacks a GGUF file, and fetches no kernels for packed ones."""
    import transformers

    settings = getattr(transformers, "GgufConfig", None)  # not in older ones, which always unpack
    return {} if settings is None else {"quantization_config": settings(dequantize=True)}


def _field(reader: Any, name: str) -> Any:
    """A field's value; None where there is none."""
    field = reader.get_field(name)
    return None if field is None else field.contents()

"""Reads a GGUF file of llama.cpp: its fields, and where each of its tensors lies.

The file is mapped and its header read once, as long as the file stays as it is, by the package
`gguf`. Its parse of 262,144 strings takes ten seconds, so here strings are found, and not decoded
before somebody asks for them. Transformers, which makes a config, a tokenizer and a model of a
file, is given this reader in the place of the package's. Knows no model.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import re
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
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
STRING, ARRAY = 8, 9  # types of fields
LONG = 1024  # values; a longer list belongs to a vocabulary
TOKENS = "tokenizer.ggml.tokens"


class GgufFile(NamedTuple):
    """A record of a GGUF file's header: sizes, types and end tokens."""

    architecture: str  # by llama.cpp's name, such as 'llama'
    numbers: str  # the type of most of its weights, such as 'Q8_0'
    nbytes: int  # of all its weights, as they are in the file
    ends: list[int]  # tokens that end an answer
    scaled: bool  # its rotary embedding is stretched to longer contexts

    def becomes(self, nbytes: int, dtype: str) -> str:
        """Say how many bytes its weights take once loaded as a type."""
        there = f"{format_bytes(self.nbytes)} of {self.numbers} in the file"
        return f"{there} become {format_bytes(nbytes)} of {dtype} in memory"


def is_gguf(where: str | Path) -> bool:
    """Return whether `where` is a GGUF file, by its first bytes."""
    path = Path(where)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def source(where: str) -> tuple[str, dict[str, Any]]:
    """Return the path and options for transformers' `from_pretrained`."""
    if not is_gguf(where):
        return where, {}
    path = Path(where)
    return str(path.parent), {"gguf_file": path.name}


class Elements(Sequence[Any]):
    """The values of a list, each made a part only when it is read, as a vocabulary has many."""

    def __init__(self, part: Callable[[int], Any], count: int) -> None:
        self.part, self.length = part, count

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.part(index)


@cache
def header_class() -> Any:
    """Return the package's reader, in which a list takes no time for each of its values.

    Its objects have a header's `fields` by name, and `tensors`.
    """
    package: Any = importlib.import_module("gguf")

    class Header(package.GGUFReader):  # type: ignore[misc]
        """A reader of a file's header, which maps the rest."""

        _values: Elements | None = None  # of the list that is to be added

        def value(self, name: str, default: Any = None) -> Any:
            """Return a field's value; `default` where there is none."""
            return self.fields[name].contents() if name in self.fields else default

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if self.byte_order == "S":
                raise UnsupportedModel(
                    "is a big-endian GGUF file; get the file for other machines, or convert it "
                    "by llama.cpp's gguf_convert_endian.py"
                )
            if raw_type != ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = struct.unpack_from("<IQ", self.data, orig_offs)
            start = orig_offs + struct.calcsize("<IQ")
            types = [package.GGUFValueType(x) for x in (ARRAY, kind)]
            if kind == STRING:
                end = self._add_strings(start, count)
            else:
                values = self._get(start, self.gguf_scalar_to_np[types[1]], count)
                self._values = Elements(lambda i: values[i : i + 1], count)
                end = start + count * values.itemsize
            if end > len(self.data):
                raise ValueError("it ends within its header")
            return end - orig_offs, [], [], types

        def _add_strings(self, start: int, count: int) -> int:
            length, starts = struct.Struct("<Q").unpack_from, array("Q", [start])
            for _ in range(count):
                start += 8 + length(self.data, start)[0]
                starts.append(start)
            self._values = Elements(lambda i: self.data[starts[i] + 8 : starts[i + 1]], count)
            return start

        def _push_field(self, field: Any, skip_sum: bool = False) -> int:
            if (values := self._values) is not None:
                field, self._values = field._replace(parts=values, data=range(len(values))), None
            added: int = super()._push_field(field, skip_sum)
            return added

    return Header


def _reader(header: Any, vocabulary: bool) -> Any:
    """Return the header that transformers reads; without lists of tokens unless it needs them."""
    if vocabulary:
        return header
    reader = copy.copy(header)
    reader.fields = {name: x for name, x in header.fields.items() if len(x.data) <= LONG}
    size = f"{header.value('general.architecture')}.vocab_size"
    if size not in reader.fields and TOKENS in header.fields:
        count = array("Q", [len(header.fields[TOKENS].data)])
        field = next(iter(header.fields.values()))  # of any number
        reader.fields[size] = field._replace(name=size, parts=[count], data=[0])
    return reader


def header(where: str | Path) -> Any:
    """Return the header of a file, which is read anew only once the file has changed.

    Raises:
        ExtraMissing: a package that reads it is not installed.
        ModelFilesBroken: it is damaged or cut short.
        UnsupportedModel: it is big-endian.
    """
    _need_packages(where)
    path = Path(where).resolve()
    state = path.stat()
    try:
        return _header(str(path), state.st_mtime_ns, state.st_size)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{str(where)!r} {error}") from error
    except (ValueError, LookupError, OverflowError, OSError, struct.error) as error:
        raise ModelFilesBroken(
            f"{str(where)!r} is a damaged GGUF file or was cut short ({first_line(error)}); get it "
            "again"
        ) from error


@lru_cache(maxsize=1)
def _header(path: str, changed: int, nbytes: int) -> Any:
    return header_class()(path)


def loadable() -> bool:
    """Return whether the packages are installed by which transformers loads GGUF files."""
    return not _missing()


def _missing() -> list[str]:
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def _need_packages(where: str | Path) -> None:
    """Raise an error with the command that installs the missing packages."""
    if missing := _missing():
        raise ExtraMissing(
            f"{str(where)!r} is a GGUF file, and reading it needs {' and '.join(missing)}, not "
            f"installed here; {how_to_install('gguf')}"
        )


def read_gguf(where: str) -> GgufFile:
    """Read a GGUF file's header; no weight is read.

    Raises:
        ExtraMissing: a package that reads it is not installed.
        ModelFilesBroken: it is damaged or cut short.
        UnsupportedModel: it is big-endian, one of several parts, or holds no language model.
    """
    file_header = header(where)
    architecture = file_header.value("general.architecture")
    if (parts := file_header.value("split.count", 0)) > 1:
        raise UnsupportedModel(
            f"{where!r} is one of {parts} parts of a model; join them, by llama.cpp's "
            "llama-gguf-split --merge"
        )
    if not isinstance(architecture, str) or not file_header.tensors:
        raise UnsupportedModel(
            f"{where!r} holds no model, but a vocabulary, an adapter or settings alone; give the "
            "GGUF file of a whole language model"
        )
    sizes = Counter[str]()
    for tensor in file_header.tensors:
        sizes[tensor.tensor_type.name] += tensor.n_bytes
    scaling = file_header.value(f"{architecture}.rope.scaling.type", "none")
    factors = any(x.name.startswith(("rope_freqs", "rope_factors")) for x in file_header.tensors)
    ends = [file_header.value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    end_ids = list(dict.fromkeys(token for token in ends if token is not None))
    numbers, scaled = max(sizes, key=lambda kind: sizes[kind]), factors or scaling != "none"
    return GgufFile(architecture, numbers, sizes.total(), end_ids, scaled)


@contextmanager
def reading(where: str, *, vocabulary: bool = False) -> Iterator[None]:
    """Give transformers this reader of a file, if `where` is a GGUF file.

    Args:
        where: of a model.
        vocabulary: a tokenizer is made, so that lists of tokens are needed, too.

    Raises:
        ExtraMissing: a package that reads it is not installed.
    """
    if not is_gguf(where):
        yield
        return
    _need_packages(where)
    package: Any = importlib.import_module("gguf")
    package.GGUFReader = lambda path: _reader(header(path), vocabulary)
    # Its bar is tqdm's own, and would be shown where those of transformers are switched off.
    shown: Any = importlib.import_module("transformers.utils.logging")
    unpacking: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    unpacking.tqdm = shown.tqdm
    try:
        yield
    finally:
        package.GGUFReader = package.gguf_reader.GGUFReader


def loading() -> dict[str, Any]:
    """Return options by which transformers unpacks a GGUF file and fetches no kernels."""
    import transformers

    settings = getattr(transformers, "GgufConfig", None)  # not in older ones, which always unpack
    return {} if settings is None else {"quantization_config": settings(dequantize=True)}


def names_in_file(architecture: str, layers: int, names: Iterable[str]) -> set[str]:
    """Return all names that a GGUF file can have for a model's parameters.

    A file has one matrix for all experts of a layer, and `gate_up_proj` of a model as two.
    """
    constants: Any = importlib.import_module("gguf.constants")
    package: Any = importlib.import_module("gguf")
    numbers = {name: number for number, name in constants.MODEL_ARCH_NAMES.items()}
    name_map, gguf_names = package.get_tensor_name_map(numbers[architecture], layers), set[str]()
    for name in names:
        stem, end = re.fullmatch(r"(.*?)(?:[._](weight|bias))?", name).groups()  # type: ignore[union-attr]
        stem = re.sub(r"\.experts\.\d+\.", ".experts.", stem)
        parts = (stem, *(stem.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")))
        gguf_names |= {
            f"{there}.{end or 'weight'}" for x in parts if (there := name_map.get_name(x))
        }
    return gguf_names

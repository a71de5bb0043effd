"""Reads a GGUF file of llama.cpp: its fields, and where each of its tensors lies.

The file is mapped and its header read once, as long as the file stays as it is: a vocabulary's
strings are found and not decoded before somebody asks for them. Transformers, which makes a config,
a tokenizer and a model of a file, is given this reader in the place of the package `gguf`'s, whose
parse of 262,144 strings takes ten seconds. Knows no model.
"""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import re
import struct
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcap.runtime.errors import (
    ExtraMissing,
    ModelFilesBroken,
    UnsupportedModel,
    first_line,
    how_to_install,
)
from kvcap.runtime.units import format_bytes

if TYPE_CHECKING:  # imported where a file is read, as commands that read none import this
    import numpy.typing as npt

MAGIC = b"GGUF"
NEEDED = ("gguf", "accelerate")  # by transformers, to load one
VERSIONS = (2, 3)
NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Holds the types of a field's numbers, by their number in a file."""
STRING, ARRAY, COUNT = 8, 9, 4
PLAIN = {
    "F32": "<f4",
    "F16": "<f2",
    "F64": "<f8",
    "I8": "<i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
}
"""Holds the types of tensors that NumPy has; others are bytes."""
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


class Field:
    """A value of a header: `data` says which of its `parts` it consists of, as the package has it.

    Args:
        name: its key.
        types: the number of its type; of a list `ARRAY` and its values' type.
        values: its numbers, or the bytes of its strings.
    """

    def __init__(self, name: str, types: list[int], values: Any) -> None:
        self.name, self.types, self.values = name, types, values  # an array, or `_Strings`

    @cached_property
    def parts(self) -> list[Any]:
        """Return a string's bytes each, or an array of one number."""
        if self._numeric:
            return [self.values[i : i + 1] for i in self.data]
        return list(self.values)

    @property
    def data(self) -> range:
        """Return which parts are the value."""
        return range(len(self.values))

    @property
    def _numeric(self) -> bool:
        return self.types[-1] != STRING

    def contents(self) -> Any:
        """Return the value as Python has it."""
        contents = self.values.tolist() if self._numeric else [str(x, "utf-8") for x in self.values]
        return contents if self.types[0] == ARRAY else contents[0]


class _Strings:
    """Strings of a mapped file, each behind its length."""

    def __init__(self, data: mmap.mmap, starts: array[int], end: int) -> None:
        self.data, self.starts, self.end = data, starts, end

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[bytes]:
        for start, after in pairwise((*self.starts, self.end + 8)):
            yield self.data[start : after - 8]


class GgufTensor(NamedTuple):
    """A tensor of a file, with the names that the package has for its parts."""

    name: str
    tensor_type: Any  # of the package's GGMLQuantizationType
    shape: tuple[int, ...]  # the other way round than PyTorch's
    n_elements: int
    n_bytes: int
    data_offset: int
    data: npt.NDArray[Any]  # mapped; rows of bytes, where the type packs numbers


class Header:
    """The fields and tensors of a file, by their names.

    Raises:
        ValueError, struct.error: it is damaged.
        UnsupportedModel: its numbers are big-endian.
    """

    def __init__(self, path: str) -> None:
        import numpy as np

        with open(path, "rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.offset = len(MAGIC)
        (version,) = self._unpack("<I")
        if version & 0xFFFF == 0:
            raise UnsupportedModel(
                f"{path!r} is a big-endian GGUF file; get the file for other machines, or convert "
                "it by llama.cpp's gguf_convert_endian.py"
            )
        if version not in VERSIONS:
            raise ValueError(f"version {version} is not known")
        tensors, fields = self._unpack("<QQ")
        self.fields: dict[str, Field] = {}
        for name, value in (("version", version), ("tensor_count", tensors), ("kv_count", fields)):
            self._add(
                Field(f"GGUF.{name}", [COUNT if name == "version" else 10], np.array([value]))
            )
        for _ in range(fields):
            name = self._string()
            (kind,) = self._unpack("<I")
            self._add(self._field(name, kind))
        entries = [self._entry() for _ in range(tensors)]
        alignment = self.value("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"it is aligned to {alignment!r}")
        start = self.offset + -self.offset % alignment
        self.tensors = {entry[0]: self._tensor(start, *entry) for entry in entries}
        if len(self.tensors) < tensors:
            raise ValueError("two of its tensors have the same name")

    def value(self, name: str, default: Any = None) -> Any:
        """Return a field's value; `default` where there is none."""
        return self.fields[name].contents() if name in self.fields else default

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        numbers = struct.unpack_from(layout, self.data, self.offset)
        self.offset += struct.calcsize(layout)
        return numbers

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        return str(self._take(length), "utf-8")

    def _take(self, count: int) -> bytes:
        if count > len(self.data) - self.offset:
            raise ValueError("it ends within its header")
        self.offset += count
        return self.data[self.offset - count : self.offset]

    def _add(self, field: Field) -> None:
        if field.name in self.fields:
            raise ValueError(f"it has {field.name} twice")
        self.fields[field.name] = field

    def _field(self, name: str, kind: int) -> Field:
        import numpy as np

        types, count = [kind], 1
        if kind == ARRAY:
            kind, count = self._unpack("<IQ")
            types = [ARRAY, kind]
        if kind == STRING:
            return Field(name, types, self._strings(count))
        if kind not in NUMBERS:
            raise ValueError(f"{name} is of an unknown type, {kind}")
        numbers = np.dtype(NUMBERS[kind])
        values = np.frombuffer(self._take(count * numbers.itemsize), numbers)
        return Field(name, types, values)

    def _strings(self, count: int) -> _Strings:
        length, offset, starts = struct.Struct("<Q").unpack_from, self.offset, array("Q")
        for _ in range(count):
            starts.append(offset + 8)
            offset += 8 + length(self.data, offset)[0]
        if offset > len(self.data):
            raise ValueError("it ends within its header")
        self.offset = offset
        return _Strings(self.data, starts, offset)

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (dimensions,) = self._unpack("<I")
        return name, self._unpack(f"<{dimensions}Q"), *self._unpack("<IQ")

    def _tensor(
        self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> GgufTensor:
        import numpy as np

        constants: Any = importlib.import_module("gguf.constants")
        quantisation = constants.GGMLQuantizationType(kind)
        numbers, nbytes = constants.GGML_QUANT_SIZES[quantisation]
        count, position, rows = prod(shape), start + offset, tuple(reversed(shape))
        size = count // numbers * nbytes
        if (rows and rows[-1] % numbers) or position + size > len(self.data):
            raise ValueError(f"it ends before {name} does")
        if quantisation.name in PLAIN:
            view = np.frombuffer(self.data, PLAIN[quantisation.name], count, position).reshape(rows)
        else:
            rows = (*rows[:-1], rows[-1] // numbers * nbytes)
            view = np.frombuffer(self.data, "u1", size, position).reshape(rows)
        return GgufTensor(name, quantisation, shape, count, size, position, view)


class Reader:
    """The face that transformers knows of a header.

    Args:
        header: of a file.
        vocabulary: with the lists of tokens, which take a second to be gone through.
    """

    def __init__(self, header: Header, vocabulary: bool) -> None:
        import numpy as np

        self.tensors = list(header.tensors.values())
        self.fields = {
            name: Field(name, field.types, field.values)  # whose parts are not held for longer
            for name, field in header.fields.items()
            if vocabulary or len(field.values) <= LONG
        }
        size = f"{header.value('general.architecture')}.vocab_size"
        if not vocabulary and size not in self.fields and TOKENS in header.fields:
            count = np.array([len(header.fields[TOKENS].values)])
            self.fields[size] = Field(size, [COUNT], count)

    def get_field(self, name: str) -> Field | None:
        """Return a field; None where there is none."""
        return self.fields.get(name)


def header(where: str | Path) -> Header:
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
    except UnsupportedModel:
        raise
    except (ValueError, LookupError, OverflowError, OSError, struct.error) as error:
        raise ModelFilesBroken(
            f"{str(where)!r} is a damaged GGUF file or was cut short ({first_line(error)}); get it "
            "again"
        ) from error


@lru_cache(maxsize=1)
def _header(path: str, changed: int, nbytes: int) -> Header:
    return Header(path)


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
    for tensor in file_header.tensors.values():
        sizes[tensor.tensor_type.name] += tensor.n_bytes
    scaling = file_header.value(f"{architecture}.rope.scaling.type", "none")
    factors = any(name.startswith(("rope_freqs", "rope_factors")) for name in file_header.tensors)
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
    package.GGUFReader = lambda path: Reader(header(path), vocabulary)
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

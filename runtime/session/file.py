"""Writes and reads the file of a saved session: a safetensors file, replaced whole or not at all.

Tensors are written one by one, so that saving needs no memory of the cache's size. A digest of
everything shows whether a file was cut short or changed. All that is not a tensor, the session's
facts, must fit a schema. A tensor may be PyTorch's or NumPy's.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from kvcap.dtypes import SAFETENSORS
from kvcap.runtime.errors import (
    KvcapError,
    SessionFileCorrupt,
    SessionFileNewer,
    SessionNotSaved,
    first_line,
)
from kvcap.runtime.files import check_plain, parse_json, replacing
from kvcap.runtime.session import settings
from kvcap.schema import fault

SCHEMA = Path(__file__).parents[1] / "schemas" / "session.schema.json"
FORMAT = "kvcap-session"
VERSION = 1
LONGEST = 100_000_000  # bytes of a header that safetensors still reads
PIECE = 1 << 20  # bytes handed to the system at once
# The settings of generation that are saved, but for the seed, which is saved beside them.
SETTINGS = tuple(name for name in settings.NAMES if name != "seed")
FLOATS = tuple(name for name, bounds in settings.NUMBERS.items() if bounds.kind is float)
Array = Any  # a torch.Tensor or a numpy.ndarray
Pieces = Sequence[Array]


def write(path: str | os.PathLike[str], tensors: Mapping[str, Pieces], facts: Any) -> None:
    """Write `tensors`, each in pieces along its first axis, and `facts`, which JSON can hold.

    A new file in the same directory takes the old one's place only when all of it is on the disk.

    Raises:
        SessionNotSaved: it cannot be written; an earlier file is as it was.
    """
    target = Path(os.path.realpath(path))
    session = json.dumps(facts, separators=(",", ":"))
    # Widest first, so that every tensor starts where its elements can be read in place.
    names = sorted(tensors, key=lambda name: (-tensors[name][0].dtype.itemsize, name))
    header: dict[str, Any] = {}
    start = 0
    for name in names:
        pieces = tensors[name]
        stop = start + sum(prod(piece.shape) * piece.dtype.itemsize for piece in pieces)
        kind, shape = _kind(pieces[0]), _shape(pieces)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    header["__metadata__"] = {
        "format": FORMAT,
        "version": str(VERSION),
        "session": session,
        "digest": digest(session, header, lambda name: map(_bytes, tensors[name])),
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    if len(head) > LONGEST:
        raise SessionNotSaved(
            f"the session cannot be saved in {str(path)!r}: its messages take {len(head):,} bytes, "
            f"and such a file holds {LONGEST:,}; begin a new one (in chat: /clear)"
        )
    try:
        if target.exists():
            check_plain(target)  # a device must not be replaced by a file
        with replacing(target) as descriptor:
            _write_all(descriptor, memoryview(len(head).to_bytes(8, "little") + head))
            for name in names:
                for piece in tensors[name]:
                    _write_all(descriptor, _bytes(piece))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SessionNotSaved(
            f"the session cannot be saved in {str(path)!r} ({reason}); free some room or give "
            "another file"
        ) from error


def digest_in(path: str | os.PathLike[str]) -> str | None:
    """Return the digest that a session's file says it has; None where there is no such file."""
    try:
        check_plain(path)
        opened: Any = safe_open
        with opened(path, framework="np") as file:
            written: str | None = (file.metadata() or {}).get("digest")
    except (SafetensorError, OSError, ValueError):
        return None
    return written


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data[:PIECE]) :]


def _bytes(tensor: Array) -> memoryview:
    if not isinstance(tensor, np.ndarray):  # bfloat16 has no type in NumPy; its bytes have
        import torch

        tensor = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


def _kind(tensor: Array) -> str:
    """Return the tensor's type as safetensors writes it, such as F32."""
    return SAFETENSORS[str(tensor.dtype).removeprefix("torch.")]


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(pieces: Pieces) -> list[int]:
    return [sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:]]


def digest(
    session: str,
    header: Mapping[str, Mapping[str, Any]],
    data: Callable[[str], Iterable[bytes | memoryview]],
) -> str:
    """Return the SHA-256 of everything in a file, in hexadecimal digits.

    Args:
        session: its facts, as JSON.
        header: type and shape of each tensor, by its name.
        data: gives the bytes of a tensor, in pieces.
    """
    total = hashlib.sha256(session.encode())
    for name, tensor in sorted(header.items()):
        total.update(f"\n{name} {tensor['dtype']} {tensor['shape']}\n".encode())
        for piece in data(name):
            total.update(piece)
    return total.hexdigest()


class SessionFile:
    """A saved session that is open for reading; opening it checks its digest.

    Args:
        path: of the file.
        framework: whose tensors to make, 'pt' (PyTorch) or 'np' (NumPy).

    Raises:
        SessionFileCorrupt: there is no such file, or it is no session's, cut short, or changed.
        SessionFileNewer: a newer kvcap wrote it, in a format that this one does not know.
    """

    def __init__(self, path: str | os.PathLike[str], framework: str = "pt") -> None:
        self.path = str(path)
        try:
            check_plain(self.path)
            opened: Any = safe_open
            self._file = opened(self.path, framework=framework).__enter__()
        except (SafetensorError, OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or first_line(error)
            raise self.corrupt(f"it cannot be read ({reason})") from error
        try:
            self.facts = self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> dict[str, Any]:
        about = self._file.metadata() or {}
        if about.get("format") != FORMAT:
            raise self.corrupt("it is no kvcap session")
        version = about.get("version", "")
        if not re.fullmatch("[0-9]{1,9}", version):
            raise self.corrupt(f"its version is {version[:20]!r}")
        if int(version) > VERSION:
            raise SessionFileNewer(
                f"{self.path!r} has session format {version}, this kvcap knows up to {VERSION}; "
                "install a newer kvcap"
            )
        session = about.get("session", "")
        self.names = frozenset(self._file.keys())
        try:
            actual = self._digest(session)
            facts = parse_json(session)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise self.corrupt("it cannot be decoded") from error
        if actual != about.get("digest") or not isinstance(facts, dict):
            raise self.corrupt("its content is not what was saved")
        return facts

    def _digest(self, session: str) -> str:
        """Return the digest of what the file has, also of types that NumPy does not know."""
        with open(self.path, "rb") as raw:
            size = int.from_bytes(raw.read(8), "little")
            header = parse_json(raw.read(size))

            def data(name: str) -> Iterator[bytes]:
                start, stop = header[name]["data_offsets"]
                raw.seek(8 + size + start)
                for at in range(start, stop, PIECE):
                    yield raw.read(min(PIECE, stop - at))

            return digest(session, {name: header[name] for name in self.names}, data)

    def tensor(self, name: str) -> Array:
        """Return a copy of one tensor."""
        return self._file.get_tensor(name)

    def taken(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a copy of one tensor, which must have this shape and type.

        Raises:
            SessionFileCorrupt: it is missing, or has others.
        """
        if name not in self.names:
            raise self.corrupt(f"{name} is missing")
        tensor = self.tensor(name)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise self.corrupt(
                f"{name} is {list(tensor.shape)} of {_name(tensor.dtype)}, not {list(shape)} of "
                f"{_name(dtype)}"
            )
        return tensor

    def corrupt(self, why: str) -> SessionFileCorrupt:
        """Return the error that refuses this file for the reason `why`."""
        return SessionFileCorrupt(
            f"{self.path!r} cannot be loaded: {why}; give a file that kvcap saved"
        )

    @contextmanager
    def corrupt_if_wrong(self) -> Iterator[None]:
        """Raise SessionFileCorrupt in place of an unnamed error, which the contents caused."""
        try:
            yield
        except KvcapError:
            raise
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RuntimeError,
            ArithmeticError,
        ) as error:
            raise self.corrupt(f"what it says cannot be ({error!r})") from error

    def close(self) -> None:
        """Close the file."""
        self._file.__exit__(None, None, None)

    def __enter__(self) -> SessionFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def checked_facts(file: SessionFile) -> dict[str, Any]:
    """Return the facts of a file once they have passed the schema.

    Raises:
        SessionFileCorrupt: naming the first place where they do not.
    """
    wrong = fault(file.facts, SCHEMA)
    if wrong is not None:
        raise file.corrupt(f"what it says cannot be ({wrong})")
    return file.facts


def check_conversation(file: SessionFile, vocabulary: int) -> None:
    """Refuse a conversation whose parts contradict each other, or the model's `vocabulary`.

    Raises:
        SessionFileCorrupt: naming the contradiction.
    """
    conversation = file.facts["conversation"]
    messages = conversation["messages"]
    if any(n >= len(messages) for n in conversation["pinned"]):
        raise file.corrupt("a message is pinned that is none of the conversation")
    if any(token >= vocabulary for token in conversation["unread"]):
        raise file.corrupt(f"a token is unread that is none of the model's {vocabulary:,}")
    if any(token >= vocabulary for token in conversation.get("read_ids", ())):
        raise file.corrupt(f"a token was read that is none of the model's {vocabulary:,}")
    spans = [*file.facts["pinned_spans"], *conversation.get("recalled_spans", ())]
    spans += [span for some in conversation.get("regions", {}).values() for span in some]
    if any(start >= stop for start, stop in spans):
        raise file.corrupt("pinned or recalled tokens, or a region, end before they begin")
    try:
        described = [messages, conversation["system"], conversation.get("tools")]
        json.dumps(described, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise file.corrupt("what was said is no Unicode text") from error


def generation_of(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the saved settings of generation with the types that samplers expect."""
    values = {name: saved.get(name) for name in SETTINGS}
    for name in FLOATS:
        if (value := values[name]) is not None:
            values[name] = float(value)
    if isinstance(values["stop_strings"], str):
        values["stop_strings"] = [values["stop_strings"]]
    return values

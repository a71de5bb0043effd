"""Which other files an ONNX file takes its weights from, read from its bytes without loading it.

A walk over the few messages of ONNX's protobuf schema that lead to a tensor. Knows no ONNX Runtime,
which opens whatever file a graph names.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

# For each message, the fields that lead to a tensor, by their numbers in onnx.proto.
LEADS = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
KEY, VALUE = 1, 2  # of an entry
DEEPEST = 100  # messages in messages, as protobuf allows


def files_named(path: Path) -> set[str]:
    """Names of the files, relative to the graph's own directory.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file.
    """
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise ValueError("it is empty")
        with (
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as data,
        ):
            return set(_named(data, "model", 0))


def _named(data: memoryview, kind: str, depth: int) -> Iterator[str]:
    if depth > DEEPEST:
        raise ValueError("it is nested too deeply")
    if kind == "entry":
        found = {number: bytes(part) for number, part in _fields(data)}
        if found.get(KEY) == b"location":
            yield found.get(VALUE, b"").decode()
        return
    leads = LEADS[kind]
    for number, part in _fields(data):
        if number in leads:
            yield from _named(part, leads[number], depth + 1)


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Numbers and bytes of a message's fields that have a length; the others hold no message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 2:
            size, at = _varint(data, at)
            if size > len(data) - at:
                raise ValueError("it was cut short")
            with data[at : at + size] as part:
                yield number, part
            at += size
        elif wire == 0:
            _, at = _varint(data, at)
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise ValueError("it is not in the format of ONNX")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64 and at < len(data):
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("it is not in the format of ONNX")

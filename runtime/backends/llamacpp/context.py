"""Holds the cells of conversations in a context of llama.cpp, and reads tokens into them.

A cell is a slot: the key and value of a token in all layers and heads. A context allocates all its
cells and the buffers of a pass once. Knows no policy.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int8, c_int32, c_void_p
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcap.runtime.backends.llamacpp.library import (
    CELL_TYPES,
    PAGE,
    Library,
    LlamaBatch,
)
from kvcap.runtime.backends.llamacpp.model import LlamaModel, reason
from kvcap.runtime.cores import free_core_count, usable_cores
from kvcap.runtime.errors import MemoryCapExceeded, UnsupportedModel
from kvcap.runtime.interrupts import interrupts_deferred

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Result = TypeVar("Result")
MIB = 1 << 20
ROUNDED = MIB / 200 + 1  # bytes by which a figure of the log may be off
CELLS = re.compile(
    r"size =\s+[\d.]+ MiB \(\s*(\d+) cells,\s*(\d+) layers,\s*(\d+)/(\d+) seqs\), "
    r"K \((\w+)\):\s+([\d.]+) MiB, V \(\w+\):\s+([\d.]+) MiB"
)
STATES = re.compile(r"size =\s+([\d.]+) MiB \(\s*\d+ cells,.*R \(\w+\)")
COMPUTE = re.compile(r"compute buffer size =\s+([\d.]+) MiB")
OUTPUT = re.compile(r"output buffer size =\s+([\d.]+) MiB")
UNITS = {"f16": 32, "q8_0": 34, "q4_0": 18}
"""Holds the bytes of which a row of each type is a multiple: of 16 numbers, or of a unit of 32."""
TYPES = frozenset(CELL_TYPES.values())
ROWS = np.dtype([("type", "<i4"), ("nbytes", "<u8")])


class Allocated(NamedTuple):
    """A count of the bytes that a context allocates, as the library's log gives them."""

    cells: int = 0  # keys and values of layers that keep every token
    sliding: int = 0  # likewise of layers that keep a window
    states: int = 0  # of recurrent layers
    compute: int = 0  # of a pass, to a hundredth of a MiB
    output: int = 0  # of logits, likewise

    @classmethod
    def parse(cls, log: str) -> Allocated:
        """Read the bytes from the library's log, and undo its rounding of those of cells."""
        caches = [_cells_bytes(*match) for match in CELLS.findall(log)]
        return cls(
            cells=caches[0] if caches else 0,
            sliding=sum(caches[1:]),
            states=_mebibytes(STATES.findall(log)),
            compute=_mebibytes(COMPUTE.findall(log)),
            output=_mebibytes(OUTPUT.findall(log)),
        )


def _mebibytes(figures: Sequence[str]) -> int:
    return sum(round(float(figure) * MIB) for figure in figures)


def _cells_bytes(
    cells: str, layers: str, sequences: str, streams: str, kind: str, keys: str, values: str
) -> int:
    """Return the exact bytes of a cache, of which the log rounds to a hundredth of a MiB.

    Several sizes may round to the figure; that is taken in which all layers are alike.
    """
    unit = int(cells) * int(streams) * UNITS.get(kind, 1)
    return sum(_whole(float(size) * MIB, unit, int(layers)) for size in (keys, values))


def _whole(size: float, unit: int, layers: int) -> int:
    """Round a size to a multiple of `unit * layers` if one is near enough, else of `unit`."""
    alike = round(size / unit / max(1, layers)) * unit * layers
    return alike if abs(alike - size) <= ROUNDED else round(size / unit) * unit


class CellMatrix(NamedTuple):
    """A matrix of a layer's keys or values, as bytes: a row for each cell."""

    data: Bytes  # [cells, n]
    kind: int  # the library's number of the type of their numbers


@dataclass(frozen=True)
class LayerCells:
    """The cells of a conversation in one layer, as the library's state holds them.

    `keys` and `values` copy them as float32 numbers [K, n, D], oldest token first.
    """

    library: Library  # whose own conversion reads quantised numbers
    head: int  # numbers of a key of one KV head, so that rows have K of them
    order: NDArray[np.intp]  # of the cells, by position
    key_rows: CellMatrix
    value_rows: CellMatrix | None  # None: the layer's keys are latents, of which values are made

    @property
    def heads(self) -> int:
        """Return the KV heads of the layer; 1 if its keys are of another length."""
        one = self.library.floats(self.key_rows.data[:1], self.key_rows.kind)
        count, rest = divmod(one.size, self.head)
        return 1 if rest else count

    def keys(self) -> Floats:
        """Return the keys [K, n, D]."""
        return self._floats(self.key_rows)

    def values(self) -> Floats:
        """Return the values [K, n, E].

        Raises:
            UnsupportedModel: the layer keeps none.
        """
        if self.value_rows is None:
            raise UnsupportedModel(
                "the model's cells hold latents without values; choose a policy that reads keys, "
                "such as keydiff-window, or streaming_llm"
            )
        return self._floats(self.value_rows)

    def _floats(self, rows: CellMatrix) -> Floats:
        cells = self.library.floats(rows.data, rows.kind)[self.order]
        return np.ascontiguousarray(cells.reshape(len(cells), self.heads, -1).swapaxes(0, 1))


def exclusively(method: Callable[..., Result]) -> Callable[..., Result]:
    """Make a method wait until no other thread calls the library for the same context."""

    @functools.wraps(method)
    def call(self: Context, *given: Any) -> Result:
        with self.lock:
            return method(self, *given)

    return call


class Context:
    """A context with room for some conversations of `cells` tokens each.

    Args:
        model: whose layers it is for.
        cells: slots of each conversation, rounded up to a multiple of 256.
        block: tokens read at once, at most.
        sequences: conversations.
        kv_dtype: of cells: 'q8_0', 'q4_0', or None for float16.
        outputs: logits that a pass may give; 0: as many as conversations.
        threads: that compute, at most as many as there are cores; None: as many as there are free
            cores, counted before each pass of several tokens.

    Raises:
        MemoryCapExceeded: the library cannot allocate it.
    """

    def __init__(
        self,
        model: LlamaModel,
        cells: int,
        block: int,
        *,
        sequences: int = 1,
        kv_dtype: str | None = None,
        outputs: int = 0,
        threads: int | None = None,
    ) -> None:
        self.model, self.library, self.calls = model, model.library, model.library.calls
        self.sequences, self.block, self.kv_dtype = sequences, max(block, sequences), kv_dtype
        self.outputs = max(outputs, sequences)
        settings = model.library.context_settings()
        settings.n_ctx = whole_pages(cells) * sequences
        settings.n_batch = settings.n_ubatch = self.block
        settings.n_seq_max = sequences
        settings.n_outputs_max = self.outputs
        settings.n_outputs_max_per_seq = max(1, outputs)
        settings.type_k = settings.type_v = CELL_TYPES[kv_dtype]
        # More threads than cores wait for each other for minutes.
        self.threads = threads and min(threads, len(usable_cores()))
        settings.n_threads = settings.n_threads_batch = self.threads or free_core_count()
        model.library.take_log()
        with interrupts_deferred():  # one amid the library's call of `_note` would be lost
            self.pointer: int | None = self.calls.llama_init_from_model(model.pointer, settings)
        log = model.library.take_log()
        if not self.pointer:
            raise MemoryCapExceeded(
                f"llama.cpp cannot allocate {cells:,} cells for {sequences} conversations: "
                f"{reason(log)}; use fewer"
            )
        # The context refers to the model, so it must be freed first.
        weakref.finalize(self, _free, self.calls, self.pointer, model)
        self.memory: int = self.calls.llama_get_memory(self.pointer)
        self.allocated = Allocated.parse(log)
        self.cells = int(self.calls.llama_n_ctx_seq(self.pointer))
        # Where sliding layers have fewer cells the library says no, and moves keys nevertheless.
        self.can_shift = model.slides or bool(self.calls.llama_memory_can_shift(self.memory))
        self._ids = (c_int32 * self.block)()
        self._positions = (c_int32 * self.block)()
        self._counts = (c_int32 * self.block)(*[1] * self.block)
        self._outputs = (c_int8 * self.block)()
        self._sequence_ids = (c_int32 * sequences)(*range(sequences))
        self._sequences = (c_void_p * self.block)()
        self.lock = threading.RLock()
        self.free = list(range(sequences))
        """Holds the conversations that nobody has; their cells are freed as they are leased."""

    @property
    def unused(self) -> bool:
        """Return whether no conversation has a sequence of this context."""
        return len(self.free) == self.sequences

    def lease(self) -> int:
        """Return the number of a sequence that no conversation has, and empty its cells."""
        sequence = self.free.pop()
        self.remove(sequence)
        return sequence

    @exclusively
    def read(self, tokens: Sequence[tuple[int, int, int]], outputs: Sequence[int]) -> Floats:
        """Read tokens, each given as its sequence, its id and its position.

        Returns:
            The logits [n, V] behind the tokens whose places in `tokens` are `outputs`.

        Raises:
            MemoryCapExceeded: the library found no cells for them, or refused them.
        """
        if self.threads is None and len(tokens) > 1:
            self.calls.llama_set_n_threads(self.pointer, free := free_core_count(), free)
        start = ctypes.addressof(self._sequence_ids)
        for index, (sequence, token, position) in enumerate(tokens):
            self._ids[index], self._positions[index] = token, position
            self._sequences[index] = start + 4 * sequence
            self._outputs[index] = 0
        for index in outputs:
            self._outputs[index] = 1
        arrays = (
            self._ids, None, self._positions, self._counts, self._sequences, self._outputs
        )  # fmt: skip
        addresses = (None if array is None else ctypes.addressof(array) for array in arrays)
        batch = LlamaBatch(len(tokens), *addresses)
        if code := self.calls.llama_decode(self.pointer, batch):
            raise MemoryCapExceeded(
                f"llama.cpp refused {len(tokens)} tokens with code {code}: "
                f"{reason(self.model.library.take_log())}"
            )
        self.model.library.lines.clear()
        rows = [self._logits(index) for index in outputs]
        return np.stack(rows) if rows else np.empty((0, self.model.vocabulary), np.float32)

    def _logits(self, index: int) -> Floats:
        pointer = self.calls.llama_get_logits_ith(self.pointer, index)
        return np.ctypeslib.as_array(pointer, (self.model.vocabulary,)).copy()

    @exclusively
    def remove(self, sequence: int, start: int = 0, stop: int = -1) -> None:
        """Free the cells of positions `start` to `stop` (-1: all further ones)."""
        if not self.calls.llama_memory_seq_rm(self.memory, sequence, start, stop):
            raise MemoryCapExceeded(
                f"llama.cpp cannot free positions {start} to {stop} of this model; begin a new "
                "conversation (in chat: /clear)"
            )

    @exclusively
    def move(self, sequence: int, start: int, stop: int, by: int) -> None:
        """Move the tokens of positions `start` to `stop` by so many positions."""
        self.calls.llama_memory_seq_add(self.memory, sequence, start, stop, by)

    @exclusively
    def state(self, sequence: int) -> Bytes:
        """Return a copy of all that a conversation's cells hold, as the library writes it."""
        size = self.calls.llama_state_seq_get_size(self.pointer, sequence)
        data = np.empty(size, np.uint8)
        self.calls.llama_state_seq_get_data(self.pointer, data.ctypes.data, size, sequence)
        return data

    @exclusively
    def set_state(self, sequence: int, state: Bytes) -> bool:
        """Have a conversation's cells hold what `state` returned; return whether it was taken."""
        state = np.ascontiguousarray(state)
        taken = self.calls.llama_state_seq_set_data(
            self.pointer, state.ctypes.data, state.nbytes, sequence
        )
        return bool(taken == state.nbytes)

    def layers(self, sequence: int, held: int) -> list[LayerCells]:
        """Return a conversation's `held` cells in each of its capped layers.

        Raises:
            MemoryCapExceeded: the state is not laid out as in the versions that were tried.
        """
        part = next(split_state(self.state(sequence), self.library))
        if part.held != held:
            raise MemoryCapExceeded(
                f"llama.cpp's state has {part.held} cells, and {held} tokens are held"
            )
        order = np.argsort(part.positions, kind="stable")
        return [
            LayerCells(self.library, self.model.key_length, order, keys, values)
            for keys, values in zip_longest(part.keys, part.values)
        ]


def _free(calls: Any, pointer: int, model: LlamaModel) -> None:
    """Free a context; `model` is kept until then."""
    calls.llama_free(pointer)


def whole_pages(cells: int) -> int:
    """Round a number of cells up to what a context allocates, a multiple of 256."""
    return -(-cells // PAGE) * PAGE


class StatePart(NamedTuple):
    """A part of a conversation's state: the cells of all layers that keep equally many.

    The library writes the number of streams (conversations of the context), then of each how many
    cells of this conversation it has. Behind a number that is not 0 follow each cell's position,
    count of sequences and sequence, then whether values are transposed, the number of layers, and
    the rows of keys and of values.
    """

    held: int  # cells
    positions: NDArray[np.int32]  # of the cells
    keys: list[CellMatrix]  # of each layer
    values: list[CellMatrix]  # likewise; none: keys are latents
    body: Bytes  # everything behind the number of cells
    stop: int  # bytes of the state up to its end


def split_state(state: Bytes, library: Library) -> Iterator[StatePart]:
    """Yield the parts of a conversation's state: of capped layers, then of sliding ones.

    Raises:
        MemoryCapExceeded: it is not laid out as in the versions that were tried.
    """
    reader = _Reader(state)
    reader.words(2)  # a mark, and the sequence
    while reader.left:
        part = StatePart(0, np.empty(0, np.int32), [], [], state[:0], 0)
        for _ in range(int(reader.words(1)[0])):
            if held := int(reader.words(1)[0]):
                if part.held:
                    raise MemoryCapExceeded("llama.cpp's state is of several conversations")
                part = _read_part(reader, held, library)
        yield part._replace(stop=reader.offset)


def _read_part(reader: _Reader, held: int, library: Library) -> StatePart:
    """Return the `held` cells of the stream that begins here."""
    begins = reader.offset
    positions = reader.words(3 * held).reshape(held, 3)[:, 0]
    by_channel, layers = (int(word) for word in reader.words(2))
    if by_channel:
        raise MemoryCapExceeded(
            "llama.cpp holds values by channel here, as where it has no flash attention; use "
            "streaming_llm, and save no session"
        )
    reader.take(library.layout.gap)
    keys, values = [reader.rows(held) for _ in range(layers)], list[CellMatrix]()
    while len(values) < layers and reader.follows(held):
        values.append(reader.rows(held))
    return StatePart(held, positions, keys, values, reader.state[begins : reader.offset], 0)


class _Reader:
    """A reader of a state's bytes from their beginning."""

    def __init__(self, state: Bytes) -> None:
        self.state, self.offset = state, 0

    @property
    def left(self) -> int:
        return self.state.nbytes - self.offset

    def take(self, size: int) -> Bytes:
        if not 0 <= size <= self.left:
            raise MemoryCapExceeded("llama.cpp's state is laid out otherwise than kvcap knows")
        self.offset += size
        return self.state[self.offset - size : self.offset]

    def words(self, count: int) -> NDArray[np.int32]:
        return np.frombuffer(self.take(4 * count), "<i4")

    def rows(self, held: int) -> CellMatrix:
        """Return the keys or the values of a layer, which begin here."""
        head = np.frombuffer(self.take(ROWS.itemsize), ROWS)[0]
        if head["type"] not in TYPES:
            raise MemoryCapExceeded(f"llama.cpp's state has rows of its type {head['type']}")
        return CellMatrix(
            self.take(held * int(head["nbytes"])).reshape(held, -1), int(head["type"])
        )

    def follows(self, held: int) -> bool:
        """Return whether rows of another layer follow, and not another part of the state."""
        if self.left < ROWS.itemsize:
            return False
        head = np.frombuffer(self.state[self.offset :], ROWS, 1)[0]
        return bool(head["type"] in TYPES and 0 < held * int(head["nbytes"]) <= self.left)


def for_streams(state: Bytes, streams: int, model: LlamaModel) -> Bytes:
    """Return a state in the layout that a context of `streams` conversations reads."""
    written, end = [state[:8].tobytes()], 8
    attention = (2 if model.window else 1) if model.recurrent else None  # states stay as they are
    for part in islice(split_state(state, model.library), attention):
        counts = np.array([streams, part.held, *[0] * (streams - 1)], "<u4").tobytes()
        written += [counts[:8], part.body.tobytes(), counts[8:]]
        end = part.stop
    return np.frombuffer(b"".join([*written, state[end:].tobytes()]), np.uint8)

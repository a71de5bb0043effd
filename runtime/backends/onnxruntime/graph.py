"""Runs one ONNX graph in ONNX Runtime on memory that is allocated once.

Inputs are read and outputs written where the caller's arrays lie, without copies. Knows no decoder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcap.dtypes import ONNX
from kvcap.runtime.backends.onnxruntime.library import library
from kvcap.runtime.errors import GraphBroken, MemoryCapExceeded, ShapeError, first_line

Array = NDArray[Any]
Binding = Any  # onnxruntime's IOBinding
BINDINGS = 4  # kept at most: some buffers are swapped after every run, so two alternate
TYPES = {port: np.dtype(name) for name, port in ONNX.items()}


class Graph:
    """A graph that is loaded for the CPU.

    Args:
        file: of the graph.
        threads: of the CPU; by default as many as `OMP_NUM_THREADS` says, or all cores.

    Raises:
        GraphBroken: ONNX Runtime cannot load the file, or data beside it is missing.
    """

    def __init__(self, file: Path, threads: int | None = None) -> None:
        runtime = library("onnxruntime")
        options = runtime.SessionOptions()
        options.log_severity_level = 4
        # Memory patterns are kept for every shape that is met, so memory would grow with them.
        options.enable_mem_pattern = False
        # Threads that spin for work take the cores from each other beside a busy process.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        count = str(threads or os.environ.get("OMP_NUM_THREADS", ""))  # as PyTorch takes it
        options.intra_op_num_threads = int(count) if count.isdigit() else 0
        self.threads = threads
        self.name, self.version = file.name, runtime.__version__
        try:
            self.session = runtime.InferenceSession(
                str(file), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its own classes, which have no common base
            raise GraphBroken(
                f"{file.name} is no graph that can be loaded: {first_line(error)}; get the files "
                "again, or export it again"
            ) from error
        self._bindings: dict[tuple[Any, ...], Any] = {}

    @property
    def inputs(self) -> dict[str, Any]:
        """Return every input by name, with its type and shape."""
        return {port.name: port for port in self.session.get_inputs()}

    @property
    def outputs(self) -> dict[str, Any]:
        """Return every output by name, with its type and shape."""
        return {port.name: port for port in self.session.get_outputs()}

    def require(self, inputs: set[str], outputs: set[str]) -> None:
        """Refuse a graph that has other inputs or outputs.

        Raises:
            ShapeError: naming them.
        """
        for kind, want, got in (
            ("inputs", inputs, set(self.inputs)),
            ("outputs", outputs, set(self.outputs)),
        ):
            if want != got:
                differ = ", ".join(sorted(want ^ got)[:4])
                raise ShapeError(
                    f"{self.name} has other {kind} than its manifest says: {differ}; export it "
                    "again"
                )

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Compute `outputs` from `inputs`: contiguous arrays of the graph's types.

        Raises:
            MemoryCapExceeded: the system refused memory.
            ShapeError: sizes that the graph does not take.
        """
        key = tuple((x.ctypes.data, x.shape) for x in (*inputs.values(), *outputs.values()))
        if key not in self._bindings:
            if len(self._bindings) == BINDINGS:
                del self._bindings[next(iter(self._bindings))]
            self._bindings[key] = self.bind(inputs, outputs)
        self.run_bound(self._bindings[key])

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Binding:
        """Return a binding by which `run_bound` reads and writes these arrays, which stay put."""
        binding = self.session.io_binding()
        self.rebind(binding, inputs, outputs)
        return binding

    @staticmethod
    def rebind(binding: Binding, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Add arrays to a binding, or replace those of the same names."""
        for bind, arrays in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, array in arrays.items():
                assert array.flags.c_contiguous, name
                bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def run_bound(self, binding: Binding) -> None:
        """Compute what `bind` bound; raise the errors of `run`."""
        try:
            self.session.run_with_iobinding(binding)
        except Exception as error:  # its own classes, which have no common base
            message = first_line(error)
            if isinstance(error, MemoryError) or "allocat" in message or "bad_alloc" in message:
                raise MemoryCapExceeded(f"the system refused memory to {self.name}") from error
            raise ShapeError(f"{self.name} cannot run: {message[:300]}") from error


class Buffer:
    """A piece of memory of fixed size that is viewed as an array of any shape that fits."""

    def __init__(self, full: tuple[int, ...], dtype: Any) -> None:
        self._flat = np.zeros(prod(full), dtype)

    @property
    def nbytes(self) -> int:
        """Return its exact bytes."""
        return self._flat.nbytes

    def at(self, shape: tuple[int, ...]) -> Array:
        """Return its first elements as an array of this shape."""
        return self._flat[: prod(shape)].reshape(shape)

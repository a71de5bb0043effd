"""Runs llama.cpp by its library, with its default attention, and keys and values in float16.

The library is the one that kvcap itself would run GGUF files by.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Sequence
from ctypes import c_bool, c_int32, c_void_p
from pathlib import Path
from typing import Any

from .serve import Unusable, serve

PIECE = 256  # a context has room for a multiple of so many tokens


class PeerContext:
    """A model loaded as llama.cpp's own programs do, with room for `tokens` of one sequence."""

    def __init__(self, file: Path, tokens: int, threads: int) -> None:
        from kvcap.runtime.backends.llamacpp.model import LlamaModel

        self.library = _library()
        self.calls, self.model = self.library.calls, LlamaModel(self.library, file)
        settings = self.library.context_settings()
        settings.n_ctx, settings.n_threads, settings.n_threads_batch = tokens, threads, threads
        self.context = self.calls.llama_init_from_model(self.model.pointer, settings)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context of {tokens} tokens")
        self.memory, self.batch = self.calls.llama_get_memory(self.context), settings.n_batch
        _declare(self.library)

    def read(self, ids: Sequence[int]) -> None:
        """Read tokens that follow those read before."""
        for first in range(0, len(ids), self.batch):
            part = ids[first : first + self.batch]
            tokens = (c_int32 * len(part))(*part)
            batch = self.calls.llama_batch_get_one(ctypes.addressof(tokens), len(part))
            if failed := self.calls.llama_decode(self.context, batch):
                raise RuntimeError(f"llama.cpp refused {len(part)} tokens with code {failed}")

    def cut(self, tokens: int) -> None:
        """Forget all but the first tokens."""
        if not tokens:
            self.calls.llama_memory_clear(self.memory, False)
        elif not self.calls.llama_memory_seq_rm(self.memory, 0, tokens, -1):
            raise RuntimeError(f"llama.cpp does not go back to {tokens} tokens")
        if self.calls.llama_memory_seq_pos_max(self.memory, 0) != tokens - 1:
            raise RuntimeError(f"llama.cpp does not hold {tokens} tokens")


class Native:
    """A GGUF file, and a context for the tokens of a measurement."""

    packages: tuple[str, ...] = ()

    def __init__(self, settings: dict[str, Any]) -> None:
        import numpy

        from kvcap.lab.peers.llama_versions import described

        cells = -(-settings["context"] // PIECE) * PIECE
        self.plain = PeerContext(_file(settings), cells, settings["threads"])
        library, calls, model = self.plain.library, self.plain.calls, self.plain.model.pointer
        self.numpy, self.calls = numpy, calls
        self.libraries = {**described(library.file), "llama.cpp": library.label}
        self.vocabulary = self.plain.model.vocabulary
        size = calls.llama_model_n_embd(model) // calls.llama_model_n_head(model)
        slot = 2 * 2 * calls.llama_model_n_head_kv(model) * size * calls.llama_model_n_layer(model)
        self.kv_bytes = slot * cells  # an upper bound if layers slide
        self.filled = self.token = 0

    def fill(self, ids: list[int]) -> None:
        """Read the prompt once; for later measurements, cut the context back to its end."""
        if self.filled != len(ids):
            self.prefill(ids)
        self.plain.cut(len(ids))
        self.filled = len(ids)

    def prefill(self, ids: list[int]) -> None:
        self.filled = 0
        self.plain.cut(0)
        self._read(ids)

    def step(self) -> None:
        self._read([self.token])

    def _read(self, ids: list[int]) -> None:
        """Read tokens, and choose the one after them."""
        self.plain.read(ids)
        logits = self.calls.llama_get_logits_ith(self.plain.context, -1)
        view = self.numpy.ctypeslib.as_array(logits, (self.vocabulary,))
        self.token = int(view.argmax())

    def eviction_seconds(self, work: Callable[[], Any]) -> float | None:
        """Return None, as llama.cpp evicts nothing."""
        return None


def _declare(library: Any) -> None:
    """Declare the functions of the library that kvcap itself does not call."""
    from kvcap.runtime.backends.llamacpp.library import LlamaBatch

    for name, result, arguments in (
        ("llama_batch_get_one", LlamaBatch, (c_void_p, c_int32)),
        ("llama_sampler_init_greedy", c_void_p, ()),
        ("llama_sampler_sample", c_int32, (c_void_p, c_void_p, c_int32)),
        ("llama_memory_clear", None, (c_void_p, c_bool)),
        ("llama_memory_seq_pos_max", c_int32, (c_void_p, c_int32)),
        ("llama_model_n_head_kv", c_int32, (c_void_p,)),
    ):
        library.symbol(name, result, arguments)


def _library() -> Any:
    """Return the library.

    Raises:
        Unusable: there is none that can be used.
    """
    from kvcap.runtime.backends.llamacpp.library import load_library
    from kvcap.runtime.errors import LibraryUnusable

    try:
        return load_library()
    except LibraryUnusable as error:
        raise Unusable(str(error)) from error


def _file(settings: dict[str, Any]) -> Path:
    """Return the model if it is a GGUF file, or else one written from its weights."""
    model = Path(settings["model"])
    if model.suffix == ".gguf":
        return model
    from .write_gguf import written

    return written(_library(), model, Path(settings["files"]), settings["weights"])


def start() -> None:
    """Load the model, read one prompt, and print the token after it, as a command would.

    The settings are the process's only argument. It ends when its input does.
    """
    settings = json.loads(sys.argv[1])
    plain = PeerContext(_file(settings), PIECE, settings["threads"])
    known = plain.model.has_tokenizer
    plain.read(plain.model.tokenizer(settings["text"])["input_ids"] if known else settings["ids"])
    calls = plain.calls
    print(calls.llama_sampler_sample(calls.llama_sampler_init_greedy(), plain.context, -1))
    sys.stdout.flush()
    sys.stdin.read()


def main() -> None:
    """Serve until the input ends."""
    serve(Native)

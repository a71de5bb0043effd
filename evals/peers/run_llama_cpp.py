"""Runs llama.cpp by llama-cpp-python: flash attention, keys and values in float16."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .serve import serve

MAIN, SPARE = 0, 1  # sequences: the one that answers, and one by which the cache is filled
PIECE = 256  # tokens: a context has a multiple; so many are read once, and copied to fill it


class Native:
    """A GGUF file that was written from the same weights, and a context for what it will read."""

    packages: tuple[str, ...] = ("llama-cpp-python", "gguf")

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp
        import numpy

        from .write_gguf import written

        self.lib, self.numpy = llama_cpp, numpy
        file = written(Path(settings["model"]), Path(settings["files"]), settings["weights"])
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_default_params()
        model.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), model)
        asked = llama_cpp.llama_context_default_params()
        asked.n_ctx = -(-settings["context"] // PIECE) * PIECE
        asked.n_threads = asked.n_threads_batch = settings["threads"]
        asked.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        asked.n_seq_max, asked.kv_unified = 2, True  # both sequences share the slots
        self.context = llama_cpp.llama_init_from_model(self.model, asked)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context of {asked.n_ctx} tokens")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.model)
        )
        self.batch = llama_cpp.llama_n_batch(self.context)
        heads = llama_cpp.llama_model_n_head_kv(self.model)
        size = llama_cpp.llama_model_n_embd(self.model) // llama_cpp.llama_model_n_head(self.model)
        slot = 2 * 2 * heads * size * llama_cpp.llama_model_n_layer(self.model)
        self.kv_bytes = slot * int(asked.n_ctx)
        self.filled = self.seen = self.token = 0

    def fill(self, ids: list[int]) -> None:
        """Read one piece, and copy its keys to all further positions."""
        lib, memory = self.lib, self.memory
        if self.filled != len(ids):
            self.filled = len(ids)
            self._empty()
            if piece := ids[:PIECE]:
                self._read(piece, SPARE, 0)
                size = lib.llama_state_seq_get_size(self.context, SPARE)
                state = (ctypes.c_uint8 * size)()
                lib.llama_state_seq_get_data(self.context, state, size, SPARE)
            for start in range(0, len(ids), PIECE):
                if start:
                    if not lib.llama_state_seq_set_data(self.context, state, size, SPARE):
                        raise RuntimeError("llama.cpp does not take back its own keys")
                    lib.llama_memory_seq_add(memory, SPARE, -1, -1, start)
                if (over := start + PIECE - len(ids)) > 0:
                    lib.llama_memory_seq_rm(memory, SPARE, start + PIECE - over, -1)
                lib.llama_memory_seq_cp(memory, SPARE, MAIN, -1, -1)
                lib.llama_memory_seq_rm(memory, SPARE, -1, -1)
        lib.llama_memory_seq_rm(memory, MAIN, len(ids), -1)  # remove tokens of earlier turns
        self.seen = len(ids)
        if lib.llama_memory_seq_pos_max(memory, MAIN) != len(ids) - 1:
            raise RuntimeError(f"llama.cpp does not hold {len(ids)} tokens")

    def prefill(self, ids: list[int]) -> None:
        self._empty()
        self._read(ids, MAIN, 0)
        self.seen = len(ids)

    def step(self) -> None:
        self._read([self.token], MAIN, self.seen)
        self.seen += 1

    def _empty(self) -> None:
        self.lib.llama_memory_clear(self.memory, False)

    def _read(self, ids: list[int], sequence: int, start: int) -> None:
        """Read tokens that follow `start` others, and choose the one after them."""
        lib = self.lib
        for first in range(0, len(ids), self.batch):
            part = ids[first : first + self.batch]
            batch = lib.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i] = token, start + first + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                batch.logits[i] = first + i == len(ids) - 1
            failed = lib.llama_decode(self.context, batch)
            lib.llama_batch_free(batch)
            if failed:
                raise RuntimeError(f"llama.cpp refused {len(part)} tokens with code {failed}")
        logits = lib.llama_get_logits_ith(self.context, -1)
        view = self.numpy.ctypeslib.as_array(logits, (self.vocabulary,))
        self.token = int(view.argmax())

    def eviction_seconds(self, turn: Callable[[], Any]) -> float | None:
        """Return None: it evicts nothing."""
        return None


def main() -> None:
    """Serve until the input ends."""
    serve(Native)

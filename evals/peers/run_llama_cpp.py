"""Runs llama.cpp by its library, with its default attention, and keys and values in float16."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .llama_library import Context, Library
from .serve import serve

PIECE = 256  # a context has room for a multiple of so many tokens


class Native:
    """A GGUF file, and a context for the tokens of a turn."""

    packages: tuple[str, ...] = ()

    def __init__(self, settings: dict[str, Any]) -> None:
        import numpy

        library = Library()
        self.numpy, self.calls, self.libraries = numpy, library.calls, library.versions
        places = -(-settings["context"] // PIECE) * PIECE
        file = _file(library, settings)
        self.context = Context(library, file, places, settings["threads"])
        calls, model = self.calls, self.context.model
        self.vocabulary = int(calls.llama_vocab_n_tokens(self.context.vocabulary))
        size = calls.llama_model_n_embd(model) // calls.llama_model_n_head(model)
        slot = 2 * 2 * calls.llama_model_n_head_kv(model) * size * calls.llama_model_n_layer(model)
        self.kv_bytes = slot * places  # an upper bound if layers slide
        self.filled = self.token = 0

    def fill(self, ids: list[int]) -> None:
        """Read the prompt once; for later turns, cut the context back to its end."""
        if self.filled != len(ids):
            self.prefill(ids)
        self.context.cut(len(ids))
        self.filled = len(ids)

    def prefill(self, ids: list[int]) -> None:
        self.filled = 0
        self.context.cut(0)
        self._read(ids)

    def step(self) -> None:
        self._read([self.token])

    def _read(self, ids: list[int]) -> None:
        """Read tokens, and choose the one after them."""
        self.context.read(ids)
        logits = self.calls.llama_get_logits_ith(self.context.context, -1)
        view = self.numpy.ctypeslib.as_array(logits, (self.vocabulary,))
        self.token = int(view.argmax())

    def eviction_seconds(self, turn: Callable[[], Any]) -> float | None:
        """Return None, as llama.cpp evicts nothing."""
        return None


def _file(library: Library, settings: dict[str, Any]) -> Path:
    """Return the model if it is a GGUF file, or else one written from its weights."""
    model = Path(settings["model"])
    if model.suffix == ".gguf":
        return model
    from .write_gguf import written

    return written(library, model, Path(settings["files"]), settings["weights"])


def start() -> None:
    """Load the model, read one prompt, and print the token after it, as a command would.

    The settings are the process's only argument. It ends when its input does.
    """
    settings = json.loads(sys.argv[1])
    library = Library()
    context = Context(library, _file(library, settings), PIECE, settings["threads"])
    ids = context.tokens(settings["text"])
    context.read(settings["ids"] if ids is None else ids)
    greedy = library.calls.llama_sampler_init_greedy()
    token = library.calls.llama_sampler_sample(greedy, context.context, -1)
    print(token, flush=True)
    sys.stdin.read()


def main() -> None:
    """Serve until the input ends."""
    serve(Native)

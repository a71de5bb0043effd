"""Loads a GGUF file's weights, tokenizer and settings by llama.cpp's library."""

from __future__ import annotations

import ctypes
import re
import weakref
from functools import cached_property
from pathlib import Path

from kvcap.runtime.backends.llamacpp.library import Library
from kvcap.runtime.backends.llamacpp.tokenizer import NO_TOKENIZER, LlamaTokenizer
from kvcap.runtime.errors import ModelFilesBroken, UnsupportedModel
from kvcap.runtime.interrupts import interrupts_deferred
from kvcap.runtime.types import ModelKind

UNMOVABLE = frozenset({"step35"})  # layers of it turn keys by unlike numbers
HADAMARD = 64  # numbers that the library rotates together before it quantises keys
LONGEST = 1 << 12  # the most bytes of a value that is read from the file's header
END = re.compile(r"EOG token\s+= (\d+) ")  # in the library's log of a loaded file
SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Maps fields of a header to the settings of generation that they are."""


class Owner:
    """An object that whoever uses a model's memory keeps."""


class LlamaModel:
    """A model of a GGUF file, loaded, or only its header for a plan.

    Args:
        library: that loads it.
        file: the file; of several parts the first.
        gpu_layers: how many layers are on a GPU, if the build has one; -1: all.
        planned: only the header is read, and contexts take no memory.

    Raises:
        ModelFilesBroken: the library cannot load it.
        UnsupportedModel: it writes no text, or layers are to be on a GPU without a build for one.
    """

    def __init__(
        self, library: Library, file: Path, *, gpu_layers: int = 0, planned: bool = False
    ) -> None:
        self.library, self.file, self.planned = library, file, planned
        calls, settings = library.calls, library.model_settings()
        if gpu_layers and not calls.llama_supports_gpu_offload():
            raise UnsupportedModel(
                f"--gpu-layers {gpu_layers} needs a build of llama.cpp for a GPU that is here, and "
                f"{str(library.file)!r} computes on the CPU; leave it out, or name a build in "
                "LLAMA_CPP_LIB_PATH"
            )
        settings.gpu_layers = gpu_layers
        if planned:
            settings.no_alloc, settings.load_mode = True, 0  # a mapped file would be read
        library.take_log()
        with interrupts_deferred():  # one amid the library's call of `_note` would be lost
            self.pointer: int | None = calls.llama_model_load_from_file(
                str(file).encode(), settings
            )
        self.loading_log = library.take_log()
        if not self.pointer:
            raise ModelFilesBroken(
                f"llama.cpp cannot load {str(file)!r}: {reason(self.loading_log)}"
            )
        self.owner = Owner()
        """Holds an object that frees the weights and the vocabulary once nobody has it."""
        weakref.finalize(self.owner, calls.llama_model_free, self.pointer)
        if calls.llama_model_has_encoder(self.pointer) or not calls.llama_model_has_decoder(
            self.pointer
        ):
            raise UnsupportedModel(
                f"{str(file)!r} holds a model of {self.architecture}, which is no decoder; give "
                "one that writes text"
            )

    @cached_property
    def tokenizer(self) -> LlamaTokenizer:
        """Return the model's tokenizer."""
        assert self.pointer is not None
        kind = self.field("tokenizer.ggml.model")
        return LlamaTokenizer(self.library, self.pointer, self.owner, kind)

    @property
    def ends(self) -> list[int]:
        """Return the tokens that end an answer, as the library lists them; the file's own first."""
        own = self.tokenizer.eos_token_id
        listed = (int(token) for token in END.findall(self.loading_log))
        return list(dict.fromkeys([*([] if own is None else [own]), *listed]))

    @property
    def architecture(self) -> str:
        """Return llama.cpp's name of the model's family, such as 'llama'."""
        return self.field("general.architecture") or "unknown"

    @property
    def kind(self) -> ModelKind:
        """Return the model's family and size."""
        return ModelKind(self.architecture, self.embedding_size)

    @property
    def title(self) -> str:
        """Return the model's name in its file, its size and its type of weights, for people."""
        name = "".join(filter(str.isprintable, self.field("general.name") or self.architecture))
        return f"{name[:64]} ({self.parameters / 1e6:,.0f}M weights, {self.weights_type})"

    @property
    def description(self) -> str:
        """Return llama.cpp's label; its size is guessed by the layers (256M for 135M)."""
        text = ctypes.create_string_buffer(256)
        self.library.calls.llama_model_desc(self.pointer, text, 256)
        return text.value.decode("utf-8", "replace")

    @property
    def vocabulary(self) -> int:
        """Return how many tokens the model knows."""
        return int(self.library.calls.llama_vocab_n_tokens(self._vocabulary))

    @property
    def has_tokenizer(self) -> bool:
        """Return whether the file says how a text becomes tokens."""
        return bool(self.library.calls.llama_vocab_type(self._vocabulary) != NO_TOKENIZER)

    @property
    def _vocabulary(self) -> int:
        pointer: int = self.library.calls.llama_model_get_vocab(self.pointer)
        return pointer

    @property
    def parameters(self) -> int:
        """Return how many numbers its weights are."""
        return int(self.library.calls.llama_model_n_params(self.pointer))

    @property
    def weights_type(self) -> str:
        """Return the type of most weights, such as 'Q4_K_M', as llama.cpp names files."""
        name = self.description.partition(" ")[2].partition(" ")[2]
        return name.replace(" - ", "_").replace("Medium", "M").replace("Small", "S")

    @property
    def trained_length(self) -> int:
        """Return the longest sequence, in tokens, that the model was trained on."""
        return int(self.library.calls.llama_model_n_ctx_train(self.pointer))

    @property
    def window(self) -> int:
        """Return the tokens of its sliding layers' window; 0: it has none."""
        return int(self.library.calls.llama_model_n_swa(self.pointer))

    @property
    def key_length(self) -> int:
        """Return the numbers of a key of one head."""
        length = self.field(f"{self.architecture}.attention.key_length")
        if length is not None:
            return int(length)
        heads = int(self.library.calls.llama_model_n_head(self.pointer))
        return self.embedding_size // max(1, heads)

    @property
    def embedding_size(self) -> int:
        """Return the numbers of a token's row in the embedding table."""
        return int(self.library.calls.llama_model_n_embd(self.pointer))

    @property
    def fixed_keys(self) -> str | None:
        """Return why the library cannot turn quantised keys to other positions; None: it can.

        It rotates quantised keys by Hadamard's matrix where heads are a multiple of 64 numbers;
        elsewhere turning them ends the process.
        """
        count = self.field(f"{self.architecture}.rope.dimension_count")
        turned = self.key_length if count is None else int(count)
        if self.key_length % HADAMARD or turned != self.key_length:
            return f"heads have {self.key_length} numbers, of which positions turn {turned}"
        return None

    @property
    def slides(self) -> bool:
        """Return whether it has sliding layers, and keys of one position that can be moved."""
        several = self.field(f"{self.architecture}.rope.dimension_sections") is not None
        return self.window > 0 and not several and self.architecture not in UNMOVABLE

    @property
    def recurrent(self) -> bool:
        """Return whether some layers, or all, keep a state instead of keys and values."""
        calls = self.library.calls
        return bool(
            calls.llama_model_is_recurrent(self.pointer)
            or calls.llama_model_is_hybrid(self.pointer)
        )

    @property
    def attends(self) -> bool:
        """Return whether any layer keeps keys and values."""
        return not self.library.calls.llama_model_is_recurrent(self.pointer)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all weights."""
        return int(self.library.calls.llama_model_size(self.pointer))

    def field(self, name: str) -> str | None:
        """Return a value of the file's header as text, or None."""
        text = ctypes.create_string_buffer(LONGEST)
        size = self.library.calls.llama_model_meta_val_str(
            self.pointer, name.encode(), text, LONGEST
        )
        return None if size < 0 else text.value.decode("utf-8", "replace")

    @property
    def sampling(self) -> dict[str, float]:
        """Return the settings of generation that the file's header has, by their names."""
        texts = {setting: self.field(name) for name, setting in SAMPLING.items()}
        return {
            setting: int(float(text)) if setting == "top_k" else float(text)
            for setting, text in texts.items()
            if text is not None
        }


def reason(log: str) -> str:
    """Return the line of the library's log that says why something failed, else its last one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = (line for line in lines if re.search("error|fail|invalid", line))
    return next(named, lines[-1] if lines else "it does not say why")

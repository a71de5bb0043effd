"""Encodes and decodes text by llama.cpp's own tokenizer, as a conversation needs it.

`Vocabulary` has the methods that kvcap uses of a `tokenizers.Tokenizer`, so that messages, recall
and answers work on either. Knows no weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_int32
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from kvcap.runtime.backends.llamacpp.library import Library
from kvcap.runtime.errors import ModelFilesBroken

NO_TOKENIZER, BYTE_PAIRS = 0, 2  # kinds of vocabularies, by the library's numbers
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1 << 0, 1 << 3, 1 << 4, 1 << 5  # attributes of a token
SPECIAL = b"\xff"  # begins the bytes of tokens that llguidance takes for no text
NAMED = ("bos", "eos", "pad")
TEMPLATES = ("tool_use", "rag")  # further chat templates that a file may have by name
DECODED = 1 << 14  # decoded texts that are kept, as an answer decodes the same few again and again


class Encoding(NamedTuple):
    """A text's tokens, as `tokenizers` returns them."""

    ids: list[int]


class AddedToken(NamedTuple):
    """A token that stands for its text wherever that occurs; special ones are no text."""

    content: str
    special: bool


class Vocabulary:
    """The vocabulary of a loaded model, with the methods of `tokenizers.Tokenizer` that kvcap uses.

    Args:
        library: that loaded it.
        pointer: to the library's vocabulary.
    """

    truncation = padding = normalizer = pre_tokenizer = None  # as a plain `tokenizers.Tokenizer`
    encode_special_tokens = False

    def __init__(self, library: Library, pointer: int) -> None:
        self._calls, self._pointer = library.calls, pointer
        self._size: int = self._calls.llama_vocab_n_tokens(pointer)
        self.decode_ids = lru_cache(DECODED)(self._decoded)

    def get_vocab_size(self) -> int:
        """Return how many tokens there are."""
        return self._size

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """Return the tokens of a text; special tokens in it are read as such."""
        raw = text.encode()
        room = len(raw) + 8
        while True:
            ids = (c_int32 * room)()
            count = self._calls.llama_tokenize(
                self._pointer, raw, len(raw), ids, room, add_special_tokens, True
            )
            if count >= 0:
                return Encoding(ids[:count])
            room = -count

    def encode_batch_fast(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[Encoding]:
        """Return the tokens of several texts."""
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens, with U+FFFD for bytes that are no letter."""
        return self.decode_ids(tuple(ids), skip_special_tokens)

    def _decoded(self, ids: tuple[int, ...], skip_special_tokens: bool) -> str:
        given = (c_int32 * len(ids))(*ids)
        room = 16 * len(ids) + 64
        while True:
            text = ctypes.create_string_buffer(room)
            size = self._calls.llama_detokenize(
                self._pointer, given, len(ids), text, room, False, not skip_special_tokens
            )
            if size >= 0:
                return text.raw[:size].decode("utf-8", "replace")
            room = -size

    def id_to_token(self, token: int) -> str | None:
        """Return a token as the vocabulary writes it; None: there is none of that number."""
        if not 0 <= token < self._size:
            return None
        text: bytes = self._calls.llama_vocab_get_text(self._pointer, token)
        return text.decode("utf-8", "replace")

    def token_to_id(self, text: str) -> int | None:
        """Return the number of an added token or a byte's token; None: it is neither."""
        return self._named.get(text)

    def get_added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Return the added tokens by their numbers."""
        return self._added

    def ends_answers(self, token: int) -> bool:
        """Return whether the library takes a token for the end of an answer."""
        return bool(self._calls.llama_vocab_is_eog(self._pointer, token))

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for; of a special one its name."""
        room = 256
        while True:
            text = ctypes.create_string_buffer(room)
            size = self._calls.llama_token_to_piece(self._pointer, token, text, room, 0, True)
            if size >= 0:
                return text.raw[:size]
            room = -size

    def indexed_by(self, kind: Any, ends: list[int]) -> Any:
        """Return llguidance's index of the vocabulary.

        Args:
            kind: its class `LLTokenizer`.
            ends: the tokens that end an answer.
        """
        tokens = [self.bytes_of(token) for token in range(self._size)]
        for token, added in self._added.items():
            if added.special:
                tokens[token] = SPECIAL + tokens[token]
        encode = ctypes.cast(self._calls.llama_tokenize, ctypes.c_void_p).value
        return kind.from_llamacpp(
            tokens=tokens,
            vocab_ptr=self._pointer,
            tokenize_fptr=encode,
            eos_token=ends or self._calls.llama_vocab_eos(self._pointer),
            slices=None,
        )

    def _attributes(self) -> Iterator[tuple[int, int]]:
        """Yield the tokens that are no plain text, each with its attributes."""
        attribute, pointer = self._calls.llama_vocab_get_attr, self._pointer
        wanted = UNKNOWN | CONTROL | USER_DEFINED | BYTE
        for token in range(self._size):
            if (bits := attribute(pointer, token)) & wanted:
                yield token, bits

    @cached_property
    def _special(self) -> dict[int, int]:
        return dict(self._attributes())

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return {
            token: AddedToken(self.id_to_token(token) or "", bool(bits & (CONTROL | UNKNOWN)))
            for token, bits in self._special.items()
            if not bits & BYTE
        }

    @cached_property
    def _named(self) -> dict[str, int]:
        return {self.id_to_token(token) or "": token for token in self._special}


class LlamaTokenizer:
    """A model's tokenizer with its special tokens and its chat template, as sessions read them.

    Args:
        library: that loaded the model.
        model: the library's pointer to it.
        owner: keeps the model's memory.

    Raises:
        ModelFilesBroken: the file has no tokenizer.
    """

    def __init__(self, library: Library, model: int, owner: object) -> None:
        calls, self._owner = library.calls, owner
        pointer = calls.llama_model_get_vocab(model)
        if calls.llama_vocab_type(pointer) == NO_TOKENIZER:
            raise ModelFilesBroken("the file has no tokenizer; give one that was made with it")
        self.backend_tokenizer = Vocabulary(library, pointer)
        named = {name: getattr(calls, f"llama_vocab_{name}")(pointer) for name in NAMED}
        self.special_tokens_map = {
            f"{name}_token": text
            for name, token in named.items()
            if (text := self.backend_tokenizer.id_to_token(token)) is not None
        }
        self.end_of_text: int = named["eos"]
        self.bos_token_id, self.eos_token_id = (
            named[name] if named[name] >= 0 else None for name in ("bos", "eos")
        )
        self.chat_template = self._templates(calls, model)

    @staticmethod
    def _templates(calls: Any, model: int) -> str | dict[str, str] | None:
        """Return the file's chat template, several by name, or None."""
        usual: bytes | None = calls.llama_model_chat_template(model, None)
        texts = {"default": usual}
        texts |= {name: calls.llama_model_chat_template(model, name.encode()) for name in TEMPLATES}
        found = {
            name: text.decode("utf-8", "replace")
            for name, text in texts.items()
            if text is not None and (name == "default" or text != usual)
        }
        if found.keys() == {"default"}:
            return found["default"]
        return found or None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return the token ids of `text`, as `input_ids`."""
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens).ids}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of tokens, as transformers' tokenizers do."""
        return self.backend_tokenizer.decode(list(map(int, ids)), skip_special_tokens)

    @property
    def ends(self) -> list[int]:
        """Return the tokens that the library takes for the end of an answer."""
        known = self.backend_tokenizer
        others = [t for t in known.get_added_tokens_decoder() if known.ends_answers(t)]
        first = [self.end_of_text] if self.end_of_text >= 0 else []
        return list(dict.fromkeys([*first, *others]))

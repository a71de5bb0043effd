"""Encodes and decodes text by llama.cpp's own tokenizer, as a conversation needs it.

`Vocabulary` has the methods that kvcap uses of a `tokenizers.Tokenizer`, so that messages, recall
and answers work on either. Knows no weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_char, c_int32
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from kvcap.runtime.backends.llamacpp.library import Library
from kvcap.runtime.errors import ModelFilesBroken

NO_TOKENIZER = 0  # the kind of a vocabulary, by the library's numbers
BYTE = 1 << 5  # attributes of a token, by the library's bits
SPECIAL = 1 << 0 | 1 << 3  # unknown and control tokens
ADDED = SPECIAL | 1 << 4  # user-defined ones as well
NO_TEXT = b"\xff"  # begins the bytes of tokens that llguidance takes for no text
BYTE_LEVEL = "gpt2"  # the kind of tokenizer whose tokens are bytes of text
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


class AddedTokens(Mapping[int, AddedToken]):
    """A view of a vocabulary's added tokens by their numbers, which looks up one at a time.

    Only who lists them all asks for every token there is.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def __getitem__(self, token: int) -> AddedToken:
        bits = self._vocabulary.attributes(token)
        if not bits & ADDED:
            raise KeyError(token)
        return AddedToken(self._vocabulary.id_to_token(token) or "", bool(bits & SPECIAL))

    def __iter__(self) -> Iterator[int]:
        return self._vocabulary.having(ADDED)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Vocabulary:
    """The vocabulary of a loaded model, with the methods of `tokenizers.Tokenizer` that kvcap uses.

    Args:
        library: that loaded it.
        pointer: to the library's vocabulary.
        byte_level: whether every token is text, as GPT-2's are, and none stands for a byte by name.
    """

    truncation = padding = normalizer = pre_tokenizer = None  # as a plain `tokenizers.Tokenizer`
    encode_special_tokens = False

    def __init__(self, library: Library, pointer: int, byte_level: bool) -> None:
        self._calls, self._pointer, self._byte_level = library.calls, pointer, byte_level
        self._size: int = self._calls.llama_vocab_n_tokens(pointer)
        self.decode_ids = lru_cache(DECODED)(self._decoded)

    def get_vocab_size(self) -> int:
        """Return how many tokens there are."""
        return self._size

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """Return the tokens of a text; special tokens in it are read as such."""
        raw, call = text.encode(), self._calls.llama_tokenize
        given = raw, len(raw)
        return Encoding(self._filled(call, given, c_int32, len(raw) + 8, add_special_tokens, True))

    def _filled(
        self, call: Any, given: tuple[Any, ...], kind: Any, room: int, *switches: int
    ) -> Any:
        """Call a function of the library that fills a buffer; return what it wrote.

        Args:
            call: takes what is given, an array, its room and switches; returns how many elements
                it wrote, or minus the room it needs.
            given: what it reads.
            kind: of elements.
            room: for so many elements, at first.
            switches: of the call.
        """
        array = (kind * room)()
        count = call(self._pointer, *given, array, room, *switches)
        return array[:count] if count >= 0 else self._filled(call, given, kind, -count, *switches)

    def encode_batch_fast(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[Encoding]:
        """Return the tokens of several texts."""
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens, with U+FFFD for bytes that are no letter."""
        return self.decode_ids(tuple(ids), skip_special_tokens)

    def _decoded(self, ids: tuple[int, ...], skip_special_tokens: bool) -> str:
        call, given = self._calls.llama_detokenize, ((c_int32 * len(ids))(*ids), len(ids))
        text = self._filled(call, given, c_char, 16 * len(ids) + 64, False, not skip_special_tokens)
        return str(text, "utf-8", "replace")

    def id_to_token(self, token: int) -> str | None:
        """Return a token as the vocabulary writes it; None: there is none of that number."""
        if not 0 <= token < self._size:
            return None
        text: bytes = self._calls.llama_vocab_get_text(self._pointer, token)
        return text.decode("utf-8", "replace")

    def token_to_id(self, text: str) -> int | None:
        """Return the number of an added token or a byte's token; None: it is neither."""
        if (byte := self._bytes.get(text)) is not None:
            return byte
        ids = self.encode(text, add_special_tokens=False).ids
        known = [token for token in ids if self.attributes(token) & ADDED]
        return known[0] if known == ids[:1] and self.id_to_token(known[0]) == text else None

    def get_added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Return the added tokens by their numbers."""
        return AddedTokens(self)

    def attributes(self, token: int) -> int:
        """Return the attributes of a token; 0: there is none of that number."""
        known = 0 <= token < self._size
        return int(known and self._calls.llama_vocab_get_attr(self._pointer, token))

    def having(self, bits: int) -> Iterator[int]:
        """Yield all tokens that have any of these attributes."""
        attributes, pointer = self._calls.llama_vocab_get_attr, self._pointer
        return (token for token in range(self._size) if attributes(pointer, token) & bits)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for; of a special one its name."""
        data: bytes = self._filled(
            self._calls.llama_token_to_piece, (token,), c_char, 256, False, True
        )
        return data

    def indexed_by(self, kind: Any, ends: list[int]) -> Any:
        """Return llguidance's index of the vocabulary.

        Args:
            kind: its class `LLTokenizer`.
            ends: the tokens that end an answer.
        """
        tokens = [self.bytes_of(token) for token in range(self._size)]
        for token in self.having(SPECIAL):
            tokens[token] = NO_TEXT + tokens[token]
        encode = ctypes.cast(self._calls.llama_tokenize, ctypes.c_void_p).value
        return kind.from_llamacpp(
            tokens=tokens,
            vocab_ptr=self._pointer,
            tokenize_fptr=encode,
            eos_token=ends or self._calls.llama_vocab_eos(self._pointer),
            slices=None,
        )

    @cached_property
    def _bytes(self) -> dict[str, int]:
        """Return the tokens that stand for a byte each, by their names such as '<0x41>'."""
        tokens = () if self._byte_level else self.having(BYTE)
        return {self.id_to_token(token) or "": token for token in tokens}


class LlamaTokenizer:
    """A model's tokenizer with its special tokens and its chat template, as sessions read them.

    Args:
        library: that loaded the model.
        model: the library's pointer to it.
        owner: keeps the model's memory.
        kind: the file's name for its kind of tokenizer.

    Raises:
        ModelFilesBroken: the file has no tokenizer.
    """

    def __init__(
        self, library: Library, model: int, owner: object, kind: str | None = None
    ) -> None:
        calls, self._owner = library.calls, owner
        pointer = calls.llama_model_get_vocab(model)
        if calls.llama_vocab_type(pointer) == NO_TOKENIZER:
            raise ModelFilesBroken("the file has no tokenizer; give one that was made with it")
        self.backend_tokenizer = Vocabulary(library, pointer, kind == BYTE_LEVEL)
        named = {name: getattr(calls, f"llama_vocab_{name}")(pointer) for name in NAMED}
        self.special_tokens_map = {
            f"{name}_token": text
            for name, token in named.items()
            if (text := self.backend_tokenizer.id_to_token(token)) is not None
        }
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
        templates = {
            name: text.decode("utf-8", "replace")
            for name, text in texts.items()
            if text is not None and (name == "default" or text != usual)
        }
        if templates.keys() == {"default"}:
            return templates["default"]
        return templates or None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return the token ids of `text`, as `input_ids`."""
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens).ids}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of tokens, as transformers' tokenizers do."""
        return self.backend_tokenizer.decode(list(map(int, ids)), skip_special_tokens)

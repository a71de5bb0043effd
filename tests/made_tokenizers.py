"""Makes small tokenizers of the kinds that models have: of bytes, letters and parts of words."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIAL = ("<unk>", "<s>", "</s>")
LETTERS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789[]/<|>:,.!?-+*=%@_(){}'\"#é"
)
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


class Wrapped:
    """A tokenizer with the interface that sessions use."""

    chat_template: str | None = None
    special_tokens_map: dict[str, str] = {}  # noqa: RUF012 - nobody adds to it

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend

    def get_chat_template(self) -> str:
        assert self.chat_template is not None
        return self.chat_template


def gemma_like(*more: tuple[str, str]) -> Tokenizer:
    """Make a tokenizer like Gemma's: spaces are letters, and a letter without a token is bytes.

    It merges `more` pairs of letters, too.
    """
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _with_bytes(normalizers.Replace(" ", "▁"), decoding, more)


def llama_like() -> Tokenizer:
    """Make a tokenizer like Gemma's that adds a space before a text, and drops it in decoding."""
    return _with_bytes(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ],
    )


def metaspace() -> Tokenizer:
    """Make a tokenizer like Llama 2's of today, which adds a space before the first word only."""
    decoding = [decoders.Metaspace(prepend_scheme="first"), decoders.ByteFallback()]
    tokenizer = _with_bytes(None, [*decoding, decoders.Fuse()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def byte_level() -> Tokenizer:
    """Make a tokenizer like GPT-2's, in which every token is some bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("Ã", "©"), ("â", "Ĥ"), ("a", "b")]
    names = [*SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _special(tokenizer)


def word_pieces() -> Tokenizer:
    """Make a tokenizer like BERT's, in which spaces separate words and are no tokens."""
    names = [*SPECIAL, *"abc.", *(f"##{letter}" for letter in "abc")]
    tokenizer = Tokenizer(models.WordPiece({x: i for i, x in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _special(tokenizer)


def ends_of_words() -> Tokenizer:
    """Make a tokenizer like GPT's, in which a token marks that a word ends."""
    names = [*SPECIAL, *"abc", *(f"{letter}</w>" for letter in "abc")]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    return _special(tokenizer)


MADE: dict[str, Callable[[], Tokenizer]] = {
    "gemma": gemma_like,
    "llama": llama_like,
    "metaspace": metaspace,
    "byte-level": byte_level,
    "word-pieces": word_pieces,
    "ends-of-words": ends_of_words,
}


def _with_bytes(
    normalizer: normalizers.Normalizer | None,
    decoding: list[decoders.Decoder],
    more: tuple[tuple[str, str], ...] = (),
) -> Tokenizer:
    merges = [("▁", "a"), ("▁", "P"), ("▁P", "a"), ("a", "r"), ("▁", "▁"), *more]
    pairs = ["".join(pair) for pair in merges]
    vocabulary = {name: i for i, name in enumerate([*SPECIAL, *BYTES, "▁", *LETTERS, *pairs])}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.decoder = normalizer, decoders.Sequence(decoding)
    return _special(tokenizer)


def _special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return tokenizer

"""Turns a text into tokens, a long one in pieces on all cores.

The tokenizers library gives one text to one core: a tenth of a second for 40,000 tokens, for which
a GPU would wait. Cut between two words, where its tokenizer splits it too, a text has the tokens of
its pieces, one after the other. Each place is tried before; a tokenizer that does not split there
(Llama 2's, Gemma's) gets the text as one. Knows no model and no chat.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from kvcap.runtime.errors import MessagesInvalid

PIECE = 1 << 14  # letters; about 4,000 tokens
NEAR = 64  # letters on each side of a cut that are tried
CUT = re.compile(r"(?<=\S) (?=[^\W\d_])")  # the space before a word
SOUGHT = 1 << 10  # letters in which such a space is looked for
BEHIND = "\n", "a", ".", "+"  # one of these shares no token with the text behind


def encode(backend: Any, text: str, *, special: bool = False) -> list[int]:
    """Return the token ids of `text`, the same as those of `backend.encode`.

    Args:
        backend: a `tokenizers.Tokenizer` that neither truncates nor pads.
        text: of any length.
        special: whether tokens are added that begin or end a text.
    """
    parts = [text[a:b] for a, b in pairwise([0, *cuts(backend, text), len(text)])]
    whole = len(parts) == 1
    # `fast` skips the offsets of tokens in the text, which take half the time of a long one.
    encodings = backend.encode_batch_fast(parts, add_special_tokens=special and whole)
    ids = [token for part in encodings for token in part.ids]
    if special and not whole:
        first = backend.post_process(encodings[0], None, True)
        added: list[int] = first.special_tokens_mask  # 0 for what the text itself has
        begin, end = added.index(0), len(added) - added[::-1].index(0)
        ids = [*first.ids[:begin], *ids, *first.ids[end:]]
    return ids


def encode_behind(backend: Any, text: str) -> list[int]:
    """Return the token ids of a text that continues another one.

    Tokenizers such as Llama 2's put a space before any text. Behind a few letters, whose tokens are
    then left out, there is none.
    """
    once = backend.encode("a", add_special_tokens=False).ids
    if backend.decode([*once, *once]) != "aa":
        for letters in BEHIND:
            ids = encode(backend, letters + text)
            begun = backend.encode(letters, add_special_tokens=False).ids
            if ids[: len(begun)] == begun:  # else it shares a token with the text
                return ids[len(begun) :]
    return encode(backend, text)


def encode_with(
    tokenizer: Any, text: str, *, special: bool = False, follows: bool = False
) -> list[int]:
    """Return the token ids of a text by a model's tokenizer.

    Args:
        tokenizer: with its `backend_tokenizer`, which may have been asked to truncate or pad.
        text: of any length.
        special: whether tokens are added that begin or end a text.
        follows: the text goes on from another.

    Raises:
        MessagesInvalid: it holds a lone surrogate, which is no letter.
    """
    check_letters(text)
    backend = tokenizer.backend_tokenizer
    if backend.truncation or backend.padding or backend.encode_special_tokens:
        # A caller left these set on the backend; transformers resets them with its next call.
        slowly: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
        return slowly
    return encode_behind(backend, text) if follows else encode(backend, text, special=special)


def check_letters(text: str) -> None:
    """Refuse a text with halves of letters, or bytes that are no UTF-8, which no tokenizer reads.

    Python has a lone surrogate for each: JSON may hold halves, and arguments and stdin of a command
    any bytes.

    Raises:
        MessagesInvalid: naming the first, with the letters around it; or it is no text.
    """
    if not isinstance(text, str):
        raise MessagesInvalid(f"a {type(text).__name__} was given; give a text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        offset = error.start
        near, code = ascii(text[max(0, offset - NEAR) : offset + NEAR]), ord(text[offset])
        if 0xDC80 <= code <= 0xDCFF:
            fault = f"the byte 0x{code - 0xDC00:02x}, which is no UTF-8; convert the text to UTF-8"
            fault += ", as iconv -f LATIN1 -t UTF-8 does"
        else:
            fault = f"half of a letter (the surrogate U+{code:04X}); give whole ones"
        raise MessagesInvalid(
            f"the text {near} cannot be read: at letter {offset + 1:,} it has {fault}"
        ) from error


def cuts(backend: Any, text: str) -> list[int]:
    """Return where a text can be cut: about every `PIECE` letters, before a space between words."""
    offsets = list[int]()
    for start in range(PIECE, len(text) - PIECE // 2, PIECE):
        space = CUT.search(text, start, start + SOUGHT)
        if space is not None and _cuts_cleanly(backend, text, space.start()):
            offsets.append(space.start())
    return offsets


def _cuts_cleanly(backend: Any, text: str, offset: int) -> bool:
    """Return whether cutting the text at `offset` leaves the tokens around it unchanged."""
    before, behind = text[offset - NEAR : offset], text[offset : offset + NEAR]

    def words(part: str) -> list[str]:
        """Return the words that the tokenizer turns into tokens one by one."""
        if backend.normalizer is not None:
            part = backend.normalizer.normalize_str(part)
        split = backend.pre_tokenizer
        return [part] if split is None else [word for word, _ in split.pre_tokenize_str(part)]

    def tokens(part: str) -> list[int]:
        """Return the tokens of a part; unlike `words` these see special tokens that hold spaces."""
        ids: list[int] = backend.encode(part, add_special_tokens=False).ids
        return ids

    whole = before + behind
    return words(whole) == words(before) + words(behind) and (
        tokens(whole) == tokens(before) + tokens(behind)
    )

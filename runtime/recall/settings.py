"""Settings that say how much evicted text is read again, and how large the index of it may be."""

from __future__ import annotations

from typing import NamedTuple

from kvcap.runtime.units import format_bytes, parse_bytes

AUTO, OFF = "auto", "off"
SHARE, USUAL = 3, 128  # of the slots; where this is few, so many tokens, or half of the slots
STORE_BYTES = 8 << 20  # a conversation's index may take, unless others are asked for
PAGE = 4096  # bytes of a page of SQLite
PAGES = 64  # of an index, at least: an empty one has about 10
LEAST_BYTES = PAGE * PAGES  # of an index
SERVED_BYTES = 1 << 20  # of the index of each of a server's conversations: some 35,000 tokens
WIDEST = 640  # numbers of a row of the embedding table that are used, at most
CAP_SHARE = 32  # of a small cap of the process, this part is for the index


class RecallSettings(NamedTuple):
    """A set of settings of recall that a user asked for.

    >>> [RecallSettings.parse(setting).limit(512) for setting in ("auto", "off", "5000")]
    [170, 0, 512]
    """

    tokens: int | None = None  # read again for a message, at most; 0: none; None: by the budget
    store_bytes: int = STORE_BYTES  # of a conversation's index, at most

    @classmethod
    def parse(
        cls,
        tokens: str | int = AUTO,
        store: str | int | None = None,
        cap: int | None = None,
        *,
        served: bool = False,
    ) -> RecallSettings:
        """Read settings as commands take them: 'auto', 'off' or a number, and bytes ('8MiB').

        Args:
            tokens: to be read again for a message, at most.
            store: bytes of the index, at most; see `index_bytes`.
            cap: bytes of the process, if there is such a cap.
            served: the conversation is one of a server's.

        Raises:
            ValueError: naming what would work.
        """
        text = str(tokens).strip().lower()
        if text not in (AUTO, OFF) and not (text.isascii() and text.isdigit()):
            raise ValueError(
                f"recall of {tokens!r} will not work; use auto, off, or the most tokens to read "
                "again for a message, such as 128"
            )
        nbytes = index_bytes(store, cap, served=served)
        return cls(None if text == AUTO else 0 if text == OFF else int(text), nbytes)

    def limit(self, budget: int) -> int:
        """Return the most tokens that are read again at a budget of so many slots."""
        usual = max(budget // SHARE, min(USUAL, budget // 2))
        return usual if self.tokens is None else min(self.tokens, budget)

    @property
    def nbytes(self) -> int:
        """Return the bytes that a conversation's index takes at most; 0 where there is none."""
        return 0 if self.tokens == 0 else self.store_bytes


def index_bytes(
    wanted: str | int | None = None, cap: int | None = None, *, served: bool = False
) -> int:
    """Return the most bytes of a conversation's index; 0: there is none, and nothing is recalled.

    >>> index_bytes("2MiB"), index_bytes(), index_bytes(cap=64 << 20), index_bytes(served=True)
    (2097152, 8388608, 2097152, 1048576)

    Args:
        wanted: a number of bytes or such as '8MiB', or 0 for none; None: by what follows.
        cap: bytes of the process, of which a 32nd is for the index; None: there is no such cap.
        served: the conversation is one of a server's, whose cap its many caches share.

    Raises:
        ValueError: an index needs more.
    """
    if wanted == 0:
        return 0
    if wanted is not None:
        nbytes = parse_bytes(wanted)
    elif served:
        nbytes = SERVED_BYTES
    else:
        nbytes = STORE_BYTES if cap is None else min(STORE_BYTES, cap // CAP_SHARE)
        nbytes = max(LEAST_BYTES, nbytes)
    if nbytes < LEAST_BYTES:
        raise ValueError(
            f"an index of evicted text in {format_bytes(nbytes)} will not work; use "
            f"{format_bytes(LEAST_BYTES)} or more, or turn recall off"
        )
    return nbytes


def vectors_bytes(size: int) -> int:
    """Return the most bytes by which texts are compared in meaning, at `size` numbers a row.

    A matrix of float32, and two more while it is made.

    >>> vectors_bytes(576), vectors_bytes(4096)
    (3981312, 4915200)
    """
    return 3 * 4 * min(size, WIDEST) ** 2


DEFAULT = RecallSettings()
"""Holds the settings that apply where nobody asks for others."""

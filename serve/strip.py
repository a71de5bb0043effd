"""Makes the strip: every token that a conversation has read, and which layers still hold it.

A slot knows its token by the token's place in the conversation, also where positions are compact,
so that nothing is guessed from texts. Knows sessions and their caches; nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from pydantic import BaseModel

from kvcap.runtime.cache.pinned_slots import clipped, merged
from kvcap.runtime.session.detokenizer import Detokenizer
from kvcap.runtime.session.session import Session
from kvcap.runtime.types import KeptTokens, Span

GROUPS = 8  # of layers, at most: more would be too narrow to see, and too much to send


class LayerGroup(BaseModel):
    """A group of neighbouring layers that hold the same tokens, or are shown as one."""

    layers: list[int]
    """Holds the layers' numbers in the model."""
    capped: bool
    """Says whether kvcap caps them; false for layers that keep a sliding window of their own."""
    heads: int
    """Counts the KV heads of all these layers."""
    held: list[int]
    """Counts for every token how many of these heads hold it; 0: it is evicted."""


class Strip(BaseModel):
    """A strip of every token that a conversation has read since its cache was last empty.

    Lists of tokens are in the order in which these were read: `tokens` and each group's `held` are
    of one length.
    """

    session_id: str
    policy: str
    budget_tokens: int
    """Counts the slots per KV head and layer."""
    cap_bytes: int
    """Holds the cap of the conversation's cache."""
    bytes: int
    """Counts the bytes of the slots in use, and of buffers that are always held."""
    held: int
    """Counts slots in use per KV head and layer, an average rounded up, at most the budget."""
    waiting: int
    """Counts slots in use above the budget, until the next eviction."""
    evicted: int
    """Counts the tokens less slots in use."""
    sinks: int
    """Counts the first tokens that are never evicted."""
    pinned: list[Span]
    """Lists the tokens [start, stop) that the user pinned, in order."""
    recalled: list[Span]
    """Lists the tokens [start, stop) of evicted text that was read again, in order."""
    tokens: list[str | None]
    """Holds the text of each; '' where it belongs to a character that a later one completes.

    None where it is not known which token it is.
    """
    groups: list[LayerGroup]


def strip_of(session: Session, session_id: str) -> Strip:
    """Return the strip of a conversation as it is now; to be called where its tokens are read.

    Args:
        session: that no other thread uses meanwhile.
        session_id: by which the API knows it.
    """
    ids, figures, cache = session.read_ids, session.stats, session.cache
    recalled = clipped(session.recall.spans, len(ids))
    # Recalled text is pinned until its answer is written; only pins of the user are shown.
    pinned = clipped(session.recall.lasting(cache.pinned_spans), len(ids))
    return Strip(
        session_id=session_id,
        policy=figures.policy,
        budget_tokens=figures.budget_tokens,
        cap_bytes=figures.cap_bytes,
        bytes=figures.bytes,
        held=figures.held_tokens,
        waiting=figures.waiting_tokens,
        evicted=figures.evicted_tokens,
        sinks=cache.sinks,
        pinned=merged(pinned),
        recalled=merged(recalled),
        tokens=pieces(session.runtime.tokenizer, ids),
        groups=grouped(cache.kept_tokens(), len(ids)),
    )


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str | None]:
    """Return the text that each token completes; None for an unknown one, whose id is below 0.

    Where none is unknown they spell the whole conversation, special tokens too.
    """
    texts = list[str | None]()
    text: Detokenizer | None = None  # a new one begins behind each unknown token
    for token in ids:
        if token < 0:
            texts.append(None)
            text = None
        else:
            text = text or Detokenizer(tokenizer, special=True)
            texts.append(text.put(token))
    return texts


def grouped(kept: Sequence[KeptTokens], seen: int) -> list[LayerGroup]:
    """Divide layers into at most `GROUPS` groups of neighbours, and one of those with windows.

    Args:
        kept: what each layer holds, by its number.
        seen: tokens read.
    """
    capped = [layer for layer in kept if layer.capped]
    native = [layer for layer in kept if not layer.capped]
    number = min(GROUPS, len(capped))
    cuts = [len(capped) * i // number for i in range(number + 1)]
    groups = [capped[a:b] for a, b in pairwise(cuts)]
    return [_group(layer, seen) for layer in (*groups, *([native] if native else []))]


def _group(kept: Sequence[KeptTokens], seen: int) -> LayerGroup:
    rows = [np.asarray(row) for layer in kept for row in layer.heads]
    counts = np.bincount(np.concatenate([np.zeros(0, int), *rows]), minlength=seen)
    return LayerGroup(
        layers=[layer.layer for layer in kept],
        capped=kept[0].capped,
        heads=len(rows),
        held=counts.tolist(),
    )

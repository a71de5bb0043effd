"""Tries on a few tokens whether a decoder that others exported stays right when tokens are evicted.

A graph that counts positions by itself, or that looks at where slots lie, runs without an error
after an eviction and gives wrong logits. Each such fault shows as two runs that should agree and do
not, or that should differ and agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcap.export.adopted.grouped import OTHER
from kvcap.export.adopted.signature import DecoderPorts
from kvcap.runtime.errors import UnsupportedModel, first_line
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.rope import moved_by

Array = NDArray[Any]
TOKENS, DROPPED, FURTHER = 12, (3, 5), 7
# Errors allowed, relative to the largest logit; those of faults are tens of times as large.
SAME = {"float32": 1e-3, "float16": 3e-2}


class EvictionTrial:
    """A trial that runs a decoder on random tokens, over any keys and values and any mask."""

    def __init__(self, decoder: DecoderPorts, vocabulary: int) -> None:
        self.decoder = decoder
        draws = np.random.default_rng(0)
        self.ids = draws.integers(0, vocabulary, (1, TOKENS + 1))
        self.empty = [self._zeros() for _ in range(2 * decoder.layers)]

    def _zeros(self) -> Array:
        decoder = self.decoder
        return np.zeros((1, decoder.kv_heads, 0, decoder.head_dim), decoder.cache)

    def run(
        self, ids: Array, past: list[Array], first: int, mask: Array | None = None
    ) -> tuple[Array, list[Array]]:
        """Run the decoder; return the last token's logits [V], and keys and values afterwards.

        Args:
            ids: tokens [1, T].
            past: keys and values [1, K, n, D], of each layer in turn.
            first: position of the first token.
            mask: attention mask [1, n + T]; by default every token is seen.

        Raises:
            UnsupportedModel: the graph cannot read these tokens after that past.
        """
        length = ids.shape[1]
        whole = past[0].shape[2] + length
        feeds = {
            "input_ids": ids,
            "attention_mask": np.ones((1, whole), np.int64) if mask is None else mask,
            "position_ids": np.arange(first, first + length, dtype=np.int64)[None],
        }
        names = [f"{i}.{kind}" for i in range(self.decoder.layers) for kind in ("key", "value")]
        feeds |= {f"past_key_values.{n}": x for n, x in zip(names, past, strict=True)}
        try:
            logits, *after = self.decoder.graph.session.run(
                ["logits", *(f"present.{name}" for name in names)], feeds
            )
        except Exception as error:  # ONNX Runtime's classes have no common base
            raise UnsupportedModel(
                f"{self.decoder.file.name} cannot read {length} tokens after "
                f"{past[0].shape[2]}: {first_line(error)[:200]}"
            ) from error
        return logits[0, -1].astype(np.float64), after

    def same(self, one: Array, other: Array) -> bool:
        """Return whether two runs' logits agree."""
        allowed = SAME[str(self.decoder.cache)] * np.abs(one).max()
        return bool(np.abs(one - other).max() <= allowed)


def check_evictable(decoder: DecoderPorts, shape: ModelShape) -> bool:
    """Try a decoder; return whether its keys can be moved to other positions exactly.

    Raises:
        UnsupportedModel: the decoder is wrong once tokens are evicted; the message names the run
            that differs.
    """
    trial, name = EvictionTrial(decoder, shape.vocabulary), decoder.file.name
    ids, last = trial.ids[:, :TOKENS], trial.ids[:, TOKENS:]
    _, past = trial.run(ids, trial.empty, 0)
    _, half = trial.run(ids[:, :8], trial.empty, 0)
    _, halves = trial.run(ids[:, 8:], half, 8)
    whole, _ = trial.run(last, past, TOKENS)
    pieces, _ = trial.run(last, halves, TOKENS)
    if not trial.same(whole, pieces):
        raise UnsupportedModel(
            f"{name} computes something else when a prompt is read in blocks; {OTHER}"
        )
    if any(layer.rope for layer in shape.layers):
        away, _ = trial.run(last, past, TOKENS + 5 * FURTHER)
        if trial.same(away, whole):
            raise UnsupportedModel(
                f"{name} takes no notice of position_ids: it counts positions by itself, which is "
                "wrong once tokens are evicted; export the model itself with kvcap export decoder"
            )
    stays = [i for i in range(TOKENS) if i not in DROPPED]
    mask = np.ones((1, TOKENS + 1), np.int64)
    mask[0, list(DROPPED)] = 0
    masked, _ = trial.run(last, past, TOKENS, mask)
    dropped, _ = trial.run(last, [x[:, :, stays] for x in past], TOKENS)
    if not trial.same(masked, dropped) or trial.same(masked, whole):
        raise UnsupportedModel(
            f"{name} computes something else when tokens are dropped than when they are masked: "
            "it goes by where slots lie; export the model itself with kvcap export decoder"
        )
    return shape.moves_exactly and _moves(trial, shape, past, whole)


def _moves(trial: EvictionTrial, shape: ModelShape, past: list[Array], whole: Array) -> bool:
    """Return whether logits stay the same if keys and the next token move to later positions."""
    ropes = [layer.rope for layer in shape.layers]
    if ropes[0] is None or any(rope != ropes[0] and rope is None for rope in ropes):
        return False  # layers without positions among others: one table cannot serve them
    moved = [
        moved_by(ropes[0], torch.from_numpy(x), FURTHER).numpy() if i % 2 == 0 else x
        for i, x in enumerate(past)
    ]
    logits, _ = trial.run(trial.ids[:, TOKENS:], moved, TOKENS + FURTHER)
    return trial.same(logits, whole)

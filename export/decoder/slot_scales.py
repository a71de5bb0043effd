"""Measures the scales by which an export's slots are held in 8 bits: one for each channel.

ONNX Runtime's attention reads quantised keys and values by scales that are the same for all tokens,
so they are measured before the first one: a model reads a text, and each channel's largest number
becomes 127. A key is turned by its position, which moves numbers between two channels; both have
the scale of the longest vector that they form, so that a key fits wherever it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvcap.export.decoder.attention import MOST
from kvcap.export.decoder.calibrate import pieces, with_stock_attention
from kvcap.export.decoder.depth import layers_of
from kvcap.export.decoder.graph import DecoderGraph
from kvcap.runtime.errors import NotExportable
from kvcap.runtime.models.arguments import cache_argument
from kvcap.runtime.models.checkpoint import Checkpoint, streaming
from kvcap.runtime.models.rope import Rope

TEXT, DRAWN = 4, 2  # pieces that are read of a text, and of tokens drawn from the vocabulary
PIECE = 256  # tokens of a piece
MARGIN = 1.1  # factor of the largest numbers measured, as other texts may have larger ones
LEAST = 1e-8  # least scale, for a channel that is always 0


def measure(decoder: DecoderGraph, ids: Tensor, checkpoint: Checkpoint | None = None) -> Tensor:
    """Measure the scales of a decoder's keys and values, [L, 2, K, D] float32.

    Args:
        decoder: whose model was loaded, or is without weights; it is left as it was.
        ids: [pieces, T] that the model reads.
        checkpoint: has the weights that the model is without.

    Raises:
        NotExportable: the weights stay in their files, and the model's layers cannot be found.
    """
    model, layers = decoder.model, layers_of(decoder.model)
    widest = Widest([layer.rope for layer in decoder.layout.shape.layers])
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(with_stock_attention(decoder))
        if checkpoint is not None:
            if layers is None:
                raise NotExportable(
                    "slots in 8 bits are measured layer by layer, and this model's layers cannot "
                    "be found; leave --kv-dtype out"
                )
            stack.enter_context(streaming(decoder, layers[1], checkpoint))
        base = model.base_model
        base(input_ids=ids, **cache_argument(base, widest), use_cache=True)
    return widest.scales()


def sample(tokenizer: Any, text: str | None, vocabulary: int, longest: int) -> Tensor:
    """Return token ids [pieces, T] to measure by: of a text, and tokens that no text has.

    Args:
        tokenizer: the model's; None: it has none, and all tokens are drawn.
        text: like those that the model will read; None: Python's own documentation, English and
            code.
        vocabulary: how many tokens there are.
        longest: tokens that the model was trained on.

    Raises:
        NotExportable: the text is too short, or there is no tokenizer to read it with.
    """
    draws, samples = torch.Generator().manual_seed(0), list[Tensor]()
    if tokenizer is not None or text is not None:
        ids = pieces(tokenizer, "\n\n".join(topics.values()) if text is None else text, longest)
        few = torch.linspace(0, len(ids) - 1, min(TEXT, len(ids))).long()
        samples.append(ids[few, :PIECE])
    length = samples[0].shape[1] if samples else min(PIECE, longest)
    samples.append(torch.randint(vocabulary, (DRAWN, length), generator=draws))
    return torch.cat(samples)


class Widest(DynamicCache):  # type: ignore[misc]
    """A cache that keeps nothing of a block but the largest number of each channel.

    Args:
        ropes: by which the keys of each layer were turned; None: they were not.
    """

    def __init__(self, ropes: Sequence[Rope | None]) -> None:
        super().__init__()
        self.ropes, self.largest = ropes, dict[int, Tensor]()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Note a block [B, K, T, D] of a layer, which attends to itself alone."""
        both = reach(key_states.float(), self.ropes[layer_idx]), value_states.float().abs()
        self.largest[layer_idx] = torch.stack([x.amax((0, 2)) for x in both])
        return key_states, value_states

    def scales(self) -> Tensor:
        """Return the scales [L, 2, K, D]."""
        layers = torch.stack([self.largest[layer] for layer in sorted(self.largest)])
        return (layers * (MARGIN / MOST)).clamp_min(LEAST)


def reach(keys: Tensor, rope: Rope | None) -> Tensor:
    """Return how large each number of keys [..., D] can be at another position."""
    magnitude = keys.abs()
    if rope is None or rope.inv_freq is None:
        return magnitude
    pairs = len(rope.inv_freq)
    if rope.interleaved:
        a, b = magnitude[..., 0 : 2 * pairs : 2], magnitude[..., 1 : 2 * pairs : 2]
    else:
        a, b = magnitude[..., :pairs], magnitude[..., pairs : 2 * pairs]
    a[...] = b[...] = torch.hypot(a, b)
    return magnitude

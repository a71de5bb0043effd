"""Rounds a decoder's matrices by what a text multiplies them with (GPTQ), layer by layer.

All pieces of the text go through a layer before the next one's turn comes: as the layer is, to see
what its matrices are multiplied with, and once more as it was rounded, so that the layers behind it
see, and make up for, what was lost. A layer's weights may come and go with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvcap.export.decoder.depth import layers_of
from kvcap.export.decoder.graph import DecoderGraph
from kvcap.export.gptq import DAMPING, gptq
from kvcap.export.weights import Packed, unpack
from kvcap.runtime.errors import NotExportable
from kvcap.runtime.models.checkpoint import Checkpoint, streaming
from kvcap.runtime.models.files import encode
from kvcap.runtime.models.quantised import is_plain
from kvcap.runtime.models.rounding import Rounding

PIECE = 512  # tokens, each piece a text of its own
LEAST, MOST = 2_048, 16_384  # tokens that are read of a text
TIED = 0.1  # damping for an LM head that is the embedding table, too, whose rows are looked up

Note = Callable[[str], None]


def refuse_text(text: str | None, dtype: str, kv_dtype: str | None = None) -> None:
    """Refuse a text where nothing is calibrated.

    Raises:
        NotExportable: weights of another type than int4, and slots in floats.
    """
    if text is not None and dtype != "int4" and kv_dtype is None:
        raise NotExportable(
            f"--calibrate is for --dtype int4, and this is {dtype}, which loses next to nothing "
            "when it is rounded to the nearest; leave it out, or measure what slots hold by it: "
            "--kv-dtype int8"
        )


def pieces(tokenizer: Any, text: str, longest: int) -> Tensor:
    """Return a text's token ids [pieces, T]; `MOST` tokens spread over it where it has more.

    Args:
        tokenizer: the model's; None: it has none.
        text: to calibrate on.
        longest: tokens that the model was trained on.

    Raises:
        NotExportable: the text has less than `LEAST` tokens, or there is no tokenizer.
    """
    if tokenizer is None:
        raise NotExportable("the model has no tokenizer to read --calibrate with; leave it out")
    opening, ids = encode(tokenizer, text)
    if len(ids) < LEAST:
        raise NotExportable(
            f"the text of --calibrate has {len(ids):,} tokens, and at least {LEAST:,} are needed; "
            "give a longer one, of what the model will read"
        )
    length = min(PIECE, longest) - len(opening)
    count = min(len(ids), MOST) // length
    starts = torch.linspace(0, len(ids) - length, count).long().tolist()
    return torch.tensor([[*opening, *ids[start : start + length]] for start in starts])


def calibrate(
    decoder: DecoderGraph,
    ids: Tensor,
    rounding: Rounding,
    checkpoint: Checkpoint | None = None,
    note: Note = lambda text: None,
) -> dict[str, Packed]:
    """Round the matrices of a model's layers, and of its head, by GPTQ.

    Args:
        decoder: whose model was loaded, or is without weights; it is left as it was.
        ids: [pieces, T], what it reads.
        rounding: of the matrices.
        checkpoint: has the weights that the model is without.
        note: called with the layer that is rounded.

    Returns:
        Matrices by all their names in the decoder; those that the text was multiplied with.

    Raises:
        NotExportable: the model's layers cannot be found.
    """
    model = decoder.model
    named_layers = layers_of(model)
    if named_layers is None:
        raise NotExportable(
            "--calibrate goes layer by layer, and this model's layers cannot be found"
        )
    packed, layers = dict[str, Packed](), named_layers[1]
    names = {id(module): name for name, module in decoder.named_modules()}
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(with_stock_attention(decoder))
        for i, layer in enumerate(layers):
            progress = partial(note, f"calibrating layer {i + 1} of {len(layers)}")
            forward = _Calibrated(layer, names, rounding, packed, progress).forward
            stack.enter_context(_instead(layer, forward))
        if checkpoint is not None:
            stack.enter_context(streaming(decoder, layers, checkpoint))
        out = model.base_model(input_ids=ids, use_cache=False)
        head, table = model.get_output_embeddings(), model.get_input_embeddings()
        if is_plain(head):
            note("calibrating the head")
            seen, tied = _Seen(), head.weight is table.weight
            for row in out.last_hidden_state:
                seen.see(head, (row,))
            rounded = gptq(head.weight, seen.of(head), rounding, TIED if tied else DAMPING)
            both = (head, table) if tied else (head,)
            packed |= {f"{names[id(module)]}.weight": rounded for module in both}
    return packed


class _Calibrated:
    """A layer that rounds its matrices by its first inputs, then runs with the rounded ones.

    Args:
        layer: of the model.
        names: of modules, by their `id`.
        rounding: of the matrices.
        packed: gets them.
        note: called when they are rounded.
    """

    def __init__(
        self,
        layer: nn.Module,
        names: Mapping[int, str],
        rounding: Rounding,
        packed: dict[str, Packed],
        note: Callable[[], None],
    ) -> None:
        self.layer, self.names, self.rounding = layer, names, rounding
        self.packed, self.note = packed, note
        self._forward = layer.forward

    def forward(self, hidden: Tensor, *args: Any, **options: Any) -> Any:
        """Compute the rounded layer's outputs of hidden states [pieces, T, hidden]."""
        self.note()
        pieces, seen = hidden.split(1), _Seen()
        # Pieces are equally long: transformers 4.57 makes the same mask for each of them.
        options = {
            name: x[:1] if isinstance(x, Tensor) and x.dim() == 4 else x
            for name, x in options.items()
        }
        linears = [part for part in self.layer.modules() if is_plain(part)]
        hooks = [linear.register_forward_pre_hook(seen.see) for linear in linears]
        for piece in pieces:
            self._forward(piece, *args, **options)
        for hook in hooks:
            hook.remove()
        before = {linear: linear.weight.data for linear in linears if linear in seen}
        try:
            for linear, weight in before.items():
                packed = gptq(weight, seen.of(linear), self.rounding)
                self.packed[f"{self.names[id(linear)]}.weight"] = packed
                linear.weight.data = unpack(packed, weight.shape[1], self.rounding).to(weight.dtype)
            results = [self._forward(piece, *args, **options) for piece in pieces]
        finally:
            for linear, weight in before.items():
                linear.weight.data = weight
        if isinstance(results[0], Tensor):
            return torch.cat(results)
        # A layer of transformers 4.57 returns a tuple.
        return torch.cat([outputs[0] for outputs in results]), *results[0][1:]


class _Seen:
    """Sums up `x xᵀ` of the inputs of linear layers; layers with the same input share a sum."""

    def __init__(self) -> None:
        self._sums = dict[nn.Module, Tensor]()
        self._last: Tensor | None = None
        self._first: nn.Module | None = None  # the first layer that was given `_last`

    def see(self, linear: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Add up the input of a linear layer; a hook that runs before it."""
        x = inputs[0]
        if x is self._last and self._first is not None:
            self._sums[linear] = self._sums[self._first]
            return
        rows = x.flatten(0, -2).float()
        if linear not in self._sums:
            self._sums[linear] = rows.new_zeros(rows.shape[1], rows.shape[1])
        self._sums[linear].addmm_(rows.T, rows)
        self._last, self._first = x, linear

    def __contains__(self, linear: nn.Module) -> bool:
        return linear in self._sums

    def of(self, linear: nn.Module) -> Tensor:
        """Return the sum [K, K] of a layer."""
        return self._sums[linear]


@contextmanager
def _instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module run another function."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


@contextmanager
def with_stock_attention(decoder: DecoderGraph) -> Iterator[None]:
    """Let a decoder's model run with an attention of transformers, as nothing is evicted."""
    model, shape = decoder.model, decoder.layout.shape
    before = model.config._attn_implementation
    # `scaled_dot_product_attention` takes neither softcaps nor sink logits.
    model.config._attn_implementation = "eager" if shape.softcap or shape.sinks else "sdpa"
    try:
        yield
    finally:
        model.config._attn_implementation = before

"""Reads the output projection `W_O` of attention, for policies that weigh values by it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvcap.runtime.errors import UnsupportedModel
from kvcap.runtime.models.config import ModelShape
from kvcap.runtime.models.quantised import is_plain, name_of


def output_projection(module: Any, shape: ModelShape) -> Tensor:
    """Return `W_O` by query head, a view [K, G, D, hidden]; a bias plays no part in eviction.

    `D` is the size of a value; for latents, of the values that `Expansion` makes of them.

    Raises:
        UnsupportedModel: the projection is quantised, adapted or otherwise no plain `nn.Linear`.
    """
    projection = getattr(module, "o_proj", None) or getattr(module, "out_proj", None)
    if not is_plain(projection):
        raise UnsupportedModel(
            f"the policy weighs values by the output projection, which is {name_of(projection)} "
            "here; it must be a plain nn.Linear of floating point weights: load the model "
            "unquantised, merge adapters, or choose a policy without criticalkv"
        )
    weight: Tensor = projection.weight.T  # [H·D, hidden]
    size = shape.head_size if shape.latent is None else shape.latent.value
    cut: Tensor = weight.unflatten(0, (shape.kv_heads, -1, size))
    return cut


def check_projections(model: Any, shape: ModelShape) -> None:
    """Refuse a model whose output projections cannot be read, before it runs.

    Raises:
        UnsupportedModel: as `output_projection`.
    """
    for module in model.get_decoder().modules():  # not those of a vision tower
        # Recurrent layers have output projections too, which no policy reads.
        attends = getattr(module, "layer_idx", None) in shape.capped
        attends = attends and not hasattr(module, "conv1d")  # Falcon-H1's Mamba 2 beside attention
        if attends and (hasattr(module, "o_proj") or hasattr(module, "out_proj")):
            output_projection(module, shape)

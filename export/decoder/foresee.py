"""Describes the decoder that an export would write, from the config and headers of its model."""

from __future__ import annotations

from typing import Any

import torch

from kvcap.dtypes import torch_dtype
from kvcap.export.decoder import manifest
from kvcap.export.decoder.graph import DecoderGraph
from kvcap.export.decoder.spec import CACHE, ROUNDINGS, check_dtype, layout_for
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.models.checkpoint import empty_model
from kvcap.runtime.models.files import load_config
from kvcap.runtime.models.names import resolve
from kvcap.runtime.models.rounding import Rounding


def foreseen(model: str, settings: CacheSettings, dtype: str, text: str | None) -> dict[str, Any]:
    """Return the manifest that an export would have, without its files; read no weights.

    The bytes of its weights are an estimate, as tensors in a file begin at round places.

    Raises:
        NotExportable, UnsupportedModel, ModelNotFound, ModelFilesBroken: as the export.
    """
    where = resolve(model)
    config, kind = load_config(where), torch_dtype(CACHE[check_dtype(dtype)])
    layout = layout_for(config, settings)
    empty = empty_model(where, config, kind).eval()
    scales = None
    if settings.kv_dtype is not None:
        shape = layout.shape
        scales = torch.ones(len(shape.layers), 2, shape.kv_heads, shape.head_size)
    facts = manifest.describe(model, DecoderGraph(empty, layout, scales), dtype, text)
    rounding = ROUNDINGS.get(dtype)
    facts["model"]["weights_bytes"] = sum(_bytes(x, rounding) for x in empty.parameters())
    return facts


def _bytes(weight: Any, rounding: Rounding | None) -> int:
    """Return the bytes of a weight in the file: of a matrix, in blocks if they are rounded."""
    if rounding is None or weight.dim() != 2:
        return int(weight.nbytes)
    rows, columns = weight.shape
    scaled = rows * -(-columns // rounding.block)  # blocks
    beside = 4 + (0 if rounding.symmetric else rounding.bits / 8)
    return int(scaled * (rounding.block * rounding.bits / 8 + beside))

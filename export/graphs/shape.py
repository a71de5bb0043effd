"""Describes the sizes that a graph is made for, given by hand or read from a model's config."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvcap.runtime.errors import NotExportable
from kvcap.runtime.models.config import ModelShape


@dataclass(frozen=True)
class Shape:
    """A layer's sizes; with `slots=None` the number of slots (and of queries) is open.

    Raises:
        ValueError: no layer can have these sizes.

    >>> Shape(kv_heads=8, heads=24, head_dim=128).groups
    3
    """

    kv_heads: int = 8  # K
    heads: int = 24  # H
    head_dim: int = 128  # D
    batch: int = 1  # B
    block: int = 128  # T, the newest slots
    budget: int = 512  # N, slots per KV head that an evict graph keeps
    slots: int | None = None  # n, slots in use while scoring
    scaling: float | None = None  # factor of attention logits; None: 1/sqrt(D)
    softcap: float | None = None  # bound c of attention logits, c * tanh(x / c); None: no bound

    def __post_init__(self) -> None:
        for name in ("kv_heads", "heads", "head_dim", "batch", "block", "budget"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} will not work; use 1 or more")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly; "
                f"use a multiple of {self.kv_heads}"
            )
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"{self.slots} slots hold nothing; use 1 or more")

    @property
    def groups(self) -> int:
        """Return how many query heads share a KV head, `G`."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        """Return the factor of attention logits."""
        return self.head_dim**-0.5 if self.scaling is None else self.scaling

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for a manifest."""
        return asdict(self)


def model_sizes(model: str) -> dict[str, Any]:
    """Return the sizes of a model's capped layers, without its weights.

    Args:
        model: 'pocket', a directory, or a repository of the hub.

    Raises:
        ModelNotFound: there is no such model.
        UnsupportedModel: kvcap cannot run the model.
        NotExportable: the model's attention has sink logits.
    """
    from kvcap.runtime.models.files import load_config
    from kvcap.runtime.models.names import resolve

    config = load_config(resolve(model)).get_text_config(decoder=True)
    shape = ModelShape.of(config)
    refuse_sinks(shape)
    return {
        "kv_heads": shape.kv_heads,
        "heads": shape.heads,
        "head_dim": shape.head_size,
        "scaling": _scaling(config, shape.capped[0]),
        "softcap": shape.softcap,
    }


def _scaling(config: Any, layer: int) -> float | None:
    """Return the factor of a layer's logits; None if its attention names none.

    Families compute it from settings of different names, or have it in their code.
    """
    from kvcap.runtime.models.weights import on_meta  # takes seconds to import

    modules = on_meta(config, torch.float32).modules()
    own = (vars(module) for module in modules if getattr(module, "layer_idx", None) == layer)
    return next((float(names["scaling"]) for names in own if "scaling" in names), None)


def refuse_sinks(shape: ModelShape) -> None:
    """Refuse a model whose attention has sink logits, which no graph here computes.

    Raises:
        NotExportable: the model has some.
    """
    if shape.sinks:
        raise NotExportable(
            f"the attention of this {shape.family} has sink logits, learned numbers beside the "
            "slots' logits, which no exported graph computes; run it with the PyTorch backend, or "
            "export a model without them, such as a Llama or a Qwen 3"
        )

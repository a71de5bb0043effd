"""Names the types of layers in configs, and says which of them no graph can run.

Imports neither torch nor transformers, so that a config's JSON is judged at once. `config.py` reads
the config that transformers makes of it, which also has what the JSON leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kvcap.runtime.units import layers_named

EXPERTS = ("moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts")
"""Names that configs have for the number of experts."""
FULL = {"full_attention", "hybrid"}  # types of layers in a config: that attend to all tokens,
ATTENTIONS = FULL | {"sliding_attention"}  # layers that attend
STATES = {"linear_attention", "conv", "mamba", "hybrid"}  # layers with a state of fixed size
WITHOUT = {"mlp", "moe"}  # layers that hold nothing
AMONG_EXPERTS = "every token chooses among experts"


def read_layers(config: Any, kinds: list[str]) -> list[int | None]:
    """Return for each layer the earlier layer whose keys and values it reads; None if its own.

    The last `num_kv_shared_layers` read the last layer of their kind before them (Gemma 3n and 4).
    """
    own = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)
    last = {kind: i for i, kind in enumerate(kinds[:own])}
    return [None if i < own else last[kind] for i, kind in enumerate(kinds)]


def named_readers(reads: Sequence[int | None]) -> str:
    """Describe which layers read which others, from `read_layers`; '' if none do.

    >>> named_readers([None, None, 0, 1])
    'layers 2 to 3 read 0 and 1'
    """
    readers = [i for i, read in enumerate(reads) if read is not None]
    if not readers:
        return ""
    read = sorted({read for read in reads if read is not None})
    return f"layers {readers[0]} to {readers[-1]} read {' and '.join(map(str, read))}"


def named_without_slots(recurrent: list[int], without: list[int], readers: str) -> str:
    """Return in words which layers hold something else than slots; '' if none do.

    Args:
        recurrent: layers with a state.
        without: layers that hold nothing.
        readers: from `named_readers`.
    """
    layers_by_content = {"keep a recurrent state": recurrent, "hold no keys and values": without}
    words = [
        f"{layers_named(layers)} {content}"
        for content, layers in layers_by_content.items()
        if layers
    ]
    return ", ".join([*words, readers] if readers else words)


def of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config's JSON; of a wrapper, with the values of its text model in front."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def not_exportable(config: Mapping[str, Any]) -> str:
    """Return why no graph can run a model, by its config's JSON; '' if that does not show it.

    It is what `ModelShape.not_exportable` says of the config that transformers makes of it.
    """
    fields = of_text(config)
    kinds, last = fields.get("layer_types"), fields.get("num_kv_shared_layers")
    if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds):
        if not isinstance(last, int) or not 0 < last < len(kinds):
            last = 0
        fits = {*kinds[len(kinds) - last :]} <= {*kinds[: len(kinds) - last]}
        reads = read_layers(SimpleNamespace(num_kv_shared_layers=last if fits else 0), kinds)
        recurrent, without = (
            [i for i, kind in enumerate(kinds) if kind in some] for some in (STATES, WITHOUT)
        )
        if why := named_without_slots(recurrent, without, named_readers(reads)):
            return why
    counts = [fields.get(name) for name in EXPERTS]
    if any(type(count) is int and count > 1 for count in counts) and "kv_lora_rank" not in fields:
        return AMONG_EXPERTS
    return ""

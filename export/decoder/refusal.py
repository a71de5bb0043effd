"""Refuses models that no decoder's graph can run, by their config's JSON alone.

PyTorch and transformers take seconds to import, for which no refusal waits.
"""

from __future__ import annotations

from pathlib import Path

from kvcap.runtime.errors import NotExportable
from kvcap.runtime.files import read_json
from kvcap.runtime.models.hub import CONFIG
from kvcap.runtime.models.kinds import not_exportable, of_text
from kvcap.runtime.models.names import locate
from kvcap.runtime.types import BUILT_IN


def refuse_by_config(model: str) -> None:
    """Refuse a model whose config's JSON, if it is here, shows that it cannot be exported.

    Raises:
        NotExportable: naming what the graph does not do.
        ModelNotFound: there is no such model.
    """
    if model in BUILT_IN:
        return
    folder = locate(model)
    if folder is None:
        from huggingface_hub import try_to_load_from_cache  # here, as only a repository needs it

        kept = try_to_load_from_cache(model, CONFIG)
        folder = Path(kept).parent if isinstance(kept, str) else Path()
    try:
        config = read_json(folder / CONFIG)
    except (OSError, ValueError):  # loading it says what is wrong with it
        return
    if isinstance(config, dict) and (why := not_exportable(config)):
        raise refusal(str(of_text(config).get("model_type")), why)


def refusal(family: str, why: str) -> NotExportable:
    """Return the error for a model that no graph of open but equal lengths can run."""
    return NotExportable(
        f"in this {family} there is what the decoder's graph does not do: {why}; export "
        "a model whose layers attend fully or slide, with RoPE of type default, linear, llama3 "
        "or yarn, or run this one with the PyTorch backend (--backend torch --weights int4 "
        "for its weights in 4 bits)"
    )

"""A decoder's directory, checked again against the model that it was made of."""

from __future__ import annotations

from pathlib import Path

from kvcap.export.decoder.graph import Decoder
from kvcap.export.decoder.spec import check_dtype, layout_for, load
from kvcap.export.decoder.verify import Report, check
from kvcap.policies import load_policy
from kvcap.runtime.errors import ManifestError
from kvcap.runtime.model_files import load_config, resolve
from kvcap.runtime.ort.manifest import NAME, read


def is_decoder(path: Path) -> bool:
    """Whether a directory is one that `kvcap export decoder` wrote."""
    return (path / NAME).is_file()


def recheck(folder: Path, model: str | None = None, quick: bool = False) -> Report:
    """Run the graph of an exported decoder beside PyTorch.

    Args:
        folder: with its manifest.
        model: where the model is, if not where it was when it was exported.
        quick: over one block past the budget only.

    Raises:
        ManifestError, ModelFilesBroken: the directory is not as it was written.
        ModelNotFound: the model is not where it was.
        GraphBroken, ShapeError: the graph cannot be run, or is another.
    """
    found = read(folder)
    if not found.fused:
        raise ManifestError(
            f"{folder.name} holds a decoder that another exporter wrote, with evictors that were "
            "checked when they were; export it again to check them again"
        )
    facts = found.facts
    name = model or str(found.model["name"])
    try:
        policy = facts["policy"]
        eviction = load_policy(policy["parts"], **policy["parameters"])
        check_dtype(facts["dtype"])
        sizes = facts["budget_tokens"], facts["block_size"], facts["positions"]
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"{NAME} describes no decoder known here: {error}") from error
    config = load_config(resolve(name))
    layout = layout_for(config, eviction, *sizes)
    return check(folder, Decoder(load(name, facts["dtype"]).model, layout), facts["dtype"], quick)

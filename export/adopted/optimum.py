"""Exports a decoder with Optimum, in an environment of its own; `adopt.py` makes it ready.

optimum-onnx needs transformers below 4.58, so it has an environment of its own. Its exporter for
the CPU writes float32 whatever it is asked for.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvcap.dtypes import short
from kvcap.export.adopted.adopt import adopt
from kvcap.export.adopted.signature import read_ports
from kvcap.export.adopted.trial import EvictionTrial
from kvcap.policies import Eviction
from kvcap.runtime.backends.onnxruntime.library import library
from kvcap.runtime.errors import ExtraMissing, NotExportable, ToleranceError
from kvcap.runtime.models.files import load_config, load_model
from kvcap.runtime.models.names import resolve

TASK = "text-generation-with-past"
WHERE = (
    "give it an environment of its own: python -m venv optimum-env && "
    "optimum-env/bin/pip install '.[optimum]'"
)
CLOSE = 1e-3  # error allowed, relative to the largest logit


def export_with_optimum(
    model: str,
    out: Path,
    policies: Iterable[Eviction] = (),
    *,
    dtype: str = "fp32",
    **settings: Any,
) -> dict[str, Any]:
    """Export `model` with optimum into `out`, with graphs beside it that evict.

    Args:
        model: 'pocket', a directory, or a repository.
        out: the directory to write; it is made only when all is done.
        policies: to evict by, as `adopt` takes them.
        dtype: fp32, or an error.
        settings: others of `adopt`.

    Returns:
        The manifest.

    Raises:
        ExtraMissing: optimum is not here, or not beside this transformers; says where it fits.
        NotExportable: another dtype, or something else is at `out`.
        ToleranceError: the decoder computes something else than the model.
        UnsupportedModel: see `adopt`.
    """
    if short(dtype) != "fp32":
        raise NotExportable(
            f"optimum's exporter for the CPU writes float32 even for --dtype {dtype}; use fp32, or "
            "--exporter kvcap"
        )
    if out.exists() and any(out.iterdir()):
        raise NotExportable(f"{str(out)!r} is there already; remove it, or give another with -o")
    export = _exporter()
    where = resolve(model)
    config = load_config(where)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".kvcap-", dir=out.parent) as name:
        folder = Path(name) / (Path(model).name or "decoder")
        with _quiet():
            export(where, folder, task=TASK, dtype="fp32", device="cpu", do_validation=False)
        _compare(folder, load_model(where, config, torch.float32).eval())
        said = adopt(folder, None, policies, exporter="optimum", **settings)
        if out.exists():
            out.rmdir()
        folder.rename(out)
    return said


def _exporter() -> Any:
    """Return optimum's function that exports.

    Raises:
        ExtraMissing: it is not installed, or does not fit.
    """
    library("onnxruntime")  # before optimum imports it: telemetry is off from here
    try:
        return importlib.import_module("optimum.exporters.onnx").main_export
    except ImportError as error:
        raise ExtraMissing(
            f"--exporter optimum needs optimum-onnx and transformers below 4.58; here is "
            f"transformers {version('transformers')} ({error}); {WHERE}"
        ) from error


def _compare(folder: Path, model: Any) -> None:
    """Hold the decoder's logits to the model's.

    Raises:
        ToleranceError: they differ.
    """
    found = read_ports(folder / "model.onnx")
    trial = EvictionTrial(found, model.config.get_text_config(decoder=True).vocab_size)
    got, _ = trial.run(trial.ids, trial.empty, 0)
    with torch.inference_mode():
        wanted = model(torch.from_numpy(trial.ids), use_cache=False).logits[0, -1].double().numpy()
    error, largest = float(abs(got - wanted).max()), float(abs(wanted).max())
    if error > CLOSE * largest:
        raise ToleranceError(
            f"optimum's decoder differs from the model by {error:.2g}, of logits up to "
            f"{largest:.2g}; use --exporter kvcap"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the tracer's advice to its own callers off the screen."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)

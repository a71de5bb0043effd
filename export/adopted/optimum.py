"""Exports a decoder with Hugging Face's optimum-onnx, and adopts it (`adopt.py`).

optimum-onnx needs transformers below 4.58, so it runs in an environment of its own. Its exporter
for the CPU writes float32 whatever type it is asked for.
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
    """Export `model` with optimum into `out`, with evictors beside it.

    Args:
        model: 'pocket', a directory, or a repository of the hub.
        out: the directory to write; it appears only when everything in it is written and checked.
        policies: the policies to write evictors for, as `adopt` takes them.
        dtype: the type of weights, of which only fp32 works.
        settings: further arguments of `adopt`.

    Returns:
        The manifest.

    Raises:
        ExtraMissing: optimum is not installed, or does not work with this transformers; the
            message says how to install it.
        NotExportable: the dtype is another, or something else is at `out`.
        ToleranceError: the decoder computes something else than the model.
        UnsupportedModel: `adopt` refuses the decoder.
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
        manifest = adopt(folder, None, policies, exporter="optimum", **settings)
        if out.exists():
            out.rmdir()
        folder.rename(out)
    return manifest


def _exporter() -> Any:
    """Return optimum's function that exports.

    Raises:
        ExtraMissing: optimum is not installed, or does not work with this transformers.
    """
    library("onnxruntime")  # before optimum imports it, to turn telemetry off
    try:
        return importlib.import_module("optimum.exporters.onnx").main_export
    except ImportError as error:
        raise ExtraMissing(
            f"--exporter optimum needs optimum-onnx and transformers below 4.58; here is "
            f"transformers {version('transformers')} ({error}); {WHERE}"
        ) from error


def _compare(folder: Path, model: Any) -> None:
    """Compare the decoder's logits with the model's.

    Raises:
        ToleranceError: the logits differ.
    """
    ports = read_ports(folder / "model.onnx")
    trial = EvictionTrial(ports, model.config.get_text_config(decoder=True).vocab_size)
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

"""Converts a graph to ORT format, and reports which nodes mobile execution providers would run."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from pathlib import Path

from kvcap.export.graphs import manifest
from kvcap.export.graphs.check import check
from kvcap.runtime.backends.onnxruntime.library import library


def to_ort(file: Path) -> Path:
    """Convert a graph to ORT format for ARM, beside it, and check the new file like the graph.

    Raises:
        ToleranceError, ShapeError: the new file computes something else; it is removed.
    """
    tool = library("onnxruntime.tools.convert_onnx_models_to_ort")
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the tool leaves a file to the collector
        tool.convert_onnx_models_to_ort(
            file, optimization_styles=[tool.OptimizationStyle.Fixed], target_platform="arm"
        )
    converted = file.with_suffix(".ort")
    try:
        check(converted, manifest.read(file), quick=True).require()
    except Exception:
        converted.unlink(missing_ok=True)
        raise
    return converted


def report(file: Path) -> str:
    """Return the text of ONNX Runtime's usability checker: which nodes CoreML and NNAPI take."""
    lines: list[str] = []
    logger = logging.getLogger("kvcap.export.graphs.mobile")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        library("onnxruntime.tools.mobile_helpers.usability_checker").analyze_model(
            file, skip_optimize=True, logger=logger
        )
    finally:
        logger.removeHandler(handler)
    return "\n".join(lines)

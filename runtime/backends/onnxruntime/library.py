"""Imports the optional packages onnx, onnxscript and onnxruntime, or says how to install them.

ONNX Runtime sends telemetry unless the environment forbids it before the import. That is done here,
so nothing else may import it first.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from kvcap.runtime.errors import ExtraMissing, how_to_install

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # too late once onnxruntime is imported


def library(name: str) -> ModuleType:
    """Import the package or module `name`, which the extra `onnx` installs.

    Raises:
        ExtraMissing: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ExtraMissing(
            f"this needs {name.split('.')[0]}, which is not installed; {how_to_install('onnx')}"
        ) from error


def require() -> None:
    """Refuse to export, before any work, where a package is missing that it needs.

    Raises:
        ExtraMissing: naming it.
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        library(name)

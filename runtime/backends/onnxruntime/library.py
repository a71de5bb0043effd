"""The optional packages onnx, onnxscript and onnxruntime: imported here, or missed by name.

ONNX Runtime sends telemetry unless the environment forbids it before it is imported, so that is
done in this one place. Nothing else imports it first.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from kvcap.runtime.errors import ExtraMissing

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # too late once onnxruntime is imported


def library(name: str) -> ModuleType:
    """The package or module `name` of the extra `onnx`.

    Raises:
        ExtraMissing: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ExtraMissing(
            f"this needs {name.split('.')[0]}, which is not installed; run: pip install kvcap[onnx]"
        ) from error


def require() -> None:
    """Refuse early where a package is missing that exporting needs.

    Raises:
        ExtraMissing: naming it.
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        library(name)

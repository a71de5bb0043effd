"""The packages that exporting needs; they are imported, or missed by name, in one place."""

from __future__ import annotations

from kvcap.runtime.errors import ExtraMissing
from kvcap.runtime.ort.library import library

__all__ = ["ExtraMissing", "library", "require"]


def require() -> None:
    """Refuse early where a package is missing.

    Raises:
        ExtraMissing: naming it.
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        library(name)

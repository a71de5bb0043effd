"""Tells quantised weights from plain ones, and says how they are loaded.

Knows the settings in checkpoints and torch's tensor types; imports no library that quantises.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from typing import Any, TypeGuard

import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvcap.runtime.errors import UnsupportedModel

UNPACKED = ("compressed-tensors", "fp8", "mxfp4")
"""Kinds of quantised weights that are converted to plain floats when they are loaded.

Their libraries would decide that by the device, by the packages that are installed, or at the first
forward pass, when the memory has been planned already.
"""
_OLD = transformers.__version__ < "5"
_PACKAGES = {  # of whose libraries transformers names one at a time, or none
    "gptq": ("optimum", "gptqmodel"),
    "awq": ("awq",) if _OLD else ("gptqmodel",),
}
_INSTALLED_AS = {"awq": "autoawq"}


def quantisation(config: Any) -> str | None:
    """Return the kind of a model's quantised weights, such as 'bitsandbytes'; None if plain.

    Args:
        config: the model's transformers config.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    if not isinstance(settings, dict):
        settings = settings.to_dict()
    method = settings.get("quant_method")
    return str(getattr(method, "value", method))


def check_packages(config: Any) -> None:
    """Refuse quantised weights that packages read which are not installed.

    Raises:
        UnsupportedModel: naming them.
    """
    method = quantisation(config)
    missing = [x for x in _PACKAGES.get(method or "", ()) if importlib.util.find_spec(x) is None]
    if missing:
        names = " ".join(_INSTALLED_AS.get(name, name) for name in missing)
        raise UnsupportedModel(
            f"weights quantised by {method!r} need a package that is not installed: pip install "
            f"{names}; or give the model unquantised, or quantised by bitsandbytes or torchao"
        )


def unpacking(config: Any) -> Any:
    """Copy the config so that a model of an `UNPACKED` kind is loaded as plain floats."""
    old = _OLD and quantisation(config) != "mxfp4"
    settings = {"run_compressed": False} if old else {"dequantize": True}
    config = copy.deepcopy(config)
    config.quantization_config = {**config.quantization_config, **settings}
    return config


def is_plain(module: Any) -> TypeGuard[nn.Linear]:
    """Return whether a module is a linear layer of ordinary floating-point numbers.

    Quantised layers are other modules, or have a tensor type of their library's own.
    """
    if type(module) is not nn.Linear:
        return False
    weight = module.weight
    return weight.dtype.is_floating_point and not is_traceable_wrapper_subclass(weight)


def name_of(module: Any) -> str:
    """Return the types of a module and its weights, for messages about unusual modules."""
    if module is None:
        return "missing"
    weight = getattr(module, "weight", None)
    of = ""
    if isinstance(weight, Tensor):
        plain = type(weight) in (Tensor, nn.Parameter)
        of = f" of {weight.dtype if plain else type(weight).__name__}"
    return f"a {type(module).__module__}.{type(module).__name__}{of}"


def parts(tensor: Any) -> Iterator[Tensor]:
    """Return the plain tensors inside a tensor of a library's own type."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names, _ = flatten()
        for name in names:
            yield from parts(getattr(tensor, name))
    elif isinstance(tensor, Tensor):
        yield tensor

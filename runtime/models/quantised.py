"""Quantised weights: which kinds there are, how they are loaded, which modules hold plain ones.

Knows the settings that checkpoints carry and torch's tensor types; imports no library that
quantises.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeGuard

import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

UNPACKED = ("compressed-tensors", "fp8")
"""Kinds that become plain floats when they are loaded.

Left to themselves, their libraries decide that by the device, or at the first forward pass, when
the memory has been planned.
"""
_UNPACK = {"run_compressed": False} if transformers.__version__ < "5" else {"dequantize": True}


def quantisation(config: Any) -> str | None:
    """The kind of a model's quantised weights, such as 'bitsandbytes'; None where they are plain.

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


def unpacking(config: Any) -> Any:
    """The config [a copy] with which a model of an `UNPACKED` kind is loaded as plain floats."""
    config = copy.deepcopy(config)
    config.quantization_config = {**config.quantization_config, **_UNPACK}
    return config


def is_plain(module: Any) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer of ordinary floating-point numbers.

    Quantised ones are other modules, or this one with a tensor type of their library's.
    """
    if type(module) is not nn.Linear:
        return False
    weight = module.weight
    return weight.dtype.is_floating_point and not is_traceable_wrapper_subclass(weight)


def parts(tensor: Any) -> Iterator[Tensor]:
    """The ordinary tensors that a tensor of a library's own type is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names, _ = flatten()
        for name in names:
            yield from parts(getattr(tensor, name))
    elif isinstance(tensor, Tensor):
        yield tensor

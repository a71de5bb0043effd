"""Compares how modules compute, apart from their weights' numbers.

Modules of equal settings do the same, so that one can be traced, or tried, for all of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import nn

PLAIN = (
    int,
    float,
    str,
    bool,
    type(None),
    torch.dtype,
    tuple,
    list,
)  # attributes that are compared
OWN = ("layer_idx", "layer_id")  # attributes that only say which layer it is


def settings(module: nn.Module) -> Hashable:
    """Return all settings of a module and its parts, without its weights' numbers and its index."""
    return tuple(
        (
            name,
            type(part),
            type(part).forward,
            _sorted({k: _plain(v) for k, v in vars(part).items() if _compares(k, v)}),
            _sorted(
                {k: p if p is None else (p.shape, p.dtype) for k, p in part._parameters.items()}
            ),
            _sorted({k: b if b is None else repr(b.tolist()) for k, b in part._buffers.items()}),
        )
        for name, part in module.named_modules()
    )


def _compares(name: str, value: Any) -> bool:
    return name not in OWN and (isinstance(value, PLAIN) or callable(value))


def _plain(value: Any) -> Any:
    """Return a value in a form that is equal for two modules that compute the same."""
    if isinstance(value, partial):  # equal to none but itself
        return value.func, repr(value.args), repr(sorted(value.keywords.items()))
    return repr(value) if isinstance(value, (tuple, list)) else value


def _sorted(facts: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return facts in the order of their names."""
    return tuple(sorted(facts.items(), key=lambda fact: fact[0]))

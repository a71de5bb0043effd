"""Keeps torch.compile out of code that follows slots: it runs as it is, between compiled graphs.

Which slots are in use is counted in Python, and changes from block to block: the compiler would
trace all of kvcap, and anew for every block.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

REASON = "kvcap follows slots in Python, between compiled graphs: compile without fullgraph=True"


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in a form that torch.compile runs as it is."""
    disable: Callable[..., Any] = torch.compiler.disable
    explained = "reason" in inspect.signature(disable).parameters  # not before torch 2.7
    wrapped: Callable[..., Any] = disable(function, **({"reason": REASON} if explained else {}))
    return wrapped


@cache
def run_uncompiled(kind: type, *methods: str) -> None:
    """Make torch.compile run these methods of a class as they are.

    To be called before an object of the class is used, and not as the class is made: the compiler
    takes a second to import, which transformers does when it makes masks.
    """
    for name in methods:
        setattr(kind, name, uncompiled(getattr(kind, name)))

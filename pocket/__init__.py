"""Pocket: a built-in 8-million-parameter Llama-architecture model that recalls facts.

It was trained on synthetic English alone (see :mod:`kvcap.pocket.corpus` and the README beside
this file): tell it codes, numbers and names, let it read thousands of tokens, and ask. It knows
nothing about the world, cannot calculate and cannot write; it says so when asked.

>>> from transformers import AutoModelForCausalLM, AutoTokenizer
>>> model = AutoModelForCausalLM.from_pretrained(path())  # doctest: +SKIP
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["path"]


def path(name: str = "pocket") -> Path:
    """Return the folder of a built-in model's config, tokenizer and weights.

    ``name`` is ``pocket``, ``pocket-plain`` or ``pocket-text``.
    """
    return Path(__file__).resolve().parent / "weights" / name

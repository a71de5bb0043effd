"""Holds the built-in models: pocket, of 8 million parameters, which recalls facts, and two more.

Pocket was trained on synthetic English alone (see the README beside this file): tell it codes,
numbers and names, let it read thousands of tokens, and ask. It knows nothing about the world,
cannot calculate and cannot write; it says so when asked.
pocket-plain, which recalls too, and pocket-text, which continues running text, have never met an
eviction in training; their cards lie beside their weights.

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

"""Names of the types of numbers that models run in: one table of full names and of short ones."""

from __future__ import annotations

NAMES = {
    "float32": ("fp32", "f32", "float"),
    "bfloat16": ("bf16",),
    "float16": ("fp16", "f16", "half"),
}


def full(name: str) -> str:
    """The full name, as PyTorch has it.

    Raises:
        ValueError: not one that models run in.

    >>> full("half"), full("BF16")
    ('float16', 'bfloat16')
    """
    plain = name.lower().removeprefix("torch.")
    for known, short in NAMES.items():
        if plain == known or plain in short:
            return known
    ways = ", ".join(f"{known} ({', '.join(short)})" for known, short in NAMES.items())
    raise ValueError(f"dtype {name!r} is not known; use one of {ways}")


def short(name: str) -> str:
    """The short name, as exports have it; another, such as int8, as it is.

    >>> short("float16"), short("int8")
    ('fp16', 'int8')
    """
    try:
        return NAMES[full(name)][0]
    except ValueError:
        return name

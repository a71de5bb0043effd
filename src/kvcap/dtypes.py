"""Names the types of numbers: as PyTorch and NumPy call them, for short, and in files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NAMES = {  # of the types that models run in: the full name, the short one first
    "float32": ("fp32", "f32", "float"),
    "bfloat16": ("bf16",),
    "float16": ("fp16", "f16", "half"),
}
SAFETENSORS = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
ONNX = {  # as ONNX Runtime says it of a graph's inputs and outputs
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "int64": "tensor(int64)",
    "int32": "tensor(int32)",
    "int8": "tensor(int8)",
    "bool": "tensor(bool)",
}


def full(name: str) -> str:
    """Return the full name of a type, as PyTorch has it.

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
    """Return the short name, as exports have it; return any other, such as int8, unchanged.

    >>> short("float16"), short("int8")
    ('fp16', 'int8')
    """
    try:
        return NAMES[full(name)][0]
    except ValueError:
        return name


def torch_dtype(name: str) -> torch.dtype:
    """Return PyTorch's type of any of these names.

    Raises:
        ValueError: not one that models run in.
    """
    import torch

    dtype: torch.dtype = getattr(torch, full(name))
    return dtype


def parse(given: str | torch.dtype | None) -> torch.dtype | None:
    """Return PyTorch's type of a name or of itself; None where none is given.

    Raises:
        ValueError: not one that models run in.
    """
    return None if given is None else torch_dtype(str(given))


def of_model(given: str | torch.dtype | None, config: Any) -> torch.dtype:
    """Return the type in which a model runs: the given one, else its config's, else float32.

    Raises:
        ValueError: not one that models run in.
    """
    import torch

    return parse(given) or getattr(config, "dtype", None) or torch.float32

"""Reads sizes in bytes from text, writes them for people, and rounds them up to caps."""

from __future__ import annotations

import re

from kvcap.runtime.errors import PlanInfeasible

MARGIN = 16 << 20  # bytes: more than a process differs from one run to the next
FACTORS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1024,
    "mi": 1024**2,
    "gi": 1024**3,
    "ti": 1024**4,
}
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def parse_bytes(size: str | int) -> int:
    """Return the bytes of 4096, '4096', '256KiB' or '1.5 GB' (KiB = 1,024, KB = 1,000).

    Raises:
        PlanInfeasible: not a size.
    """
    if type(size) is int:
        return size
    text = size.lower() if isinstance(size, str) else ""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text)
    if not match or match[2] not in FACTORS:
        raise PlanInfeasible(f"{size!r} is not a size; write 1048576, 256KiB, 64MiB or 2GB")
    return int(float(match[1]) * FACTORS[match[2]])


def format_bytes(count: int, of: int | None = None) -> str:
    """Return bytes as people write them; with `of`, a part and its whole in the whole's unit.

    >>> format_bytes(800), format_bytes(57856), format_bytes(512 * 1024, of=3 * 1024**2)
    ('800 B', '56.5 KiB', '0.5/3.0 MiB')
    """
    whole = count if of is None else of
    power = next((i for i in range(len(UNITS)) if whole < 1024 ** (i + 1)), len(UNITS) - 1)

    def shown(value: int) -> str:
        return f"{value / 1024**power:,.{1 if power else 0}f}"

    return f"{shown(count)}{'' if of is None else '/' + shown(of)} {UNITS[power]}"


def with_margin(nbytes: int) -> int:
    """Return a cap in whole MiB that holds a process planned to take `nbytes`, in every run.

    >>> with_margin(500 << 20) >> 20
    516
    """
    return -(-(nbytes + MARGIN) >> 20) << 20


def layers_named(indices: list[int]) -> str:
    """Return layers in words, such as 'layer 3' or 'layers 0 to 7, 9'."""
    runs: list[list[int]] = []
    for index in sorted(set(indices)):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"layer{'' if len(set(indices)) == 1 else 's'} {', '.join(words)}"

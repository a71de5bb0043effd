"""What people see on stderr: notes, errors, sizes; and which exit code an error has.

Results go to stdout elsewhere. `kvcap --help` imports this, so nothing heavy is imported here.
"""

from __future__ import annotations

import os
import sys
import traceback

from kvcap.runtime.errors import MemoryCapExceeded, ModelNotFound, PlanInfeasible

OK, FAILED, USAGE, INFEASIBLE, CAP, INTERRUPTED = 0, 1, 2, 3, 4, 130
CODES: tuple[tuple[type[Exception], int], ...] = (
    (PlanInfeasible, INFEASIBLE),
    (MemoryCapExceeded, CAP),
    (ModelNotFound, USAGE),
    (ValueError, USAGE),  # the house rule: ValueError is what a user can get wrong
)


def exit_code(error: Exception) -> int:
    """The exit code that tells scripts what kind of error it was."""
    return next((code for kind, code in CODES if isinstance(error, kind)), FAILED)


def complain(error: Exception | str) -> None:
    """One line on stderr; the traceback too where KVCAP_DEBUG is set."""
    if isinstance(error, Exception) and os.environ.get("KVCAP_DEBUG"):
        traceback.print_exception(error)
    say = str(error).strip().splitlines() or [type(error).__name__]
    print(f"kvcap: {say[0]}", file=sys.stderr, flush=True)


def dim(text: str) -> None:
    """A side remark on stderr."""
    print(f"\x1b[2m{text}\x1b[0m" if styled() else text, file=sys.stderr, flush=True)


def styled() -> bool:
    """Whether stderr is a terminal that understands escape sequences."""
    if not sys.stderr.isatty():
        return False
    from rich.console import Console

    console = Console(stderr=True)
    return not (console.is_dumb_terminal or console.legacy_windows)


UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: int, of: int | None = None) -> str:
    """Bytes for people; with `of`, a part and its whole in the whole's unit.

    >>> size(800), size(57856), size(512 * 1024, of=3 * 1024**2)
    ('800 B', '56.5 KiB', '0.5/3.0 MiB')
    """
    whole = count if of is None else of
    power = next((i for i in range(len(UNITS)) if whole < 1024 ** (i + 1)), len(UNITS) - 1)

    def shown(value: int) -> str:
        return f"{value / 1024**power:,.{1 if power else 0}f}"

    return f"{shown(count)}{'' if of is None else '/' + shown(of)} {UNITS[power]}"

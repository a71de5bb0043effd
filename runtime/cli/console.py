"""Prints notes and errors on stderr, and knows the exit code of every error.

Results go to stdout elsewhere. `kvcap --help` imports this, so nothing heavy is imported here.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from kvcap.runtime.errors import MemoryCapExceeded, ModelNotFound, PlanInfeasible, first_line

OK, FAILED, USAGE, INFEASIBLE, CAP, INTERRUPTED = 0, 1, 2, 3, 4, 130
CODES: tuple[tuple[type[Exception], int], ...] = (
    (PlanInfeasible, INFEASIBLE),
    (MemoryCapExceeded, CAP),
    (ModelNotFound, USAGE),
    (ValueError, USAGE),  # the house rule: ValueError is what a user can get wrong
)


def exit_code(error: Exception) -> int:
    """Return the exit code by which scripts distinguish kinds of errors."""
    return next((code for kind, code in CODES if isinstance(error, kind)), FAILED)


def complain(error: Exception | str) -> None:
    """Print an error, or a complaint, as one line; with its traceback if KVCAP_DEBUG is set."""
    if isinstance(error, Exception) and os.environ.get("KVCAP_DEBUG"):
        traceback.print_exception(error)
    say(("kvcap:", "red"), f" {first_line(error)}")


def dim(text: str) -> None:
    """Print a side remark, dimly."""
    say((text, "dim"))


def say(*parts: str | tuple[str, str]) -> None:
    """Print a line on stderr; each part is text or, for terminals, (text, style).

    A terminal gets it wrapped between words. Control characters, which a file, a name or a model
    may have brought in, are never obeyed.
    """
    texts = [part if isinstance(part, str) else part[0] for part in parts]
    if not styled():
        print(visible("".join(texts)), file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    styles = ["" if isinstance(part, str) else part[1] for part in parts]
    shown = zip(map(visible, texts), styles, strict=True)
    Console(stderr=True, highlight=False).print(Text.assemble(*shown))


VISIBLE = dict.fromkeys((*range(32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")
del VISIBLE[ord("\n")], VISIBLE[ord("\t")]


def visible(text: str) -> str:
    """Return the text with control characters replaced, so that no escape sequence is obeyed."""
    return text.translate(VISIBLE)


def styled() -> bool:
    """Return whether stderr is a terminal that understands escape sequences."""
    if not sys.stderr.isatty():
        return False
    from rich.console import Console

    console = Console(stderr=True)
    return not (console.is_dumb_terminal or console.legacy_windows)


def columns() -> int | None:
    """Return the width of the terminal; None where stderr is none."""
    if not styled():
        return None
    from rich.console import Console

    return Console(stderr=True).width


def fitted(parts: Sequence[str], drop: Sequence[int], width: int | None) -> str:
    """Join parts in one line, without as many of the droppable ones as the width demands.

    Args:
        parts: texts; empty ones are left out in any case.
        drop: indices of parts that may be left out, the least needed first.
        width: in columns; None is any.

    >>> fitted(["seen 21", "kept 21", "131 tok/s"], drop=[2, 0], width=20)
    'seen 21 · kept 21'
    """
    left = {index: part for index, part in enumerate(parts) if part}
    for index in drop:
        if width is None or len(" · ".join(left.values())) <= width:
            break
        left.pop(index, None)
    return " · ".join(left.values())

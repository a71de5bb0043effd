"""The live meter: one line below the text while a prompt is read and an answer is written.

It is drawn on stderr and taken away again; the answer itself is written to stdout, untouched. Knows
nothing of how text is made.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from rich.cells import cell_len

from kvcap.runtime.screen import size, styled
from kvcap.runtime.stats import Stats, Turn

BAR = 24  # columns
# Make room below (which scrolls at the bottom), remember the place, write, and return to it.
BELOW = "\x1bD\x1b[A\x1b7\r\n\x1b[2K\x1b[2m{}\x1b[0m\x1b8"
CLEAR = "\x1b[J"


class Meter:
    """Writes text to stdout and, on a terminal, keeps one line of figures below it.

    Args:
        stats: asked for the figures whenever the line is drawn.
        shown: whether to draw at all; otherwise text is only passed on.
    """

    def __init__(self, stats: Callable[[], Stats], *, shown: bool = True) -> None:
        self._stats, self._shown = stats, shown and styled()
        self._drawn = False
        self._column = 0  # where stdout's line stands, if that is the same terminal
        self._terminal = sys.stdout.isatty()
        self._start = time.perf_counter()

    def reading(self, done: int, total: int) -> None:
        """Show how far a prompt of more than one block has been read."""
        if not self._shown or (done == total and not self._drawn):
            return
        filled = BAR * done // total
        rate = done / (time.perf_counter() - self._start)
        bar = "━" * filled + "╌" * (BAR - filled)
        self._draw(f"reading {bar} {done:,}/{total:,} · {kv(self._stats())} · {rate:,.0f} tok/s")

    def write(self, text: str) -> None:
        """Pass `text` on to stdout."""
        self.clear()
        if self._terminal:
            text = text.translate(VISIBLE)
            self._column = cell_len(text.rpartition("\n")[2]) + (
                0 if "\n" in text else self._column
            )
        sys.stdout.write(text)
        sys.stdout.flush()
        if self._shown:
            stats = self._stats()
            rate = stats.turn.decode_tok_s if stats.turn else 0
            self._draw(f"{figures(stats)} · {rate:,.0f} tok/s")

    def clear(self) -> None:
        """Take the line away."""
        if self._drawn:
            sys.stderr.write(CLEAR)
            sys.stderr.flush()
            self._drawn = False

    def _draw(self, line: str) -> None:
        width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        if self._column and self._column % width == 0:
            return  # the next character wraps; moving the cursor would make it overwrite the last
        sys.stderr.write(BELOW.format(line[: width - 1]))
        sys.stderr.flush()
        self._drawn = True


# A model may have read escape sequences; on a terminal it must not be able to speak them.
VISIBLE = dict.fromkeys((*range(32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")
del VISIBLE[ord("\n")], VISIBLE[ord("\t")]


def kv(stats: Stats) -> str:
    """Slots and bytes, of how many."""
    return (
        f"KV {stats.held_tokens:,}/{stats.budget_tokens:,} slots · "
        f"{size(stats.bytes, of=stats.cap_bytes)}"
    )


def figures(stats: Stats) -> str:
    """Slots, bytes, and what became of everything that was read."""
    return f"{kv(stats)} · seen {stats.seen_tokens:,} · evicted {stats.evicted_tokens:,}"


ENDINGS = {
    "length": " · at max_new_tokens",
    "interrupted": " · stopped",
    "cap": " · at the cap",
    "full": " · the cache is full",
    "error": " · failed",
}


def summary(stats: Stats) -> str:
    """The line after an answer."""
    turn = stats.turn or Turn()
    rate = f" · {turn.decode_tok_s:,.0f} tok/s" if turn.decode_s else ""
    return (
        f"seen {stats.seen_tokens:,} · kept {stats.held_tokens:,} · "
        f"evicted {stats.evicted_tokens:,} (+{turn.evicted_tokens:,} now) · "
        f"KV {size(stats.bytes, of=stats.cap_bytes)}{rate}"
        f"{ENDINGS.get(turn.finish_reason or '', '')}"
    )
